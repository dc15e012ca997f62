"""Time to first token of a prompt whose passages are all cached at other positions, beside computing it, in one run.

A worker answers a prompt of some passages; then the same passages are asked for in another order. What is held is found
from the worker's own KV events (fingerprints at every offset), planned, turned and repaired by the worker. Cold is the
same prompt with an empty cache.

PYTHONPATH=. python tests/bench/bench_fused.py --model DIR [--rounds 3] [--json FILE]
"""

import asyncio
import os
import random
import statistics
import time
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from cachecore.blocks import pack_tokens
from cachecore.index.content import MemoryContentIndex
from cachecore.index.content_feed import ContentFeed
from cachecore.index.schema import parse_holder
from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.rekey import Rekeyer
from cachecore.scope import Fidelity, Keyring
from cachecore.transfer.plan import PARAMETER, Grant, Plan, sign
from gateway.shifted import Passages
from tests.bench.model_bench import parser_of, write
from workers.engine import Generation, Sampling
from workers.reference.engine import EngineOptions, ReferenceEngine
from workers.transfer.service import TransferOptions

SYSTEM_TOKENS, QUESTION_TOKENS = 40, 38
SHAPES = ((800, 4, 2.0), (2_000, 8, 3.0))
"""Tokens, passages, and how many times sooner it should be."""


class Seconds(NamedTuple):
    wall: float
    cpu: float
    """Of all threads: steadier, where other work shares the machine."""


class Bench:
    def __init__(self, model: Path) -> None:
        self.keyring = Keyring.generate()
        renderer = HuggingFaceRenderer.load(model)
        options = EngineOptions("bench", transfer=TransferOptions(), max_model_len=4096)
        self.feed = ContentFeed(MemoryContentIndex())
        self.engine = ReferenceEngine.load(model, renderer, options, self.keyring, self._events)
        self.naming = self.engine._derive_naming("")
        size = self.engine.info.block_size_tokens
        self.rekeyer = Rekeyer(size, lambda salt, adapter: self.naming, with_texts=True)
        self.numbers = iter(range(10**6))

    def _events(self, events: Any) -> None:
        assert self.engine.info.transfer is not None
        self.feed.apply(self.holder, self.rekeyer.rekey(events))

    @property
    def holder(self) -> Any:
        assert self.engine.info.transfer is not None
        return parse_holder(self.engine.info.transfer.holder.encode())

    async def first_token(self, token_ids: list[int], documents: list[Any], fidelity: Fidelity) -> tuple[Seconds, Any]:
        """How long it took, and the first output."""
        generation = Generation(
            f"bench-{next(self.numbers)}",
            token_ids,
            Sampling(max_tokens=2, temperature=0.0, ignore_eos=True),
            kv_transfer_params={PARAMETER: documents},
            fidelity=fidelity,
        )
        started, worked = time.perf_counter(), time.process_time()
        taken, first = Seconds(0.0, 0.0), None
        async for output in self.engine.generate(generation):
            if first is None:
                taken, first = Seconds(time.perf_counter() - started, time.process_time() - worked), output
        return taken, first

    def plans(self, token_ids: list[int]) -> tuple[list[Any], float]:
        """Signed, and the seconds that finding them took."""
        started = time.perf_counter()
        passages = Passages(self.feed, self.naming, pack_tokens(token_ids[:-1]))
        runs = passages.find(SYSTEM_TOKENS // 16 * 16, lambda holder: False, self.holder)
        found = time.perf_counter() - started
        grant = Grant(self.naming.scope.key_id, self.holder, Fidelity.FUSED, time.time() + 600)
        plans = [Plan(self.holder, (), r.run, r.source_position, r.target_position, "raw", 60.0) for r in runs]
        return [sign(plan, grant, self.keyring) for plan in plans], found

    async def round(self, count: int, passages: int, seed: int) -> dict[str, float]:
        draw = random.Random(seed)

        def text(tokens: int) -> list[int]:
            return [draw.randrange(1_000, 40_000) for _ in range(tokens)]

        each = (count - SYSTEM_TOKENS - QUESTION_TOKENS) // passages
        system, question, texts = text(SYSTEM_TOKENS), text(QUESTION_TOKENS), [text(each) for _ in range(passages)]
        await self.first_token([*system, *chain.from_iterable(texts), 7], [], Fidelity.EXACT)
        prompt = [*system, *chain.from_iterable(texts[1:] + texts[:1]), *question]
        documents, found = self.plans(prompt)
        fused, first = await self.first_token(prompt, documents, Fidelity.FUSED)
        assert first.fidelity is Fidelity.FUSED
        await self.engine.reset_prefix_cache()
        cold, exact = await self.first_token(prompt, [], Fidelity.EXACT)
        assert (exact.fidelity, exact.cached_tokens) == (Fidelity.EXACT, 0)
        await self.engine.reset_prefix_cache()
        return {
            "cold_s": cold.wall,
            "fused_s": fused.wall,
            "ratio": cold.wall / fused.wall,
            "ratio_cpu": cold.cpu / fused.cpu,
            "found_ms": found * 1e3,
            "cached_tokens": first.cached_tokens,
        }


async def run(model: Path, rounds: int) -> dict[str, Any]:
    bench = Bench(model)
    await bench.engine.start()
    shapes = []
    try:
        await bench.round(400, 2, 99)
        for count, passages, bar in SHAPES:
            rows = [await bench.round(count, passages, seed) for seed in range(rounds)]
            ratios = {name: statistics.median(row[name] for row in rows) for name in ("ratio", "ratio_cpu")}
            shapes.append({"tokens": count, "passages": passages, "bar": bar, **ratios, "rows": rows})
    finally:
        await bench.engine.stop()
    return {"shapes": shapes, "load": os.getloadavg()[0]}


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    result = asyncio.run(run(arguments.model, arguments.rounds))
    for shape in result["shapes"]:
        for row in shape["rows"]:
            print(
                f"{shape['tokens']} tokens: cold {row['cold_s']:.2f} s, fused {row['fused_s']:.2f} s: "
                f"{row['ratio']:.2f}x ({row['ratio_cpu']:.2f}x in CPU time), {row['cached_tokens']} not prefilled, "
                f"found in {row['found_ms']:.1f} ms"
            )
        medians = f"median {shape['ratio']:.2f}x, {shape['ratio_cpu']:.2f}x in CPU time"
        print(f"{shape['tokens']} tokens: {medians} (bar {shape['bar']})")
    print(f"load average {result['load']:.1f}")
    write(result, arguments.json)


if __name__ == "__main__":
    main()

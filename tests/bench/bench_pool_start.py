"""What a pool saves a worker that has just come up: time to first token of a 1,900-token prompt, cold and from a pool.

A worker computes the prompts and stores them in a directory; it is stopped, another one with another epoch is started,
which has nothing but the pool. What the first one waited for while it stored is measured too: the same prompts, cold,
with and without a pool.

PYTHONPATH=. python tests/bench/bench_pool_start.py --model DIR [--rounds 3] [--codec i8] [--run-blocks 4] [--json FILE]
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cachecore.blocks import HASH_BYTES, PrefixHash, pack_tokens
from cachecore.index.schema import parse_holder
from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, Keyring, Naming
from cachecore.store.pools import PoolBounds, run_ends
from cachecore.transfer.capability import Run
from cachecore.transfer.plan import PARAMETER, Grant, Plan, sign
from tests.bench.model_bench import parser_of, write
from workers.engine import Generation, Sampling, StepOutput
from workers.pools import RUN_BLOCKS, OpenPools, PoolSettings
from workers.reference.config import ModelConfig
from workers.reference.engine import EngineOptions, ReferenceEngine
from workers.reference.tiers.pools import PoolTier
from workers.reference.weights import Weights, load_weights
from workers.transfer.service import TransferOptions

PROMPT_TOKENS = 1_900
BLOCK = 16
KEYRING = Keyring.generate()
SPEEDUP_MIN = 10.0


class Bench:
    def __init__(self, model: Path, root: Path, settings: PoolSettings) -> None:
        self.renderer = HuggingFaceRenderer.load(model)
        self.config = ModelConfig.load(model)
        self.weights: Weights = load_weights(model, self.config, torch.float32, torch.device("cpu"))
        self.root = root
        self.settings = settings

    def worker(self, pooled: bool = True) -> tuple[ReferenceEngine, PoolTier]:
        tier = PoolTier(OpenPools([f"shared=dir:{self.root}"], self.settings), ("raw", "i8"))
        attachments = (tier.attach,) if pooled else ()
        transfer = TransferOptions(codecs=("raw", "i8"), attachments=attachments)
        options = EngineOptions(
            "bench",
            blocks=512,
            max_model_len=2_048,
            dtype="float32",
            device="cpu",
            transfer=transfer,
            on_named=tier.offer,
        )
        return ReferenceEngine(self.config, self.weights, self.renderer, options, KEYRING), tier

    def plans(self, tier: PoolTier, target: ReferenceEngine, token_ids: Sequence[int]) -> list[dict[str, Any]]:
        """One for each whole run, as a gateway would sign them."""
        scope = IdentityScope("bench", KEYRING.key_id(DEFAULT_TENANT), BLOCK, tokenizer=self.renderer.fingerprint)
        naming = Naming.of(scope, KEYRING)
        chain = naming.hasher.chain(naming.root, pack_tokens(token_ids))
        holder = tier.pools["shared"].holder
        assert holder is not None
        assert target.info.transfer is not None
        grant = Grant(
            scope.key_id,
            parse_holder(target.info.transfer.holder.encode()),
            Fidelity.QUANTIZED,
            time.time() + 120,
        )
        documents = []
        names = naming.root + chain
        for end, blocks in run_ends(0, len(chain) // HASH_BYTES, self.settings.run_blocks):
            first, tail = end - blocks, PrefixHash(names[end * HASH_BYTES : (end + 1) * HASH_BYTES])
            run = Run(PrefixHash(names[first * HASH_BYTES : (first + 1) * HASH_BYTES]), tail, first, blocks)
            position = first * BLOCK
            documents.append(sign(Plan(holder, (), run, position, position, self.settings.codec, 60.0), grant, KEYRING))
        return documents


async def first_token(
    engine: ReferenceEngine, token_ids: list[int], plans: Sequence[dict[str, Any]] = ()
) -> tuple[float, StepOutput]:
    params = {PARAMETER: list(plans)} if plans else None
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    generation = Generation(
        f"{time.monotonic_ns()}", token_ids, sampling, kv_transfer_params=params, fidelity=Fidelity.QUANTIZED
    )
    started = time.perf_counter()
    async for output in engine.generate(generation):
        return time.perf_counter() - started, output
    raise SystemExit("the engine generated nothing")


async def compute(bench: Bench, prompts: Sequence[list[int]], pooled: bool) -> list[tuple[float, StepOutput]]:
    engine, tier = bench.worker(pooled)
    await engine.start()
    try:
        await first_token(engine, prompts[0][:600][::-1])  # the first pass sets memory up
        found = [await first_token(engine, prompt) for prompt in prompts]
        if pooled:
            assert tier.writer is not None
            runs = len(list(run_ends(0, PROMPT_TOKENS // BLOCK, bench.settings.run_blocks)))
            while tier.writer.counts["stored"] < len(prompts) * runs:
                await asyncio.sleep(0.05)
        return found
    finally:
        await engine.stop()


async def start_from_pool(bench: Bench, prompts: Sequence[list[int]]) -> list[tuple[float, StepOutput]]:
    engine, tier = bench.worker()
    await engine.start()
    try:
        await first_token(engine, prompts[0][:600][::-1])
        return [await first_token(engine, prompt, bench.plans(tier, engine, prompt)) for prompt in prompts]
    finally:
        await engine.stop()


async def run(bench: Bench, rounds: int) -> dict[str, Any]:
    draw = random.Random(1)
    prompts = [[draw.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(rounds)]
    alone = await compute(bench, prompts, pooled=False)
    storing = await compute(bench, prompts, pooled=True)
    started = await start_from_pool(bench, prompts)
    rows = []
    for (cold_seconds, cold), (storing_seconds, _), (seconds, output) in zip(alone, storing, started, strict=True):
        report = output.transfer
        if report is None or report.outcome != "fetched":
            raise SystemExit(f"nothing came from the pool: {report}")
        row = {
            "cold_ms": cold_seconds * 1e3,
            "cold_while_storing_ms": storing_seconds * 1e3,
            "from_pool_ms": seconds * 1e3,
            "load_ms": report.seconds * 1e3,
            "cached_tokens": output.cached_tokens,
            "bytes": report.payload_bytes,
            "ratio": cold_seconds / seconds,
            "same_token": output.token_ids[0] == cold.token_ids[0],
        }
        rows.append(row)
        print({key: round(value, 1) for key, value in row.items()})
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "codec": bench.settings.codec,
        "run_blocks": bench.settings.run_blocks,
        "load": os.getloadavg()[0],
        "rows": rows,
        "ratio": statistics.median(row["ratio"] for row in rows),
        "storing_ratio": statistics.median(row["cold_while_storing_ms"] / row["cold_ms"] for row in rows),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--codec", default="i8")
    parser.add_argument("--run-blocks", type=int, default=RUN_BLOCKS)
    parser.add_argument("--directory", type=Path, help="of the pool; default: a temporary one")
    arguments = parser.parse_args()
    settings = PoolSettings(PoolBounds(8 << 30), arguments.run_blocks, arguments.codec)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        result = asyncio.run(run(Bench(arguments.model, Path(root), settings), arguments.rounds))
    print(f"from a pool {result['ratio']:.1f}x sooner than cold (bar {SPEEDUP_MIN})")
    print(f"cold while storing: {result['storing_ratio']:.2f}x of cold without a pool")
    write(result, arguments.json)


if __name__ == "__main__":
    main()

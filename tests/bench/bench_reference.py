"""Time to first token of the reference worker on a 1,900-token prompt: computed, and on a full prefix hit, in one run.

python tests/bench/bench_reference.py --model DIR [--rounds 3] [--json FILE]
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path

from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.scope import Keyring
from workers.engine import Generation, Sampling
from workers.reference.engine import EngineOptions, ReferenceEngine

PROMPT_TOKENS = 1_900


async def first_token(engine: ReferenceEngine, name: str, token_ids: list[int]) -> tuple[float, int, int]:
    """(seconds, cached tokens, first token) of one greedy generation."""
    started = time.perf_counter()
    stream = engine.generate(Generation(name, token_ids, Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)))
    async for output in stream:
        return time.perf_counter() - started, output.cached_tokens, output.token_ids[0]
    raise SystemExit("the engine generated nothing")


async def run(model: Path, rounds: int) -> dict[str, object]:
    renderer = HuggingFaceRenderer.load(model)
    engine = ReferenceEngine.load(model, renderer, EngineOptions("bench"), Keyring.generate(), lambda events: None)
    await engine.start()
    draw = random.Random(1)
    rows = []
    try:
        for number in range(rounds):
            token_ids = [draw.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
            cold, cached, token = await first_token(engine, f"cold-{number}", token_ids)
            await asyncio.sleep(1.0)
            hit, cached_hit, token_hit = await first_token(engine, f"hit-{number}", token_ids)
            await asyncio.sleep(1.0)
            assert (cached, token) == (0, token_hit)
            rows.append({"cold_s": cold, "hit_s": hit, "ratio": cold / hit, "cached_tokens": cached_hit})
    finally:
        await engine.stop()
    return {"prompt_tokens": PROMPT_TOKENS, "rows": rows, "ratio": statistics.median(row["ratio"] for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments.model, arguments.rounds))
    for row in result["rows"]:  # type: ignore[attr-defined]
        print(
            f"cold {row['cold_s']:.2f} s, hit {row['hit_s']:.3f} s: {row['ratio']:.1f}x, {row['cached_tokens']} cached"
        )
    print(f"median ratio {result['ratio']:.1f}x (bar 10)")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

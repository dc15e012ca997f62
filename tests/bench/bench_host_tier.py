"""What host memory (tier L1) costs and saves: a prompt that the engine's memory gave up comes back by copies.

One engine whose KV memory holds one prompt of 1,900 tokens, and whose host memory holds several. Prompts are sent in
turn, so each is evicted by the next; then again, when each comes back from host memory.

PYTHONPATH=. python tests/bench/bench_host_tier.py --model DIR [--rounds 3] [--json FILE]
"""

import asyncio
import os
import random
import statistics
from pathlib import Path
from typing import Any

import torch

from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.scope import Keyring
from tests.bench.model_bench import parser_of, write
from workers.engine import Generation, Sampling
from workers.reference.config import ModelConfig
from workers.reference.engine import EngineOptions, ReferenceEngine
from workers.reference.weights import load_weights

PROMPT_TOKENS = 1_900
BLOCKS = 125


async def first_token(engine: ReferenceEngine, token_ids: list[int], request_id: str) -> tuple[float, int, int]:
    """Seconds, cached tokens, token."""
    loop = asyncio.get_running_loop()
    generation = Generation(request_id, token_ids, Sampling(max_tokens=1, temperature=0.0, ignore_eos=True))
    started = loop.time()
    async for output in engine.generate(generation):
        return loop.time() - started, output.cached_tokens, output.token_ids[0]
    raise SystemExit("the engine generated nothing")


async def run(model: Path, rounds: int) -> dict[str, Any]:
    config = ModelConfig.load(model)
    weights = load_weights(model, config, torch.float32, torch.device("cpu"))
    options = EngineOptions(
        "bench", blocks=BLOCKS, max_model_len=1_950, dtype="float32", device="cpu", host_kv_mib=100 * (rounds + 1)
    )
    engine = ReferenceEngine(config, weights, HuggingFaceRenderer.load(model), options, Keyring.generate())
    draw = random.Random(1)
    prompts = [[draw.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(rounds)]
    await engine.start()
    metrics, rows = engine.metrics.host, []
    assert metrics is not None
    try:
        await first_token(engine, prompts[0][:600][::-1], "warm")
        cold = [await first_token(engine, prompt, f"cold {at}") for at, prompt in enumerate(prompts)]
        kept_seconds, kept_bytes = metrics.copy_seconds, metrics.saved_bytes
        again = [await first_token(engine, prompt, f"again {at}") for at, prompt in enumerate(prompts)]
    finally:
        await engine.stop()
    for (seconds, _, token), (again_seconds, cached, token_again) in zip(cold, again, strict=True):
        row = {
            "cold_ms": seconds * 1e3,
            "from_host_ms": again_seconds * 1e3,
            "ratio": seconds / again_seconds,
            "cached_tokens": cached,
            "same_token": token == token_again,
        }
        rows.append(row)
        print({key: round(value, 1) for key, value in row.items()})
    return {
        "load": os.getloadavg()[0],
        "rows": rows,
        "ratio": statistics.median(row["ratio"] for row in rows),
        "kept_share": kept_seconds / sum(seconds for seconds, _, _ in cold),
        "kept_gb_per_s": kept_bytes / kept_seconds / 1e9,
    }


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    result = asyncio.run(run(arguments.model, arguments.rounds))
    print(f"from host memory {result['ratio']:.1f}x sooner than cold")
    print(f"keeping took {result['kept_share']:.2%} of computing, at {result['kept_gb_per_s']:.1f} GB/s")
    write(result, arguments.json)


if __name__ == "__main__":
    main()

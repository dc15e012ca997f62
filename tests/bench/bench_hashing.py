"""What naming a prompt's blocks costs: packing, prefix names, prefix and content names, by prompt and block size.

    PYTHONPATH=. .venv-bench/bin/python tests/bench/bench_hashing.py [--json FILE] [--rounds N]

Times are microseconds, the least and the median of the rounds; ns/token is of the median. Where the wheel
ai-dynamo-runtime is installed, its hash of the same list of tokens (one hash a block, unkeyed, unchained) stands
beside ours, calls alternating. `append` is what a conversation's next turn pays: 256 tokens after the rest.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from cachecore.blocks import HASH_BYTES, TOKEN_BYTES, BlockHasher, PrefixHash, pack_tokens

ROOT = PrefixHash(bytes(HASH_BYTES))
APPENDED_TOKENS = 256


def peer(tokens: list[int], block: int) -> Callable[[], object] | None:
    try:
        from dynamo._core import compute_block_hash_for_seq
    except ImportError:
        return None
    return lambda: compute_block_hash_for_seq(tokens, block)


def cases(tokens: list[int], block: int) -> dict[str, Callable[[], object]]:
    hasher, packed = BlockHasher(bytes(32), block), pack_tokens(tokens)
    kept = (len(tokens) - APPENDED_TOKENS) // block * block
    parent = PrefixHash(hasher.chain(ROOT, packed[: kept * TOKEN_BYTES])[-HASH_BYTES:]) if kept else ROOT
    tail = packed[kept * TOKEN_BYTES :]
    named: dict[str, Callable[[], object]] = {
        "pack": lambda: pack_tokens(tokens),
        "prefix": lambda: hasher.chain(ROOT, packed),
        "prefix + content": lambda: (hasher.chain(ROOT, packed), hasher.contents(packed)),
        "append": lambda: hasher.chain(parent, tail),
    }
    beside = peer(tokens, block)
    return named if beside is None else {**named, "dynamo": beside}


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(1)
    for count in (1024, 8192, 65_536):
        tokens = [rng.randrange(150_000) for _ in range(count)]
        for block in (16, 64, 512):
            calls = cases(tokens, block)
            samples: dict[str, list[float]] = {}
            for _ in range(rounds):
                for name, call in calls.items():
                    start = time.perf_counter_ns()
                    call()
                    samples.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000)
            for name, kept in samples.items():
                size = APPENDED_TOKENS if name == "append" else count
                median = statistics.median(kept)
                yield {
                    "tokens": count,
                    "block": block,
                    "case": name,
                    "min_us": round(min(kept), 1),
                    "median_us": round(median, 1),
                    "ns_per_token": round(median * 1000 / size, 1),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--rounds", type=int, default=50, help="rounds of each case (default 50)")
    options = parser.parse_args()
    rows = []
    for row in measure(options.rounds):
        head = f"{row['tokens']:>7} tokens  block {row['block']:>3}  {row['case']:<17}"
        print(f"{head}{row['min_us']:>9} / {row['median_us']:>9} us {row['ns_per_token']:>7} ns/token", flush=True)
        rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

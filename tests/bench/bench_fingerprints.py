"""What looking texts up costs: fingerprints and names per 1,000 tokens, and a query of an index of many texts.

python tests/bench/bench_fingerprints.py [--holdings 100000] [--json FILE]
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from cachecore.blocks import pack_tokens
from cachecore.events import BlockStored
from cachecore.fingerprints import Fingerprinter
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.content import MemoryContentIndex
from cachecore.index.content_feed import ContentFeed
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from gateway.shifted import Passages

KEYRING = Keyring.generate()
NAMING = Naming.of(IdentityScope("m", KEYRING.key_id(DEFAULT_TENANT), 16), KEYRING)
HOLDER, OTHER = (Worker(WorkerName(name), Epoch(1)) for name in "ab")
PROMPT_BLOCKS = 64


def best_ms(work: Callable[[], object], rounds: int = 15) -> float:
    """The quickest of several, in CPU time: the machine may be busy with other things."""
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken) * 1e3


def per_1000_tokens(tokens: int) -> dict[str, float]:
    draw, subject, hasher = random.Random(tokens), Fingerprinter(NAMING), NAMING.hasher
    packed = pack_tokens([draw.randrange(50_000) for _ in range(tokens)])
    scale = 1_000 / tokens
    return {
        "tokens": tokens,
        "every_offset_ms": best_ms(lambda: subject.windows(packed)) * scale,
        "every_block_ms": best_ms(lambda: subject.blocks(packed)) * scale,
        "content_hashes_ms": best_ms(lambda: hasher.contents(packed)) * scale,
        "prefix_hashes_ms": best_ms(lambda: hasher.chain(NAMING.root, packed)) * scale,
    }


def filled(holdings: int) -> tuple[ContentFeed, list[list[int]], float]:
    """A content index, the prompts in it, and the CPU microseconds that a block cost it."""
    draw, feed = random.Random(1), ContentFeed(MemoryContentIndex())
    rekeyer = Rekeyer(16, lambda salt, adapter: NAMING, with_texts=True)
    prompts = [[draw.randrange(50_000) for _ in range(16 * PROMPT_BLOCKS)] for _ in range(holdings // PROMPT_BLOCKS)]
    told = []
    for number, prompt in enumerate(prompts):
        handles = tuple(range(number * PROMPT_BLOCKS, (number + 1) * PROMPT_BLOCKS))
        told.append(rekeyer.rekey([BlockStored(handles, None, prompt, 16)]))
    gc.freeze()
    started = time.process_time()
    for events in told:
        feed.apply(HOLDER, events)
    return feed, prompts, (time.process_time() - started) / (len(prompts) * PROMPT_BLOCKS) * 1e6


def query(feed: ContentFeed, prompts: list[list[int]], tokens: int, held: bool) -> dict[str, float]:
    """Finding all of a prompt that is held as pieces of others, at odd offsets; or nothing of one that is not."""
    draw = random.Random(5)
    asked: list[int] = []
    while len(asked) < tokens:
        asked += [draw.randrange(50_000) for _ in range(5)]
        piece = draw.choice(prompts)[64:320]
        asked += piece if held else [token + 50_000 for token in piece]
    packed = pack_tokens(asked[:tokens])
    runs = Passages(feed, NAMING, packed).find(0, lambda holder: True, OTHER)
    milliseconds = best_ms(lambda: Passages(feed, NAMING, packed).find(0, lambda holder: True, OTHER))
    return {"tokens": tokens, "runs": len(runs), "found_tokens": sum(run.tokens for run in runs), "ms": milliseconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--holdings", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    costs = [per_1000_tokens(tokens) for tokens in (1_000, 8_000, 100_000)]
    for cost in costs:
        print(
            ", ".join(f"{name} {value:.3f}" if name != "tokens" else f"{value} tokens" for name, value in cost.items())
        )
    feed, prompts, microseconds = filled(arguments.holdings)
    print(f"{len(feed.index)} holdings, {microseconds:.1f} us to add one")
    queries = [query(feed, prompts, tokens, held) for tokens in (2_000, 20_000) for held in (False, True)]
    for one in queries:
        print(f"{one['tokens']} tokens: {one['runs']} runs, {one['found_tokens']} tokens found in {one['ms']:.2f} ms")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"per_1000_tokens": costs, "add_us": microseconds, "queries": queries}, indent=1)
        )


if __name__ == "__main__":
    main()

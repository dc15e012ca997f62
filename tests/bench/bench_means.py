"""What means of texts cost: cutting a prompt, looking for anchors, reading and turning means of its passages, joining.

Beside it, in the same run, what reading the same files takes. KV of SmolLM2's shape, random; a directory as the pool.

PYTHONPATH=. python tests/bench/bench_means.py [--tokens 800] [--passages 4] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from cachecore.blocks import pack_tokens
from cachecore.chunks import Chunk, Chunker
from cachecore.kv.means import MeanKv
from cachecore.kv.rope import rope_table
from cachecore.kv.variants import RopeConfig
from cachecore.scope import DEFAULT_TENANT, IdentityScope, KeyId, Keyring, Naming
from cachecore.store.pools import DirectoryPool, PoolBounds
from cachecore.store.pools.means import Contexts
from workers.transfer.means import Known, MeanStore, MeanText
from workers.transfer.shape import KvShape

SHAPE = KvShape(bytes(16), 30, 3, 64, 16, "float32")
ROUNDS = 7


async def measured(tokens: int, passages: int, codec: str, directory: Path) -> dict[str, Any]:
    keyring = Keyring.generate()
    naming = Naming.of(IdentityScope("bench", KeyId(DEFAULT_TENANT, 0), 16), keyring)
    pool = DirectoryPool("bench", directory, PoolBounds(1 << 30))
    await pool.start()
    rope = rope_table(RopeConfig("default", 100_000.0, SHAPE.head_dim), 4096)
    store = MeanStore({"bench": pool}, SHAPE, rope, keyring, codec, ThreadPoolExecutor(2))
    draw = random.Random(1)
    prompt = [draw.randrange(49_000) for _ in range(tokens)]
    packed, size = pack_tokens(prompt), tokens // passages
    chunks = list(Chunker(naming).cut(packed))
    anchors = [next(chunk for chunk in chunks if chunk.start >= number * size) for number in range(passages)]
    for number, anchor in enumerate(anchors):
        start = number * size
        text = MeanText(naming, anchor.name, prompt[start : start + size], anchor.start - start)
        await store.put(text, pool, Contexts(2, bytes(16)), _mean(size))

    async def read(anchor: Chunk) -> Known:
        known = await store.find(naming, anchor.name, pool)
        assert known is not None
        await store.turned(known, slice(0, size), anchor.start)
        return known

    async def read_all() -> None:
        for anchor in anchors:
            await read(anchor)

    async def look() -> None:
        found = await asyncio.gather(*(store.holder(naming, chunk.name) for chunk in chunks))
        assert sum(pool is not None for pool in found) == passages

    async def join() -> None:
        (await store.mean_of(known)).joined(_mean(size))

    files, known = list(directory.rglob("*.hckv")), await read(anchors[0])
    row = {
        "codec": codec,
        "chunks": len(chunks),
        "cut_ms": await _cpu_ms(lambda: _nothing(list(Chunker(naming).cut(packed)))),
        "look_ms": await _cpu_ms(look),
        "read_ms": await _cpu_ms(read_all),
        "files_ms": await _cpu_ms(lambda: _nothing([bytearray(file.read_bytes()) for file in files])),
        "join_ms": await _cpu_ms(join),
    }
    await pool.close()
    return row


def _mean(tokens: int) -> MeanKv:
    shape = (SHAPE.layers, tokens, SHAPE.kv_heads, SHAPE.head_dim)
    return MeanKv(torch.randn(shape), torch.randn(shape), 2)


async def _nothing(_: object) -> None:
    """What was to be done is done."""


async def _cpu_ms(work: Callable[[], Any]) -> float:
    """Of all threads, the median of some rounds: steadier than the clock where other work shares the machine."""
    taken = []
    for _ in range(ROUNDS):
        began = time.process_time()
        await work()
        taken.append((time.process_time() - began) * 1e3)
    return statistics.median(taken)


async def run(tokens: int, passages: int) -> dict[str, Any]:
    rows = []
    for codec in ("raw", "i8"):
        with tempfile.TemporaryDirectory() as directory:
            rows.append(await measured(tokens, passages, codec, Path(directory)))
    return {"tokens": tokens, "passages": passages, "rows": rows, "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = asyncio.run(run(arguments.tokens, arguments.passages))
    for row in result["rows"]:
        print(
            f"{row['codec']}: {row['chunks']} chunks cut in {row['cut_ms']:.1f} ms and looked for in "
            f"{row['look_ms']:.1f} ms, {arguments.passages} texts read and turned in {row['read_ms']:.1f} ms (their "
            f"files alone: {row['files_ms']:.1f}), one joined in {row['join_ms']:.1f} ms"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()

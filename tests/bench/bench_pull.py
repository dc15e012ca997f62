"""What pulling KV from a peer saves: time to first token of a 1,900-token prompt, cold and pulled, and what is gained
by computing the rest of a prompt while its beginning is still on its way.

Two engines in this process, with the same weights, talk over loopback TCP; for the second part through a proxy that
lets through so many bytes a second that loading takes as long as computing.

PYTHONPATH=. python tests/bench/bench_pull.py --model DIR [--rounds 3] [--json FILE]
"""

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cachecore.blocks import HASH_BYTES, PrefixHash, pack_tokens
from cachecore.index.schema import parse_holder
from cachecore.prompts.huggingface import HuggingFaceRenderer
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, Keyring, Naming
from cachecore.transfer.capability import Run
from cachecore.transfer.plan import PARAMETER, Grant, Plan, sign
from tests.bench.model_bench import parser_of, write
from workers.engine import Generation, Sampling, StepOutput
from workers.reference.config import ModelConfig
from workers.reference.engine import EngineOptions, ReferenceEngine
from workers.reference.weights import load_weights
from workers.transfer.service import TransferOptions

PROMPT_TOKENS = 1_900
OVERLAP_TOKENS, SPLIT = 960, 480
"""Of the second part's prompts, and of those what is loaded, before what is computed."""
BLOCK = 16
KEYRING = Keyring.generate()
SPEEDUP_MIN, OVERLAP_MAX = 10.0, 0.75
_CHUNK_BYTES = 16 << 10


class Measured:
    """One generation up to its first token."""

    def __init__(self, seconds: float, output: StepOutput) -> None:
        self.seconds = seconds
        self.token = output.token_ids[0]
        self.cached_tokens = output.cached_tokens
        self.transfer = output.transfer


async def first_token(engine: ReferenceEngine, token_ids: list[int], *plans: dict[str, Any]) -> Measured:
    params = {PARAMETER: list(plans)} if plans else None
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    generation = Generation(
        f"{time.monotonic_ns()}", token_ids, sampling, kv_transfer_params=params, fidelity=Fidelity.QUANTIZED
    )
    started = time.perf_counter()
    async for output in engine.generate(generation):
        return Measured(time.perf_counter() - started, output)
    raise SystemExit("the engine generated nothing")


def plan(source: ReferenceEngine, target: ReferenceEngine, token_ids: list[int], codec: str, address: str) -> Any:
    """For all full blocks of `token_ids`, as a gateway would sign it."""
    scope = IdentityScope("bench", KEYRING.key_id(DEFAULT_TENANT), BLOCK, tokenizer=source.renderer.fingerprint)
    naming = Naming.of(scope, KEYRING)
    chain = naming.hasher.chain(naming.root, pack_tokens(token_ids))
    run = Run(naming.root, PrefixHash(chain[-HASH_BYTES:]), 0, len(chain) // HASH_BYTES)
    holders = [parse_holder(engine.info.transfer.holder.encode()) for engine in (source, target)]  # type: ignore[union-attr]
    grant = Grant(scope.key_id, holders[1], Fidelity.QUANTIZED, time.time() + 120)
    return sign(Plan(holders[0], (address,), run, 0, 0, codec, 60.0), grant, KEYRING)


@contextlib.asynccontextmanager
async def throttled(address: str, bytes_per_second: float) -> AsyncIterator[str]:
    """A proxy in front of `address`, with a link's rate towards whoever connects."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port), limit=_CHUNK_BYTES)
        try:
            await asyncio.gather(pump(reader, upstream_writer, 1e12), pump(upstream_reader, writer, bytes_per_second))
        finally:
            upstream_writer.close()
            writer.close()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: float) -> None:
        due = 0.0
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                due = max(due, time.monotonic()) + len(data) / rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                writer.write(data)
                await writer.drain()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def pulled(
    source: ReferenceEngine, target: ReferenceEngine, token_ids: list[int], codec: str, address: str = ""
) -> Measured:
    """Of a prompt whose beginning the source holds."""
    await target.reset_prefix_cache()
    held = token_ids[: (len(token_ids) - 1) // BLOCK * BLOCK] if not address else token_ids[:SPLIT]
    assert source.info.transfer is not None
    found = await first_token(
        target, token_ids, plan(source, target, held, codec, address or source.info.transfer.addresses[0])
    )
    if found.transfer is None or found.transfer.outcome != "fetched" or found.cached_tokens != len(held):
        raise SystemExit(f"nothing was pulled: {found.transfer}")
    return found


async def measure_pulls(source: ReferenceEngine, target: ReferenceEngine, prompts: Sequence[list[int]]) -> Any:
    rows = []
    for token_ids in prompts:
        cold = await first_token(source, token_ids)
        row: dict[str, Any] = {"cold_ms": cold.seconds * 1e3}
        for codec in ("raw", "i8"):
            found = await pulled(source, target, token_ids, codec)
            row[f"{codec}_ms"] = found.seconds * 1e3
            row[f"{codec}_bytes"] = found.transfer.payload_bytes if found.transfer else 0
            row[f"{codec}_ratio"] = cold.seconds / found.seconds
            row[f"{codec}_same_token"] = found.token == cold.token
        row["hit_ms"] = (await first_token(target, token_ids)).seconds * 1e3
        rows.append(row)
        print({key: round(value, 1) for key, value in row.items()})
    return rows


async def measure_overlap(
    source: ReferenceEngine, target: ReferenceEngine, waiting: ReferenceEngine, prompts: Sequence[list[int]]
) -> Any:
    rows = []
    for token_ids in prompts:
        await first_token(source, token_ids[: SPLIT + 1])
        await target.reset_prefix_cache()
        await first_token(target, token_ids[: SPLIT + 1])
        compute = (await first_token(target, token_ids)).seconds
        assert source.info.transfer is not None
        rate = SPLIT * source.info.transfer.bytes_per_token / compute
        async with throttled(source.info.transfer.addresses[0], rate) as address:
            overlapped = await pulled(source, target, token_ids, "raw", address)
            sequential = await pulled(source, waiting, token_ids, "raw", address)
        assert overlapped.token == sequential.token
        row = {
            "compute_ms": compute * 1e3,
            "link_mb_per_s": rate / 1e6,
            "load_ms": sequential.transfer.seconds * 1e3 if sequential.transfer else 0.0,
            "load_then_compute_ms": sequential.seconds * 1e3,
            "overlapped_ms": overlapped.seconds * 1e3,
            "ratio": overlapped.seconds / sequential.seconds,
        }
        rows.append(row)
        print({key: round(value, 2) for key, value in row.items()})
    return rows


async def run(model: Path, rounds: int) -> dict[str, Any]:
    renderer = HuggingFaceRenderer.load(model)
    config = ModelConfig.load(model)
    weights = load_weights(model, config, torch.float32, torch.device("cpu"))
    transfer = TransferOptions(codecs=("raw", "i8"))
    settings = [transfer, transfer, replace(transfer, ahead_steps=0)]
    engines = [
        ReferenceEngine(
            config,
            weights,
            renderer,
            EngineOptions("bench", blocks=256, max_model_len=2_048, dtype="float32", device="cpu", transfer=own),
            KEYRING,
        )
        for own in settings
    ]
    draw = random.Random(1)
    prompts = [[draw.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(4 * rounds)]
    for engine in engines:
        await engine.start()
    try:
        for engine in engines:  # the first pass of each sets memory up
            await first_token(engine, prompts[0][:600][::-1])
        pulls = await measure_pulls(engines[0], engines[1], prompts[:rounds])
        overlap = await measure_overlap(*engines, [prompt[:OVERLAP_TOKENS] for prompt in prompts[rounds:]])
    finally:
        for engine in engines:
            await engine.stop()
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "load": os.getloadavg()[0],
        "pulls": pulls,
        "overlap": overlap,
        "raw_ratio": statistics.median(row["raw_ratio"] for row in pulls),
        "i8_ratio": statistics.median(row["i8_ratio"] for row in pulls),
        "overlap_ratio": statistics.median(row["ratio"] for row in overlap),
    }


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    result = asyncio.run(run(arguments.model, arguments.rounds))
    print(f"sooner than cold: raw {result['raw_ratio']:.1f}x, i8 {result['i8_ratio']:.1f}x (bar {SPEEDUP_MIN})")
    print(f"overlapped {result['overlap_ratio']:.2f}x of load, then compute (bar {OVERLAP_MAX})")
    write(result, arguments.json)


if __name__ == "__main__":
    main()

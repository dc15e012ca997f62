"""Two workers with one tiny model, and plans as a gateway would sign them."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash, pack_tokens
from cachecore.holders import Holder
from cachecore.index.schema import parse_holder
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, KeyId, Keyring, Naming, Salt, TenantId
from cachecore.transfer.capability import Run
from cachecore.transfer.plan import PARAMETER, Grant, Plan, sign
from cachecore.transfer.tcp.client import ClientSettings
from tests.workers.reference.support import KEYRING, BytesRenderer, greedy, run, tiny_engine, tokens_of
from workers.engine import Generation, StepOutput
from workers.reference.engine import ReferenceEngine
from workers.transfer.service import TransferOptions

SIZE = 4
TENANT = KeyId(DEFAULT_TENANT, 0)
RIVAL = KeyId(TenantId("rival"), 0)
PATIENT = ClientSettings(stall_seconds=20, connect_seconds=20)

_rng = random.Random(9)
PROMPT = [_rng.randrange(97) for _ in range(90)]
"""22 blocks and two tokens."""
BLOCKS = 22
HELD = BLOCKS * SIZE
"""Tokens of the prompt that can be held or pulled."""
LAYERS = 4
LAYER_BYTES = HELD * 2 * 8 * 2 * 4
"""Of the whole prompt as `raw`: each layer is a frame here, some 300 bytes longer."""


def transfer_options(**changes: Any) -> TransferOptions:
    return TransferOptions(**{"codecs": ("raw", "i8"), "client": PATIENT, "frame_bytes": 1, **changes})


@contextlib.asynccontextmanager
async def worker(transfer: Mapping[str, Any] | None = None, **options: Any) -> AsyncIterator[ReferenceEngine]:
    """A started engine that moves KV, with room for every prompt here."""
    own = {"blocks": 128, "layers": LAYERS, "transfer": transfer_options(**(transfer or {})), **options}
    engine = tiny_engine(**own)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@contextlib.asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[ReferenceEngine, ReferenceEngine]]:
    async with worker(**options) as source, worker(**options) as target:
        yield source, target


def holder_of(engine: ReferenceEngine) -> Holder:
    assert engine.info.transfer is not None
    return parse_holder(engine.info.transfer.holder.encode())


def naming_of(key_id: KeyId = TENANT) -> Naming:
    scope = IdentityScope("tiny", key_id, SIZE, tokenizer=BytesRenderer.fingerprint)
    return Naming.of(scope, KEYRING)


def chain_of(prompt: Sequence[int], naming: Naming | None = None) -> Chain:
    naming = naming or naming_of()
    return naming.hasher.chain(naming.root, pack_tokens(prompt))


def run_of(prompt: Sequence[int], first: int, end: int, naming: Naming | None = None) -> Run:
    """Blocks `first` to `end` of a prompt."""
    naming = naming or naming_of()
    chain = chain_of(prompt, naming)
    parent = chain[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else naming.root
    return Run(PrefixHash(parent), PrefixHash(chain[(end - 1) * HASH_BYTES : end * HASH_BYTES]), first, end - first)


def plan_of(
    source: ReferenceEngine, prompt: Sequence[int] = PROMPT, first: int = 0, end: int | None = None, **changes: Any
) -> Plan:
    assert source.info.transfer is not None
    naming = naming_of(changes.pop("key_id", TENANT))
    one = run_of(prompt, first, len(prompt) // SIZE if end is None else end, naming)
    addresses = tuple(source.info.transfer.addresses)
    return Plan(holder_of(source), addresses, one, first * SIZE, first * SIZE, "raw", 30.0)._replace(**changes)


def signed(
    plan: Plan,
    target: ReferenceEngine,
    *,
    key_id: KeyId = TENANT,
    fidelity: Fidelity = Fidelity.QUANTIZED,
    seconds: float = 60.0,
    keyring: Keyring = KEYRING,
) -> dict[str, Any]:
    return sign(plan, Grant(key_id, holder_of(target), fidelity, time.time() + seconds), keyring)


def generation(
    prompt: Sequence[int] = PROMPT, *documents: object, request_id: str = "one", tokens: int = 10, **fields: Any
) -> Generation:
    params = {PARAMETER: list(documents)} if documents else None
    return Generation(request_id, prompt, greedy(tokens), kv_transfer_params=params, **fields)


async def warm(engine: ReferenceEngine, prompt: Sequence[int] = PROMPT, **fields: Any) -> list[int]:
    """Have an engine compute a prompt and let go of it; the greedy tokens that follow it."""
    tokens = tokens_of(await run(engine, generation(prompt, request_id="warm", **fields)))
    await until(lambda: at_rest(engine))
    return tokens


async def answer(engine: ReferenceEngine, one: Generation) -> tuple[list[int], StepOutput]:
    """Greedy tokens and the first output."""
    outputs = await run(engine, one)
    return tokens_of(outputs), outputs[0]


def salt_of(key_id: KeyId) -> str:
    return KEYRING.mint_salt(Salt(key_id))


async def until(condition: Any, seconds: float = 20.0) -> None:
    """Wait for something that happens on another thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        await asyncio.sleep(0.002)


def at_rest(engine: ReferenceEngine) -> bool:
    """Nobody references a block."""
    return engine._core.pool.blocks_available == engine._core.pool.blocks_total


class Link:
    """A proxy in front of a source, that does to what the source sends what its attributes say."""

    def __init__(self, address: str) -> None:
        self._upstream = address.removeprefix("tcp://").rsplit(":", 1)
        self.flip_at: int | None = None
        """A bit of this byte is flipped."""
        self.cut_at: int | None = None
        """Here the connection ends."""
        self.hold_at: int | None = None
        """From here on nothing passes before `opened`."""
        self.opened = asyncio.Event()
        self.sent = 0
        """Bytes passed on."""
        self.connections = 0
        self._talks: set[asyncio.Task[None]] = set()
        self.address = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Link"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for talk in self._talks:
                talk.cancel()
            await asyncio.gather(*self._talks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.CancelledError):
            source_reader, source_writer = await asyncio.open_connection(*self._upstream)
            up = asyncio.create_task(_copy(reader, source_writer))
            try:
                await self._pass_on(source_reader, writer)
            finally:
                up.cancel()
                source_writer.close()  # first: this may be cancelled while it waits
                await asyncio.gather(up, return_exceptions=True)
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := bytearray(await reader.read(4096)):
            start, end = self.sent, self.sent + len(data)
            if self.flip_at is not None and start <= self.flip_at < end:
                data[self.flip_at - start] ^= 0x10
            if self.cut_at is not None and end > self.cut_at:
                writer.write(data[: max(0, self.cut_at - start)])
                await writer.drain()
                return
            if self.hold_at is not None and end > self.hold_at:
                writer.write(data[: max(0, self.hold_at - start)])
                await self.opened.wait()
                data = data[max(0, self.hold_at - start) :]
            writer.write(data)
            await writer.drain()
            self.sent += end - start


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()

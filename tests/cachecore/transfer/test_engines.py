"""Channels over engines, with an engine that reads this process's own memory: records, slots, landings, and liars."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from cachecore.scope import Keyring
from cachecore.transfer.engines.channel import (
    PullingChannel,
    Record,
    ServingChannel,
    introduce,
    read_introduction,
    record,
)
from cachecore.transfer.engines.contract import EngineUnavailable, Peer, Region, load
from cachecore.transfer.engines.memory import Landings, Slots
from cachecore.transfer.engines.wire import EngineSettings, EngineWire
from cachecore.transfer.errors import Reason, WireError
from cachecore.transfer.tcp.channel import PlainChannel, receive_exactly
from cachecore.transfer.tcp.client import ClientSettings, TcpTransport
from cachecore.transfer.tcp.server import TcpServer
from cachecore.transfer.transport import Failed, Fetched, Outcome, Transport
from tests.cachecore.transfer.contract_suite import LONG, LONG_BYTES, Carrier, TransportSuite
from tests.cachecore.transfer.test_tcp import LocalServed
from tests.cachecore.transfer.world import (
    EXPECTATION,
    KEYRING,
    LAYER_BYTES,
    LAYERS,
    STRANGERS,
    ListSink,
    Script,
    layer_payload,
    make_plan,
    make_pull,
)


class LocalEngine:
    """Reads end after `looks` looks at them; with None, never."""

    scheme = "local"

    def __init__(self, looks: int | None = 2) -> None:
        self.looks = looks
        self.regions: list[Region] = []
        self.readings: list[LocalReading] = []
        self.kept_going = 0

    def register(self, region: Region) -> None:
        self.regions.append(region)

    def describe(self, region: Region) -> bytes:
        return b"here"

    def meet(self, description: bytes) -> Peer:
        assert description == b"here"
        return Peer("here")

    def read(self, peer: Peer, address: int, region: Region, size: int) -> "LocalReading":
        for known in self.regions:
            if known.address <= address and address + size <= known.address + len(known.memory):
                start = address - known.address
                self.readings.append(LocalReading(known.memory[start : start + size], region.memory, self.looks))
                return self.readings[-1]
        raise WireError("not registered", Reason.CLOSED)

    def progress(self) -> None:
        self.kept_going += 1

    def close(self) -> None:
        self.regions.clear()


class LocalReading:
    def __init__(self, source: memoryview, target: memoryview, looks: int | None) -> None:
        self.looks = looks
        self._source, self._target = source, target

    def is_over(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= 1
        if self.looks <= 0:
            self._target[: len(self._source)] = self._source
        return self.looks <= 0

    def abandon(self) -> bool:
        """One that cannot be stopped."""
        return self.looks is not None and self.looks <= 0


SETTINGS = EngineSettings(slot_bytes=1 << 20, slots=4, inline_bytes_max=LAYER_BYTES // 2)


class LocalCarrier:
    def __init__(self, settings: EngineSettings = SETTINGS) -> None:
        self.engine = LocalEngine()
        self.wire = EngineWire(self.engine, KEYRING, settings)

    @contextlib.asynccontextmanager
    async def serve(self, script: Script, *, clock_ahead_seconds: float = 0.0) -> AsyncIterator[LocalServed]:
        source = script.source()
        server = TcpServer(source, KEYRING, wire=self.wire, clock=lambda: time.time() + clock_ahead_seconds)
        await server.start()
        yield LocalServed(server, source)
        await server.close()

    @contextlib.asynccontextmanager
    async def transport(
        self, keyring: Keyring = KEYRING, *, streams: int = 1, stall_seconds: float = 10.0
    ) -> AsyncIterator[Transport]:
        settings = ClientSettings(streams=streams, stall_seconds=stall_seconds, connect_seconds=10)
        transport = TcpTransport(keyring, settings, wires=[self.wire])
        yield transport
        transport.close()


class TestLocalEngine(TransportSuite):
    @pytest.fixture
    def carrier(self) -> Carrier:
        return LocalCarrier()


async def pull(carrier: LocalCarrier, script: Script, sink: ListSink, stall_seconds: float = 10.0) -> Outcome:
    async with carrier.serve(script) as served, carrier.transport(stall_seconds=stall_seconds) as transport:
        deadline = asyncio.get_running_loop().time() + 30
        return await transport.fetch(make_pull(make_plan(served.address)), EXPECTATION, sink, deadline)


async def test_long_sends_travel_by_the_engine_and_short_ones_beside_it() -> None:
    carrier, sink = LocalCarrier(EngineSettings(slot_bytes=1 << 20, slots=4)), ListSink()
    assert isinstance(await pull(carrier, Script(), sink), Fetched)
    assert carrier.engine.readings == []
    assert isinstance(await pull(carrier, LONG, sink), Fetched)
    assert len(carrier.engine.readings) == 2 * LAYERS


async def test_without_a_free_slot_it_comes_beside_the_engine() -> None:
    carrier, sink = LocalCarrier(), ListSink()
    while carrier.wire._slots.take():
        pass
    assert isinstance(await pull(carrier, LONG, sink), Fetched)
    assert sink.layers == {layer: layer_payload(layer, LONG_BYTES) for layer in range(LAYERS)}
    assert carrier.engine.readings == []


async def test_slots_and_landings_come_back() -> None:
    carrier = LocalCarrier()
    for _ in range(3):
        assert isinstance(await pull(carrier, LONG, ListSink()), Fetched)
    assert len(carrier.wire._slots._free) == SETTINGS.slots
    assert len(carrier.wire._landings._spare) == 1
    assert len(carrier.engine.regions) == 2


async def test_memory_that_a_read_may_still_write_to_is_not_used_again() -> None:
    carrier = LocalCarrier()
    carrier.engine.looks = None
    outcome = await pull(carrier, Script(), ListSink(), stall_seconds=0.2)
    assert outcome[:2] == (Reason.STALLED, 0)
    carrier.engine.looks = 2
    assert isinstance(await pull(carrier, Script(), ListSink()), Fetched)
    stuck, later = (reading._target.obj for reading in carrier.engine.readings[:2])
    assert stuck is not later
    carrier.engine.readings[0].looks = 0
    assert {id(carrier.wire._landings.take().memory.obj) for _ in range(2)} == {id(stuck), id(later)}


async def test_a_read_that_fails() -> None:
    carrier = LocalCarrier()
    carrier.wire._slots  # noqa: B018  registered
    carrier.engine.regions.clear()
    outcome = await pull(carrier, Script(), ListSink())
    assert outcome[:2] == (Reason.CLOSED, 0)


async def test_memory_that_cannot_be_registered_is_an_outcome() -> None:
    carrier = LocalCarrier()
    carrier.wire._slots  # noqa: B018  registered

    def refuse(region: Region) -> None:
        raise EngineUnavailable("no more memory can be pinned")

    carrier.engine.register = refuse  # type: ignore[method-assign]
    outcome = await pull(carrier, Script(), ListSink())
    assert isinstance(outcome, Failed)
    assert outcome.reason is Reason.UNREACHABLE
    assert "pinned" in outcome.detail


async def test_a_landing_is_copied_before_it_is_believed() -> None:
    """What is written there later changes nothing that a sink has."""
    carrier, sink = LocalCarrier(), ListSink()
    assert isinstance(await pull(carrier, LONG, sink), Fetched)
    for region in carrier.engine.regions:
        region.memory[:] = bytes(len(region.memory))
    assert sink.layers == {layer: layer_payload(layer, LONG_BYTES) for layer in range(LAYERS)}


# ---- records ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    yield ours, theirs
    ours.close()
    theirs.close()


LOCATED = record(Record.LOCATED, bytes(8) + (100).to_bytes(4, "little"))
INTRODUCTION = record(Record.ENGINE, introduce(b"here", KEYRING))


LIES = {
    "where before who": (LOCATED, Reason.MALFORMED),
    "not registered": (INTRODUCTION + LOCATED, Reason.CLOSED),
    "too much": (INTRODUCTION + record(Record.LOCATED, bytes(8) + (1 << 21).to_bytes(4, "little")), Reason.MALFORMED),
    "nothing": (INTRODUCTION + record(Record.LOCATED, bytes(12)), Reason.MALFORMED),
    "a short record": (INTRODUCTION + record(Record.LOCATED, bytes(11)), Reason.MALFORMED),
    "a stranger": (record(Record.ENGINE, introduce(b"here", STRANGERS)), Reason.FORGED),
    "an unknown key": (record(Record.ENGINE, b"\x09" + introduce(b"here", KEYRING)[1:]), Reason.FORGED),
    "no description": (record(Record.ENGINE, introduce(b"here", KEYRING)[:36]), Reason.MALFORMED),
    "a long description": (record(Record.ENGINE, bytes(1 << 17)), Reason.MALFORMED),
    "a puller's record": (record(Record.TAKEN), Reason.MALFORMED),
    "no bytes": (record(Record.INLINE), Reason.MALFORMED),
    "no record": (b"\x07" + bytes(4), Reason.MALFORMED),
}


@pytest.mark.parametrize("what", LIES)
async def test_a_source_that_lies_to_a_puller(ends: tuple[socket.socket, socket.socket], what: str) -> None:
    said, reason = LIES[what]
    engine = LocalEngine()
    puller = PullingChannel(PlainChannel(ends[0]), engine, Landings(engine, 1 << 20), 1 << 20, KEYRING)
    ends[1].sendall(said)
    with pytest.raises(WireError) as caught:
        await puller.receive_into(memoryview(bytearray(10)))
    assert caught.value.reason is reason
    assert engine.readings == []


async def test_an_engine_is_kept_going_while_it_may_be_read_from() -> None:
    engine = LocalEngine()
    slots = Slots(engine, 100, 2)
    taken = [slots.take(), slots.take()]
    await asyncio.sleep(0.05)
    assert engine.kept_going > 3
    for slot in taken:
        assert slot is not None
        slots.give_back(slot)
    before = engine.kept_going
    await asyncio.sleep(0.02)
    assert engine.kept_going == before
    assert slots.take() is not None
    assert engine.kept_going == before + 1


@pytest.mark.parametrize("said", [INTRODUCTION, LOCATED, record(Record.TAKEN)], ids=["who", "where", "taken"])
async def test_a_puller_cannot_make_a_source_read(ends: tuple[socket.socket, socket.socket], said: bytes) -> None:
    engine = LocalEngine()
    source = ServingChannel(PlainChannel(ends[0]), Slots(engine, 1 << 20, 4), 2, 10, b"")
    ends[1].sendall(said)
    with pytest.raises(WireError) as caught:
        await source.receive_into(memoryview(bytearray(10)))
    assert caught.value.reason is Reason.MALFORMED
    assert engine.readings == []


async def test_a_source_runs_only_so_far_ahead(ends: tuple[socket.socket, socket.socket]) -> None:
    slots = Slots(LocalEngine(), 1 << 20, 4)
    source, puller = ServingChannel(PlainChannel(ends[0]), slots, 2, 10, b""), PlainChannel(ends[1])
    for _ in range(2):
        await source.send([bytes(100)])
    third = asyncio.create_task(source.send([bytes(100)]))
    done, _ = await asyncio.wait([third], timeout=0.05)
    assert not done
    await puller.send([record(Record.TAKEN)])
    await third
    assert len(slots._free) == 2
    source.close()
    assert len(slots._free) == 4


async def test_a_puller_that_speaks_out_of_turn(ends: tuple[socket.socket, socket.socket]) -> None:
    source = ServingChannel(PlainChannel(ends[0]), Slots(LocalEngine(), 1 << 20, 4), 1, 10, b"")
    await source.send([bytes(100)])
    ends[1].sendall(record(Record.INLINE, b"x"))
    with pytest.raises(WireError, match="out of turn"):
        await source.send([bytes(100)])


async def test_what_a_source_sends_arrives_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    """Inline, by the engine, inline: as one stream."""
    engine = LocalEngine()
    introduction = introduce(engine.describe(Region.allocate(1)), KEYRING)
    source = ServingChannel(PlainChannel(ends[0]), Slots(engine, 1 << 20, 4), 2, 10, introduction)
    puller = PullingChannel(PlainChannel(ends[1]), engine, Landings(engine, 1 << 20), 1 << 20, KEYRING)
    sent = [bytes([number]) * size for number, size in enumerate((3, 100, 4, 5000, 70000, 1))]
    for part in sent:
        await source.send([part[: len(part) // 2], part[len(part) // 2 :]])
        assert await receive_exactly(puller, len(part)) == part
    assert len(engine.readings) == 3
    assert puller.is_quiet()
    source.close()
    assert puller.has_ended()
    assert not puller.is_quiet()


def test_a_description_reads_back() -> None:
    body = introduce(b"here", KEYRING)
    assert read_introduction(body, KEYRING) == b"here"
    for position in (0, 4, 35, 36, len(body) - 1):
        forged = bytearray(body)
        forged[position] ^= 1
        with pytest.raises(WireError):
            read_introduction(bytes(forged), KEYRING)


def test_an_engine_that_is_not_installed_says_what_to_install() -> None:
    with pytest.raises(EngineUnavailable, match=r"pip install 'ropeway\[nixl\]'; it also needs luck"):
        load(("no_such_engine",), "nixl", "luck")

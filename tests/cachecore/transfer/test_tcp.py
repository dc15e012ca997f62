"""The contract over real sockets, and what only sockets have: connections, streams, TLS."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import uvloop

from cachecore.scope import KeyId, Keyring
from cachecore.transfer.errors import Reason
from cachecore.transfer.frames import PIECE_BYTES
from cachecore.transfer.header import Span
from cachecore.transfer.tcp import channel
from cachecore.transfer.tcp.client import ClientSettings, TcpTransport
from cachecore.transfer.tcp.server import ServerSettings, TcpServer
from cachecore.transfer.transport import Draft, Fetched, Outcome, Request, Transport
from tests.cachecore.transfer.contract_suite import (
    LONG,
    Carrier,
    MortalCarrier,
    SeparateSuite,
    TransportSuite,
    is_whole,
)
from tests.cachecore.transfer.processes import separate_carrier
from tests.cachecore.transfer.serving import PATIENT, pull, serving
from tests.cachecore.transfer.world import (
    ACME,
    EXPECTATION,
    HEADER,
    KEYRING,
    LAYERS,
    RUN,
    STRANGERS,
    TARGET,
    ListSink,
    MemorySource,
    Script,
    ScriptedSource,
    make_plan,
    make_pull,
)


@dataclass
class LocalServed:
    server: TcpServer
    source: ScriptedSource

    @property
    def address(self) -> str:
        return self.server.address

    async def requests(self) -> list[Request]:
        return self.source.requests

    async def freed(self) -> int:
        return self.source.closed

    async def stop(self) -> None:
        await self.server.close()


class TcpCarrier:
    @contextlib.asynccontextmanager
    async def serve(self, script: Script, *, clock_ahead_seconds: float = 0.0) -> AsyncIterator[LocalServed]:
        source = script.source()
        async with serving(source, clock=lambda: time.time() + clock_ahead_seconds) as server:
            yield LocalServed(server, source)

    @contextlib.asynccontextmanager
    async def transport(
        self, keyring: Keyring = KEYRING, *, streams: int = 1, stall_seconds: float = 10.0
    ) -> AsyncIterator[Transport]:
        settings = ClientSettings(streams=streams, stall_seconds=stall_seconds, connect_seconds=10)
        transport = TcpTransport(keyring, settings)
        yield transport
        transport.close()


class TestTcp(TransportSuite):
    @pytest.fixture
    def carrier(self) -> Carrier:
        return TcpCarrier()


@pytest.fixture(scope="module")
def between_processes() -> Iterator[MortalCarrier]:
    with separate_carrier() as carrier:
        yield carrier


class TestTcpBetweenProcesses(SeparateSuite):
    @pytest.fixture
    def carrier(self, between_processes: MortalCarrier) -> MortalCarrier:
        return between_processes


async def test_a_run_arrives_under_uvloop() -> None:
    def work() -> Outcome:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(there_and_back())

    async def there_and_back() -> Outcome:
        async with serving(LONG.source()) as server:
            return await pull(server.address, settings=replace(PATIENT, streams=2))

    outcome = await asyncio.to_thread(work)
    assert isinstance(outcome, Fetched)


async def test_a_source_learns_what_is_wanted() -> None:
    source = MemorySource()
    async with serving(source) as server:
        await pull(server.address, settings=replace(PATIENT, streams=2))
    spans = sorted((request.wanted.layers, request.wanted.stride) for request in source.requests)
    assert spans == [(Span(0, 6, 6), 2), (Span(1, 5, 6), 2)]
    assert {request.capability.run for request in source.requests} == {RUN}
    assert {request.capability.target for request in source.requests} == {TARGET}


async def test_a_connection_serves_one_pull_after_another() -> None:
    async with serving(MemorySource(), ServerSettings(connections_max=1)) as server:
        transport = TcpTransport(KEYRING, PATIENT)
        for _ in range(3):
            deadline = asyncio.get_running_loop().time() + 30
            order = make_pull(make_plan(server.address))
            assert is_whole(await transport.fetch(order, EXPECTATION, ListSink(), deadline))
        transport.close()
    assert server.counts.transfers == 3


async def test_a_kept_connection_that_the_source_closed_is_not_used() -> None:
    transport = TcpTransport(KEYRING, PATIENT)
    deadline = asyncio.get_running_loop().time() + 30
    async with serving(MemorySource()) as server:
        port = int(server.address.rpartition(":")[2])
        order = make_pull(make_plan(server.address))
        assert is_whole(await transport.fetch(order, EXPECTATION, ListSink(), deadline))
    async with serving(MemorySource(), ServerSettings(port=port)):
        assert is_whole(await transport.fetch(order, EXPECTATION, ListSink(), deadline))
    transport.close()


async def test_connections_to_sources_that_are_gone_are_not_kept_for_ever() -> None:
    transport = TcpTransport(KEYRING, replace(PATIENT, idle_seconds=0.01))
    deadline = asyncio.get_running_loop().time() + 30
    async with serving(MemorySource()) as first, serving(MemorySource()) as second:
        for server in (first, second):
            assert is_whole(
                await transport.fetch(make_pull(make_plan(server.address)), EXPECTATION, ListSink(), deadline)
            )
            await asyncio.sleep(0.02)
        assert list(transport.links._idle) == [second.address]
    transport.close()
    assert transport.links._idle == {}


async def test_a_pull_that_ends_after_its_transport_was_closed_leaves_nothing_open() -> None:
    gate = asyncio.Event()
    source = MemorySource(before=lambda layer: gate.wait())
    transport = TcpTransport(KEYRING, PATIENT)
    deadline = asyncio.get_running_loop().time() + 30
    async with serving(source) as server:
        order = make_pull(make_plan(server.address))
        task = asyncio.create_task(transport.fetch(order, EXPECTATION, ListSink(), deadline))
        while not source.requests:
            await asyncio.sleep(0.001)
        transport.close()
        gate.set()
        assert is_whole(await task)
    assert transport.links._idle == {}


async def test_a_payload_of_many_parts() -> None:
    """More than the kernel takes in one call."""

    class Crumbs(MemorySource):
        def draft(self, layer: int, size: int = 1, with_tokens: bool = False) -> Draft:
            header = HEADER._replace(layers=Span(layer, 1, LAYERS), layer_bytes=(3000,))
            return Draft(header, [bytes([layer])] * 3000)

    sink = ListSink()
    async with serving(Crumbs()) as server:
        assert isinstance(await pull(server.address, sink), Fetched)
    assert sink.layers == {layer: bytes([layer]) * 3000 for layer in range(LAYERS)}


async def test_who_asks_for_nothing_is_let_go() -> None:
    """Soon where nothing authentic was ever asked for, later otherwise."""
    async with serving(MemorySource(), ServerSettings(greeting_seconds=0.01)) as server:
        host, port = server.address.removeprefix("tcp://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert len(await asyncio.wait_for(reader.read(), 5)) == 24
        writer.close()
    async with serving(MemorySource(), ServerSettings(idle_seconds=0.01)) as server:
        transport = TcpTransport(KEYRING, PATIENT)
        deadline = asyncio.get_running_loop().time() + 30
        order = make_pull(make_plan(server.address))
        assert is_whole(await transport.fetch(order, EXPECTATION, ListSink(), deadline))
        (kept,) = transport.links._idle[server.address]
        while kept.channel.is_quiet():
            await asyncio.sleep(0.01)
        transport.close()


async def test_a_key_that_was_dropped_meanwhile() -> None:
    order = make_pull(make_plan(), key_id=KeyId(ACME.tenant, 1))
    async with serving(MemorySource()) as server:
        transport = TcpTransport(STRANGERS, PATIENT)
        deadline = asyncio.get_running_loop().time() + 30
        order = order._replace(plan=order.plan._replace(addresses=(server.address,)))
        outcome = await transport.fetch(order, EXPECTATION, ListSink(), deadline)
    assert outcome[:2] == (Reason.FORGED, 0)


async def test_streams_run_at_most_one_frame_ahead() -> None:
    held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked: list[int] = []
    source = MemorySource(before=asked.append)
    sink = ListSink(after=lambda frame: held)
    source.payload = lambda layer: bytes(16 << 20)  # more than sockets buffer
    async with serving(source) as server:
        task = asyncio.create_task(pull(server.address, sink, settings=replace(PATIENT, streams=2)))
        while not sink.frames:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(sink.frames) == 1
        assert max(asked) <= 3
        held.set_result(None)
        assert isinstance(await task, Fetched)
    assert sorted(asked) == list(range(LAYERS))


@pytest.mark.parametrize("direction", ["receive", "send"])
async def test_a_socket_that_is_always_ready_lets_others_run(direction: str) -> None:
    class Ready:
        def recv_into(self, room: memoryview) -> int:
            return len(room)

        def sendmsg(self, parts: list[bytes]) -> int:
            return sum(map(len, parts))

    moved, turns = 0, [0]

    async def watch() -> None:
        while True:
            turns.append(moved)
            await asyncio.sleep(0)

    unconnected = socket.socket()
    one = channel.PlainChannel(unconnected)
    one._socket, piece = Ready(), memoryview(bytearray(PIECE_BYTES))  # type: ignore[assignment]
    watching = asyncio.create_task(watch())
    while moved < 64 << 20:
        if direction == "receive":
            moved += await one.receive_into(piece)
        else:
            await one.send([piece])
            moved += len(piece)
    watching.cancel()
    unconnected.close()
    assert max(later - sooner for sooner, later in pairwise(turns)) <= channel.YIELD_BYTES + PIECE_BYTES
    assert len(turns) > 16


async def test_more_than_it_takes_is_busy() -> None:
    gate = asyncio.Event()
    source = MemorySource(before=lambda layer: gate.wait())
    async with serving(source, ServerSettings(transfers_max=1)) as server:
        first = asyncio.create_task(pull(server.address, settings=PATIENT))
        while not source.requests:
            await asyncio.sleep(0.001)
        assert await pull(server.address) == (Reason.BUSY,)
        gate.set()
        assert is_whole(await first)
        assert is_whole(await pull(server.address))
    assert server.counts.refusals == {Reason.BUSY: 1}


async def test_the_second_address_is_tried() -> None:
    async with serving(MemorySource()) as server:
        addresses = ("tcp://127.0.0.1:1", "nixl://127.0.0.1:7", server.address)
        assert is_whole(await pull("", plan={"addresses": addresses}))

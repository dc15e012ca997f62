"""Events that are told once, to whoever asks: a server made by hand, on a real socket."""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cachecore.blocks import pack_tokens, split_chain
from cachecore.holders import Epoch, Tier, Worker, WorkerName
from cachecore.index.contract import PrefixIndex
from cachecore.index.memory import MemoryIndex
from cachecore.prompts.plain import PlainRenderer
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from cachecore.trtllm_events import TrtllmEvents
from gateway.config import ProbesConfig, UpstreamTlsConfig, WorkerConfig
from gateway.fleet import polling
from gateway.fleet.engines.contract import EventEndpoints
from gateway.fleet.engines.discovery import ADAPTERS
from gateway.fleet.intake import EventSource
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.polling import Pace, PolledIntake
from gateway.fleet.registry import Fleet
from gateway.fleet.sequence import VoidReason
from gateway.fleet.streams import Intakes, OwnStreams
from gateway.fleet.texts import TextStreams
from gateway.tls import upstream_context
from tests.cachecore.transfer.certificates import Authority

SIZE = 4
HOLDER = Worker(WorkerName("w"), Epoch(1))
RING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", RING.key_id(DEFAULT_TENANT), SIZE), RING)
QUICK = Pace(idle_seconds=0.005, answer_seconds=2.0, retry_seconds=0.01, retry_seconds_max=0.04)


def tokens_of(block: int) -> list[int]:
    return [block * 10 + place for place in range(SIZE)]


def names(*blocks: int) -> set[bytes]:
    """Of a chain of these blocks."""
    tokens = pack_tokens([token for block in blocks for token in tokens_of(block)])
    return set(split_chain(NAMING.hasher.chain(NAMING.root, tokens)))


def stored(*blocks: int, parent: int | None = None) -> dict[str, Any]:
    told = [
        {"block_hash": block, "cache_level": 0, "tokens": [{"token_id": token} for token in tokens_of(block)]}
        for block in blocks
    ]
    return {"type": "stored", "parent_hash": parent, "blocks": told}


def removed(*blocks: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(blocks)}


class Server:
    """Says what it is told to, each answer once, in bytes; then that there is nothing."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.asked: list[bytes] = []
        self.connections = 0
        self.url = ""
        self._number = 0

    def tell(self, *events: dict[str, Any], skip: int = 0, rank: int | None = None) -> None:
        """Events, numbered after `skip` that nobody gets to hear."""
        self._number += skip
        ranked = {} if rank is None else {"attention_dp_rank": rank}
        numbered = []
        for event in events:
            numbered.append({"event_id": self._number, "window_size": 64, "data": event, **ranked})
            self._number += 1
        self.answers.append(http(json.dumps(numbered).encode()))

    def restart(self) -> None:
        self._number = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0) if self.answers else http(b"[]")
                for start in range(0, len(answer), 1000):
                    writer.write(answer[start : start + 1000])
                    await writer.drain()
                if b"connection: close" in answer or not answer.startswith(b"HTTP"):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def http(body: bytes, status: int = 200, length: int | None = None, more: str = "") -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status} x\r\n{more}content-length: {size}\r\n\r\n".encode() + body


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/kv_cache_events"
    yield server
    listener.close()


class World:
    def __init__(self, intake: PolledIntake, index: PrefixIndex, voided: list[VoidReason]) -> None:
        self.intake = intake
        self.index = index
        self.voided = voided

    @property
    def held(self) -> set[bytes]:
        return set(self.index.holdings(HOLDER, Tier.L0))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.003)

    async def holds(self, *blocks: int) -> None:
        await self.until(lambda: self.held == names(*blocks))


@asynccontextmanager
async def following(
    server: Server,
    index: PrefixIndex | None = None,
    resume_from: int | None = None,
    rank: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[World]:
    index, voided = index or MemoryIndex(), list[VoidReason]()
    rekeyer, source = Rekeyer(SIZE, lambda *_: NAMING), EventSource(server.url)
    decoder = TrtllmEvents(SIZE, rank=rank)
    intake = PolledIntake(
        HOLDER, source, index, rekeyer, decoder, voided.append, resume_from=resume_from, pace=QUICK, tls=tls
    )
    await intake.start()
    yield World(intake, index, voided)
    await intake.stop()


async def test_what_is_told_is_in_the_index(server: Server) -> None:
    server.tell({"type": "created", "num_blocks_per_cache_level": [64]}, stored(1, 2))
    server.tell(stored(3, parent=2))
    async with following(server) as world:
        await world.holds(1, 2, 3)
        server.tell(removed(3))
        await world.holds(1, 2)
        stats = world.intake.stats()
        assert (stats.batches, stats.malformed, stats.gaps, stats.unanswered) == (3, 0, 0, 0)
        assert stats.last_seen is not None
        assert not world.intake.behind
        assert world.index.sequence(HOLDER) == 2
    assert all(asked.startswith(b"POST /kv_cache_events HTTP/1.1") for asked in server.asked)
    assert server.connections == 1


async def test_over_tls_whom_the_fleet_believes_is_believed(tmp_path: Path) -> None:
    server, files = Server(), Authority.make(tmp_path).certify("engine")
    shown = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    shown.load_cert_chain(files.certificate, files.key)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=shown)
    server.url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/kv_cache_events"
    server.tell(stored(1))
    async with following(server) as world:
        await world.until(lambda: world.intake.stats().unanswered > 0)
        assert server.asked == []
    async with following(server, tls=upstream_context(UpstreamTlsConfig(ca=files.authority))) as world:
        await world.holds(1)
    listener.close()


async def test_nothing_to_tell_is_no_batch(server: Server) -> None:
    async with following(server) as world:
        await world.until(lambda: len(server.asked) > 5)
        stats = world.intake.stats()
        assert (stats.batches, stats.last_seen, world.index.sequence(HOLDER)) == (0, None, None)


async def test_what_was_told_before_is_not_missed(server: Server) -> None:
    server.tell(stored(1), skip=100)
    async with following(server) as world:
        await world.holds(1)
        assert world.voided == []


async def test_a_gap_voids_what_is_known_and_what_comes_next_is_a_beginning(server: Server) -> None:
    server.tell(stored(1, 2))
    async with following(server) as world:
        await world.holds(1, 2)
        server.tell(stored(5), skip=3)
        await world.holds(5)
        server.tell(removed(1), removed(5))
        await world.until(lambda: not world.held)
        assert world.voided == [VoidReason.GAP]
        assert world.intake.stats().gaps == 1


async def test_numbers_that_begin_again_are_another_process(server: Server) -> None:
    server.tell(stored(1, 2), stored(3, parent=2))
    async with following(server) as world:
        await world.holds(1, 2, 3)
        server.restart()
        server.tell(stored(1))
        await world.holds(1)
        assert world.voided == [VoidReason.RESTART]


async def test_other_ranks_say_nothing_of_this_one(server: Server) -> None:
    server.tell(stored(1), rank=1)
    async with following(server, rank=1) as world:
        await world.holds(1)
        server.tell(stored(2), rank=0)
        await world.until(lambda: world.intake.stats().other_rank == 1)
        assert world.held == names(1)


async def test_what_is_doubted_is_learned_anew(server: Server) -> None:
    server.tell(stored(1))
    async with following(server) as world:
        await world.holds(1)
        world.intake.forget(reread=True)
        await world.until(lambda: not world.held)
        server.tell(stored(1))
        await world.holds(1)
        assert world.voided == [VoidReason.DOUBT]


async def test_whoever_takes_over_begins_with_nothing(server: Server) -> None:
    index = MemoryIndex()
    server.tell(stored(1, 2))
    async with following(server, index) as world:
        await world.holds(1, 2)
    server.tell(stored(7))
    async with following(server, index, resume_from=0) as world:
        await world.holds(7)
        assert index.sequence(HOLDER) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (http(b"", 404), "status 404"),
        (http(b"[", 500), "status 500"),
        (http(b"[]", length=50, more="connection: close\r\n"), "without sending complete message body"),
        (b"nonsense\r\n\r\n", "illegal status line"),
    ],
    ids=["no such route", "an error", "cut", "no HTTP"],
)
async def test_a_server_that_fails_is_asked_again(
    server: Server, caplog: pytest.LogCaptureFixture, answer: bytes, reason: str
) -> None:
    caplog.set_level(logging.INFO, "ropeway.events")
    server.answers = [answer] * 4
    async with following(server) as world:
        await world.until(lambda: not server.answers)
        server.tell(stored(1))
        await world.holds(1)
        assert world.intake.stats().unanswered == 4
    said = [record.getMessage() for record in caplog.records]
    assert [reason in said[0], "tells its KV events again" in said[1], len(said)] == [True, True, 2]


async def test_a_server_that_is_not_there_is_asked_again(server: Server, unused_tcp_port: int) -> None:
    real, server.url = server.url, f"http://127.0.0.1:{unused_tcp_port}/kv_cache_events"
    async with following(server) as world:
        await world.until(lambda: world.intake.stats().unanswered >= 2)
        assert world.index.sequence(HOLDER) is None
    server.url = real


async def test_an_answer_that_is_too_long_is_not_read_and_shows_as_a_gap(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.tell(stored(1))
    async with following(server) as world:
        await world.holds(1)
        monkeypatch.setattr(polling, "ANSWER_BYTES_MAX", 2000)
        server.tell(*(stored(block) for block in range(10, 60)))
        server.tell(stored(2))
        await world.holds(2)
        assert world.voided == [VoidReason.GAP]
        assert world.intake.stats().unanswered == 1


async def test_what_cannot_be_read_is_counted(server: Server) -> None:
    server.answers = [http(b"{}"), http(b'[{"event_id": 0, "data": {"type": "stored"}}]'), http(b"\xff")]
    async with following(server) as world:
        await world.until(lambda: world.intake.stats().malformed == 3)
        server.restart()
        server.tell(stored(9), skip=1)
        await world.holds(9)


def test_the_longer_it_fails_the_later_it_is_asked() -> None:
    pace = Pace()
    assert [pace.after(failures) for failures in (1, 2, 3, 7, 1000)] == [0.5, 1.0, 2.0, 30.0, 30.0]


# ---- as a worker of a fleet ------------------------------------------------------------------------------------------


async def test_a_worker_of_a_fleet_is_followed(scripted: Any) -> None:
    """By its engine's name alone, through the same stages as any other."""
    events = [{"event_id": 0, "data": stored(1, 2)}]

    def tell_once(_document: Any) -> list[Any]:
        told = list(events)
        events.clear()
        return told

    worker = await scripted(
        {
            "/v1/models": {"data": [{"id": "m", "owned_by": "tensorrt_llm"}]},
            "/version": {"version": "1.2.0"},
            "/health": "",
            "/kv_cache_events": tell_once,
        }
    )
    knowledge = Knowledge(MemoryIndex())
    streams = OwnStreams(Intakes(knowledge.index, lambda *_: NAMING))
    fleet = Fleet(ProbesConfig(interval_seconds=0.05, timeout_seconds=5.0), {"m": PlainRenderer()}, knowledge, streams)
    record = await fleet.register(WorkerConfig(url=worker.engine.url, name="w", block_size_tokens=SIZE))
    try:
        async with asyncio.timeout(10):
            while not record.healthy or set(knowledge.index.holdings(record.holder(), Tier.L0)) != names(1, 2):
                await asyncio.sleep(0.005)
        assert record.adapter is ADAPTERS["trtllm"]
        assert [type(intake) for intake in record.intakes] == [PolledIntake]
    finally:
        await fleet.stop()


async def test_texts_are_not_read_a_second_time_where_each_event_is_told_once(server: Server) -> None:
    class Inner:
        followed: Sequence[Any] = ()

        async def follow(self, record: Any, pool: Any) -> None:
            self.followed = [record]

        async def stop(self) -> None: ...

    class Record:
        name = "w"
        holders = (HOLDER,)

        class discovery:
            events = EventEndpoints.at(server.url)

    inner = Inner()
    texts = TextStreams(inner, lambda *_: NAMING, None)  # type: ignore[arg-type]
    await texts.follow(Record(), None)  # type: ignore[arg-type]
    assert len(inner.followed) == 1
    assert texts._followed == {}
    await texts.stop()
    assert server.asked == []

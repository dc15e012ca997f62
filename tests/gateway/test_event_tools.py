"""`ropeway events`: a stream recorded from a worker's publisher and played to a gateway's intake."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from cachecore.captures import Capture, CapturedMessage, CaptureHeader, write_capture
from cachecore.events import BlockStored, Dialect, EventBatch, encode_batch
from cachecore.holders import Epoch, Tier, Worker, WorkerName
from cachecore.index.memory import MemoryIndex
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, IdentityScope, Keyring, Naming
from gateway import event_tools
from gateway.errors import StartupError
from gateway.event_tools import Playing, Recording
from gateway.fleet.framing import Message
from gateway.fleet.intake import EventIntake, EventSource
from workers.publisher import EventPublisher, PublisherConfig, ReplayFraming

SIZE = 4
HOLDER = Worker(WorkerName("w1"), Epoch(1))
RING = Keyring({0: bytes(32)}, 0)
NAMING = Naming.of(IdentityScope("m", RING.key_id(DEFAULT_TENANT), SIZE), RING)
REPOSITORY = Path(__file__).parents[2]


def batch(handle: int) -> EventBatch:
    parent = handle - 1 if handle > 1 else None
    return EventBatch(1.0, (BlockStored((handle,), parent, list(range(handle * SIZE, (handle + 1) * SIZE)), SIZE),))


def payload(handle: int) -> bytes:
    return encode_batch(batch(handle), Dialect.VLLM_MAP)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = EventPublisher()
    yield publisher
    publisher.close()


@asynccontextmanager
async def recording(recording: Recording) -> AsyncIterator[None]:
    """Records while the block runs, and has to end by itself."""
    task = asyncio.create_task(event_tools.capture(recording, as_json=True))
    try:
        yield
        assert await asyncio.wait_for(task, 10) == 0
    finally:
        task.cancel()


async def publish_until(publisher: EventPublisher, count: int, path: Path, handle: int) -> None:
    """Publish until the file has so many messages: a subscription takes a moment."""
    async with asyncio.timeout(10):
        while not path.exists() or len(path.read_bytes().splitlines()) < count:
            publisher.publish(batch(handle))
            handle += 1
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("framing", list(ReplayFraming))
async def test_what_was_announced_before_comes_first(
    framing: ReplayFraming, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = EventPublisher(PublisherConfig(framing=framing))
    path = tmp_path / "events.jsonl"
    try:
        for handle in (1, 2, 3):
            publisher.publish(batch(handle))
        wanted = Recording(publisher.endpoint, path, publisher.replay_endpoint, note="three, then more", messages_max=6)
        async with recording(wanted):
            await asyncio.sleep(0.2)
            for handle in range(4, 200):
                if publisher.publish(batch(handle)) and path.exists() and "ended" in capsys.readouterr().out:
                    break
                await asyncio.sleep(0.02)
    finally:
        publisher.close()
    capture = Capture(path)
    messages = list(capture)
    assert (capture.header.note, capture.header.endpoint) == ("three, then more", publisher.endpoint)
    assert [(message.sequence, message.payload) for message in messages[:3]] == [(n, payload(n + 1)) for n in range(3)]
    assert [message.replayed for message in messages] == [True] * 3 + [False] * 3
    assert messages[0].topic == ("kv-events" if framing is ReplayFraming.V4 else "")
    assert messages[-1].topic == "kv-events"
    sequences = [message.sequence for message in messages]
    assert sequences == sorted(set(sequences))
    assert [message.at for message in messages] == sorted(message.at for message in messages)


async def test_bounds_end_a_recording(
    publisher: EventPublisher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = Recording(publisher.endpoint, tmp_path / "silent.jsonl", seconds_max=0.05)
    assert await event_tools.capture(silent, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ended"], said["messages"], said["first_sequence"]) == ("seconds", 0, None)
    assert list(Capture(tmp_path / "silent.jsonl")) == []

    small = Recording(publisher.endpoint, tmp_path / "small.jsonl", bytes_max=1)
    async with recording(small):
        for handle in range(1, 100):
            publisher.publish(batch(handle))
            await asyncio.sleep(0.01)
    assert len(list(Capture(tmp_path / "small.jsonl"))) == 1
    assert json.loads(capsys.readouterr().out)["ended"] == "bytes"


async def test_messages_that_are_no_events_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint, path = f"ipc://{tmp_path}/events", tmp_path / "events.jsonl"
    context = zmq.asyncio.Context()
    try:
        async with recording(Recording(endpoint, path, bind=True, messages_max=1)):
            with context.socket(zmq.XPUB) as engine:
                engine.linger = 1000
                await asyncio.sleep(0.05)
                engine.connect(endpoint)
                await engine.recv()
                await engine.send_multipart([b"kv", b"short", b"x"])
                await engine.send_multipart(Message(7, payload(1), b"kv").live())
    finally:
        context.destroy(linger=0)
    assert next(iter(Capture(path))).sequence == 7
    said = json.loads(capsys.readouterr().out)
    assert (said["odd"], said["messages"], said["ended"]) == (1, 1, "messages")


async def test_silence_hints_at_the_side_that_binds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = Recording("tcp://127.0.0.1:9", tmp_path / "events.jsonl", seconds_max=0.05)
    assert await event_tools.capture(wanted, as_json=False) == 0
    assert "Nothing was heard from tcp://127.0.0.1:9. vLLM binds endpoints with '*'" in capsys.readouterr().out


async def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("precious")
    with pytest.raises(StartupError, match="exists already"):
        await event_tools.capture(Recording("tcp://127.0.0.1:9", path), as_json=False)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("bind", [False, True])
async def test_an_endpoint_that_cannot_be_used(tmp_path: Path, bind: bool) -> None:
    with pytest.raises(StartupError, match="nonsense cannot be"):
        await event_tools.capture(Recording("nonsense", tmp_path / "events.jsonl", bind=bind), as_json=False)
    assert not (tmp_path / "events.jsonl").exists()


# ---- playing ---------------------------------------------------------------------------------------------------------


def captured(path: Path, *handles: int, apart_seconds: float = 0.0) -> Path:
    messages = [
        CapturedMessage(place * apart_seconds, "kv-events", place, payload(handle))
        for place, handle in enumerate(handles)
    ]
    write_capture(path, CaptureHeader.new(1.0), messages)
    return path


async def followed(source: EventSource, blocks: int) -> None:
    """An intake that has come to hold so many blocks."""
    context, index = zmq.asyncio.Context(), MemoryIndex()
    intake = EventIntake(HOLDER, source, index, Rekeyer(SIZE, lambda *_: NAMING), context)
    await intake.start()
    try:
        async with asyncio.timeout(10):
            while len(set(index.holdings(HOLDER, Tier.L0))) < blocks:
                await asyncio.sleep(0.01)
    finally:
        await intake.stop()
        context.destroy(linger=0)


@pytest.mark.parametrize("gateway_binds", [False, True])
async def test_a_gateway_takes_a_played_stream_for_an_engine(tmp_path: Path, gateway_binds: bool) -> None:
    live, again = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/again"
    path = captured(tmp_path / "events.jsonl", *range(1, 21))
    playing = Playing(path, live, again, connect=gateway_binds, speed=float("inf"))
    following = asyncio.create_task(followed(EventSource(live, again, bind=gateway_binds), 20))
    assert await event_tools.replay(playing, as_json=False) == 0
    await following


async def test_who_comes_late_can_ask_again(tmp_path: Path) -> None:
    live, again = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/again"
    playing = Playing(
        captured(tmp_path / "events.jsonl", 1, 2, 3), live, again, speed=float("inf"), linger_seconds=10.0
    )
    player = asyncio.create_task(event_tools.replay(playing, as_json=False))
    context = zmq.asyncio.Context()
    with context.socket(zmq.SUB) as first:
        first.subscribe("")
        first.connect(live)
        for _ in range(3):
            await asyncio.wait_for(first.recv_multipart(), 10)
    context.destroy(linger=0)
    await followed(EventSource(live, again), 3)
    player.cancel()
    await asyncio.gather(player, return_exceptions=True)


async def test_the_pace_is_that_of_the_recording(tmp_path: Path) -> None:
    live = f"ipc://{tmp_path}/live"
    playing = Playing(captured(tmp_path / "events.jsonl", 1, 2, 3, apart_seconds=1.0), live, speed=10.0)
    following = asyncio.create_task(followed(EventSource(live), 3))
    began = asyncio.get_running_loop().time()
    await event_tools.replay(playing, as_json=False)
    assert asyncio.get_running_loop().time() - began >= 0.2  # two seconds of stream, ten times as fast
    await following


async def test_nobody_who_listens(tmp_path: Path) -> None:
    playing = Playing(captured(tmp_path / "events.jsonl", 1), f"ipc://{tmp_path}/live", wait_seconds=0.05)
    with pytest.raises(StartupError, match=r"nobody has subscribed at ipc://.* in 0\.05 seconds"):
        await event_tools.replay(playing, as_json=False)


async def test_a_file_that_is_broken_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("nothing of the kind\n")
    with pytest.raises(StartupError, match=r"events\.jsonl: this is no capture of KV events"):
        await event_tools.replay(Playing(path, f"ipc://{tmp_path}/live"), as_json=False)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_recording_that_is_interrupted_is_kept(publisher: EventPublisher, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    publisher.publish(batch(1))
    arguments = ["events", "capture", str(path), "--endpoint", publisher.endpoint, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ropeway", *arguments, "--replay-endpoint", str(publisher.replay_endpoint)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    assert b"Ctrl-C ends the recording" in process.stderr.readline()
    asyncio.run(publish_until(publisher, 3, path, 2))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, b"")
    said = json.loads(out)
    assert (said["ended"], said["first_sequence"], said["file"]) == ("interrupted", 0, str(path))
    assert len(list(Capture(path))) == said["messages"] >= 2

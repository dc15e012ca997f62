"""`ropeway events`: an engine's KV events recorded to a file, and a file played as an engine would send it.

The recorder listens as a gateway does and writes what it hears, undecoded. Where there is a replay socket it first
writes what the engine announced before; what comes live meanwhile waits. The player binds a PUB socket (or connects to
whoever binds), sends each message at the pace at which it was recorded, and answers replays of what it has sent.
"""

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

import orjson
import zmq
import zmq.asyncio

from cachecore.captures import Capture, CapturedMessage, CaptureError, CaptureHeader, CaptureWriter
from gateway.errors import StartupError
from gateway.fleet.framing import (
    END_OF_REPLAY,
    MESSAGE_BYTES_MAX,
    Message,
    live_message,
    replay_request,
    replayed_message,
    requested_start,
)

_REPLAY_SECONDS_MAX: Final = 5.0
"""Silence after which a replay counts as over."""
_WAITING_MAX: Final = 10_000
_KEPT_MAX: Final = 10_000
"""Messages of a played capture that can be asked for again, as vLLM keeps by default."""
_LINGER_MS: Final = 2_000


class Recording(NamedTuple):
    """What `capture` is asked for."""

    endpoint: str
    path: Path
    replay_endpoint: str | None = None
    bind: bool = False
    """Bind the endpoint, for an engine that connects to it."""
    topic: str = ""
    note: str = ""
    seconds_max: float | None = None
    """None until interrupted, or until one of the other bounds is met."""
    messages_max: int = 100_000
    bytes_max: int = 2**30
    """Of the file."""


class Playing(NamedTuple):
    """What `replay` is asked for."""

    path: Path
    endpoint: str
    replay_endpoint: str | None = None
    connect: bool = False
    """Connect to the endpoint, which a gateway has bound."""
    speed: float = 1.0
    """Times as fast as it was recorded; `inf` does not wait between messages."""
    wait_seconds: float = 60.0
    """For a first subscriber."""
    linger_seconds: float = 0.0
    """How long replays are answered after the last message."""


@dataclass(slots=True)
class Heard:
    """What became of a recording."""

    messages: int = 0
    replayed: int = 0
    first_sequence: int | None = None
    last_sequence: int | None = None
    odd: int = 0
    """Messages without the three frames of an event stream; they are not in the file."""
    bytes: int = 0
    ended: str = ""
    """Why it stopped: `interrupted`, `seconds`, `messages` or `bytes`."""


async def capture(recording: Recording, as_json: bool) -> int:
    """Record until a bound is met or SIGINT comes. Raises StartupError."""
    header = CaptureHeader.new(time.time(), recording.endpoint, recording.note)
    with _context() as context, _live_socket(context, recording) as live, _new_file(recording, header) as out:
        recorder = _Recorder(recording, live, out)
        async with _until_interrupted() as interrupted:
            print(f"Listening to {recording.endpoint}; Ctrl-C ends the recording.", file=sys.stderr)
            await recorder.run(context, interrupted)
    heard = recorder.heard
    heard.bytes = out.bytes
    if as_json:
        print(orjson.dumps({"file": str(recording.path), **asdict(heard)}).decode())
    else:
        print(_summary(recording, heard))
    return 0


async def replay(playing: Playing, as_json: bool) -> int:
    """Play a whole file. Raises StartupError."""
    try:
        source = Capture(playing.path)
        with _context() as context, _sending_sockets(context, playing) as sockets:
            player = _Player(playing, source, *sockets)
            sent = await player.run()
    except CaptureError as error:
        raise StartupError(str(error)) from error
    if as_json:
        print(orjson.dumps({"file": str(playing.path), "messages": sent}).decode())
    else:
        print(f"{sent} messages of {playing.path} were sent.")
    return 0


@contextmanager
def _context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=_LINGER_MS)


# ---- recording -------------------------------------------------------------------------------------------------------


class _Recorder:
    """Writes a stream down: first what a replay brings, then what came live meanwhile, then what comes."""

    def __init__(self, recording: Recording, live: zmq.asyncio.Socket, out: CaptureWriter) -> None:
        self._recording = recording
        self._live = live
        self._out = out
        self._began = time.monotonic()
        self._replaying = recording.replay_endpoint is not None
        self._waiting: deque[CapturedMessage] = deque()
        self.heard = Heard()
        self._full = asyncio.Event()

    async def run(self, context: zmq.asyncio.Context, interrupted: asyncio.Event) -> None:
        listening = asyncio.create_task(self._listen())
        tasks = [listening, asyncio.create_task(interrupted.wait()), asyncio.create_task(self._full.wait())]
        if self._recording.replay_endpoint is not None:
            tasks.append(asyncio.create_task(self._ask_for_history(context, self._recording.replay_endpoint)))
        try:
            async with asyncio.timeout(self._recording.seconds_max):
                await asyncio.wait(tasks[:3], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self.heard.ended = "seconds"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._end_replay()
        self.heard.ended = self.heard.ended or "interrupted"

    async def _listen(self) -> None:
        while True:
            heard = live_message(await self._live.recv_multipart())
            if heard is None:
                self.heard.odd += 1
                continue
            if len(self._waiting) >= _WAITING_MAX:
                self._end_replay()
            if self._replaying:
                self._waiting.append(self._message(heard))
            else:
                self._write(self._message(heard))

    async def _ask_for_history(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        with context.socket(zmq.DEALER) as dealer, suppress(TimeoutError):
            dealer.linger = 0
            dealer.connect(endpoint)
            await dealer.send_multipart(replay_request(0))
            while self._replaying:
                async with asyncio.timeout(_REPLAY_SECONDS_MAX):
                    heard = replayed_message(await dealer.recv_multipart())
                if heard is None:
                    self.heard.odd += 1
                elif heard.ends_replay:
                    break
                else:
                    self._write(self._message(heard, replayed=True))
        self._end_replay()

    def _message(self, heard: Message, replayed: bool = False) -> CapturedMessage:
        at = round(time.monotonic() - self._began, 6)
        return CapturedMessage(at, heard.topic.decode("utf-8", "replace"), heard.sequence, heard.payload, replayed)

    def _end_replay(self) -> None:
        """Write what waited, but for what the replay has brought as well."""
        self._replaying = False
        last = self.heard.last_sequence
        waiting, self._waiting = self._waiting, deque()
        for message in waiting:
            if last is None or message.sequence > last:
                self._write(message)

    def _write(self, message: CapturedMessage) -> None:
        heard, recording = self.heard, self._recording
        if heard.ended:
            return
        self._out.add(message)
        heard.messages += 1
        heard.replayed += message.replayed
        heard.first_sequence = message.sequence if heard.first_sequence is None else heard.first_sequence
        heard.last_sequence = message.sequence
        if heard.messages >= recording.messages_max:
            heard.ended = "messages"
        elif self._out.bytes >= recording.bytes_max:
            heard.ended = "bytes"
        if heard.ended:
            self._full.set()


def _new_file(recording: Recording, header: CaptureHeader) -> CaptureWriter:
    try:
        return CaptureWriter(recording.path, header)
    except FileExistsError:
        raise StartupError(f"{recording.path} exists already: a capture is not written over another") from None
    except OSError as error:
        raise StartupError(f"{recording.path}: {error.strerror}") from error


@contextmanager
def _live_socket(context: zmq.asyncio.Context, recording: Recording) -> Iterator[zmq.asyncio.Socket]:
    with context.socket(zmq.SUB) as live:
        live.linger = 0
        live.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        live.setsockopt_string(zmq.SUBSCRIBE, recording.topic)
        _attach(live, recording.endpoint, recording.bind)
        yield live


def _summary(recording: Recording, heard: Heard) -> str:
    odd = f" {heard.odd} further messages are no events." if heard.odd else ""
    if not heard.messages:
        hint = (
            ""
            if recording.bind
            else (
                " vLLM binds endpoints with '*' and connects to others; for those, --bind listens where it connects to."
            )
        )
        return f"Nothing was heard from {recording.endpoint}.{odd}{hint}"
    return (
        f"{heard.messages} messages, {heard.first_sequence} to {heard.last_sequence}, {heard.replayed} of them by "
        f"replay, are in {recording.path} ({heard.bytes} bytes; ended by: {heard.ended}).{odd}"
    )


@asynccontextmanager
async def _until_interrupted() -> AsyncIterator[asyncio.Event]:
    """An event that SIGINT and SIGTERM set, so that what was heard until then is kept."""
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    try:
        yield interrupted
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


# ---- playing ---------------------------------------------------------------------------------------------------------


class _Player:
    """Sends a capture's messages at their pace, and once more to whoever asks."""

    def __init__(
        self, playing: Playing, source: Capture, live: zmq.asyncio.Socket, router: zmq.asyncio.Socket | None
    ) -> None:
        self._playing = playing
        self._source = source
        self._live = live
        self._router = router
        self._kept: deque[Message] = deque(maxlen=_KEPT_MAX)

    async def run(self) -> int:
        """The number of messages sent."""
        answering = asyncio.create_task(self._answer_replays(self._router)) if self._router is not None else None
        try:
            await self._wait_for_subscriber()
            sent = await self._send_all()
            await asyncio.sleep(self._playing.linger_seconds)
        finally:
            if answering is not None:
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
        return sent

    async def _wait_for_subscriber(self) -> None:
        """What is published before anybody listens is lost."""
        try:
            async with asyncio.timeout(self._playing.wait_seconds):
                while not (await self._live.recv()).startswith(b"\1"):
                    pass
        except TimeoutError:
            message = f"nobody has subscribed at {self._playing.endpoint} in {self._playing.wait_seconds:g} seconds"
            raise StartupError(message) from None

    async def _send_all(self) -> int:
        sent, began = 0, time.monotonic()
        for captured in self._source:
            ahead = began + captured.at / self._playing.speed - time.monotonic()
            await asyncio.sleep(max(ahead, 0.0))
            message = Message(captured.sequence, captured.payload, captured.topic.encode())
            self._kept.append(message)
            await self._live.send_multipart(message.live())
            sent += 1
        return sent

    async def _answer_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            identity, *request = await router.recv_multipart()
            start = requested_start(request)
            if start is None:
                continue
            for message in [kept for kept in self._kept if kept.sequence >= start]:
                await router.send_multipart([identity, *message.replayed()])
            await router.send_multipart([identity, *END_OF_REPLAY.replayed()])


@contextmanager
def _sending_sockets(
    context: zmq.asyncio.Context, playing: Playing
) -> Iterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket | None]]:
    live = context.socket(zmq.XPUB)
    router = context.socket(zmq.ROUTER) if playing.replay_endpoint is not None else None
    try:
        live.setsockopt(zmq.XPUB_NODROP, 1)  # a file waits for whoever listens
        _attach(live, playing.endpoint, not playing.connect)
        if router is not None and playing.replay_endpoint is not None:
            router.setsockopt(zmq.SNDHWM, 0)
            _attach(router, playing.replay_endpoint, bind=True)
        yield live, router
    finally:
        for socket in (live, router):
            if socket is not None:
                socket.close(linger=_LINGER_MS)


def _attach(socket: zmq.asyncio.Socket, endpoint: str, bind: bool) -> None:
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise StartupError(f"{endpoint} cannot be {'bound' if bind else 'connected to'}: {error}") from error

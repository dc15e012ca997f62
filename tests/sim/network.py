"""A network of TCP connections without a socket: what TCP and the kernel do to an asyncio protocol, drawn from a seed.

Each direction is a queue of segments that arrive in order, each after a delay. The rules are those of Linux:

* what is written leaves as the window allows, in pieces of any size; the rest waits in the transport, and beyond its
  high-water mark the protocol is told to pause;
* a reader that has paused lets what arrives pile up, and the window fills;
* `close` sends what waits, then a FIN; where unread bytes have arrived it is a reset instead. `abort` drops what waits.
  `SO_LINGER` of zero makes either a reset;
* bytes that reach a closed end are answered with a reset; a reset may overtake what is on its way;
* a reset is noticed by who reads or writes, not by who has paused reading.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

HIGH_WATER_BYTES: Final = 65_536
READ_BYTES_MAX: Final = 262_144
_LINGER_ZERO: Final = struct.pack("ii", 1, 0)
_TCP_ESTABLISHED: Final = 1
_TCP_CLOSED: Final = 7
_TCP_CLOSE_WAIT: Final = 8

Trace = Callable[[str, str, bytes], None]
"""(who, what happened, bytes)."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How a network behaves, for a whole history."""

    latency_seconds_max: float = 0.002
    window_bytes: int = 65_536
    """Under way or unread at most, in each direction."""
    piece_bytes_max: int = 65_536
    """Of one segment."""
    overtaking: float = 0.5
    """How often a reset destroys what is on its way before it."""


class _Socket:
    """What protocols ask of a transport's socket."""

    def __init__(self, end: "End") -> None:
        self._end = end

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        if (level, name) == (socket.SOL_SOCKET, socket.SO_LINGER) and value == _LINGER_ZERO:
            self._end.resets = True

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        assert (level, name, size) == (socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return bytes([self._end.tcp_state])

    def getpeername(self) -> tuple[str, int]:
        return self._end.peer_name

    def getsockname(self) -> tuple[str, int]:
        return self._end.own_name


class End(asyncio.Transport):
    """One end of a connection: the transport of its protocol."""

    peer: "End"

    def __init__(self, network: "Network", name: str, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._network = network
        self._loop = network.loop
        self._random = network.random
        self._protocol = protocol
        self.name = name
        self.own_name, self.peer_name = ("10.0.0.1", 1), ("10.0.0.2", 2)
        self.resets = False
        """A close is a reset."""
        self.lost = False
        """The protocol has been told, or is about to be."""
        self._waiting = bytearray()
        """Written, and not sent yet."""
        self._under_way: deque[Callable[[], None]] = deque()
        self._unacknowledged = 0
        self._last_arrival = 0.0
        self._paused_writing = self._paused_reading = False
        self._closing = self._eof_wanted = self._fin_sent = False
        self._unread: deque[bytes] = deque()
        self._fin_received = self._fin_told = False
        self._reset_by: Exception | None = None
        """The peer's reset, until it is noticed."""
        self._read_due = False

    def __repr__(self) -> str:
        return f"<End {self.name}>"

    @property
    def tcp_state(self) -> int:
        """As the kernel has it: a reset shows at once, whoever reads."""
        if self.lost or self._reset_by is not None:
            return _TCP_CLOSED
        return _TCP_CLOSE_WAIT if self._fin_received else _TCP_ESTABLISHED

    def begin(self) -> None:
        self._protocol.connection_made(self)
        self._notice()

    # asyncio.Transport, writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._eof_wanted:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._closing or not data:
            return
        if self._reset_by is not None:
            self._lose(self._reset_by)
            return
        self._network.trace(self.name, "writes", bytes(data))
        self._waiting += data
        self._send()
        if len(self._waiting) > HIGH_WATER_BYTES and not self._paused_writing:
            self._paused_writing = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._closing and not self._eof_wanted:
            self._eof_wanted = True
            self._network.trace(self.name, "ends", b"")
            self._send()

    def get_write_buffer_size(self) -> int:
        return len(self._waiting)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return HIGH_WATER_BYTES // 4, HIGH_WATER_BYTES

    # asyncio.Transport, reading

    def pause_reading(self) -> None:
        self._paused_reading = True

    def resume_reading(self) -> None:
        if self._paused_reading:
            self._paused_reading = False
            self._notice()

    def is_reading(self) -> bool:
        return not self._paused_reading and not self._closing

    # asyncio.Transport, ends

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._network.trace(self.name, "closes", b"")
            self._send()

    def abort(self) -> None:
        if self.lost:
            return
        if not self._closing:
            self._network.trace(self.name, "aborts", b"")
        self._closing = True
        self._waiting.clear()
        self._send()

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "peername":
                return self.peer_name
            case "sockname":
                return self.own_name
            case "socket":
                return _Socket(self)
        return default

    # What is under way

    def _send(self) -> None:
        weather = self._network.weather
        while self._waiting and self._unacknowledged < weather.window_bytes:
            size = min(len(self._waiting), weather.window_bytes - self._unacknowledged)
            size = min(size, self._random.randint(1, weather.piece_bytes_max))
            piece = bytes(self._waiting[:size])
            del self._waiting[:size]
            self._unacknowledged += size
            self._arrive(self.peer._receive, piece)
        if self._paused_writing and len(self._waiting) <= HIGH_WATER_BYTES // 4 and not self._closing:
            self._paused_writing = False
            self._protocol.resume_writing()
        if self._waiting:
            return
        if self._closing and not self.lost:
            self._hang_up()
        elif self._eof_wanted and not self._fin_sent:
            self._fin_sent = True
            self._arrive(self.peer._receive_fin)

    def _hang_up(self) -> None:
        """All that is to be sent has been sent: the socket is closed."""
        if self.resets or self._unread:
            self._reset_peer()
        elif not self._fin_sent:
            self._fin_sent = True
            self._arrive(self.peer._receive_fin)
        self._lose(None)

    def _reset_peer(self) -> None:
        overtakes = self._random.random() < self._network.weather.overtaking
        if overtakes:
            self._loop.call_later(self._delay(), self.peer._receive_reset)
        else:
            self._arrive(self.peer._receive_reset)

    def _delay(self) -> float:
        return self._random.random() * self._network.weather.latency_seconds_max

    def _arrive(self, arrive: Callable[..., None], *arguments: Any) -> None:
        """In order, whatever the delays. (Timers of one moment go off in any.)"""
        self._last_arrival = max(self._last_arrival, self._loop.time() + self._delay())
        self._under_way.append(partial(arrive, *arguments))
        self._loop.call_at(self._last_arrival, self._deliver)

    def _deliver(self) -> None:
        self._under_way.popleft()()

    def _receive(self, piece: bytes) -> None:
        if self.lost:
            # Nobody is here any more.
            if self._reset_by is None:
                self._arrive(self.peer._receive_reset)
            return
        if self._reset_by is None:
            self._unread.append(piece)
            self._notice()

    def _receive_fin(self) -> None:
        self._fin_received = True
        self._notice()

    def _receive_reset(self) -> None:
        if self.lost or self._reset_by is not None:
            return
        self._reset_by = ConnectionResetError(104, "Connection reset by peer")
        self._notice()

    def _notice(self) -> None:
        """Something may be there to be read: what came at one moment is one read."""
        if not self._read_due and not self._paused_reading:
            self._read_due = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_due = False
        if self.lost or self._paused_reading:
            return
        if self._unread and not self._closing:
            data = b"".join(self._unread)
            self._unread.clear()
            if len(data) > READ_BYTES_MAX:
                self._unread.append(data[READ_BYTES_MAX:])
                data = data[:READ_BYTES_MAX]
            self._network.trace(self.name, "reads", data)
            self._protocol.data_received(data)
            self.peer._acknowledge(len(data))
            self._notice()
        elif self._reset_by is not None:
            self._lose(self._reset_by)
        elif self._fin_received and not self._fin_told and not self._closing:
            self._fin_told = True
            self._network.trace(self.name, "reads the end", b"")
            if not self._protocol.eof_received():
                self.close()

    def _acknowledge(self, size: int) -> None:
        self._unacknowledged -= size
        if not self.lost:
            self._send()

    def _lose(self, error: Exception | None) -> None:
        if self.lost:
            return
        self.lost = self._closing = True
        self._waiting.clear()
        self._network.ends.discard(self)
        self._loop.call_soon(self._tell_lost, error)

    def _tell_lost(self, error: Exception | None) -> None:
        self._network.trace(self.name, "is lost" if error is None else "is reset", b"")
        self._protocol.connection_lost(error)


Accept = Callable[[], Coroutine[Any, Any, asyncio.Protocol]]
"""Called for each connection to an address: who serves it. Raises OSError, or waits for ever."""


class _Ends(dict[End, None]):
    """A set that keeps its order."""

    def add(self, end: End) -> None:
        self[end] = None

    def discard(self, end: End) -> None:
        self.pop(end, None)


class Network:
    """Who listens where, and every connection that is open."""

    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random, weather: Weather, trace: Trace) -> None:
        self.loop = loop
        self.random = random
        self.weather = weather
        self.trace = trace
        self.ends = _Ends()
        self._made = 0
        """Connections there ever were."""
        self._listeners: dict[tuple[str, int], Accept] = {}

    def listen(self, host: str, port: int, accept: Accept) -> None:
        self._listeners[host, port] = accept

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        await asyncio.sleep(self.random.random() * self.weather.latency_seconds_max)
        accept = self._listeners.get((host, port))
        if accept is None:
            raise ConnectionRefusedError(111, "Connection refused")
        serving = await accept()
        protocol = factory()
        end, _ = self.join(protocol, serving, f"to {port} #{self._made}")
        return end, protocol

    def join(self, calling: asyncio.Protocol, serving: asyncio.Protocol, name: str) -> tuple[End, End]:
        """Connect two protocols."""
        caller, server = End(self, f"{name} caller", calling), End(self, f"{name} server", serving)
        caller.peer, server.peer = server, caller
        caller.own_name, caller.peer_name = server.peer_name, server.own_name
        self.ends.add(caller)
        self.ends.add(server)
        self._made += 1
        server.begin()
        caller.begin()
        return caller, server

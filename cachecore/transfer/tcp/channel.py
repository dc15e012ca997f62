"""A byte stream between two workers: plain sockets, which copy nothing in this process, or TLS.

A `Wire` makes channels: `TcpWire` those of this module, `cachecore.transfer.engines` others.

Plain sockets are used as they are, not through asyncio's transports: these take one read per turn of the loop, and
copy what the kernel does not take at once. A channel gives way to the loop after YIELD_BYTES, since a socket that is
always ready would never let anybody else run.
"""

import asyncio
import contextlib
import select
import socket
from collections.abc import Sequence
from typing import Protocol

from cachecore.transfer.errors import Reason, WireError
from cachecore.transfer.frames import HEAD_BYTES_MAX, PIECE_BYTES, Buffer
from cachecore.transfer.tcp.tls import SUFFIX, Tls

YIELD_BYTES = 2 << 20
_ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL


class Channel(Protocol):
    @property
    def batch_bytes(self) -> int:
        """What is best sent at a time."""
        ...

    async def receive_into(self, room: memoryview) -> int:
        """How many bytes came, at least one. Raises WireError(CLOSED)."""
        ...

    async def send(self, parts: Sequence[Buffer]) -> None:
        """All of them. Raises WireError(CLOSED)."""
        ...

    def is_quiet(self) -> bool:
        """Whether it is up and nothing has come that nobody waited for, as far as can be told without waiting."""
        ...

    def has_ended(self) -> bool:
        """Whether the other side has closed it, as far as can be told without waiting."""
        ...

    def close(self) -> None:
        """At once; what was not sent is lost."""
        ...


class Wire(Protocol):
    """How channels come to be. One may serve and pull."""

    @property
    def scheme(self) -> str:
        """What addresses in a plan begin with."""
        ...

    async def connect(self, host: str, port: int) -> Channel:
        """Raises OSError."""
        ...

    async def accepted(self, connection: socket.socket) -> Channel:
        """The channel of a connection that a listener took. Raises OSError."""
        ...


def _ended() -> WireError:
    return WireError("the other side has closed the connection", Reason.CLOSED)


def _broken(error: OSError) -> WireError:
    return WireError(f"the connection broke: {error.strerror or error}", Reason.CLOSED)


async def receive_exactly(channel: Channel, size: int) -> bytes:
    data = bytearray(size)
    room = memoryview(data)
    while room:
        room = room[await channel.receive_into(room) :]
    return bytes(data)


class PlainChannel:
    batch_bytes = PIECE_BYTES + HEAD_BYTES_MAX

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._since_yield = 0

    async def receive_into(self, room: memoryview) -> int:
        try:
            try:
                count = self._socket.recv_into(room)
            except (BlockingIOError, InterruptedError):
                # Nothing is there yet. To ask the loop first would cost more than to ask the kernel.
                count = await self._loop.sock_recv_into(self._socket, room)
        except OSError as error:
            raise _broken(error) from error
        if not count:
            raise _ended()
        self._since_yield += count
        if self._since_yield >= YIELD_BYTES:
            await self._give_way()
        return count

    async def send(self, parts: Sequence[Buffer]) -> None:
        try:
            sent = self._send_now(parts)
            for part in parts:
                if sent < len(part):
                    await self._loop.sock_sendall(self._socket, memoryview(part)[sent:])
                sent = max(0, sent - len(part))
        except OSError as error:
            raise _broken(error) from error
        self._since_yield += sum(map(len, parts))
        if self._since_yield >= YIELD_BYTES:
            await self._give_way()

    def _send_now(self, parts: Sequence[Buffer]) -> int:
        """As much as the kernel takes at once."""
        try:
            return self._socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            return 0

    def is_quiet(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        return False  # its end, or bytes out of turn

    def has_ended(self) -> bool:
        if self._socket.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._socket, _ENDED)
        return bool(poll.poll(0))

    def close(self) -> None:
        # Not close() alone: a reader in another thread or a forked process would keep the connection up.
        with contextlib.suppress(OSError):  # the other side may have been quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    async def _give_way(self) -> None:
        self._since_yield = 0
        await asyncio.sleep(0)


class TlsChannel:
    batch_bytes = PIECE_BYTES + HEAD_BYTES_MAX

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive_into(self, room: memoryview) -> int:
        try:
            data = await self._reader.read(len(room))
        except OSError as error:
            raise _broken(error) from error
        if not data:
            raise _ended()
        room[: len(data)] = data
        return len(data)

    async def send(self, parts: Sequence[Buffer]) -> None:
        try:
            for part in parts:
                self._writer.write(part)
            await self._writer.drain()
        except OSError as error:
            raise _broken(error) from error

    def is_quiet(self) -> bool:
        return not self.has_ended()

    def has_ended(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.transport.abort()


def scheme_of(transport: str, tls: Tls | None) -> str:
    """What addresses of a transport begin with."""
    return transport if tls is None else transport + SUFFIX


class TcpWire:
    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls

    @property
    def scheme(self) -> str:
        return scheme_of("tcp", self._tls)

    async def connect(self, host: str, port: int) -> Channel:
        if (tls := self._tls) is not None:
            name = tls.expected_name(host)
            return TlsChannel(
                *await asyncio.open_connection(host, port, ssl=tls.pulling, server_hostname=name, limit=YIELD_BYTES)
            )
        loop = asyncio.get_running_loop()
        error: OSError = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            connection = socket.socket(family, kind, protocol)
            try:
                connection.setblocking(False)
                await loop.sock_connect(connection, address)
                return PlainChannel(connection)
            except OSError as failure:
                connection.close()
                error = failure
            except BaseException:
                connection.close()
                raise
        raise error

    async def accepted(self, connection: socket.socket) -> Channel:
        if self._tls is None:
            return PlainChannel(connection)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=YIELD_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls.serving)
        return TlsChannel(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

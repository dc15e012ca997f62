"""Serving KV over TCP: `TcpServer` checks who asks, and a `Source` of the worker's or the pool's says what it holds.

A request is served when its capability authenticates, has not expired, means this holder in this life, and comes with a
proof that the puller has the tenant's key. What the source gives is checked once more before it leaves: it must be the
run, tenant, codec and fidelity that the capability names. Payloads are sealed piece by piece on their way out.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from cachecore.scope import Keyring
from cachecore.transfer.capability import Capability, check_proof, check_source, read_capability
from cachecore.transfer.errors import FrameError, Reason, TransferError, Unserved, WireError
from cachecore.transfer.frames import Buffer, FrameWriter, cut
from cachecore.transfer.tcp.channel import Channel, TcpWire, Wire, receive_exactly
from cachecore.transfer.tcp.messages import (
    CHALLENGE_BYTES,
    MESSAGE_HEAD,
    Kind,
    MessageHead,
    RequestBody,
    challenge_of,
)
from cachecore.transfer.tcp.patience import Patience
from cachecore.transfer.tcp.tls import Tls, is_address
from cachecore.transfer.transport import Draft, Request, Sealed, Source

logger = logging.getLogger("ropeway.transfer")

_BATCH_BUFFERS_MAX = 512
"""Fewer than the kernel takes in one call."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 0
    connections_max: int = 256
    transfers_max: int = 32
    """At a time; who comes then is told BUSY, and computes."""
    greeting_seconds: float = 5.0
    """For a TLS handshake, and then for a first request that is authentic."""
    idle_seconds: float = 60.0
    """A connection that asks for nothing for so long after that is closed."""
    stall_seconds: float = 5.0
    """A puller that takes nothing for so long is given up."""


@dataclass(slots=True)
class ServerCounts:
    """What was done; counters only grow."""

    transfers: int = 0
    """Served to the end."""
    frames: int = 0
    payload_bytes: int = 0
    refusals: Counter[Reason] = field(default_factory=Counter)
    broken: Counter[Reason] = field(default_factory=Counter)
    """Connections that ended in the middle of something."""


class TcpServer:
    """Belongs to the loop that it was started on; that may be one of a thread of its own."""

    def __init__(
        self,
        source: Source,
        keyring: Keyring,
        settings: ServerSettings | None = None,
        *,
        tls: Tls | None = None,
        wire: Wire | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Over TCP, with `tls` where given, or over another `wire`."""
        self.source = source
        self._keyring = keyring
        self.settings = settings or ServerSettings()
        self._wire = wire or TcpWire(tls)
        self._clock = clock
        self.writer = FrameWriter(keyring.frame_key)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._transfers = 0
        self.counts = ServerCounts()

    @property
    def address(self) -> str:
        """As a plan names it: by a name rather than a number where it listens under one, as certificates do."""
        if self._listener is None:
            raise RuntimeError("not started")
        host, port = self._listener.getsockname()[:2]
        if self.settings.host and not is_address(self.settings.host):
            host = self.settings.host
        return f"{self._wire.scheme}://[{host}]:{port}" if ":" in host else f"{self._wire.scheme}://{host}:{port}"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        family = socket.AF_INET6 if ":" in self.settings.host else socket.AF_INET
        self._listener = socket.create_server((self.settings.host, self.settings.port), family=family, backlog=256)
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))

    async def close(self) -> None:
        """Stop listening and end every connection."""
        tasks = [task for task in (self._accepting, *self._connections) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("cannot accept a connection: %s", error)  # out of files, most likely
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= self.settings.connections_max:
                connection.close()
                continue
            task = asyncio.create_task(self._serve_connection(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve_connection(self, connection: socket.socket) -> None:
        channel: Channel | None = None
        try:
            async with asyncio.timeout(self.settings.greeting_seconds):
                channel = await self._wire.accepted(connection)
            await _Conversation(self, channel).run()
        except TransferError as error:
            self.counts.broken[error.reason] += 1
            logger.info("a connection ended: %s", error)
        except (OSError, TimeoutError) as error:
            self.counts.broken[Reason.CLOSED] += 1
            logger.info("a connection ended: %s", str(error) or type(error).__name__)
        finally:
            (channel or connection).close()

    def authorize(self, body: RequestBody, challenge: bytes) -> Request:
        """Raises CapabilityError."""
        capability = read_capability(body.token, self._keyring, self._clock())
        check_proof(capability, self._keyring, challenge, body.signed(), body.proof)
        check_source(capability, self.source.holder)
        return Request(capability, body.wanted)

    @contextlib.contextmanager
    def transferring(self) -> Iterator[None]:
        """Raises Unserved(BUSY)."""
        if self._transfers >= self.settings.transfers_max:
            raise Unserved(f"{self._transfers} transfers under way", Reason.BUSY)
        self._transfers += 1
        try:
            yield
        finally:
            self._transfers -= 1


class _Conversation:
    """One connection: a greeting, then requests one after the other."""

    def __init__(self, server: TcpServer, channel: Channel) -> None:
        self._server = server
        self._channel = channel
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self._patience_seconds = server.settings.greeting_seconds

    async def run(self) -> None:
        await self._channel.send([MessageHead(Kind.GREETING, CHALLENGE_BYTES).encode() + self._challenge])
        number = 0
        while (body := await self._next_request()) is not None:
            await self._answer(body, challenge_of(self._challenge, number))
            number += 1

    async def _next_request(self) -> RequestBody | None:
        """None once the puller has gone, or asks for nothing any more."""
        try:
            async with asyncio.timeout(self._patience_seconds):
                head = await receive_exactly(self._channel, MESSAGE_HEAD.size)
        except (WireError, TimeoutError):
            return None
        message = MessageHead.decode(head, Kind.REQUEST)
        async with asyncio.timeout(self._server.settings.stall_seconds):
            return RequestBody.decode(await receive_exactly(self._channel, message.length))

    async def _answer(self, body: RequestBody, challenge: bytes) -> None:
        try:
            request = self._server.authorize(body, challenge)
            self._patience_seconds = self._server.settings.idle_seconds
            with self._server.transferring():
                await self._serve(request)
        except WireError:
            raise
        except TransferError as error:
            await self._refuse(error.reason, error)
        except Exception as error:
            logger.exception("a source failed")
            await self._refuse(Reason.INTERNAL, error)

    async def _refuse(self, reason: Reason, error: Exception) -> None:
        self._server.counts.refusals[reason] += 1
        logger.info("refused (%s): %s", reason, error)
        async with asyncio.timeout(self._server.settings.stall_seconds):
            await self._channel.send([MessageHead(Kind.REFUSED, 0, reason).encode()])

    async def _serve(self, request: Request) -> None:
        counts = self._server.counts
        async with (
            contextlib.aclosing(self._server.source.serve(request)) as outgoing,
            Patience(None, self._server.settings.stall_seconds, self._channel.has_ended) as patience,
        ):
            patience.held = True
            async for frame in outgoing:
                patience.held = False
                _check(frame, request.capability)
                await self._send(frame, patience)
                counts.frames += 1
                counts.payload_bytes += frame.header.payload_bytes
                patience.held = True
            patience.held = False
            await self._channel.send([MessageHead(Kind.END, 0).encode()])
        counts.transfers += 1

    async def _send(self, frame: Draft | Sealed, patience: Patience) -> None:
        buffers: Iterator[Buffer]
        if isinstance(frame, Sealed):
            length, buffers = sum(map(len, frame.buffers)), cut(frame.buffers)
        else:
            sealing = self._server.writer.begin(frame.header)
            length, buffers = sealing.frame_bytes, chain([sealing.head], sealing.pieces(frame.parts))
        try:
            for batch in self._batches(chain([MessageHead(Kind.FRAME, length).encode()], buffers)):
                await self._channel.send(batch)
                patience.moved = True
        except WireError:
            raise
        except Exception as error:  # the puller could not tell a refusal from the rest of the frame
            raise WireError(f"a source's frame broke off: {error!r}", Reason.INTERNAL) from error

    def _batches(self, buffers: Iterable[Buffer]) -> Iterator[list[Buffer]]:
        """Buffers that go out together: small ones with their neighbours."""
        batch: list[Buffer] = []
        size, size_max = 0, self._channel.batch_bytes
        for buffer in buffers:
            if batch and (size + len(buffer) > size_max or len(batch) == _BATCH_BUFFERS_MAX):
                yield batch
                batch, size = [], 0
            batch.append(buffer)
            size += len(buffer)
        yield batch


def _check(frame: Draft | Sealed, capability: Capability) -> None:
    """A source that mixes up its runs must not hand one tenant's to another. Raises FrameError."""
    header = frame.header
    if header.key_id != capability.key_id:
        raise FrameError(f"a source gave KV of {header.key_id} for {capability}", Reason.OTHER_TENANT)
    given = (header.parent, header.tail, header.first_block, header.blocks, header.codec)
    if given != (*capability.run, capability.codec) or header.fidelity > capability.fidelity:
        raise FrameError(f"a source gave {header} for {capability}", Reason.INTERNAL)
    if isinstance(frame, Draft) and sum(memoryview(part).nbytes for part in frame.parts) != header.payload_bytes:
        raise FrameError(f"a source gave parts of another length than {header} says", Reason.INTERNAL)

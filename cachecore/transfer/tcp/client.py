"""Pulling KV over TCP: `TcpTransport` keeps every promise of `cachecore.transfer.transport`.

A pull may use several streams: stream s of n asks for every n-th layer from the s-th on, and hands its frames over in
turn, so that a sink sees the layers in order and no stream is more than one frame ahead. A connection that answered all
it was asked is kept for the next pull from there; whatever ends a pull early also ends its connections, since frames
are still under way on them.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from cachecore.scope import Keyring
from cachecore.transfer.capability import PROOF_BYTES
from cachecore.transfer.errors import FrameError, Reason, TransferError, WireError
from cachecore.transfer.frames import Frame, FrameLimits, FrameReader
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.memory import Allocate, RecycledMemory
from cachecore.transfer.plan import Pull
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
from cachecore.transfer.tcp.tls import Tls
from cachecore.transfer.transport import Expectation, Failed, Fetched, Outcome, Refused, Sink, Wanted

_ADDRESS = re.compile(r"([a-z0-9+]+)://(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})")
_LIMITS = FrameLimits()


@dataclass(frozen=True, slots=True)
class ClientSettings:
    streams: int = 1
    """Connections that one pull shares. More than one pays where one TCP connection does not fill the link."""
    stall_seconds: float = 0.5
    """A source that sends nothing for so long is given up, whatever the deadline."""
    connect_seconds: float = 0.5
    """For each address of a source."""
    idle_connections: int = 8
    """Kept for each source."""
    idle_seconds: float = 30.0
    """Less than what the source waits for."""
    limits: FrameLimits = _LIMITS


class Refusal(Exception):
    """The source's answer is no. Stays within this module."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class TcpTransport:
    def __init__(
        self,
        keyring: Keyring,
        settings: ClientSettings | None = None,
        *,
        tls: Tls | None = None,
        wires: Sequence[Wire] = (),
        allocate: Allocate | None = None,
    ) -> None:
        """Over TCP, with `tls` where given, and over other `wires`: of a plan's addresses, the first that takes one."""
        self.keyring = keyring
        self.allocate = allocate or RecycledMemory()
        self.settings = settings or ClientSettings()
        self.links = _Links(self.settings, (TcpWire(tls), *wires))

    @property
    def schemes(self) -> Sequence[str]:
        """Of the addresses that it can pull from."""
        return tuple(self.links.wires)

    async def fetch(self, pull: Pull, expectation: Expectation, sink: Sink, deadline: float) -> Outcome:
        loop = asyncio.get_running_loop()
        began = loop.time()
        order = _Order(sink, expectation.layers.first)
        count = max(1, min(self.settings.streams, expectation.layers.size))
        streams = [_Stream(self, pull, expectation, order, number, count) for number in range(count)]
        tasks = [asyncio.create_task(stream.run(deadline)) for stream in streams]
        try:
            outcome = await _first_bad(tasks, order)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return outcome or Fetched(order.frames, order.payload_bytes, loop.time() - began)

    def close(self) -> None:
        """Close the connections that no pull is using."""
        self.links.close()


async def _first_bad(tasks: "list[asyncio.Task[None]]", order: "_Order") -> Outcome | None:
    """What the first stream to fail failed of; None when none did. Raises what the sink raised."""
    for done in asyncio.as_completed(tasks):
        try:
            await done
        except Refusal as refusal:
            if order.frames:
                return Failed(refusal.reason, order.layer, "given up by the source")
            return Refused(refusal.reason)
        except TransferError as error:
            return Failed(error.reason, order.layer, str(error))
    return None


class _Order:
    """The sink, in front of which streams queue up by layer."""

    def __init__(self, sink: Sink, layer: int) -> None:
        self._sink = sink
        self._turns: dict[int, asyncio.Event] = {}
        self.layer = layer
        """The first that has not been delivered."""
        self.frames = 0
        self.payload_bytes = 0

    async def deliver(self, frame: Frame) -> None:
        layers = frame.header.layers
        if layers.first != self.layer:
            await self._turns.setdefault(layers.first, asyncio.Event()).wait()
        await self._sink.take(frame)
        self.layer = layers.end
        self.frames += 1
        self.payload_bytes += len(frame.payload)
        if (turn := self._turns.pop(self.layer, None)) is not None:
            turn.set()


class _Stream:
    """One connection's share of a pull."""

    def __init__(
        self, transport: TcpTransport, pull: Pull, expectation: Expectation, order: _Order, number: int, stride: int
    ) -> None:
        layers = expectation.layers
        self._transport = transport
        self._pull = pull
        self._expectation = expectation
        self._order = order
        self._stride = stride
        self._layer = layers.first + number
        self._wanted = Wanted(
            expectation.compatibility,
            Span(self._layer, layers.end - self._layer, layers.total),
            stride,
            expectation.kv_heads,
            number == 0 and pull.plan.is_shifted,
        )

    async def run(self, deadline: float) -> None:
        """Raises Refusal, TransferError, and what the sink raises."""
        settings = self._transport.settings
        async with Patience(deadline, settings.stall_seconds) as patience:
            patience.held = True
            async with self._transport.links.use(self._pull.plan.addresses) as link:
                patience.held = False
                await self._converse(link, patience)

    async def _converse(self, link: "_Link", patience: Patience) -> None:
        transport = self._transport
        reader = FrameReader(transport.keyring.frame_key, transport.settings.limits, self._check, transport.allocate)
        await link.ask(self._pull, self._wanted, transport.keyring)
        while (message := await link.next_message()).kind is Kind.FRAME:
            frame = await link.receive(message.length, reader, patience)
            patience.held = True
            await self._order.deliver(frame)
            patience.held = False
            patience.moved = True
        if message.reason is not None:
            raise Refusal(message.reason)
        if self._layer < self._expectation.layers.end:
            raise WireError(f"the source ended before layer {self._layer}", Reason.INCOMPLETE)

    def _check(self, header: FrameHeader) -> None:
        """Every header, before memory is set aside for its payload. Raises FrameError."""
        self._expectation.check(header, self._pull)
        layers = header.layers
        if layers.first != self._layer or layers.end > self._expectation.layers.end:
            raise FrameError(f"layers {layers} where {self._layer} was to come", Reason.UNEXPECTED)
        if self._stride > 1 and layers.size > 1:
            raise FrameError(f"layers {layers} on one of {self._stride} streams", Reason.UNEXPECTED)
        if header.with_tokens != (self._wanted.with_tokens and layers.first == self._wanted.layers.first):
            raise FrameError("a frame with token ids where none were asked for, or without", Reason.UNEXPECTED)
        self._layer = layers.first + self._stride if self._stride > 1 else layers.end


class _Link:
    """A connection to a source."""

    def __init__(self, channel: Channel, challenge: bytes, expires_at: float) -> None:
        self.channel = channel
        self.expires_at = expires_at
        self._challenge = challenge
        self._requests = 0

    async def ask(self, pull: Pull, wanted: Wanted, keyring: Keyring) -> None:
        body = RequestBody(wanted, pull.token, bytes(PROOF_BYTES))
        challenge = challenge_of(self._challenge, self._requests)
        try:
            body = body._replace(proof=pull.capability.prove(keyring, challenge, body.signed()))
        except KeyError:
            raise WireError(f"no key for {pull.capability.key_id} any more", Reason.FORGED) from None
        self._requests += 1
        data = body.encode()
        await self.channel.send([MessageHead(Kind.REQUEST, len(data)).encode() + data])

    async def next_message(self) -> MessageHead:
        head = await receive_exactly(self.channel, MESSAGE_HEAD.size)
        return MessageHead.decode(head, Kind.FRAME, Kind.END, Kind.REFUSED)

    async def receive(self, length: int, reader: FrameReader, patience: Patience) -> Frame:
        """The frame that a message of `length` bytes is. Raises FrameError, WireError."""
        frames: list[Frame] = []
        receive_into = self.channel.receive_into
        while length:
            count = await receive_into(reader.buffer()[:length])
            patience.moved = True
            length -= count
            frames += reader.advance(count)
        if len(frames) != 1 or not reader.idle:
            raise WireError("a message that is not one frame", Reason.MALFORMED)
        return frames[0]


class _Links:
    """Connections to all sources, kept while nobody uses them."""

    def __init__(self, settings: ClientSettings, wires: Sequence[Wire]) -> None:
        self._settings = settings
        self.wires = {wire.scheme: wire for wire in wires}
        self._idle: dict[str, list[_Link]] = {}
        self._closed = False

    @contextlib.asynccontextmanager
    async def use(self, addresses: tuple[str, ...]) -> AsyncIterator[_Link]:
        """A connection to the first of the addresses that takes one; closed unless the block ends well.

        Raises WireError(UNREACHABLE).
        """
        address, link = await self._open(addresses)
        try:
            yield link
        except Refusal:
            self._keep(address, link)
            raise
        except BaseException:
            link.channel.close()
            raise
        self._keep(address, link)

    def close(self) -> None:
        self._closed = True
        self._sweep(float("inf"))

    async def _open(self, addresses: tuple[str, ...]) -> tuple[str, _Link]:
        problems = []
        for address in addresses:
            if (link := self._take(address)) is not None:
                return address, link
            try:
                async with asyncio.timeout(self._settings.connect_seconds):
                    return address, await self._dial(address)
            except (OSError, WireError, UnicodeError) as error:  # the last: a name that cannot be one in DNS
                problems.append(f"{address}: {str(error) or type(error).__name__}")
        raise WireError("; ".join(problems) or "a plan without an address", Reason.UNREACHABLE)

    def _take(self, address: str) -> _Link | None:
        links = self._idle.get(address, [])
        now = asyncio.get_running_loop().time()
        while links:
            link = links.pop()
            if link.expires_at > now and link.channel.is_quiet():
                return link
            link.channel.close()
        return None

    def _keep(self, address: str, link: _Link) -> None:
        now = asyncio.get_running_loop().time()
        self._sweep(now)
        if self._closed or len(self._idle.get(address, [])) >= self._settings.idle_connections:
            link.channel.close()
            return
        link.expires_at = now + self._settings.idle_seconds
        self._idle.setdefault(address, []).append(link)

    def _sweep(self, now: float) -> None:
        """Sources that are gone are not asked again, so their connections have to be closed by whoever comes by."""
        for address, links in list(self._idle.items()):
            while links and links[0].expires_at <= now:
                links.pop(0).channel.close()
            if not links:
                del self._idle[address]

    async def _dial(self, address: str) -> _Link:
        """Raises OSError, WireError, UnicodeError."""
        parts = _ADDRESS.fullmatch(address)
        if parts is None or parts[1] not in self.wires or int(parts[4]) > 0xFFFF:
            raise WireError("not an address of this transport", Reason.UNREACHABLE)
        scheme, six, name, port = parts.groups()
        channel = await self.wires[scheme].connect(six or name, int(port))
        try:
            head = await receive_exactly(channel, MESSAGE_HEAD.size)
            MessageHead.decode(head, Kind.GREETING)
            return _Link(channel, await receive_exactly(channel, CHALLENGE_BYTES), 0.0)
        except BaseException:
            channel.close()
            raise

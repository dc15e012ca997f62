"""Every way in which a source may fail or lie ends in an outcome, in time, and with nothing wrong in the sink."""

import asyncio
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from cachecore.blocks import PrefixHash
from cachecore.scope import Fidelity
from cachecore.transfer.errors import FrameError, Reason, WireError
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.tcp.client import ClientSettings
from cachecore.transfer.tcp.messages import MESSAGE_HEAD, Kind, MessageHead, RequestBody
from cachecore.transfer.tcp.server import ServerSettings
from cachecore.transfer.transport import Draft, Failed, Fetched, Refused, Wanted, fidelity_at
from tests.cachecore.transfer.serving import (
    END,
    frame_bytes,
    frame_message,
    honest,
    listening,
    lying,
    pull,
    sending,
    serving,
)
from tests.cachecore.transfer.world import (
    EXPECTATION,
    HEADER,
    KEYRING,
    LAYERS,
    RIVAL,
    STRANGERS,
    ListSink,
    MemorySource,
    layer_payload,
    make_plan,
    make_pull,
    whole_run,
)

QUICK = ClientSettings(stall_seconds=0.3, connect_seconds=10)


async def lie(*parts: bytes, then_hang: bool = False, **options: Any) -> tuple[Failed, ListSink]:
    """What a puller makes of a source that sends these bytes after a request."""
    sink = ListSink()
    async with lying(sending(*parts, then_hang=then_hang)) as address:
        outcome = await pull(address, sink, **options)
    assert isinstance(outcome, Failed), outcome
    assert sink.layers == whole_run(range(outcome.layer))
    return outcome, sink


async def test_an_honest_script_is_believed() -> None:
    """So that the lies below fail for what they are."""
    sink = ListSink()
    async with lying(sending(*honest(range(LAYERS)), END)) as address:
        assert isinstance(await pull(address, sink), Fetched)
    assert sink.layers == whole_run()


# ---- sources that fail -----------------------------------------------------------------------------------------------


async def test_killed_within_a_layer() -> None:
    outcome, _ = await lie(*honest(range(3)), honest(range(3, 4))[0][:-300])
    assert (outcome.reason, outcome.layer) == (Reason.CLOSED, 3)


async def test_killed_between_layers() -> None:
    outcome, _ = await lie(*honest(range(2)))
    assert (outcome.reason, outcome.layer) == (Reason.CLOSED, 2)


@pytest.mark.parametrize("cut", [0, 3, MESSAGE_HEAD.size, 60, 500])
async def test_hung(cut: int) -> None:
    outcome, _ = await lie(*honest(range(2)), honest(range(2, 3))[0][:cut], then_hang=True, settings=QUICK)
    assert (outcome.reason, outcome.layer) == (Reason.STALLED, 2)


async def test_slower_than_the_deadline() -> None:
    """Every byte comes soon enough, and all of them too late."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"".join(honest(range(LAYERS))):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.01)

    sink = ListSink()
    async with lying(drip) as address:
        began = time.monotonic()
        outcome = await pull(address, sink, seconds=0.5)
        took = time.monotonic() - began
    assert outcome[:2] == (Reason.DEADLINE, 0)
    assert 0.4 < took < 10


async def test_nobody_there() -> None:
    outcome = await pull("tcp://127.0.0.1:1")
    assert outcome[:2] == (Reason.UNREACHABLE, 0)


async def test_there_but_silent() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(say_nothing) as address:
        outcome = await pull(address, settings=ClientSettings(connect_seconds=0.1))
    assert outcome[:2] == (Reason.UNREACHABLE, 0)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:99999", "tcp://a..b:1", "nixl://127.0.0.1:1", "tcp://127.0.0.1", "tcp://[zz]:1"]
)
async def test_an_address_that_is_none(address: str) -> None:
    assert (await pull(address))[:2] == (Reason.UNREACHABLE, 0)


async def test_no_address_at_all() -> None:
    assert (await pull("", plan={"addresses": ()}))[:2] == (Reason.UNREACHABLE, 0)


# ---- sources that lie ------------------------------------------------------------------------------------------------

FRAME = frame_bytes(MemorySource().draft(0))


@pytest.mark.parametrize("position", [4, 7, 100, 140, 160, 200, 600, len(FRAME) - 1])
async def test_a_flipped_bit(position: int) -> None:
    """In header, nonce, head tag, payload and tag."""
    flipped = bytearray(FRAME)
    flipped[position] ^= 1
    outcome, _ = await lie(frame_message(bytes(flipped)), END)
    assert outcome.reason in (Reason.FORGED, Reason.MALFORMED)


async def test_a_frame_of_somebody_elses_making() -> None:
    outcome, _ = await lie(frame_message(frame_bytes(MemorySource().draft(0), STRANGERS)), END)
    assert outcome.reason is Reason.FORGED


@pytest.mark.parametrize("length", [len(FRAME) - 1, len(FRAME) + 1, 40])
async def test_a_message_that_is_not_one_frame(length: int) -> None:
    data = (FRAME + FRAME)[:length]
    outcome, _ = await lie(MessageHead(Kind.FRAME, length).encode() + data, END)
    assert outcome.reason is Reason.MALFORMED


async def test_two_frames_in_a_message() -> None:
    frames = b"".join(frame_bytes(MemorySource().draft(layer)) for layer in range(2))
    sink = ListSink()
    async with lying(sending(frame_message(frames), END)) as address:
        outcome = await pull(address, sink)
    assert outcome[:2] == (Reason.MALFORMED, 0)
    assert sink.frames == []


async def test_done_before_it_is_done() -> None:
    outcome, _ = await lie(*honest(range(4)), END)
    assert (outcome.reason, outcome.layer) == (Reason.INCOMPLETE, 4)


@pytest.mark.parametrize("layers", [(1,), (0, 0), (0, 2), (0, 1, 0), (5, 4, 3, 2, 1, 0)])
async def test_layers_out_of_order(layers: tuple[int, ...]) -> None:
    """Authentic frames of the very run, replayed."""
    messages = [honest(range(layer, layer + 1))[0] for layer in layers]
    outcome, _ = await lie(*messages, END)
    assert outcome.reason is Reason.UNEXPECTED


LIES: dict[str, tuple[Callable[[FrameHeader], FrameHeader], Reason]] = {
    "class": (lambda header: header._replace(compatibility=b"X" * 16), Reason.INCOMPATIBLE),
    "dtype": (lambda header: header._replace(dtype="float16"), Reason.INCOMPATIBLE),
    "head_dim": (lambda header: header._replace(head_dim=4), Reason.INCOMPATIBLE),
    "value_dim": (lambda header: header._replace(value_dim=4), Reason.INCOMPATIBLE),
    "kv_heads": (lambda header: header._replace(kv_heads=Span(0, 1, 2)), Reason.INCOMPATIBLE),
    "block_size": (lambda header: header._replace(block_size_tokens=8), Reason.INCOMPATIBLE),
    "depth": (lambda header: header._replace(layers=Span(0, 1, 7)), Reason.INCOMPATIBLE),
    "scope": (lambda header: header._replace(scope=b"X" * 16), Reason.OTHER_TENANT),
    "tenant": (lambda header: header._replace(key_id=RIVAL), Reason.OTHER_TENANT),
    "parent": (lambda header: header._replace(parent=PrefixHash(b"X" * 16)), Reason.UNEXPECTED),
    "tail": (lambda header: header._replace(tail=PrefixHash(b"X" * 16)), Reason.UNEXPECTED),
    "first_block": (lambda header: header._replace(first_block=3), Reason.UNEXPECTED),
    "blocks": (lambda header: header._replace(blocks=2), Reason.UNEXPECTED),
    "position": (lambda header: header._replace(position=9), Reason.UNEXPECTED),
    "codec": (lambda header: header._replace(codec="i8"), Reason.UNEXPECTED),
    "fidelity": (lambda header: header._replace(fidelity=Fidelity.QUANTIZED), Reason.UNEXPECTED),
    "tokens": (lambda header: header._replace(with_tokens=True, layer_bytes=(720,)), Reason.UNEXPECTED),
}


@pytest.mark.parametrize("what", LIES)
async def test_an_authentic_frame_that_was_not_asked_for(what: str) -> None:
    change, reason = LIES[what]
    frame = frame_bytes(Draft(change(HEADER), [layer_payload(0)]))
    outcome, _ = await lie(frame_message(frame), END)
    assert (outcome.reason, outcome.layer) == (reason, 0)


async def test_noise() -> None:
    random = Random(5)
    for _ in range(30):
        outcome, _ = await lie(random.randbytes(random.randrange(1, 300)))
        assert outcome.reason in (Reason.MALFORMED, Reason.CLOSED)


def test_the_fidelity_where_it_is_wanted() -> None:
    assert fidelity_at(HEADER, HEADER.position) is Fidelity.EXACT
    assert fidelity_at(HEADER, 0) is Fidelity.ROTATED
    assert fidelity_at(HEADER._replace(fidelity=Fidelity.FUSED), 0) is Fidelity.FUSED
    pull_there = make_pull(make_plan(target_position=64), fidelity=Fidelity.QUANTIZED)
    with pytest.raises(FrameError, match="ROTATED"):
        EXPECTATION.check(HEADER, pull_there)


# ---- pullers that may not --------------------------------------------------------------------------------------------


async def test_a_request_is_good_once() -> None:
    """Recorded on one connection and played on another, or again on the same one."""
    recorded: list[bytes] = []

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Between puller and source."""
        up_reader, up_writer = await asyncio.open_connection(*server.address.removeprefix("tcp://").split(":"))
        writer.write(await up_reader.readexactly(24))
        head = await reader.readexactly(MESSAGE_HEAD.size)
        recorded.append(head + await reader.readexactly(MessageHead.decode(head, Kind.REQUEST).length))
        for _ in range(2):
            up_writer.write(recorded[0])
        writer.write(await up_reader.readexactly(len(b"".join(honest(range(LAYERS)))) + MESSAGE_HEAD.size))
        replies.append(await up_reader.readexactly(MESSAGE_HEAD.size))
        up_writer.close()

    replies: list[bytes] = []
    source = MemorySource()
    async with serving(source) as server:
        async with listening(record) as address:
            assert isinstance(await pull(address), Fetched)
        reader, writer = await asyncio.open_connection(*server.address.removeprefix("tcp://").split(":"))
        await reader.readexactly(24)
        writer.write(recorded[0])
        replies.append(await reader.readexactly(MESSAGE_HEAD.size))
        writer.close()
    refused = MessageHead(Kind.REFUSED, 0, Reason.FORGED).encode()
    assert replies == [refused, refused]
    assert len(source.requests) == 1


async def test_a_capability_of_another_tenant() -> None:
    """The source would give one tenant's blocks to another: the server does not let it, the puller does not take it."""
    async with serving(MemorySource()) as server:
        assert await pull(server.address, key_id=RIVAL) == Refused(Reason.OTHER_TENANT)
    outcome, _ = await lie(*honest(range(LAYERS)), END, key_id=RIVAL)
    assert (outcome.reason, outcome.layer) == (Reason.OTHER_TENANT, 0)


@pytest.mark.parametrize("length", [0, 1, 8, 9, 100, 5000])
async def test_noise_does_not_disturb_a_server(length: int) -> None:
    random = Random(length)
    async with serving(MemorySource()) as server:
        host, port = server.address.removeprefix("tcp://").split(":")
        for prefix in (b"", MessageHead(Kind.REQUEST, 200).encode()):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(prefix + random.randbytes(length))
            writer.write_eof()
            await reader.read()
            writer.close()
        assert isinstance(await pull(server.address), Fetched)


async def test_a_source_that_breaks_down_within_a_frame() -> None:
    """A refusal there would pass for the rest of the frame."""

    class Crooked(MemorySource):
        def draft(self, layer: int, size: int = 1, with_tokens: bool = False) -> Draft:
            header = HEADER._replace(layers=Span(layer, 1, LAYERS), layer_bytes=(700_000,))
            return Draft(header, [bytes(600_000), memoryview(bytes(200_000))[::2]])  # not contiguous

    async with serving(Crooked()) as server:
        assert (await pull(server.address))[:2] == (Reason.CLOSED, 0)
        assert server.counts.broken == {Reason.INTERNAL: 1}


async def test_a_puller_that_takes_nothing_is_given_up() -> None:
    """Its transfer does not hold a place for ever."""
    source = MemorySource(payload=lambda layer: bytes(16 << 20))
    settings = ServerSettings(stall_seconds=0.1, transfers_max=1)
    never = ListSink(after=lambda frame: asyncio.sleep(60))
    async with serving(source, settings) as server:
        task = asyncio.create_task(pull(server.address, never, seconds=60))
        while not server.counts.broken[Reason.STALLED]:
            await asyncio.sleep(0.01)
        assert source.closed == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_request_reads_back() -> None:
    order = make_pull(make_plan())
    wanted = Wanted(b"C" * 16, Span.all(LAYERS), 1, Span(1, 1, 2), True)
    body = RequestBody(wanted, order.token, order.capability.prove(KEYRING, b"c", b"r"))
    data = body.encode()
    assert RequestBody.decode(data) == body
    for end in range(len(data)):
        with pytest.raises(WireError):
            RequestBody.decode(data[:end])


@pytest.mark.parametrize(
    "head",
    [
        b"RX\x04\x00\x00\x00\x00\x00",
        b"RW\x00\x00\x00\x00\x00\x00",
        b"RW\x06\x00\x00\x00\x00\x00",
        b"RW\x04\x01\x00\x00\x00\x00",
        b"RW\x04\xff\x00\x00\x00\x00",
        b"RW\x04\x00\x01\x00\x00\x00",
        b"RW\x05\x00\x00\x00\x00\x00",
        b"RW\x05\xff\x00\x00\x00\x00",
        b"RW\x03\x00\x00\x00\x00\x00",
        b"RW\x01\x00\x0f\x00\x00\x00",
        b"RW\x02\x00\xff\xff\x00\x00",
    ],
)
def test_what_is_no_message(head: bytes) -> None:
    with pytest.raises(WireError):
        MessageHead.decode(head, *Kind)


def test_messages_read_back() -> None:
    heads = [MessageHead(Kind.END, 0), MessageHead(Kind.GREETING, 16), MessageHead(Kind.FRAME, 2**32 - 1)]
    heads += [MessageHead(Kind.REFUSED, 0, reason) for reason in Reason]
    assert [MessageHead.decode(head.encode(), *Kind) for head in heads] == heads
    assert MessageHead(Kind.REFUSED, 0, Reason.STALE).encode() == b"RW\x05\x09\x00\x00\x00\x00"
    with pytest.raises(WireError):
        MessageHead.decode(heads[0].encode(), Kind.FRAME)

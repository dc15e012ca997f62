"""What every transport must do, whatever carries the bytes. A backend's test file says how to serve and how to pull."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol

import pytest

from cachecore.blocks import PrefixHash
from cachecore.holders import Epoch
from cachecore.scope import Fidelity, Keyring
from cachecore.transfer.errors import FrameError, Reason, Unserved
from cachecore.transfer.frames import PIECE_BYTES, Frame, FrameWriter
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.transport import (
    Draft,
    Expectation,
    Failed,
    Fetched,
    Outcome,
    Refused,
    Sealed,
    Source,
    Transport,
)
from tests.cachecore.transfer.world import (
    EXPECTATION,
    HEADER,
    KEYRING,
    LAYER_BYTES,
    LAYERS,
    RIVAL,
    RUN,
    SOURCE,
    STRANGERS,
    TARGET,
    TOKENS,
    ListSink,
    MemorySource,
    layer_payload,
    make_plan,
    make_pull,
    whole_run,
)

LONG_BYTES = 3 * PIECE_BYTES + 5


class Carrier(Protocol):
    def serve(self, source: Source, *, clock: Callable[[], float] = ...) -> AbstractAsyncContextManager[str]:
        """The address that a plan names; nothing is left of it when the block ends."""
        ...

    def transport(
        self, keyring: Keyring = ..., *, streams: int = ..., stall_seconds: float = ...
    ) -> AbstractAsyncContextManager[Transport]: ...


def long_source() -> MemorySource:
    return MemorySource(payload=lambda layer: layer_payload(layer, LONG_BYTES))


def is_whole(outcome: Outcome, layers: int = LAYERS) -> bool:
    return isinstance(outcome, Fetched) and outcome.payload_bytes == layers * LAYER_BYTES and not outcome.shared


class TransportSuite:
    @pytest.fixture
    def carrier(self) -> Carrier:
        raise NotImplementedError

    async def pull(
        self,
        carrier: Carrier,
        address: str,
        sink: ListSink | None = None,
        *,
        keyring: Keyring = KEYRING,
        minted_by: Keyring = KEYRING,
        expectation: Expectation = EXPECTATION,
        seconds: float = 30.0,
        streams: int = 1,
        stall_seconds: float = 10.0,
        plan: dict[str, Any] | None = None,
        **grant: Any,
    ) -> Outcome:
        order = make_pull(make_plan(address, **(plan or {})), keyring=minted_by, **grant)
        async with carrier.transport(keyring, streams=streams, stall_seconds=stall_seconds) as transport:
            deadline = asyncio.get_running_loop().time() + seconds
            return await transport.fetch(order, expectation, sink or ListSink(), deadline)

    # ---- what arrives ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("streams", [1, 2, 4, 99])
    async def test_a_run_arrives_layer_by_layer(self, carrier: Carrier, streams: int) -> None:
        sink = ListSink()
        async with carrier.serve(MemorySource()) as address:
            outcome = await self.pull(carrier, address, sink, streams=streams)
        assert is_whole(outcome), outcome
        assert sink.layers == whole_run()
        assert list(sink.layers) == list(range(LAYERS))

    @pytest.mark.parametrize("streams", [1, 3])
    async def test_long_layers(self, carrier: Carrier, streams: int) -> None:
        sink = ListSink()
        async with carrier.serve(long_source()) as address:
            outcome = await self.pull(carrier, address, sink, streams=streams)
        assert isinstance(outcome, Fetched)
        assert sink.layers == {layer: layer_payload(layer, LONG_BYTES) for layer in range(LAYERS)}

    async def test_some_layers_several_to_a_frame(self, carrier: Carrier) -> None:
        sink = ListSink()
        wanted = replace(EXPECTATION, layers=Span(1, 3, LAYERS))
        async with carrier.serve(MemorySource(layers_per_frame=2)) as address:
            outcome = await self.pull(carrier, address, sink, expectation=wanted)
        assert is_whole(outcome, 3)
        assert [frame.header.layers for frame in sink.frames] == [Span(1, 2, LAYERS), Span(3, 1, LAYERS)]
        assert sink.layers == whole_run(range(1, 4))

    async def test_sealed_frames_pass_as_they_are(self, carrier: Carrier) -> None:
        """A pool's: made once, under a nonce that the puller sees."""
        source = MemorySource()
        frames = [FrameWriter(KEYRING.frame_key).seal(*source.draft(layer)) for layer in range(LAYERS)]

        class Shelf(MemorySource):
            async def serve(self, request):  # type: ignore[no-untyped-def]
                for layer, buffers in enumerate(frames):
                    yield Sealed(source.draft(layer).header, buffers)

        sink = ListSink()
        async with carrier.serve(Shelf()) as address:
            assert is_whole(await self.pull(carrier, address, sink))
        assert [frame.sealed for frame in sink.frames] == frames

    @pytest.mark.parametrize("streams", [1, 2])
    async def test_token_ids_come_with_a_shifted_run(self, carrier: Carrier, streams: int) -> None:
        sink = ListSink()
        shifted = {"target_position": 64}
        async with carrier.serve(MemorySource()) as address:
            outcome = await self.pull(carrier, address, sink, streams=streams, plan=shifted, fidelity=Fidelity.ROTATED)
        assert isinstance(outcome, Fetched)
        assert [bytes(frame.token_ids) for frame in sink.frames] == [TOKENS] + [b""] * (LAYERS - 1)
        assert sink.layers == whole_run()

    async def test_a_source_learns_what_is_wanted(self, carrier: Carrier) -> None:
        source = MemorySource()
        async with carrier.serve(source) as address:
            await self.pull(carrier, address, expectation=replace(EXPECTATION, layers=Span(2, 3, LAYERS)))
        (request,) = source.requests
        assert (request.capability.run, request.capability.target) == (RUN, TARGET)
        assert (request.wanted.layers, request.wanted.kv_heads) == (Span(2, 3, LAYERS), HEADER.kv_heads)

    async def test_many_pulls_at_a_time(self, carrier: Carrier) -> None:
        tails = [PrefixHash(bytes([number]) * 16) for number in range(12)]

        class Many(MemorySource):
            async def serve(self, request):  # type: ignore[no-untyped-def]
                number = request.capability.run.tail[0]
                one = MemorySource(header=HEADER._replace(tail=tails[number]), payload=lambda layer: of(number, layer))
                async for draft in one.serve(request):
                    yield draft

        def of(number: int, layer: int) -> bytes:
            return layer_payload(100 * number + layer)

        sinks = [ListSink() for _ in tails]
        async with carrier.serve(Many()) as address, carrier.transport(streams=2) as transport:
            deadline = asyncio.get_running_loop().time() + 30
            orders = [make_pull(make_plan(address, run=RUN._replace(tail=tail))) for tail in tails]
            pairs = zip(orders, sinks, strict=True)
            fetches = [transport.fetch(order, EXPECTATION, sink, deadline) for order, sink in pairs]
            outcomes = await asyncio.gather(*fetches)
        assert all(map(is_whole, outcomes))
        for number, sink in enumerate(sinks):
            assert sink.layers == {layer: of(number, layer) for layer in range(LAYERS)}

    async def test_a_slow_sink_is_waited_for(self, carrier: Carrier) -> None:
        """The puller's own slowness is no stall of the source's, and holds back the other stream, too."""
        sink = ListSink(after=lambda frame: asyncio.sleep(0.6))
        async with carrier.serve(MemorySource()) as address:
            wanted = replace(EXPECTATION, layers=Span(0, 3, LAYERS))
            outcome = await self.pull(carrier, address, sink, expectation=wanted, streams=2, stall_seconds=0.5)
        assert is_whole(outcome, 3), outcome

    async def test_what_a_sink_raises_comes_out(self, carrier: Carrier) -> None:
        def fail(frame: Frame) -> None:
            raise ZeroDivisionError

        source = MemorySource()
        async with carrier.serve(source) as address:
            with pytest.raises(ZeroDivisionError):
                await self.pull(carrier, address, ListSink(after=fail), streams=2)
        assert source.closed == len(source.requests)

    async def test_who_gives_up_frees_the_source(self, carrier: Carrier) -> None:
        source = MemorySource(before=lambda layer: asyncio.sleep(60) if layer == 3 else None)
        sink = ListSink()
        async with carrier.serve(source) as address:
            task = asyncio.create_task(self.pull(carrier, address, sink))
            while len(sink.frames) < 3:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert source.closed == 1

    # ---- sources that fail -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("streams", [1, 3])
    async def test_a_source_that_hangs(self, carrier: Carrier, streams: int) -> None:
        sink = ListSink()
        async with carrier.serve(
            MemorySource(before=lambda layer: asyncio.sleep(60) if layer == 3 else None)
        ) as address:
            outcome = await self.pull(carrier, address, sink, streams=streams, stall_seconds=0.5)
        assert isinstance(outcome, Failed)
        assert (outcome.reason, outcome.layer) == (Reason.STALLED, 3)
        assert sink.layers == whole_run(range(3))

    async def test_a_source_slower_than_the_deadline(self, carrier: Carrier) -> None:
        sink = ListSink()
        async with carrier.serve(MemorySource(before=lambda layer: asyncio.sleep(0.2))) as address:
            outcome = await self.pull(carrier, address, sink, seconds=0.7)
        assert isinstance(outcome, Failed)
        assert outcome.reason is Reason.DEADLINE
        assert sink.layers == whole_run(range(outcome.layer))

    async def test_a_deadline_that_has_passed(self, carrier: Carrier) -> None:
        async with carrier.serve(MemorySource()) as address:
            assert (await self.pull(carrier, address, seconds=-1))[:2] == (Reason.DEADLINE, 0)

    async def test_a_source_that_stops_serving(self, carrier: Carrier) -> None:
        source = MemorySource(before=lambda layer: asyncio.sleep(60) if layer == 2 else None)
        sink = ListSink()
        async with carrier.serve(source) as address:
            task = asyncio.create_task(self.pull(carrier, address, sink, stall_seconds=30))
            while len(sink.frames) < 2:
                await asyncio.sleep(0.001)
        assert (await task)[:2] == (Reason.CLOSED, 2)
        assert sink.layers == whole_run(range(2))

    async def test_evicted_before(self, carrier: Carrier) -> None:
        async with carrier.serve(MemorySource(header=HEADER._replace(tail=PrefixHash(b"x" * 16)))) as address:
            assert await self.pull(carrier, address) == Refused(Reason.STALE)

    async def test_evicted_meanwhile(self, carrier: Carrier) -> None:
        def evict(layer: int) -> None:
            if layer == 4:
                raise Unserved("evicted", Reason.STALE)

        sink = ListSink()
        async with carrier.serve(MemorySource(before=evict)) as address:
            outcome = await self.pull(carrier, address, sink)
        assert outcome[:2] == (Reason.STALE, 4)
        assert sink.layers == whole_run(range(4))

    async def test_a_defect_of_the_source(self, carrier: Carrier) -> None:
        def break_down(layer: int) -> None:
            raise ZeroDivisionError

        async with carrier.serve(MemorySource(before=break_down)) as address:
            assert await self.pull(carrier, address) == Refused(Reason.INTERNAL)

    @pytest.mark.parametrize(
        "header",
        [
            HEADER._replace(codec="i8"),
            HEADER._replace(fidelity=Fidelity.FUSED),
            HEADER._replace(blocks=2),
            HEADER._replace(layer_bytes=(767,)),
        ],
    )
    async def test_a_source_that_gives_something_else(self, carrier: Carrier, header: FrameHeader) -> None:
        class Confused(MemorySource):
            def draft(self, layer: int, size: int = 1, with_tokens: bool = False) -> Draft:
                return Draft(header, [layer_payload(layer)])

        async with carrier.serve(Confused()) as address:
            assert await self.pull(carrier, address) == Refused(Reason.INTERNAL)

    async def test_a_payload_that_the_sink_cannot_use(self, carrier: Carrier) -> None:
        def refuse(frame: Frame) -> None:
            raise FrameError("no such codec", Reason.UNUSABLE)

        async with carrier.serve(MemorySource()) as address:
            outcome = await self.pull(carrier, address, ListSink(after=refuse))
        assert outcome[:2] == (Reason.UNUSABLE, 0)

    # ---- pullers that may not ----------------------------------------------------------------------------------------

    async def test_another_class(self, carrier: Carrier) -> None:
        wanted = replace(EXPECTATION, compatibility=b"X" * 16)
        async with carrier.serve(MemorySource()) as address:
            assert await self.pull(carrier, address, expectation=wanted) == Refused(Reason.INCOMPATIBLE)

    async def test_an_expired_capability(self, carrier: Carrier) -> None:
        source = MemorySource()
        async with carrier.serve(source, clock=lambda: time.time() + 61) as address:
            assert await self.pull(carrier, address) == Refused(Reason.EXPIRED)
        assert source.requests == []

    async def test_a_forged_capability(self, carrier: Carrier) -> None:
        source = MemorySource()
        async with carrier.serve(source) as address:
            outcome = await self.pull(carrier, address, minted_by=STRANGERS)
        assert outcome == Refused(Reason.FORGED)
        assert source.requests == []

    async def test_a_capability_in_the_wrong_hands(self, carrier: Carrier) -> None:
        """Seen in a log: good, and of no use to who lacks the tenant's key."""
        source = MemorySource()
        async with carrier.serve(source) as address:
            outcome = await self.pull(carrier, address, keyring=STRANGERS)
        assert outcome == Refused(Reason.FORGED)
        assert source.requests == []

    async def test_a_capability_of_another_tenant(self, carrier: Carrier) -> None:
        """The source itself would give one tenant's blocks to another."""
        async with carrier.serve(MemorySource()) as address:
            assert await self.pull(carrier, address, key_id=RIVAL) == Refused(Reason.OTHER_TENANT)

    @pytest.mark.parametrize(
        ("holder", "reason"),
        [
            (SOURCE._replace(epoch=Epoch(8)), Reason.OTHER_EPOCH),
            (SOURCE._replace(rank=1), Reason.OTHER_SOURCE),
            (SOURCE._replace(name="worker-c"), Reason.OTHER_SOURCE),  # type: ignore[arg-type]
        ],
    )
    async def test_another_source_or_another_life_of_it(self, carrier: Carrier, holder: Any, reason: Reason) -> None:
        source = MemorySource(holder=holder)
        async with carrier.serve(source) as address:
            assert await self.pull(carrier, address) == Refused(reason)
        assert source.requests == []

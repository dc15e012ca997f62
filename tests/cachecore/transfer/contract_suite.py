"""What every transport must do, whatever carries the bytes. A backend's test file says how to serve and how to pull.

Sources are scripts, so that `SeparateSuite` can run the same between two processes, and end one of them.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Protocol

import pytest

from cachecore.blocks import PrefixHash
from cachecore.holders import Epoch
from cachecore.scope import Fidelity, Keyring
from cachecore.transfer.errors import FrameError, Reason
from cachecore.transfer.frames import PIECE_BYTES, Frame
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.transport import Expectation, Failed, Fetched, Outcome, Refused, Request, Transport
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
    Script,
    layer_payload,
    make_plan,
    make_pull,
    seal_as_before,
    whole_run,
)

LONG_BYTES = 3 * PIECE_BYTES + 5


class Served(Protocol):
    address: str
    """As a plan names it."""

    async def requests(self) -> list[Request]:
        """What the source has been asked."""
        ...

    async def freed(self) -> int:
        """How many of them it has done with."""
        ...

    async def stop(self) -> None:
        """Serve no more."""
        ...


class Carrier(Protocol):
    def serve(self, script: Script, *, clock_ahead_seconds: float = ...) -> AbstractAsyncContextManager[Served]:
        """Nothing is left of it when the block ends."""
        ...

    def transport(
        self, keyring: Keyring = ..., *, streams: int = ..., stall_seconds: float = ...
    ) -> AbstractAsyncContextManager[Transport]: ...


class MortalCarrier(Carrier, Protocol):
    def serve_alone(self, script: Script) -> AbstractAsyncContextManager["MortalServed"]:
        """In a process of its own."""
        ...


class MortalServed(Served, Protocol):
    def kill(self) -> None: ...

    def freeze(self) -> None: ...


async def frames_of(sink: ListSink, count: int, task: "asyncio.Task[Outcome]") -> None:
    """Until so many are there."""
    while len(sink.frames) < count:
        assert not task.done(), await task
        await asyncio.sleep(0.001)


LONG = Script(layer_bytes=LONG_BYTES)


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
        async with carrier.serve(Script()) as served:
            outcome = await self.pull(carrier, served.address, sink, streams=streams)
        assert is_whole(outcome), outcome
        assert sink.layers == whole_run()
        assert list(sink.layers) == list(range(LAYERS))

    @pytest.mark.parametrize("streams", [1, 3])
    async def test_long_layers(self, carrier: Carrier, streams: int) -> None:
        sink = ListSink()
        async with carrier.serve(LONG) as served:
            outcome = await self.pull(carrier, served.address, sink, streams=streams)
        assert isinstance(outcome, Fetched)
        assert sink.layers == {layer: layer_payload(layer, LONG_BYTES) for layer in range(LAYERS)}

    async def test_some_layers_several_to_a_frame(self, carrier: Carrier) -> None:
        sink = ListSink()
        wanted = replace(EXPECTATION, layers=Span(1, 3, LAYERS))
        async with carrier.serve(Script(layers_per_frame=2)) as served:
            outcome = await self.pull(carrier, served.address, sink, expectation=wanted)
        assert is_whole(outcome, 3)
        assert [frame.header.layers for frame in sink.frames] == [Span(1, 2, LAYERS), Span(3, 1, LAYERS)]
        assert sink.layers == whole_run(range(1, 4))

    async def test_sealed_frames_pass_as_they_are(self, carrier: Carrier) -> None:
        """A pool's: made once, under a nonce that the puller sees."""
        sink = ListSink()
        async with carrier.serve(Script(sealed=True)) as served:
            assert is_whole(await self.pull(carrier, served.address, sink))
        made = [seal_as_before(MemorySource().draft(layer)) for layer in range(LAYERS)]
        assert [frame.sealed for frame in sink.frames] == made

    @pytest.mark.parametrize("streams", [1, 2])
    async def test_token_ids_come_with_a_shifted_run(self, carrier: Carrier, streams: int) -> None:
        sink = ListSink()
        shifted = {"target_position": 64}
        async with carrier.serve(Script()) as served:
            outcome = await self.pull(
                carrier, served.address, sink, streams=streams, plan=shifted, fidelity=Fidelity.ROTATED
            )
        assert isinstance(outcome, Fetched)
        assert [bytes(frame.token_ids) for frame in sink.frames] == [TOKENS] + [b""] * (LAYERS - 1)
        assert sink.layers == whole_run()

    async def test_a_source_learns_what_is_wanted(self, carrier: Carrier) -> None:
        async with carrier.serve(Script()) as served:
            await self.pull(carrier, served.address, expectation=replace(EXPECTATION, layers=Span(2, 3, LAYERS)))
            (request,) = await served.requests()
        assert (request.capability.run, request.capability.target) == (RUN, TARGET)
        assert (request.wanted.layers, request.wanted.kv_heads) == (Span(2, 3, LAYERS), HEADER.kv_heads)

    @pytest.mark.parametrize(("layer_bytes", "runs"), [(LAYER_BYTES, 12), (LONG_BYTES, 4)])
    async def test_many_pulls_at_a_time(self, carrier: Carrier, layer_bytes: int, runs: int) -> None:
        tails = [PrefixHash(bytes([number]) * 16) for number in range(runs)]
        sinks = [ListSink() for _ in tails]
        script = Script(runs=runs, layer_bytes=layer_bytes)
        async with carrier.serve(script) as served, carrier.transport(streams=2) as transport:
            deadline = asyncio.get_running_loop().time() + 30
            orders = [make_pull(make_plan(served.address, run=RUN._replace(tail=tail))) for tail in tails]
            pairs = zip(orders, sinks, strict=True)
            fetches = [transport.fetch(order, EXPECTATION, sink, deadline) for order, sink in pairs]
            outcomes = await asyncio.gather(*fetches)
        assert all(isinstance(outcome, Fetched) for outcome in outcomes)
        for number, sink in enumerate(sinks):
            assert sink.layers == {layer: layer_payload(100 * number + layer, layer_bytes) for layer in range(LAYERS)}

    async def test_a_slow_sink_is_waited_for(self, carrier: Carrier) -> None:
        """The puller's own slowness is no stall of the source's, and holds back the other stream, too."""
        sink = ListSink(after=lambda frame: asyncio.sleep(0.6))
        async with carrier.serve(Script()) as served:
            wanted = replace(EXPECTATION, layers=Span(0, 3, LAYERS))
            outcome = await self.pull(carrier, served.address, sink, expectation=wanted, streams=2, stall_seconds=0.5)
        assert is_whole(outcome, 3), outcome

    async def test_what_a_sink_raises_comes_out(self, carrier: Carrier) -> None:
        def fail(frame: Frame) -> None:
            raise ZeroDivisionError

        async with carrier.serve(Script()) as served:
            with pytest.raises(ZeroDivisionError):
                await self.pull(carrier, served.address, ListSink(after=fail), streams=2)
            await self.all_freed(served)

    async def test_who_gives_up_frees_the_source(self, carrier: Carrier) -> None:
        sink = ListSink()
        async with carrier.serve(Script(hangs_at=3)) as served:
            task = asyncio.create_task(self.pull(carrier, served.address, sink))
            await frames_of(sink, 3, task)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await self.all_freed(served)

    async def all_freed(self, served: Served) -> None:
        async with asyncio.timeout(30):
            while await served.freed() < len(await served.requests()):
                await asyncio.sleep(0.01)

    # ---- sources that fail -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("streams", [1, 3])
    async def test_a_source_that_hangs(self, carrier: Carrier, streams: int) -> None:
        sink = ListSink()
        async with carrier.serve(Script(hangs_at=3)) as served:
            outcome = await self.pull(carrier, served.address, sink, streams=streams, stall_seconds=0.5)
        assert isinstance(outcome, Failed)
        assert (outcome.reason, outcome.layer) == (Reason.STALLED, 3)
        assert sink.layers == whole_run(range(3))

    async def test_a_source_slower_than_the_deadline(self, carrier: Carrier) -> None:
        sink = ListSink()
        async with carrier.serve(Script(seconds_per_layer=0.2)) as served:
            outcome = await self.pull(carrier, served.address, sink, seconds=0.7)
        assert isinstance(outcome, Failed)
        assert outcome.reason is Reason.DEADLINE
        assert sink.layers == whole_run(range(outcome.layer))

    async def test_a_deadline_that_has_passed(self, carrier: Carrier) -> None:
        async with carrier.serve(Script()) as served:
            assert (await self.pull(carrier, served.address, seconds=-1))[:2] == (Reason.DEADLINE, 0)

    async def test_a_source_that_stops_serving(self, carrier: Carrier) -> None:
        sink = ListSink()
        async with carrier.serve(Script(hangs_at=2)) as served:
            task = asyncio.create_task(self.pull(carrier, served.address, sink, stall_seconds=30))
            await frames_of(sink, 2, task)
            await served.stop()
            assert (await task)[:2] == (Reason.CLOSED, 2)
        assert sink.layers == whole_run(range(2))

    async def test_evicted_before(self, carrier: Carrier) -> None:
        async with carrier.serve(Script(header=HEADER._replace(tail=PrefixHash(b"x" * 16)))) as served:
            assert await self.pull(carrier, served.address) == Refused(Reason.STALE)

    async def test_evicted_meanwhile(self, carrier: Carrier) -> None:
        sink = ListSink()
        async with carrier.serve(Script(evicted_at=4)) as served:
            outcome = await self.pull(carrier, served.address, sink)
        assert outcome[:2] == (Reason.STALE, 4)
        assert sink.layers == whole_run(range(4))

    async def test_a_defect_of_the_source(self, carrier: Carrier) -> None:
        async with carrier.serve(Script(breaks_at=0)) as served:
            assert await self.pull(carrier, served.address) == Refused(Reason.INTERNAL)

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
        async with carrier.serve(Script(instead=header)) as served:
            assert await self.pull(carrier, served.address) == Refused(Reason.INTERNAL)

    async def test_a_payload_that_the_sink_cannot_use(self, carrier: Carrier) -> None:
        def refuse(frame: Frame) -> None:
            raise FrameError("no such codec", Reason.UNUSABLE)

        async with carrier.serve(Script()) as served:
            outcome = await self.pull(carrier, served.address, ListSink(after=refuse))
        assert outcome[:2] == (Reason.UNUSABLE, 0)

    # ---- pullers that may not ----------------------------------------------------------------------------------------

    async def test_another_class(self, carrier: Carrier) -> None:
        wanted = replace(EXPECTATION, compatibility=b"X" * 16)
        async with carrier.serve(Script()) as served:
            assert await self.pull(carrier, served.address, expectation=wanted) == Refused(Reason.INCOMPATIBLE)

    async def test_an_expired_capability(self, carrier: Carrier) -> None:
        async with carrier.serve(Script(), clock_ahead_seconds=61) as served:
            assert await self.pull(carrier, served.address) == Refused(Reason.EXPIRED)
            assert await served.requests() == []

    async def test_a_forged_capability(self, carrier: Carrier) -> None:
        async with carrier.serve(Script()) as served:
            assert await self.pull(carrier, served.address, minted_by=STRANGERS) == Refused(Reason.FORGED)
            assert await served.requests() == []

    async def test_a_capability_in_the_wrong_hands(self, carrier: Carrier) -> None:
        """Seen in a log: good, and of no use to who lacks the tenant's key."""
        async with carrier.serve(Script()) as served:
            assert await self.pull(carrier, served.address, keyring=STRANGERS) == Refused(Reason.FORGED)
            assert await served.requests() == []

    async def test_a_capability_of_another_tenant(self, carrier: Carrier) -> None:
        """The source itself would give one tenant's blocks to another."""
        async with carrier.serve(Script()) as served:
            assert await self.pull(carrier, served.address, key_id=RIVAL) == Refused(Reason.OTHER_TENANT)

    @pytest.mark.parametrize(
        ("holder", "reason"),
        [
            (SOURCE._replace(epoch=Epoch(8)), Reason.OTHER_EPOCH),
            (SOURCE._replace(rank=1), Reason.OTHER_SOURCE),
            (SOURCE._replace(name="worker-c"), Reason.OTHER_SOURCE),  # type: ignore[arg-type]
        ],
    )
    async def test_another_source_or_another_life_of_it(self, carrier: Carrier, holder: Any, reason: Reason) -> None:
        async with carrier.serve(Script(holder=holder)) as served:
            assert await self.pull(carrier, served.address) == Refused(reason)
            assert await served.requests() == []


class SeparateSuite(TransportSuite):
    """For sources in other processes, whose end nobody can tidy up after."""

    @pytest.fixture
    def carrier(self) -> MortalCarrier:
        raise NotImplementedError

    @pytest.mark.parametrize("layer_bytes", [LAYER_BYTES, LONG_BYTES])
    async def test_a_source_that_is_killed(self, carrier: MortalCarrier, layer_bytes: int) -> None:
        """Between two layers; the next pull from there fails at once, too."""
        sink = ListSink()
        async with carrier.serve_alone(Script(hangs_at=2, layer_bytes=layer_bytes)) as served:
            task = asyncio.create_task(self.pull(carrier, served.address, sink, stall_seconds=30))
            await frames_of(sink, 2, task)
            served.kill()
            assert (await task)[:2] == (Reason.CLOSED, 2)
            assert (await self.pull(carrier, served.address))[:2] == (Reason.UNREACHABLE, 0)
        assert sink.layers == {layer: layer_payload(layer, layer_bytes) for layer in range(2)}

    async def test_a_source_that_freezes(self, carrier: MortalCarrier) -> None:
        """Anywhere, perhaps within a layer."""
        sink = ListSink()
        async with carrier.serve_alone(replace(LONG, seconds_per_layer=0.05)) as served:
            task = asyncio.create_task(self.pull(carrier, served.address, sink, stall_seconds=2))
            await frames_of(sink, 2, task)
            served.freeze()
            outcome = await task
        assert isinstance(outcome, Failed)
        assert outcome.reason is Reason.STALLED
        assert sink.layers == {layer: layer_payload(layer, LONG_BYTES) for layer in range(outcome.layer)}

    async def test_a_source_that_freezes_until_the_deadline(self, carrier: MortalCarrier) -> None:
        sink = ListSink()
        async with carrier.serve_alone(Script(seconds_per_layer=0.05)) as served:
            task = asyncio.create_task(self.pull(carrier, served.address, sink, seconds=2, stall_seconds=30))
            await frames_of(sink, 2, task)
            served.freeze()
            outcome = await task
        assert isinstance(outcome, Failed)
        assert outcome.reason is Reason.DEADLINE

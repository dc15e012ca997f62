"""The contract between those who serve KV, those who pull it, and what carries it between them.

A transport keeps these promises:

* what reaches a sink is authentic, was asked for, and comes layer by layer, none twice and none left out;
* whatever a source does (dies, hangs, lies, has restarted, no longer holds the run), `fetch` answers with an `Outcome`
  before its deadline; it raises only what the sink raises, and CancelledError;
* memory is bounded by the frames under way, one for each stream.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cachecore.holders import Holder
from cachecore.scope import Fidelity
from cachecore.transfer.capability import Capability
from cachecore.transfer.errors import FrameError, Reason
from cachecore.transfer.frames import Buffer, Frame
from cachecore.transfer.header import FrameHeader, Span
from cachecore.transfer.plan import Pull

# ---- serving ---------------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """What of a run a puller asks for."""

    compatibility: bytes
    """The puller's own class; a source of another one raises Unserved(INCOMPATIBLE)."""
    layers: Span
    stride: int
    """Of `layers`, every `stride`-th from the first on: pulls over several streams share a run's layers."""
    kv_heads: Span
    with_tokens: bool
    """The run's token ids, too, in the frame of the first layer."""


class Request(NamedTuple):
    """From a puller that has proved to hold the tenant's key, for this source in this life."""

    capability: Capability
    wanted: Wanted


class Draft(NamedTuple):
    """A frame to be sealed while it is sent. Its parts must keep their bytes until the next frame is asked for."""

    header: FrameHeader
    parts: Sequence[Buffer]


class Sealed(NamedTuple):
    """A frame that lies ready (in a pool)."""

    header: FrameHeader
    buffers: Sequence[Buffer]


class Source(Protocol):
    """What a worker or a pool lends a transport to serve from."""

    @property
    def holder(self) -> Holder: ...

    def serve(self, request: Request) -> AsyncGenerator[Draft | Sealed, None]:
        """The wanted layers in order, one or (where the stride is 1) several to a frame.

        Closed when the puller goes away. Raises Unserved, also between frames.
        """
        ...


# ---- pulling ---------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    async def take(self, frame: Frame) -> None:
        """The next layers. The frame's memory is the sink's from now on.

        Raises FrameError(UNUSABLE) for a payload that it can make nothing of.
        """
        ...


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a puller asks for and takes nothing else than."""

    compatibility: bytes
    scope: bytes
    """`Naming.root` of the request's scope."""
    layers: Span
    kv_heads: Span
    head_dim: int
    value_dim: int
    block_size_tokens: int
    dtype: str

    def check(self, header: FrameHeader, pull: Pull) -> None:
        """Raises FrameError for a frame that does not belong to this pull. The order of layers is not looked at."""
        for reason, found, wanted in (
            (Reason.INCOMPATIBLE, _engine_of(header), self._engine),
            (Reason.OTHER_TENANT, (header.scope, header.key_id), (self.scope, pull.capability.key_id)),
            (Reason.UNEXPECTED, _run_of(header), (*pull.plan.run, pull.plan.source_position, pull.plan.codec)),
        ):
            if found != wanted:
                raise FrameError(f"a frame of {found} where {wanted} was asked for", reason)
        delivered = fidelity_at(header, pull.plan.target_position)
        if delivered > pull.capability.fidelity:
            raise FrameError(f"a frame that would be {delivered.name}", Reason.UNEXPECTED)

    @property
    def _engine(self) -> tuple[object, ...]:
        shape = (self.kv_heads, self.head_dim, self.value_dim, self.block_size_tokens, self.dtype)
        return (self.compatibility, self.layers.total, *shape)


def fidelity_at(header: FrameHeader, position: int) -> Fidelity:
    """How good the frame's KV is once it stands at `position`."""
    return header.fidelity if position == header.position else max(header.fidelity, Fidelity.ROTATED)


def _engine_of(header: FrameHeader) -> tuple[object, ...]:
    shape = (header.kv_heads, header.head_dim, header.value_dim, header.block_size_tokens, header.dtype)
    return (header.compatibility, header.layers.total, *shape)


def _run_of(header: FrameHeader) -> tuple[object, ...]:
    run = (header.parent, header.tail, header.first_block, header.blocks)
    return (*run, header.position, header.codec)


class Fetched(NamedTuple):
    """Every wanted layer is in the sink."""

    frames: int
    payload_bytes: int
    seconds: float
    shared: bool = False
    """Another pull of the same run, under way in this process, brought it: into that one's sink, not into this one."""


class Refused(NamedTuple):
    """The source said no."""

    reason: Reason


class Failed(NamedTuple):
    """It did not come, or was not what it must be. The layers before `layer` are in the sink, and good."""

    reason: Reason
    layer: int
    detail: str = ""


Outcome = Fetched | Refused | Failed


class Transport(Protocol):
    async def fetch(self, pull: Pull, expectation: Expectation, sink: Sink, deadline: float) -> Outcome:
        """Carry out a plan. `deadline` is in the running loop's time."""
        ...

"""What a pool promises: KV that every worker can read and that outlives them all (tier L2).

What it keeps are runs. A run is consecutive blocks of one chain, for one range of layers and one of KV heads, in one
codec: one or more sealed frames, each for some of the layers. To a pool a frame is opaque; who reads it checks its MAC.
A run is stored, found and evicted as a whole, under a key that the reader can compute from its own chain: writers cut
chains at multiples of fixed sizes (`run_ends`), so that runs of different prompts with one prefix are the same runs.

The rules, which one contract suite checks for every pool:

* **Whole or not at all.** A reader never sees half a run, whatever becomes of the writer. A frame that came back is one
  that was put under this very key, byte for byte (CRC and key are checked here, the MAC by the caller).
* **Nothing raises.** A pool that is away, full, slow or broken is a miss or a refusal with its reason, and a metric. No
  request depends on a pool.
* **Bounds.** What is stored never exceeds `bytes_max`; a tenant's share never exceeds its quota by more than what is
  being written at that moment. Room is made by evicting what is worth least (`renewed`): the least recently used, later
  what was used often. What nobody reads for `idle_seconds_max` is collected.
* **Many writers, many readers**, in many processes. A run is written once: the second writer learns that it is present.
* **Announced.** Whoever stores or removes a run announces it, once, to whom the index listens. A process that dies in
  between leaves the index wrong until somebody restates the pool from `runs()`; a match that it causes is a miss.
* **Generations.** A pool that was wiped, or came back empty, is another generation: what was known of the old is void.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple, Protocol

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Pool, Tier
from cachecore.index.contract import IndexEvent, Removed, Stored
from cachecore.scope import Fidelity, KeyId, TenantId

Buffer = bytes | bytearray | memoryview

DIGEST_BYTES = 16
BLOCKS_MAX = 4096
LAYERS_MAX = 4096
HEADS_MAX = 4096
_CODEC = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
LONG_RUN_TIMES = 4
"""How many short runs a long one is as long as: it costs less to find, to plan and to read than they do."""
CREDITS_MAX = 60
"""How many reuses count at most."""


class Extent(NamedTuple):
    """A half-open range of layers or of KV heads."""

    start: int
    end: int

    def overlaps(self, other: "Extent") -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class RunKey:
    """All that makes one run's bytes another's or not. Raises ValueError for what no run can be."""

    compatibility: bytes
    """Digest of weights, RoPE table, KV dtype and layout, DIGEST_BYTES long."""
    scope: bytes
    """Digest of the identity scope, DIGEST_BYTES long."""
    key_id: KeyId
    """Whose it is, and under which epoch of keys it was named and sealed."""
    tail: PrefixHash
    """Of the last block: it names every block before it as well."""
    blocks: int
    """How many blocks, the one named `tail` being the last."""
    layers: Extent
    """Of the model's; a pipeline stage stores its own."""
    heads: Extent
    """KV heads; a tensor-parallel rank stores its own."""
    codec: str
    fidelity: Fidelity = Fidelity.EXACT

    def __post_init__(self) -> None:
        if not len(self.compatibility) == len(self.scope) == DIGEST_BYTES or len(self.tail) != HASH_BYTES:
            raise ValueError("digests and names of a run have 16 bytes")
        if not 1 <= self.blocks <= BLOCKS_MAX:
            raise ValueError(f"a run has 1 to {BLOCKS_MAX} blocks, not {self.blocks}")
        if not 0 <= self.layers.start < self.layers.end <= LAYERS_MAX:
            raise ValueError(f"no range of layers: {self.layers}")
        if not 0 <= self.heads.start < self.heads.end <= HEADS_MAX:
            raise ValueError(f"no range of heads: {self.heads}")
        if not _CODEC.fullmatch(self.codec):
            raise ValueError(f"no name of a codec: {self.codec!r}")

    def canonical(self) -> bytes:
        """Injective byte form: fields of fixed size, then the two names, of which the first is preceded by its size."""
        codec = self.codec.encode()
        numbers = (self.blocks, *self.layers, *self.heads, int(self.fidelity), len(codec))
        packed = self.key_id.epoch.to_bytes(4, "little") + b"".join(number.to_bytes(2, "little") for number in numbers)
        return self.compatibility + self.scope + self.tail + packed + codec + self.key_id.tenant.encode()

    @property
    def tenant(self) -> TenantId:
        return self.key_id.tenant

    @property
    def name(self) -> str:
        """What the run is called in every store: safe as a file's name, and enough to announce its end by."""
        digest = blake2b(self.canonical(), digest_size=DIGEST_BYTES, person=b"ropeway.run.v1").hexdigest()
        return f"{self.tail.hex()}-{int(self.fidelity)}-{digest}"


@dataclass(frozen=True, slots=True)
class PoolRun:
    """A run as its writer describes it. Raises ValueError when the description contradicts itself."""

    key: RunKey
    parent: PrefixHash
    """Before the first block: another block's name, or the root of the chain."""
    chain: Chain
    """Names of the blocks; the last is `key.tail`."""
    first_block: int
    """Position in the prompt, which is also the source position of its RoPE phase."""

    def __post_init__(self) -> None:
        if len(self.parent) != HASH_BYTES or len(self.chain) != HASH_BYTES * self.key.blocks:
            raise ValueError("a run's chain has as many names as its key has blocks")
        if self.chain[-HASH_BYTES:] != self.key.tail:
            raise ValueError("a run's chain ends with another block than its key says")
        if not 0 <= self.first_block < 2**32:
            raise ValueError(f"no position of a block: {self.first_block}")

    def stored(self) -> Stored:
        return Stored(self.parent, self.chain, Tier.L2, self.key.fidelity)

    def removed(self) -> Removed:
        return Removed(self.chain, Tier.L2, self.key.fidelity)


class SealedFrame(NamedTuple):
    """Some layers of a run, sealed: header, payload and MAC as the transfer's frames have them, in pieces."""

    layers: Extent
    buffers: Sequence[Buffer]

    @property
    def size_bytes(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


def run_ends(first: int, end: int, short: int) -> Iterator[tuple[int, int]]:
    """Where writers cut a chain of which blocks `first` to `end` have just come: (where a run ends, how many blocks it
    has). It may begin before `first`.

    Long runs wherever one is complete, short ones of `short` blocks behind the last of them. All end at multiples of
    their size. What follows the last of these is in none.
    """
    long = LONG_RUN_TIMES * short
    for block in range(first // long * long + long, end + 1, long):
        yield block, long
    for block in range(max(end // long * long, first // short * short) + short, end + 1, short):
        yield block, short


# ---- outcomes --------------------------------------------------------------------------------------------------------


class MissReason(StrEnum):
    ABSENT = "absent"
    AWAY = "away"
    """The store did not answer, or not in time."""
    BROKEN = "broken"
    """What lies there is not what was put there. It is removed."""
    GONE = "gone"
    """Evicted while it was being read."""


class Missed(NamedTuple):
    reason: MissReason
    detail: str = ""


class Found(NamedTuple):
    frames: tuple[SealedFrame, ...]
    """In the order of their layers; together they cover what was asked for."""


class DeclineReason(StrEnum):
    LARGE = "large"
    """More than the pool may ever hold at once, for this tenant or at all."""
    FULL = "full"
    """No room could be made now."""
    BUSY = "busy"
    """Another writer is at it."""
    AWAY = "away"


class Declined(NamedTuple):
    reason: DeclineReason
    detail: str = ""


class Accepted(NamedTuple):
    new: bool
    """False when the pool had the run already."""


class RemovalReason(StrEnum):
    BOUND = "bound"
    QUOTA = "quota"
    IDLE = "idle"
    ASKED = "asked"
    BROKEN = "broken"


# ---- bounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """Of one pool; every process that opens it should say the same."""

    bytes_max: int
    tenant_bytes_max: int = 0
    """Quota of a tenant that `quotas` does not name; 0 for none."""
    quotas: Mapping[TenantId, int] = field(default_factory=dict)
    run_bytes_max: int = 1 << 30
    idle_seconds_max: float = 7 * 86_400.0
    reuse_credit_seconds: float = 60.0
    """By how much each reuse makes a run look younger, up to CREDITS_MAX times as much."""

    def __post_init__(self) -> None:
        if min(self.bytes_max, self.run_bytes_max, self.idle_seconds_max) <= 0 or self.tenant_bytes_max < 0:
            raise ValueError(f"bounds of a pool are positive: {self}")

    def quota(self, tenant: TenantId) -> int:
        """Bytes that the tenant may hold; `bytes_max` where it has no quota."""
        return min(self.quotas.get(tenant, self.tenant_bytes_max) or self.bytes_max, self.bytes_max)


def renewed(worth: float, now: float, credit_seconds: float) -> float:
    """What a run is worth after it was read: a time, so that worth ages by itself; the least is evicted first.

    A new run is worth the time of its storing. One reuse makes it look `credit_seconds` younger than one that is new
    now, and those that follow soon add up: recency and count in the one number that a file system, a sorted set and an
    object store can all keep.
    """
    return min(max(worth, now) + credit_seconds, now + CREDITS_MAX * credit_seconds)


# ---- announcements and statistics ------------------------------------------------------------------------------------


class Announcement(NamedTuple):
    """What changed in a pool, by this process's hand."""

    holder: Pool
    event: IndexEvent
    """Tier L2. A run whose own description could not be read any more is announced by its last block alone."""
    run: PoolRun | None
    """None for a whole pool, or where the run's description could not be read any more."""

    @property
    def key(self) -> RunKey | None:
        return self.run.key if self.run is not None else None


Announce = Callable[[Announcement], None]

LATENCY_BOUNDS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(slots=True)
class Latency:
    """A histogram: `counts[n]` answers took at most LATENCY_BOUNDS_SECONDS[n], the last one took longer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_SECONDS) + 1))
    seconds: float = 0.0

    def observe(self, seconds: float) -> None:
        place = sum(seconds > bound for bound in LATENCY_BOUNDS_SECONDS)
        self.counts[place] += 1
        self.seconds += seconds


@dataclass(slots=True)
class PoolStats:
    """Occupancy as this process knows it, and counters of what this process did; counters only ever grow."""

    holder: Pool | None = None
    """None until the pool was reached."""
    up: bool = False
    reason: str = ""
    """Why it is not up."""
    runs: int = 0
    bytes: int = 0
    bytes_max: int = 0
    tenant_bytes: dict[TenantId, int] = field(default_factory=dict)
    hits: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict)
    stored: int = 0
    present: int = 0
    declined: dict[DeclineReason, int] = field(default_factory=dict)
    removed: dict[RemovalReason, int] = field(default_factory=dict)
    read_bytes: int = 0
    written_bytes: int = 0
    first_frame: Latency = field(default_factory=Latency)
    """From the question to the first frame of a hit."""
    write: Latency = field(default_factory=Latency)


class KvPool(Protocol):
    """See the module's opening for the rules. One instance belongs to one event loop."""

    @property
    def holder(self) -> Pool | None:
        """This pool in its present generation; None until it was reached for the first time."""
        ...

    async def start(self) -> None:
        """Reach the pool, or go on trying in the background. Never raises for a pool that is away."""
        ...

    async def close(self) -> None: ...

    async def put(self, run: PoolRun, frames: Sequence[SealedFrame]) -> Accepted | Declined:
        """Store a run. Its frames cover `run.key.layers` in order; ValueError when they do not.

        Once begun it goes on to its end, also when the caller is cancelled: the frames' memory is in use until then.
        """
        ...

    def stream(self, key: RunKey, layers: Extent | None = None) -> AsyncGenerator[SealedFrame | Missed, None]:
        """Frames that overlap `layers` (all by default), in their order, read ahead of the consumer.

        `Missed` is the last item where it was cut short: what came before it is sound. Close it when leaving early.
        """
        ...

    async def get(self, key: RunKey, layers: Extent | None = None) -> Found | Missed:
        """The same, gathered."""
        ...

    async def contains(self, key: RunKey) -> bool:
        """Whether it is there now; False when the pool is away."""
        ...

    async def evict(self, key: RunKey) -> bool:
        """Remove a run; True when it was this call that did."""
        ...

    async def collect(self) -> None:
        """Remove what nobody reads and what dead writers left. `start` sees to it that this happens now and then."""
        ...

    async def wipe(self) -> bool:
        """Begin another generation and drop everything. False when the pool is away."""
        ...

    def runs(self) -> AsyncIterator[PoolRun]:
        """All that is stored, in no order, to restate the index from. Ends early when the pool goes away, and is then
        not `up` any more."""
        ...

    def stats(self) -> PoolStats: ...

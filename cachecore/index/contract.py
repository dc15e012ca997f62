"""What a prefix index promises. Every backend (memory, redis, mirror) passes one behaviour suite.

The rules:

* **Writes are idempotent.** `apply` carries the position of a batch in its holder's event stream; a batch at or before
  the last one applied changes nothing. Several gateways can then hand the same stream to one index.
* **Counts.** Engines keep several physical copies of a block and announce each: a block is held until it has been
  removed as often as it was stored. Removing what was never stored is counted and otherwise ignored.
* **Nonsense is dropped alone.** A store that repeats a block, holds its own parent, or is no whole number of names is
  counted (`extra["malformed_events"]`) and otherwise ignored, and so is a removal that is no whole number of names.
* **Matches are exact.** A depth is the number of LEADING blocks of the query that the place holds, each one confirmed.
  Mid-chain evictions leave holes; a match ends at the first hole of that holder.
* **Bounds shorten, never lie.** When a bounded index must forget, it forgets holdings (least recently matched first):
  later matches get shorter, never wrong.
* **The dead are not believed.** After `forget(holder)` nothing of that holder is ever matched again, at once, whatever
  it takes to free the memory.
"""

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cachecore.blocks import Chain, ContentHash, PrefixHash
from cachecore.holders import Holder, Place, Tier
from cachecore.scope import Fidelity, Naming


class Origin(NamedTuple):
    """By what a chain is named. Kept whole beside handles, so that whoever follows the stream next names alike.

    Constant along a chain, and few: one for each (salt, adapter) of a stream.
    """

    salt: str | None
    """Cache salt that the first block of the prompt was stored under."""
    adapter: str | None
    group: int | None = None
    """The engine's KV cache group that the handles belong to; None when it has but one."""
    root: PrefixHash = PrefixHash(b"")
    """Of the naming, as evidence: keys and settings may have changed since."""


class Text(NamedTuple):
    """What stored blocks say, and how they are named. Kept in the process that read it in an engine's events."""

    naming: Naming
    tokens: bytes
    """`pack_tokens`, of every block of the chain."""


class Stored(NamedTuple):
    """Consecutive blocks of one chain have been stored.

    `parent` is the PrefixHash before the first of them (the chain's root for block 0). Whoever cannot name the parent
    cannot name the blocks: such stores never reach an index.

    The last three fields change nothing that is matched. An index that outlives its writer keeps handles and origin, so
    that whoever follows the event stream next knows which blocks the engine means; every other index ignores them. The
    text is for content indexes.
    """

    parent: PrefixHash
    chain: Chain
    tier: Tier = Tier.L0
    fidelity: Fidelity = Fidelity.EXACT
    handles: tuple[int, ...] = ()
    """The engine's handles of these blocks, 0 <= handle < 2**64, each standing for as many consecutive blocks as the
    others (k names a handle): an index that keeps handles drops all blocks of one or none. Empty when a handle does not
    stand for whole blocks. A holder that has blocks without handles, or one block under two different handles, cannot
    be handed over: a later removal would not be understood."""
    origin: Origin | None = None
    """How the chain is named; None for a store without handles."""
    text: Text | None = None
    """None where nobody asked for it, and for blocks that depend on more than tokens (images)."""


class Removed(NamedTuple):
    """One copy of each of these blocks is gone from the tier. They need not be consecutive."""

    chain: Chain
    tier: Tier = Tier.L0
    fidelity: Fidelity = Fidelity.EXACT


class Cleared(NamedTuple):
    """Everything of the holder is gone: from one tier, or from all when `tier` is None."""

    tier: Tier | None = None


IndexEvent = Stored | Removed | Cleared


class Match(NamedTuple):
    """How deep each place can serve a query of `blocks` blocks.

    `depths[place]` counts leading blocks that the holder has in that tier or a nearer one, at that fidelity or a
    better one. A holder with blocks 0-9 in L0 and 0-19 in L1 has `{L0: 10, L1: 20}`. A place is listed if at least
    one of the blocks counted for it lies in that very place, so no depth is 0.
    """

    blocks: int
    depths: Mapping[Place, int]


NO_MATCH = Match(0, {})


@dataclass(slots=True)
class IndexStats:
    """Sizes and counters of an index; counters only ever grow."""

    blocks: int = 0
    """Distinct blocks known."""
    holdings: int = 0
    """(block, place) pairs."""
    runs: int = 0
    holders: int = 0
    blocks_max: int = 0
    """The bound on `blocks`; 0 when unbounded."""
    evicted_blocks: int = 0
    stale_batches: int = 0
    """Batches refused because their sequence number had been seen."""
    unknown_removals: int = 0
    """Removals of blocks that the place did not hold."""
    extra: dict[str, int] = field(default_factory=dict)


class PrefixIndex(Protocol):
    """Which place holds which prefix. See the module's opening for the rules."""

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        """Apply one batch of a holder's event stream. False (and no change) when it was applied before."""
        ...

    def match(self, chain: Chain) -> Match | Awaitable[Match]:
        """How deep each place can serve `chain`, which starts at block 0. A local index answers at once."""
        ...

    def forget(self, holder: Holder) -> None:
        """The holder is gone (a worker's epoch ended, a pool's generation closed). Its sequence is forgotten too."""
        ...

    def sequence(self, holder: Holder) -> int | None:
        """Last sequence number applied for the holder; None before its first batch."""
        ...

    def holdings(self, holder: Holder, tier: Tier) -> Iterator[PrefixHash]:
        """Every block the holder has in the tier, in no particular order: for consistency checks and dumps."""
        ...

    def stats(self) -> IndexStats: ...


class ContentHolding(NamedTuple):
    """One KV of a text: where it lies, after which prefix it was computed, and at which block position."""

    place: Place
    source: PrefixHash
    position_blocks: int
    parent: PrefixHash
    """The name before `source`: what tells a run of one chain from blocks of several."""


class ContentIndex(Protocol):
    """Which places hold a block's text at ANY position: one ContentHash, many KVs. Kept where shifted reuse is on."""

    def add(self, content: ContentHash, holding: ContentHolding, fingerprint: int | None = None) -> None:
        """`fingerprint` of the text (`cachecore.fingerprints`): it can then be found at any offset."""
        ...

    def remove(self, place: Place, source: PrefixHash) -> None:
        """The block named `source` has left the place."""
        ...

    def find(
        self, content: ContentHash, limit: int = 8
    ) -> Sequence[ContentHolding] | Awaitable[Sequence[ContentHolding]]:
        """Up to `limit` holdings of the text, most recently added first."""
        ...

    def resolve(self, fingerprint: int) -> ContentHash | None:
        """A held text with this fingerprint: a guess, to be confirmed by the tokens that were asked about."""
        ...

    def forget(self, holder: Holder) -> None: ...

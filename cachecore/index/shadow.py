"""The shadow of a holder: what its writer believes the server has of it, or will have after the next step.

Batches are applied here at once; a step is then the difference, drained (`Drained`). Handles are kept so that whoever
follows the event stream next can go on: once a block has come without a handle, or under two, nobody can, and the
holder says so (`persistable`) until it is cleared. Matches are exact all the same.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES
from cachecore.holders import Tier
from cachecore.index.contract import Cleared, IndexEvent, Origin, Stored
from cachecore.index.pieces import Label, PieceEdit, Pieces
from cachecore.index.runs import well_formed
from cachecore.index.schema import (
    HANDLE_BYTES,
    NAMINGS_MAX,
    NO_NAMING,
    PIECE_BLOCKS_MAX,
    PLACE_CODES,
    HolderSnapshot,
    encode_naming,
    layer_of,
    place_code,
)

_BARE = Label(NO_NAMING, 0)


@dataclass(slots=True)
class ShadowCounts:
    """Over all shadows of a process; only ever grow."""

    unknown_removals: int = 0
    malformed_events: int = 0
    evicted_blocks: int = 0


class Drained(NamedTuple):
    """What the next step changes."""

    emptied: Sequence[bytes]
    """Codes of places that lose everything before anything else happens."""
    edits: Mapping[bytes, list[PieceEdit]]
    copies: Mapping[bytes, list[tuple[bytes, int]]]
    namings: Mapping[int, bytes]
    """Descriptions by number; empty where the number is free again."""


@dataclass(slots=True)
class _Naming:
    number: int
    pieces: int = 0


@dataclass(slots=True)
class Namings:
    """Numbers for origins, as long as there are pieces under them."""

    _by_origin: dict[Origin, _Naming] = field(default_factory=dict)
    _origins: dict[int, Origin] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _changed: set[int] = field(default_factory=set)
    _doubtful: set[int] = field(default_factory=set)
    """Numbers that there may be no pieces under."""

    def number(self, origin: Origin) -> int:
        """NO_NAMING when there are too many."""
        naming = self._by_origin.get(origin)
        if naming is None:
            if not self._free and len(self._origins) == NAMINGS_MAX:
                return NO_NAMING
            naming = _Naming(self._free.pop() if self._free else len(self._origins) + 1)
            self._by_origin[origin] = naming
            self._origins[naming.number] = origin
            self._changed.add(naming.number)
            self._doubtful.add(naming.number)
        return naming.number

    def load(self, origins: Mapping[int, Origin]) -> None:
        if len(set(origins.values())) < len(origins):
            raise ValueError("one origin under two numbers")
        self._origins = dict(origins)
        self._by_origin = {origin: _Naming(number) for number, origin in origins.items()}
        self._doubtful = set(origins)
        self._free = [number for number in range(1, max(origins, default=0)) if number not in origins]

    def count(self, numbers: Iterable[int], pieces: int) -> None:
        """So many pieces more under each of these numbers."""
        for number in numbers:
            if number != NO_NAMING:
                self._by_origin[self._origins[number]].pieces += pieces
                self._doubtful.add(number)

    def settle(self) -> None:
        """Give up what there are no pieces under."""
        for number in self._doubtful:
            origin = self._origins[number]
            if not self._by_origin[origin].pieces:
                del self._by_origin[origin], self._origins[number]
                self._free.append(number)
                self._changed.add(number)
        self._doubtful.clear()

    def drain(self) -> dict[int, bytes]:
        changed, self._changed = self._changed, set()
        return {n: encode_naming(self._origins[n]) if n in self._origins else b"" for n in changed}

    def restate(self) -> None:
        self._changed = set(self._origins)

    def undo_drain(self, drained: Mapping[int, bytes]) -> None:
        self._changed |= drained.keys()


class Shadow:
    """`blocks_max` bounds the holdings kept; what was stored to least recently goes first. 0 means no bound."""

    def __init__(self, blocks_max: int, counts: ShadowCounts) -> None:
        self._blocks_max = blocks_max
        self._counts = counts
        self._places: dict[bytes, Pieces] = {}
        self._namings = Namings()
        self._emptied: set[bytes] = set()
        self._stores = 0
        self.sequence: int | None = None
        self.persistable = True

    @classmethod
    def load(cls, snapshot: HolderSnapshot, blocks_max: int, counts: ShadowCounts) -> "Shadow":
        """Raises ValueError when the snapshot contradicts itself."""
        shadow = cls(blocks_max, counts)
        shadow.sequence, shadow.persistable = snapshot.sequence, snapshot.persistable
        shadow._namings.load(snapshot.namings)
        for record in snapshot.pieces:
            if record.naming != NO_NAMING and record.naming not in snapshot.namings:
                raise ValueError(f"a piece of an unknown naming {record.naming}")
            origin = snapshot.namings.get(record.naming)
            shadow._place(record.code).load(record, origin.root if origin is not None else b"")
        for code, copies in snapshot.copies.items():
            shadow._place(code).load_copies(copies)
        shadow._settle_namings()
        return shadow

    @property
    def codes(self) -> bytes:
        """The places in use."""
        return b"".join(sorted(code for code, pieces in self._places.items() if pieces.blocks))

    @property
    def rooted(self) -> bytes:
        """The places that hold of every chain a beginning or nothing, as far as is known."""
        return b"".join(sorted(code for code, pieces in self._places.items() if pieces.blocks and not pieces.orphans))

    @property
    def blocks(self) -> int:
        return sum(pieces.blocks for pieces in self._places.values())

    @property
    def dirty(self) -> bool:
        return bool(self._emptied) or any(pieces.dirty for pieces in self._places.values())

    def places(self, tier: Tier | None = None) -> list[Pieces]:
        return [pieces for code, pieces in self._places.items() if tier in (None, layer_of(code)[0])]

    def sizes(self) -> list[tuple[bytes, int, int]]:
        """Of each place in use: its code, and how many fields its two hashes have."""
        return [(code, pieces.fields, len(pieces.copies)) for code, pieces in self._places.items() if pieces.blocks]

    @property
    def fields(self) -> int:
        """Of all the server's hashes of places."""
        return sum(pieces.fields + len(pieces.copies) for pieces in self._places.values())

    def apply(self, sequence: int, events: Sequence[IndexEvent]) -> list[IndexEvent]:
        """The events that mean anything; the others are counted."""
        self.sequence = sequence
        told = [event for event in events if self._apply(event)]
        if self._blocks_max:
            self._evict()
        self._settle_namings()
        return told

    def _apply(self, event: IndexEvent) -> bool:
        if isinstance(event, Cleared):
            self._clear(event.tier)
            return True
        if not (well_formed(event.parent + event.chain) if isinstance(event, Stored) else _whole(event.chain)):
            self._counts.malformed_events += 1
            return False
        if not event.chain:
            return False
        pieces = self._place(place_code(event.tier, event.fidelity))
        if isinstance(event, Stored):
            self._store(pieces, event)
        else:
            self._counts.unknown_removals += pieces.remove(event.chain)
        return True

    def _store(self, pieces: Pieces, event: Stored) -> None:
        self._stores += 1
        handles, label, unit = self._handles(event)
        if not pieces.store(event.parent, event.chain, handles, label, unit, self._stores) or not handles:
            self.persistable = False

    def _handles(self, event: Stored) -> tuple[bytes, Label, int]:
        """The event's handles, packed, one for each block; how its pieces are labelled; blocks a handle."""
        blocks, count = len(event.chain) // HASH_BYTES, len(event.handles)
        unit = blocks // count if count else 0
        if event.origin is None or unit * count != blocks or not 0 < unit <= PIECE_BLOCKS_MAX:
            return b"", _BARE, 1
        handles = event.handles if unit == 1 else [handle for handle in event.handles for _ in range(unit)]
        try:
            packed = struct.pack(f"<{blocks}Q", *handles)
        except struct.error:
            return b"", _BARE, 1
        naming = self._namings.number(event.origin)
        return (
            (packed, Label(naming, HANDLE_BYTES, event.origin.root), unit) if naming != NO_NAMING else (b"", _BARE, 1)
        )

    def _clear(self, tier: Tier | None) -> None:
        for code, pieces in self._places.items():
            if tier in (None, layer_of(code)[0]):
                pieces.clear()
                self._emptied.add(code)
        if not self.blocks:
            self.persistable = True

    def _evict(self) -> None:
        while (excess := self.blocks - self._blocks_max) > 0:
            oldest = min((pieces for pieces in self._places.values() if pieces), key=lambda pieces: pieces.oldest)
            self._counts.evicted_blocks += oldest.drop_oldest(excess)

    def _settle_namings(self) -> None:
        for pieces in self._places.values():
            if pieces.opened or pieces.closed:
                self._namings.count(pieces.opened, 1)
                self._namings.count(pieces.closed, -1)
                pieces.opened, pieces.closed = [], []
        self._namings.settle()

    def _place(self, code: bytes) -> Pieces:
        pieces = self._places.get(code)
        if pieces is None:
            pieces = self._places[code] = Pieces()
        return pieces

    # What the server must be told

    def drain(self, blocks_max: int | None = None) -> Drained:
        """What has changed since the last time; with `blocks_max`, no more than about so many blocks of it."""
        edits: dict[bytes, list[PieceEdit]] = {}
        for code, pieces in self._places.items():
            edits[code] = pieces.drain(blocks_max)
            if blocks_max is not None:
                blocks_max -= sum(len(edit.names) // HASH_BYTES for edit in edits[code])
        return self._drained(edits)

    def drain_losses(self) -> Drained:
        """As `drain`, but only what the server must give up, and what takes it no memory to speak of."""
        return self._drained({code: pieces.drain_losses() for code, pieces in self._places.items()})

    def _drained(self, edits: dict[bytes, list[PieceEdit]]) -> Drained:
        emptied, self._emptied = self._emptied, set()
        copies = {code: pieces.drain_copies() for code, pieces in self._places.items()}
        return Drained(sorted(emptied), edits, copies, self._namings.drain())

    def undo_drain(self, drained: Drained) -> None:
        """The server has taken nothing of what was drained last."""
        self._emptied.update(drained.emptied)
        self._namings.undo_drain(drained.namings)
        for pieces in self._places.values():
            pieces.undo_drain()

    def restate(self) -> None:
        """The next steps must write everything, over whatever there is."""
        self._emptied = set(PLACE_CODES)
        self._namings.restate()
        for pieces in self._places.values():
            pieces.restate()


def _whole(chain: bytes) -> bool:
    return len(chain) % HASH_BYTES == 0

"""The shadow of one place of a holder: what the server has of it, and what the next step must change there.

A place is kept as pieces, consecutive blocks of one chain that are all held; a removal in the middle of a piece makes
two of it. The server keeps each piece under its first name, so whatever happens between two steps comes down to this:
how many blocks of it the server has, how many of these are still the same, and what follows them now (`PieceEdit`).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash, split_chain
from cachecore.index.locator import Locator
from cachecore.index.runs import Segment, leading, require, span, unknown
from cachecore.index.schema import CHUNK_BLOCKS, HANDLE_BYTES, PIECE_BLOCKS_MAX, PIECE_HEADER, PieceRecord

PIECE_BLOCKS = PIECE_BLOCKS_MAX
"""Blocks in a piece that is full."""


class Label(NamedTuple):
    """What all blocks of a piece have in common besides their place."""

    naming: int
    handle_bytes: int
    root: bytes = b""
    """Of the naming, where it is known: the parent of first blocks."""


class Piece(Segment):
    __slots__ = ("handles", "label", "parent", "used")

    def __init__(self, number: int, parent: bytes, label: Label) -> None:
        super().__init__(number)
        self.parent = parent
        self.label = label
        self.handles = bytearray()
        self.used = 0

    def __repr__(self) -> str:
        return f"Piece({self.number}, {self.blocks} blocks from {self.first.hex()[:8]}, {self.label})"

    @property
    def header(self) -> bytes:
        return PIECE_HEADER.pack(self.parent, self.label.naming, self.label.handle_bytes)

    def add(self, names: bytes, handles: bytes) -> None:
        self.names += names
        self.handles += handles

    def handles_at(self, start: int, stop: int) -> bytes:
        width = self.label.handle_bytes
        return bytes(self.handles[start * width : stop * width])


class PieceEdit(NamedTuple):
    """What becomes of the server's piece under the name `first`."""

    first: bytes
    stored_blocks: int
    """What the server has; 0 for no piece."""
    kept_blocks: int
    header: bytes
    """Of a piece of which nothing is kept."""
    names: bytes
    handles: bytes
    """After those kept."""


class Pieces:
    """See the module's opening. Handles come packed, one for each block, or not at all."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[bytes, Piece] = OrderedDict()
        self._locator: Locator[Piece] = Locator()
        self._free_numbers: list[int] = []
        self._copies: dict[bytes, int] = {}
        self._changes: dict[bytes, tuple[int, int]] = {}
        self._sent: dict[bytes, tuple[int, int]] = {}
        self._changed_copies: set[bytes] = set()
        self._sent_copies: set[bytes] = set()
        self._followers: dict[bytes, int] = {}
        """How many pieces begin after a block, where that block is no root."""
        self.orphans = 0
        """Pieces that begin neither after a root nor after a block that is held here."""
        self.fields = 0
        """Of the server's hash."""
        self.opened: list[int] = []
        """Namings of the pieces made since the caller last looked, once for each."""
        self.closed: list[int] = []
        """And of those dissolved."""

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def blocks(self) -> int:
        return self._locator.count

    @property
    def copies(self) -> dict[bytes, int]:
        """Copies of each block beyond the first."""
        return self._copies

    @property
    def dirty(self) -> bool:
        return bool(self._changes or self._changed_copies)

    @property
    def oldest(self) -> int:
        """When the piece that was stored to least recently was stored to. There must be one."""
        return next(iter(self._pieces.values())).used

    def names(self) -> Iterator[PrefixHash]:
        for piece in self._pieces.values():
            yield from split_chain(Chain(bytes(piece.names)))

    def packed_names(self) -> bytes:
        return b"".join(piece.names for piece in self._pieces.values())

    # Storing

    def store(self, parent: bytes, chain: bytes, handles: bytes, label: Label, unit: int, now: int) -> bool:
        """One more copy of each block. `unit` blocks belong to one handle and stay together. False when a block that
        was held before has come under another handle."""
        agreed = True
        position, total = 0, len(chain) // HASH_BYTES
        before = self._locator.find(parent)
        piece, start = (before[0], before[1] + 1) if before else (None, 0)
        while position < total:
            name = chain[position * HASH_BYTES : (position + 1) * HASH_BYTES]
            found = None if piece is None or not piece.names.startswith(name, start * HASH_BYTES) else (piece, start)
            found = found or self._locator.find(name)
            if found is None:
                count = unknown(chain[position * HASH_BYTES :], self._pieces)
                after = chain[(position - 1) * HASH_BYTES : position * HASH_BYTES] if position else parent
                piece, start, count = self._extend(piece, start, count, after, label, unit)
                self._append(piece, chain, handles, position, count)
            else:
                piece, start = self._join(piece, start, found[0]) if found[1] == 0 and piece else found
                count = piece.shared(chain, position, start)
                agreed &= self._count_up(piece, start, chain, handles, position, count)
            self._touch(piece, now)
            position, start = position + count, start + count
        return agreed

    def load(self, record: PieceRecord, root: bytes) -> None:
        """Take over what the server has. Raises ValueError when one block is in two pieces."""
        names = record.names
        if len(set(split_chain(names))) < len(names) // HASH_BYTES or any(map(self._locator.find, split_chain(names))):
            raise ValueError("one block in two places of a snapshot")
        piece = self._open(record.parent, Label(record.naming, record.handle_bytes, root))
        self._grow(piece, names, record.packed_handles)
        self._pieces[piece.first] = piece

    def load_copies(self, copies: Mapping[PrefixHash, int]) -> None:
        self._copies.update({name: count for name, count in copies.items() if self._locator.find(name)})

    def _extend(
        self, piece: Piece | None, start: int, count: int, parent: bytes, label: Label, unit: int
    ) -> tuple[Piece, int, int]:
        """The piece that takes the next blocks of a chain, where in it, and how many of `count` it has room for."""
        full = max(PIECE_BLOCKS // unit, 1) * unit
        if piece is not None and start == piece.blocks and piece.label == label and start < full:
            return piece, start, min(count, full - start)
        return self._open(parent, label), 0, min(count, full)

    def _append(self, piece: Piece, chain: bytes, handles: bytes, position: int, count: int) -> None:
        names, width, start = chain[position * HASH_BYTES : (position + count) * HASH_BYTES], 0, piece.blocks
        if handles:
            width = HANDLE_BYTES
        if start:
            self._note(piece, start)
        else:
            self._changes.setdefault(names[:HASH_BYTES], (0, 0))
            self._pieces[names[:HASH_BYTES]] = piece
        self._grow(piece, names, handles[position * width : (position + count) * width])

    def _grow(self, piece: Piece, names: bytes, handles: bytes) -> None:
        start = piece.blocks
        self._locator.add(names, piece, start)
        piece.add(names, handles)
        self.orphans -= self._following(names)
        self.fields += _fields(piece.blocks) - _fields(start)

    def _join(self, piece: Piece, start: int, after: Piece) -> tuple[Piece, int]:
        """Where a chain goes on from one piece to the beginning of another: make them one if the first is the longer
        (so that a chain stored from its end backwards costs n log n) and both fit. Where `after` begins now."""
        fits = after.blocks <= start and start + after.blocks <= PIECE_BLOCKS
        if piece is after or start != piece.blocks or not fits or piece.label != after.label:
            return after, 0
        names, handles = bytes(after.names), bytes(after.handles)
        self._close(after)
        self._note(piece, start)
        self._grow(piece, names, handles)
        return piece, start

    def _count_up(self, piece: Piece, start: int, chain: bytes, handles: bytes, position: int, count: int) -> bool:
        for name in split_chain(Chain(chain[position * HASH_BYTES : (position + count) * HASH_BYTES])):
            self._copies[name] = self._copies.get(name, 0) + 1
            self._changed_copies.add(name)
        width = HANDLE_BYTES if handles else 0
        return piece.handles_at(start, start + count) == handles[position * width : (position + count) * width]

    def _touch(self, piece: Piece, now: int) -> None:
        piece.used = now
        self._pieces.move_to_end(piece.first)

    # Removing

    def remove(self, chain: bytes) -> int:
        """One copy fewer of each block; how many were not held."""
        unknown = 0
        gone: dict[Piece, int] = {}
        rest = memoryview(self._ascending(chain))
        while rest:
            found = self._locator.find(bytes(rest[:HASH_BYTES]))
            blocks = 1
            if found is None:
                unknown += 1
            else:
                piece, start = found
                blocks = piece.equal(rest, start)
                mask = span(start, start + blocks)
                if self._copies:
                    mask = self._count_down(bytes(rest[: blocks * HASH_BYTES]), start)
                unknown += (mask & gone.get(piece, 0)).bit_count()
                gone[piece] = gone.get(piece, 0) | mask
            rest = rest[blocks * HASH_BYTES :]
        for piece, mask in gone.items():
            if mask:
                self._cut(piece, mask)
        self._locator.shrink()
        return unknown

    def drop_oldest(self, blocks: int) -> int:
        """Forget up to `blocks` blocks, but whole handles, from the end of the piece that was stored to least recently;
        how many it were."""
        piece = next(iter(self._pieces.values()))
        kept = max(0, piece.blocks - blocks)
        while kept > 0 and piece.handles_at(kept - 1, kept) == piece.handles_at(kept, kept + 1) != b"":
            kept -= 1
        names = Chain(bytes(piece.names[kept * HASH_BYTES :]))
        self._truncate(piece, kept)
        self._locator.shrink()
        for name in split_chain(names):
            if self._copies.pop(name, 0):
                self._changed_copies.add(name)
        return len(names) // HASH_BYTES

    def clear(self) -> None:
        """Forget everything, also what was to be changed: the caller empties the server's keys."""
        self.closed += [piece.label.naming for piece in self._pieces.values()]
        self._pieces.clear()
        self._locator = Locator()
        self._free_numbers.clear()
        self._followers.clear()
        self.orphans = self.fields = 0
        self._copies.clear()
        self.forget_changes()

    def _ascending(self, chain: bytes) -> bytes:
        """Engines free a sequence from its end: then the second block named stands before the first."""
        if len(chain) > HASH_BYTES:
            found = self._locator.find(chain[HASH_BYTES : 2 * HASH_BYTES])
            if found is not None and found[0].names.startswith(chain[:HASH_BYTES], (found[1] + 1) * HASH_BYTES):
                return np.frombuffer(chain, dtype=np.uint64).reshape(-1, 2)[::-1].tobytes()
        return chain

    def _count_down(self, names: bytes, start: int) -> int:
        """Take one copy from each block that has further ones; a mask of the others' positions."""
        mask = 0
        for position, name in enumerate(split_chain(Chain(names)), start):
            copies = self._copies.get(name, 0)
            if not copies:
                mask |= 1 << position
                continue
            self._changed_copies.add(name)
            if copies == 1:
                del self._copies[name]
            else:
                self._copies[name] = copies - 1
        return mask

    def _cut(self, piece: Piece, gone: int) -> None:
        """Keep the piece up to the first block gone; what is held after that becomes pieces of its own."""
        names, handles, label = bytes(piece.names), bytes(piece.handles), piece.label
        width, used = label.handle_bytes, piece.used
        alive = span(0, piece.blocks) & ~gone
        start = leading(alive)
        self._truncate(piece, start)
        while alive >> start:
            start += (alive >> start & -(alive >> start)).bit_length() - 1
            stop = start + leading(alive >> start)
            rest = self._open(names[(start - 1) * HASH_BYTES : start * HASH_BYTES], label)
            rest.used = used
            self._append(rest, names[: stop * HASH_BYTES], handles[: stop * width], start, stop - start)
            start = stop

    def _truncate(self, piece: Piece, blocks: int) -> None:
        if not blocks:
            self._close(piece)
            return
        self._note(piece, blocks)
        self.fields += _fields(blocks) - _fields(piece.blocks)
        names = bytes(piece.names[blocks * HASH_BYTES :])
        self._locator.discard(names, piece, blocks)
        self.orphans += self._following(names)
        del piece.names[blocks * HASH_BYTES :]
        del piece.handles[blocks * piece.label.handle_bytes :]

    # Pieces

    def _open(self, parent: bytes, label: Label) -> Piece:
        pieces = self._locator.runs
        if self._free_numbers:
            piece = Piece(self._free_numbers.pop(), parent, label)
            pieces[piece.number] = piece
        else:
            piece = Piece(len(pieces), parent, label)
            pieces.append(piece)
        self.opened.append(label.naming)
        if parent != label.root:
            self._followers[parent] = self._followers.get(parent, 0) + 1
            self.orphans += self._locator.find(parent) is None
        return piece

    def _close(self, piece: Piece) -> None:
        self._note(piece, 0)
        names = bytes(piece.names)
        del self._pieces[piece.first]
        self._locator.discard(names, piece, 0)
        self.orphans += self._following(names)
        self._locator.runs[piece.number] = None
        self.fields -= _fields(piece.blocks)
        self._free_numbers.append(piece.number)
        self.closed.append(piece.label.naming)
        if piece.parent != piece.label.root:
            self.orphans -= self._locator.find(piece.parent) is None
            self._followers[piece.parent] -= 1
            if not self._followers[piece.parent]:
                del self._followers[piece.parent]

    def _following(self, names: bytes) -> int:
        """How many pieces begin after one of these blocks."""
        followers = self._followers
        if not followers or unknown(names, followers) * HASH_BYTES == len(names):
            return 0
        return sum(followers.get(name, 0) for name in split_chain(Chain(names)))

    def _note(self, piece: Piece, kept: int) -> None:
        """Only the first `kept` blocks of a piece are about to stay as they are."""
        first = piece.first
        stored, before = self._changes.get(first) or (piece.blocks, piece.blocks)
        self._changes[first] = stored, min(before, kept)

    # What the server must be told

    def drain(self, blocks_max: int | None = None) -> list[PieceEdit]:
        """What has changed since the last time; with `blocks_max`, no more than about so many blocks of it."""
        edits: list[PieceEdit] = []
        blocks = 0
        self._sent = {}
        for first in list(self._changes):
            if blocks_max is not None and blocks >= blocks_max:
                break
            stored, kept = self._sent[first] = self._changes.pop(first)
            piece = self._pieces.get(first)
            if piece is not None and (stored, kept) != (piece.blocks, piece.blocks):
                edits.append(_edit(piece, stored, kept))
                blocks += piece.blocks - kept
            elif piece is None and stored:
                edits.append(PieceEdit(first, stored, 0, b"", b"", b""))
        return edits

    def drain_losses(self) -> list[PieceEdit]:
        """As `drain`, but only what the server must give up: what it must add stays to be drained."""
        edits: list[PieceEdit] = []
        self._sent = {}
        for first, (stored, kept) in list(self._changes.items()):
            if kept < stored:
                edits.append(PieceEdit(first, stored, kept, b"", b"", b""))
                self._sent[first] = self._changes.pop(first)
                if first in self._pieces:
                    self._changes[first] = kept, kept
            elif first not in self._pieces:
                del self._changes[first]
        return edits

    def drain_copies(self) -> list[tuple[bytes, int]]:
        self._sent_copies, self._changed_copies = self._changed_copies, set()
        return [(name, self._copies.get(name, 0)) for name in self._sent_copies]

    def undo_drain(self) -> None:
        """The server has taken nothing of what was drained last."""
        for first, (stored, kept) in self._sent.items():
            since = self._changes.get(first)
            self._changes[first] = stored, kept if since is None else min(kept, since[1])
        self._changed_copies |= self._sent_copies
        self._sent, self._sent_copies = {}, set()

    def restate(self) -> None:
        """The server has nothing of this place, or is about to."""
        self.forget_changes()
        self._changes = dict.fromkeys(self._pieces, (0, 0))
        self._changed_copies = set(self._copies)

    def forget_changes(self) -> None:
        self._changes, self._sent = {}, {}
        self._changed_copies, self._sent_copies = set(), set()

    def check_invariants(self) -> None:
        """Raise AssertionError where the structures disagree. Walks everything: for tests."""
        blocks = 0
        for first, piece in self._pieces.items():
            require(piece.first == first, "a piece stands under another name than its first")
            require(0 < piece.blocks <= PIECE_BLOCKS_MAX, "a piece is empty or too long")
            require(len(piece.handles) == piece.blocks * piece.label.handle_bytes, "handles are missing")
            blocks += piece.blocks
            for position, name in enumerate(split_chain(Chain(bytes(piece.names)))):
                require(self._locator.find(name) == (piece, position), "the locator does not find a block")
        require(blocks == self._locator.count == self._locator.used_cells(), "blocks are counted wrongly")
        pieces = self._pieces.values()
        require(self.fields == sum(_fields(piece.blocks) for piece in pieces), "fields are counted wrongly")
        followers = Counter(piece.parent for piece in pieces if piece.parent != piece.label.root)
        require(self._followers == followers, "followers are counted wrongly")
        orphans = sum(count for parent, count in followers.items() if self._locator.find(parent) is None)
        require(self.orphans == orphans, "orphans are counted wrongly")
        held = set(self.names())
        require(self._copies.keys() <= held and all(self._copies.values()), "copies of what is not held")


def _fields(blocks: int) -> int:
    """A head, and the chunks; no piece has none."""
    return 1 - (-blocks // CHUNK_BLOCKS) if blocks else 0


def _edit(piece: Piece, stored: int, kept: int) -> PieceEdit:
    header = b"" if kept else piece.header
    names = bytes(piece.names[kept * HASH_BYTES :])
    return PieceEdit(piece.first, stored, kept, header, names, piece.handles_at(kept, piece.blocks))

"""What lies where in Redis or Valkey, byte for byte, and nothing of how it gets there.

Every holder has one writer, so the server needs no set logic: what it keeps of a holder is a copy of its writer's
pieces. All keys of a holder carry one hash tag, its shard, so each atomic step touches one slot of a cluster. With P
the prefix and s the shard:

    P:{s}:holders               HASH    holder id -> record: "fence revision sequence places persistable fields rooted"
    P:{s}:runs:<holder>:<c>     HASH    pieces, as below; c is a place code
    P:{s}:copies:<holder>:<c>   HASH    name -> copies beyond the first, ASCII; only where there are some
    P:{s}:namings:<holder>      HASH    naming number, ASCII -> msgpack [salt, adapter, group, root]
    P:{s}:lease:<holder>        STRING  the gateway that follows the holder's events; expires
    P:{s}:epochs                HASH    lives of workers that do not count them themselves
    P:{s}:stream                STREAM  the last changes of the shard's holders: h f r q k e
    P:{fleet}:<name>            what gateways tell each other

A holder id is `w/<name>/<epoch>/<rank>` or `p/<name>/<generation>`, the name percent-encoded. A place code is one
letter: tier and fidelity. A piece is consecutive blocks of one chain, all held at that place; it lies under the name of
its first block, cut into chunks of CHUNK_BLOCKS:

    first name         blocks (u16 LE) | parent (16) | naming number (u16 LE) | bytes of a handle (u8: 0 or 8)
                       | the last name of each chunk (16 each)
    first name, u8 n   names of chunk n (16 each) | their handles (u64 LE each)

Since names are chained, a match needs the first of these and, where it ends within the piece, one of the others.

Whatever is decoded here may come from a server that others can write to: everything is bounded and checked, and what
does not parse is a ValueError.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.holders import Epoch, Holder, Pool, Tier, Worker, WorkerName
from cachecore.index.contract import Cleared, IndexEvent, Origin, Removed, Stored
from cachecore.scope import Fidelity

SHARDS = 16
PIECE_BLOCKS_MAX = 512
"""A piece that is longer does not decode. Writers keep to a bound of their own below this one."""
CHUNK_BLOCKS = 42
"""With handles these are 1008 bytes, which fill an allocation; `apply.lua` and `match.lua` know the number as well."""
HANDLE_BYTES = 8
NO_NAMING = 0
NAMINGS_MAX = 0xFFFF
RESTATING = -1
"""The revision of a record whose holder is being restated: what is there is true, but not all of it."""
EVENTS_BYTES_MAX = 64 << 20
HOLDER_ID_BYTES_MAX = 1024
HOLDERS_CACHED = 2048
"""More than most fleets have. Each takes some 400 bytes, and the dead fill what is left: one for each life."""

PIECE_HEADER = struct.Struct("<16sHB")
_HEAD = struct.Struct("<H16sHB")
_EVENT_HEADER = struct.Struct("<cBI")
_PREFIX_PATTERN = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_HOLDER_PATTERN = re.compile(rb"w/([A-Za-z0-9._~%-]+)/(-?\d{1,20})/(\d{1,9})|p/([A-Za-z0-9._~%-]+)/(-?\d{1,20})")
_RECORD_PATTERN = re.compile(
    rb"(\d{1,16}) (-1|\d{1,16}) (-1|\d{1,20}) (-|[a-l]{1,12}) ([01]) (-1|\d{1,12}) (-|[a-l]{1,12})"
)
_CODE_FIRST = ord("a")
_CODES = [bytes([_CODE_FIRST + number]) for number in range(len(Tier) * len(Fidelity))]
_LAYERS = {
    code: (Tier(number // len(Fidelity)), Fidelity(number % len(Fidelity))) for number, code in enumerate(_CODES)
}
PLACE_CODES: tuple[bytes, ...] = tuple(_CODES)
_EVERY_TIER = 0xFF


class Version(NamedTuple):
    """Which state of a holder: ordered."""

    fence: int
    revision: int


class Record(NamedTuple):
    """What the server says of a holder as a whole."""

    version: Version
    sequence: int | None
    """Of the engine's last batch that is in; None before the first."""
    places: bytes
    """The codes of the places in use."""
    persistable: bool
    """Whether the handles of all blocks are known: whoever follows the event stream next can go on from here."""
    fields: int | None = None
    """Of all its runs and copies: the server may have evicted a key, and nothing else would say so to a reader. None
    where that is not known."""
    rooted: bytes = b""
    """The codes of those places that are known to hold no block without all before it: of every chain they have one
    stretch, from its beginning, or nothing."""

    @property
    def whole(self) -> bool:
        """Whether the server has everything that the holder's writer knew. Less than that while it is being restated,
        or while the server has no memory for more."""
        return self.fields is not None and self.version.revision != RESTATING

    def encode(self) -> bytes:
        sequence = -1 if self.sequence is None else self.sequence
        places, rooted = self.places or b"-", self.rooted or b"-"
        fields = -1 if self.fields is None else self.fields
        fence, revision = self.version
        return b"%d %d %d %s %d %d %s" % (fence, revision, sequence, places, self.persistable, fields, rooted)

    @classmethod
    def decode(cls, text: bytes) -> "Record":
        parts = _RECORD_PATTERN.fullmatch(text)
        if parts is None:
            raise ValueError(f"not a holder's record: {text[:80]!r}")
        fence, revision, sequence, places, persistable, fields, rooted = parts.groups()
        return cls(
            Version(int(fence), int(revision)),
            None if sequence == b"-1" else int(sequence),
            b"" if places == b"-" else places,
            persistable == b"1",
            None if fields == b"-1" else int(fields),
            b"" if rooted == b"-" else rooted,
        )


class Kind(StrEnum):
    """What an entry of the stream says."""

    APPLY = "a"
    NEW = "n"
    """As APPLY, to a holder that held nothing before."""
    FORGET = "f"
    RESTATED = "s"
    """The holder has been written anew, or its snapshots miss nothing any more; no events."""


class Entry(NamedTuple):
    holder: Holder
    version: Version
    sequence: int | None
    kind: Kind
    events: bytes
    """For `decode_events`."""

    @classmethod
    def decode(cls, fields: Mapping[bytes, bytes]) -> "Entry":
        try:
            sequence = int(fields[b"q"])
            return cls(
                parse_holder(fields[b"h"]),
                Version(int(fields[b"f"]), int(fields[b"r"])),
                None if sequence < 0 else sequence,
                Kind(fields[b"k"].decode()),
                fields[b"e"],
            )
        except KeyError as error:
            raise ValueError(f"a stream entry without field {error}") from error


class PieceRecord(NamedTuple):
    """Consecutive blocks of one chain at one place of a holder."""

    code: bytes
    parent: PrefixHash
    naming: int
    """A key of the snapshot's `namings`, or NO_NAMING."""
    handle_bytes: int
    names: Chain
    packed_handles: bytes
    """`handle_bytes` for each name; consecutive names of one engine block have equal ones."""

    @property
    def tier(self) -> Tier:
        return _LAYERS[self.code][0]

    @property
    def fidelity(self) -> Fidelity:
        return _LAYERS[self.code][1]

    @property
    def handles(self) -> tuple[int, ...]:
        """One for each name, or none."""
        return struct.unpack(f"<{len(self.packed_handles) // HANDLE_BYTES}Q", self.packed_handles)


class HolderSnapshot(NamedTuple):
    """Everything the server has of a holder at one moment."""

    version: Version
    sequence: int | None
    persistable: bool
    whole: bool
    """As the record's."""
    pieces: list[PieceRecord]
    copies: dict[bytes, dict[PrefixHash, int]]
    """By place code: copies of a block beyond the first."""
    namings: dict[int, Origin]


@dataclass(frozen=True, slots=True)
class Schema:
    """The names of keys. Deployments that share a server differ by prefix."""

    prefix: str = "ropeway"

    def __post_init__(self) -> None:
        if not _PREFIX_PATTERN.fullmatch(self.prefix):
            raise ValueError(f"key prefix {self.prefix!r} must match {_PREFIX_PATTERN.pattern}")

    def holders(self, shard: int) -> bytes:
        return self._in_shard(shard, b"holders")

    def stream(self, shard: int) -> bytes:
        return self._in_shard(shard, b"stream")

    def epochs(self, shard: int) -> bytes:
        return self._in_shard(shard, b"epochs")

    def runs(self, holder: Holder, code: bytes) -> bytes:
        return self._of_holder(holder, b"runs") + b":" + code

    def copies(self, holder: Holder, code: bytes) -> bytes:
        return self._of_holder(holder, b"copies") + b":" + code

    def namings(self, holder: Holder) -> bytes:
        return self._of_holder(holder, b"namings")

    def contents(self, holder: Holder) -> list[bytes]:
        """Every key that may hold something of what the holder has."""
        places = [key for code in PLACE_CODES for key in (self.runs(holder, code), self.copies(holder, code))]
        return [self.namings(holder), *places]

    def lease(self, holder: Holder) -> bytes:
        return self._of_holder(holder, b"lease")

    def fleet(self, name: str) -> bytes:
        return f"{self.prefix}:{{fleet}}:{name}".encode()

    def _in_shard(self, shard: int, kind: bytes) -> bytes:
        return b"%s:{%d}:%s" % (self.prefix.encode(), shard, kind)

    def _of_holder(self, holder: Holder, kind: bytes) -> bytes:
        return self._in_shard(shard_of(holder), kind) + b":" + holder_id(holder)


# ---- holders and places ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=HOLDERS_CACHED)
def holder_id(holder: Holder) -> bytes:
    name = quote(holder.name, safe="").encode()
    if isinstance(holder, Worker):
        return b"w/%s/%d/%d" % (name, holder.epoch, holder.rank)
    return b"p/%s/%d" % (name, holder.generation)


@lru_cache(maxsize=HOLDERS_CACHED)
def parse_holder(text: bytes) -> Holder:
    """The inverse of `holder_id`. Raises ValueError for anything that it does not return."""
    parts = _HOLDER_PATTERN.fullmatch(text) if len(text) <= HOLDER_ID_BYTES_MAX else None
    if parts is None:
        raise ValueError(f"not a holder id: {text[:80]!r}")
    name, epoch, rank, pool, generation = parts.groups()
    holder: Holder
    if pool is not None:
        holder = Pool(unquote(pool.decode(), errors="strict"), int(generation))
    else:
        holder = Worker(WorkerName(unquote(name.decode(), errors="strict")), Epoch(int(epoch)), int(rank))
    if holder_id(holder) != text:
        raise ValueError(f"a holder id that is not spelled as it should be: {text[:80]!r}")
    return holder


def shard_of(holder: Holder) -> int:
    """By name: all ranks and lives of a worker lie together."""
    return _shard_of_name(holder.name)


@lru_cache(maxsize=HOLDERS_CACHED)
def _shard_of_name(name: str) -> int:
    return blake2b(name.encode(), digest_size=8).digest()[0] % SHARDS


def place_code(tier: Tier, fidelity: Fidelity) -> bytes:
    return _CODES[tier * len(Fidelity) + fidelity]


def layer_of(code: bytes) -> tuple[Tier, Fidelity]:
    """The inverse of `place_code`. Raises ValueError for anything that it does not return."""
    layer = _LAYERS.get(code)
    if layer is None:
        raise ValueError(f"not a place code: {code[:8]!r}")
    return layer


# ---- pieces, namings, snapshots --------------------------------------------------------------------------------------


def decode_pieces(code: bytes, runs: Mapping[bytes, bytes]) -> list[PieceRecord]:
    """All pieces of a place, from its hash."""
    return [_decode_piece(code, first, head, runs) for first, head in runs.items() if len(first) == HASH_BYTES]


def _decode_piece(code: bytes, first: bytes, head: bytes, runs: Mapping[bytes, bytes]) -> PieceRecord:
    if len(head) < _HEAD.size:
        raise ValueError(f"a piece's head of {len(head)} bytes")
    blocks, parent, naming, handle_bytes = _HEAD.unpack_from(head)
    if handle_bytes not in (0, HANDLE_BYTES) or not 0 < blocks <= PIECE_BLOCKS_MAX:
        raise ValueError(f"a piece of {blocks} blocks with handles of {handle_bytes} bytes")
    names, handles = b"", b""
    for number, start in enumerate(range(0, blocks, CHUNK_BLOCKS)):
        count = min(CHUNK_BLOCKS, blocks - start)
        chunk = runs.get(first + bytes([number]), b"")
        if len(chunk) != count * (HASH_BYTES + handle_bytes):
            raise ValueError(f"a piece's chunk of {len(chunk)} bytes for {count} blocks")
        names += chunk[: count * HASH_BYTES]
        handles += chunk[count * HASH_BYTES :]
    if names[:HASH_BYTES] != first:
        raise ValueError("a piece under another name than its first")
    return PieceRecord(code, PrefixHash(parent), naming, handle_bytes, Chain(names), handles)


def encode_naming(origin: Origin) -> bytes:
    return msgspec.msgpack.encode(origin)


def decode_naming(value: bytes) -> Origin:
    try:
        return msgspec.msgpack.decode(value, type=Origin)
    except msgspec.MsgspecError as error:
        raise ValueError(f"a naming that does not parse: {error}") from error


Pairs = Sequence[bytes]
"""A hash as the server lists it: field, value, field, value."""


def decode_snapshot(record: bytes, places: Sequence[tuple[bytes, Pairs, Pairs]], namings: Pairs) -> HolderSnapshot:
    """From what `snapshot.lua` answers: the record, (code, runs, copies) of each place, and the namings."""
    said = Record.decode(record)
    there = sum(len(runs) + len(further) for _, runs, further in places) // 2
    if said.fields is not None and said.fields != there:
        raise ValueError(f"the server has lost a part of it: {there} fields of {said.fields}")
    pieces: list[PieceRecord] = []
    copies: dict[bytes, dict[PrefixHash, int]] = {}
    for code, runs, further in places:
        layer_of(code)
        pieces += decode_pieces(code, dict(_pairs(runs)))
        counts = {PrefixHash(name): _number(count, 2**32) for name, count in _pairs(further)}
        if any(len(name) != HASH_BYTES for name in counts):
            raise ValueError("copies of something that is no block")
        if counts:
            copies[code] = counts
    origins = {_number(number, NAMINGS_MAX): decode_naming(value) for number, value in _pairs(namings)}
    return HolderSnapshot(said.version, said.sequence, said.persistable, said.whole, pieces, copies, origins)


def _pairs(listed: Pairs) -> Iterator[tuple[bytes, bytes]]:
    return zip(listed[::2], listed[1::2], strict=True)


def _number(text: bytes, most: int) -> int:
    number = int(text) if text.isdigit() and len(text) <= 20 else -1
    if not 0 < number <= most:
        raise ValueError(f"not a number in 1..{most}: {text[:20]!r}")
    return number


# ---- events ----------------------------------------------------------------------------------------------------------


def encode_events(events: Sequence[IndexEvent]) -> bytes:
    """What a mirror needs of a batch. Handles and origins stay behind.

    Each event is kind, place (or for a clearing tier, 0xFF for all), names (u32 LE), then the names: 's' has its parent
    first, 'r' lists what is removed, 'c' has none.
    """
    parts: list[bytes] = []
    for event in events:
        if isinstance(event, Cleared):
            tier = _EVERY_TIER if event.tier is None else event.tier
            parts.append(_EVENT_HEADER.pack(b"c", tier, 0))
            continue
        code = event.tier * len(Fidelity) + event.fidelity + _CODE_FIRST
        kind, before = (b"s", event.parent) if isinstance(event, Stored) else (b"r", b"")
        parts += (_EVENT_HEADER.pack(kind, code, len(event.chain) // HASH_BYTES), before, event.chain)
    return b"".join(parts)


def decode_events(blob: bytes) -> list[IndexEvent]:
    """The inverse of `encode_events`. Raises ValueError for what is too long or not exactly a sequence of events."""
    if len(blob) > EVENTS_BYTES_MAX:
        raise ValueError(f"{len(blob)} bytes of events")
    events: list[IndexEvent] = []
    at = 0
    while at < len(blob):
        event, at = _decode_event(blob, at)
        events.append(event)
    return events


def _decode_event(blob: bytes, at: int) -> tuple[IndexEvent, int]:
    if len(blob) - at < _EVENT_HEADER.size:
        raise ValueError("events end within a header")
    kind, code, blocks = _EVENT_HEADER.unpack_from(blob, at)
    at += _EVENT_HEADER.size
    if kind == b"c":
        if blocks or code not in (*Tier, _EVERY_TIER):
            raise ValueError("a clearing of something else than a tier")
        return Cleared(None if code == _EVERY_TIER else Tier(code)), at
    tier, fidelity = layer_of(bytes([code]))
    names_at = at + (HASH_BYTES if kind == b"s" else 0)
    end = names_at + blocks * HASH_BYTES
    if kind not in (b"s", b"r") or end > len(blob):
        raise ValueError(f"an event {kind!r} of {blocks} blocks in {len(blob) - at} bytes")
    chain = Chain(blob[names_at:end])
    if kind == b"r":
        return Removed(chain, tier, fidelity), end
    return Stored(PrefixHash(blob[at:names_at]), chain, tier, fidelity), end

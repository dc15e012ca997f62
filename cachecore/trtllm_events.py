"""TensorRT-LLM's KV cache events, which are pulled as JSON, as the events of the other engines.

`LLM.get_kv_cache_events()` (and `/kv_cache_events` of its server) gives each event once, numbered from 0:

    {"event_id": 1, "window_size": 4096, "data": {"type": "stored", "parent_hash": null, "blocks": [
        {"type": "stored_block", "block_hash": 17, "cache_level": 0, "priority": 35,
         "tokens": [{"type": "unique_token", "token_id": 5, "token_extra_id": 0}, ...]}]}}
    {"event_id": 2, "window_size": 4096, "data": {"type": "updated", "block_hash": 17, "priority": null,
        "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1}}}
    {"event_id": 3, "window_size": 4096, "data": {"type": "removed", "block_hashes": [17]}}

What differs, and is straightened here: blocks that are not full are published too; a block moves between memories by an
update that names neither its tokens nor its parent; a removal does not say from where; and a block is announced once,
however often it is used. So the decoder remembers each block for as long as it is held.

It never raises on foreign bytes: an event that cannot be read costs itself alone.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Final, NamedTuple

import msgspec

from cachecore.events import BlockKeys, BlockRemoved, BlockStored, EventBatch, KvEvent

BLOCKS_MAX: Final = 500_000

_HANDLE_MASK: Final = 2**64 - 1
_MEDIA: Final = ("GPU", "CPU")
_FARTHER_MEDIUM: Final = "DISK"
_FORGOTTEN_SHARE: Final = 16


class Pulled(NamedTuple):
    """What one answer says."""

    batch: EventBatch
    first_id: int | None
    """Number of its first event; None when it has none. One that is not `last_id + 1` of the answer before means that
    events were lost, or that the engine has started over: then `forget` what is known."""
    last_id: int | None
    other_rank: int = 0
    """Events of other ranks, which are left out."""


class _Token(msgspec.Struct, gc=False):
    token_id: int
    token_extra_id: int = 0


class _StoredBlock(msgspec.Struct, gc=False):
    block_hash: int
    tokens: list[_Token]
    cache_level: int = 0


class _Stored(msgspec.Struct, tag="stored"):
    blocks: list[_StoredBlock]
    parent_hash: int | None = None


class _Removed(msgspec.Struct, tag="removed"):
    block_hashes: list[int]


class _Levels(msgspec.Struct):
    old_value: int
    new_value: int


class _Updated(msgspec.Struct, tag="updated"):
    block_hash: int
    cache_level: _Levels | None = None


class _Event(msgspec.Struct):
    event_id: int
    data: msgspec.Raw
    window_size: int | None = None
    attention_dp_rank: int | None = None


class _Kind(msgspec.Struct):
    type: str


_decode_list: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_event: Final = msgspec.json.Decoder(_Event).decode
_decode_kind: Final = msgspec.json.Decoder(_Kind).decode
_decode_data: Final = msgspec.json.Decoder(_Stored | _Removed | _Updated).decode
_TYPES: Final = frozenset({"stored", "removed", "updated"})


class _Held(msgspec.Struct, gc=False):
    """A block that the engine holds."""

    parent: int | None
    tokens: "array[int]"
    keys: BlockKeys
    level: int
    window: int | None


class TrtllmEvents:
    """Decodes the answers of one engine rank, one after another.

    `tokens_per_block` is the engine's: blocks with fewer tokens are not full, and say nothing. Of several attention
    windows the widest counts. `blocks_max` bounds what is remembered when removals get lost; what is forgotten counts
    as removed. An engine with attention data parallelism tells of all ranks in one answer; events that name another one
    than `rank` are left out.
    """

    def __init__(self, tokens_per_block: int, blocks_max: int = BLOCKS_MAX, rank: int = 0) -> None:
        if tokens_per_block < 1 or blocks_max < 1:
            raise ValueError("tokens_per_block and blocks_max must be positive")
        self._tokens_per_block = tokens_per_block
        self._blocks_max = blocks_max
        self._rank = rank
        self._held: dict[int, _Held] = {}
        self._widest: int | None = None

    def __len__(self) -> int:
        return len(self._held)

    def forget(self) -> None:
        """Events were lost, or the engine has started over."""
        self._held.clear()

    def decode(self, payload: bytes, timestamp: float = 0.0) -> Pulled:
        """The events of one answer, which is a JSON list. Never raises."""
        events: list[KvEvent] = []
        ids: list[int] = []
        malformed = other_rank = 0
        try:
            raws = _decode_list(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return Pulled(EventBatch(timestamp, (), None, malformed=1), None, None)
        for raw in raws:
            try:
                event = _decode_event(raw)
                if event.attention_dp_rank not in (None, self._rank):
                    other_rank += 1
                    continue
                ids.append(event.event_id)
                events += self._read(event)
            except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError):
                malformed += 1
        batch = EventBatch(timestamp, tuple(events), None, malformed)
        return Pulled(batch, ids[0] if ids else None, ids[-1] if ids else None, other_rank)

    def _read(self, event: _Event) -> list[KvEvent]:
        window = event.window_size
        if _decode_kind(event.data).type not in _TYPES:
            self._widest = window if window is not None and window > (self._widest or 0) else self._widest
            return []  # `created`, or one that we do not know
        if window is not None and self._widest is not None and window != self._widest:
            return []
        data = _decode_data(event.data)
        if isinstance(data, _Stored):
            return [*self._stored(data, window), *self._forgotten()]
        if isinstance(data, _Removed):
            return self._removed([name & _HANDLE_MASK for name in data.block_hashes])
        return self._moved(data.block_hash & _HANDLE_MASK, data.cache_level)

    def _stored(self, stored: _Stored, window: int | None) -> list[KvEvent]:
        """Runs of blocks that are new here, in one memory each; whatever follows a block that is not full is not."""
        parent = None if stored.parent_hash is None else stored.parent_hash & _HANDLE_MASK
        fresh: list[tuple[int, _Held]] = []
        for block in stored.blocks:
            if len(block.tokens) != self._tokens_per_block:
                break
            handle = block.block_hash & _HANDLE_MASK
            if handle not in self._held:
                tokens = array("I", [token.token_id for token in block.tokens])
                held = _Held(parent, tokens, _keys(block.tokens), block.cache_level, window)
                self._held[handle] = held
                fresh.append((handle, held))
            parent = handle
        return list(self._runs(fresh))

    def _runs(self, fresh: Sequence[tuple[int, _Held]]) -> Iterator[BlockStored]:
        start = 0
        for end in range(1, len(fresh) + 1):
            if end == len(fresh) or fresh[end][1].parent != fresh[end - 1][0] or _apart(fresh[end - 1], fresh[end]):
                yield self._store(fresh[start:end])
                start = end

    def _store(self, run: Sequence[tuple[int, _Held]]) -> BlockStored:
        first = run[0][1]
        keys = tuple(held.keys for _, held in run)
        return BlockStored(
            tuple(handle for handle, _ in run),
            first.parent,
            [token for _, held in run for token in held.tokens],
            self._tokens_per_block,
            _medium(first.level),
            extra_keys=keys if any(keys) else None,
        )

    def _removed(self, handles: Sequence[int]) -> list[KvEvent]:
        """A handle that is not known was never stored, or not full."""
        found = [(handle, self._held.pop(handle)) for handle in handles if handle in self._held]
        return [
            BlockRemoved(tuple(handle for handle, _ in group), medium)
            for medium, group in groupby(found, lambda each: _medium(each[1].level))
        ]

    def _moved(self, handle: int, levels: _Levels | None) -> list[KvEvent]:
        held = self._held.get(handle)
        if held is None or levels is None or _medium(levels.new_value) == _medium(held.level):
            return []
        left = BlockRemoved((handle,), _medium(held.level))
        held.level = levels.new_value
        return [self._store([(handle, held)]), left]

    def _forgotten(self) -> list[KvEvent]:
        surplus = len(self._held) - self._blocks_max
        if surplus <= 0:
            return []
        return self._removed(list(islice(self._held, surplus + self._blocks_max // _FORGOTTEN_SHARE)))


def _apart(before: tuple[int, _Held], after: tuple[int, _Held]) -> bool:
    return before[1].level != after[1].level


def _medium(level: int) -> str:
    return _MEDIA[level] if 0 <= level < len(_MEDIA) else _FARTHER_MEDIUM


def _keys(tokens: Sequence[_Token]) -> BlockKeys:
    """What a block depends on besides its tokens: each extra id, from where it begins."""
    keys: dict[int, Any] = {}
    for offset, token in enumerate(tokens):
        if token.token_extra_id:
            keys.setdefault(token.token_extra_id, (f"trtllm:{token.token_extra_id}", offset))
    return tuple(keys.values()) or None

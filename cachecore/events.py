"""KV events of the engines: every dialect decoded into one set of types, and encoded again.

Engines announce what enters and leaves their KV cache over ZeroMQ, one msgpack batch per scheduler step. There is one
idea and many spellings: an event is a map with a `type` key (vLLM since 2026, SGLang) or an array with the tag first
(older vLLM and SGLang), both may occur in one batch; hashes are unsigned integers, signed ones, or raw digests;
optional fields are absent, nil or cut off at the end.

Decoding is tolerant, since the stream must outlive a version skew: unknown keys and unknown event types are ignored,
a bad event costs itself alone (counted in `EventBatch.malformed`), and nothing here raises on foreign bytes. Three
attempts, fastest first: the whole batch into typed structs; event by event into typed structs; one event read as plain
objects and straightened.

Handles. A block hash from an engine is opaque here: a 64-bit number that later events use to name the block. Digests
fold to their last 8 bytes (as vLLM's own integers do), SGLang's signed integers are taken modulo 2**64.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from cachecore.holders import Tier

ExtraKey = str | bytes | int | tuple[Any, ...]
"""What an engine hashed into a block besides tokens: a LoRA name, a salt, a digest, an (identifier, offset) pair."""
BlockKeys = tuple[ExtraKey, ...] | None

_HANDLE_MASK: Final = 2**64 - 1
_DEVICE_MEDIUM: Final = "GPU"


class Dialect(StrEnum):
    """How an engine spells events."""

    VLLM_MAP = "vllm"
    VLLM_ARRAY = "vllm-array"
    SGLANG = "sglang"


class BlockStored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks have entered the cache; each one's parent is the one before it."""

    block_hashes: tuple[int, ...]
    """Handles, 0 <= handle < 2**64."""
    parent_block_hash: int | None
    """Handle of the block before the first; None at the beginning of a prompt."""
    token_ids: Sequence[int]
    block_size: int
    medium: str = _DEVICE_MEDIUM
    lora_name: str | None = None
    extra_keys: tuple[BlockKeys, ...] | None = None
    """One entry for each block."""
    cache_salt: str | None = None
    """None when the event does not say: vLLM says it with the first block of a prompt only. Our workers say it again
    with a run that is less faithful than its parent."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """One copy of each block has left the medium."""

    block_hashes: tuple[int, ...]
    medium: str = _DEVICE_MEDIUM
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """The engine has dropped its whole prefix cache."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, gc=False):
    """What one message of an event stream says."""

    timestamp: float
    """Wall-clock seconds of the engine."""
    events: tuple[KvEvent, ...]
    rank: int | None = None
    """Data-parallel rank, where the engine says it."""
    malformed: int = 0
    """Events (or 1 for a whole message) that could not be read."""


# ---- wire forms ------------------------------------------------------------------------------------------------------

_WireHash = int | bytes
_WireKeys = tuple[Any, ...] | None  # msgspec cannot tell text from bytes within a union


class _StoredFields(msgspec.Struct, gc=False):
    """In the order of vLLM's array form."""

    block_hashes: list[_WireHash]
    parent_block_hash: _WireHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[_WireKeys] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class _RemovedFields(msgspec.Struct, gc=False):
    block_hashes: list[_WireHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class _MapStored(_StoredFields, tag="BlockStored", tag_field="type", omit_defaults=True, gc=False):
    cache_salt: str | None = None


class _MapRemoved(_RemovedFields, tag="BlockRemoved", tag_field="type", omit_defaults=True, gc=False):
    pass


class _MapCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", gc=False):
    pass


class _ArrayStored(_StoredFields, tag="BlockStored", array_like=True, gc=False):
    pass


class _ArrayRemoved(_RemovedFields, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ArrayCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


_MapEvent = _MapStored | _MapRemoved | _MapCleared
_ArrayEvent = _ArrayStored | _ArrayRemoved | _ArrayCleared

_WIRE_TYPES: Final[dict[str, type[_MapEvent]]] = {
    "BlockStored": _MapStored,
    "BlockRemoved": _MapRemoved,
    "AllBlocksCleared": _MapCleared,
}
_SLOTS: Final = {
    "BlockStored": _ArrayStored.__struct_fields__,
    "BlockRemoved": _ArrayRemoved.__struct_fields__,
    "AllBlocksCleared": (),
}


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_MapEvent]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: Any = None


class _RawMapBatch(msgspec.Struct, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: Any = None


_decode_fast: Final = msgspec.msgpack.Decoder(_Batch).decode
_decode_raw: Final = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_raw_map: Final = msgspec.msgpack.Decoder(_RawMapBatch).decode
_decode_map: Final[Callable[[msgspec.Raw], _MapEvent]] = msgspec.msgpack.Decoder(_MapEvent).decode
_decode_array: Final[Callable[[msgspec.Raw], _ArrayEvent]] = msgspec.msgpack.Decoder(_ArrayEvent).decode
_decode_any: Final = msgspec.msgpack.Decoder().decode
_encode: Final = msgspec.msgpack.Encoder().encode


class _Malformed(ValueError):
    """An event that cannot be read."""


_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What the decoder raises; the last for values nested a thousand deep, also where it skips them."""


# ---- decoding --------------------------------------------------------------------------------------------------------


def decode_batch(payload: bytes) -> EventBatch:
    """Read one message of any dialect. Never raises: what cannot be read is counted in `malformed`."""
    try:
        batch = _decode_fast(payload)
        events = [event for wire in batch.events if (event := _from_wire(wire)) is not None]
    except _UNREADABLE:
        return _decode_slowly(payload)
    return EventBatch(batch.ts, tuple(events), batch.data_parallel_rank)


def _decode_slowly(payload: bytes) -> EventBatch:
    """Event by event, so that one that is old, new or broken does not cost the others."""
    batch: _RawBatch | _RawMapBatch
    try:
        batch = _decode_raw(payload)
    except _UNREADABLE:
        try:
            batch = _decode_raw_map(payload)
        except _UNREADABLE:
            return EventBatch(0.0, (), None, malformed=1)
    events: list[KvEvent] = []
    malformed = 0
    for raw in batch.events:
        try:
            event = _read_event(raw)
        except (*_UNREADABLE, TypeError, KeyError):
            malformed += 1
            continue
        if event is not None:
            events.append(event)
    rank = batch.data_parallel_rank
    return EventBatch(batch.ts, tuple(events), rank if type(rank) is int else None, malformed)


def _read_event(raw: msgspec.Raw) -> KvEvent | None:
    """One event of any form; None for one that says nothing to us (an unknown type, a placeholder)."""
    for decode in (_decode_map, _decode_array):
        try:
            wire = decode(raw)
        except msgspec.ValidationError:
            continue
        if not (isinstance(wire, _ArrayStored) and _ends_as_sglang(wire.lora_id, wire.lora_name, wire.extra_keys)):
            return _from_wire(wire)
    return _read_plainly(_decode_any(raw))


def _read_plainly(event: Any) -> KvEvent | None:
    fields: dict[str, Any]
    match event:
        case {"type": str(tag)}:
            fields = event
        case [str(tag), *slots]:
            fields = {"type": tag, **_fields_of_array(tag, slots)}
        case _:
            raise _Malformed("an event is a map with a type or an array with a tag")
    if tag not in _WIRE_TYPES:
        return None
    return _from_wire(msgspec.convert(_straightened(fields), _WIRE_TYPES[tag]))


def _fields_of_array(tag: str, slots: list[Any]) -> dict[str, Any]:
    metadata = slots.pop() if slots and isinstance(slots[-1], dict) else {}  # SGLang's, behind the slots
    fields = dict(zip(_SLOTS.get(tag, ()), slots, strict=False)) | metadata
    if _ends_as_sglang(fields.get("lora_id"), fields.get("lora_name"), fields.get("extra_keys")):
        fields["cache_salt"], fields["session_id"] = fields.pop("lora_name", None), fields.pop("extra_keys", None)
    return fields


def _ends_as_sglang(lora_id: Any, lora_name: Any, extra_keys: Any) -> bool:
    """Whether the slots after `medium` are SGLang's salt and session rather than vLLM's adapter and extra keys.

    vLLM never names an adapter without its id, and its extra keys are an array.
    """
    return isinstance(extra_keys, str) or (isinstance(lora_name, str) and lora_id is None and not extra_keys)


def _straightened(fields: dict[str, Any]) -> dict[str, Any]:
    """Legal but rare: EAGLE's token bigrams (the first token counts), a block's key without a list, no parent."""
    straight = {"parent_block_hash": None, **fields}
    tokens = straight.get("token_ids")
    if isinstance(tokens, list):
        straight["token_ids"] = [token[0] if isinstance(token, list) and token else token for token in tokens]
    keys = straight.get("extra_keys")
    if isinstance(keys, list):
        straight["extra_keys"] = [key if key is None or isinstance(key, list) else [key] for key in keys]
    return straight


def _from_wire(wire: _MapEvent | _ArrayEvent) -> KvEvent | None:
    if isinstance(wire, _RemovedFields):
        handles = _handles(wire.block_hashes)
        return BlockRemoved(handles, wire.medium or _DEVICE_MEDIUM, wire.group_idx, wire.locality, wire.ownership)
    if isinstance(wire, _StoredFields):
        return _stored_from_wire(wire, wire.cache_salt if isinstance(wire, _MapStored) else None)
    return AllBlocksCleared()


def _stored_from_wire(wire: _StoredFields, cache_salt: str | None) -> BlockStored | None:
    if wire.block_size == 0 and not wire.token_ids:
        return None  # an offload placeholder: moves no prefix that anyone could match
    if wire.block_size < 1:
        raise _Malformed("a block holds at least one token")
    lora_name = _lora_name(wire)
    parent = wire.parent_block_hash
    return BlockStored(
        _handles(wire.block_hashes),
        None if parent is None else _handle(parent),
        wire.token_ids,
        wire.block_size,
        wire.medium or _DEVICE_MEDIUM,
        lora_name,
        None if wire.extra_keys is None else tuple(map(_block_keys, wire.extra_keys)),
        cache_salt or _salt_in_keys(wire.extra_keys, lora_name),
        wire.group_idx,
        wire.kv_cache_spec_kind,
        wire.locality,
        wire.ownership,
        wire.session_id,
    )


def _handles(hashes: Iterable[_WireHash]) -> tuple[int, ...]:
    return tuple([name & _HANDLE_MASK if type(name) is int else _handle(name) for name in hashes])


def _handle(name: _WireHash) -> int:
    if isinstance(name, int):
        return name & _HANDLE_MASK
    if not name:
        raise _Malformed("a digest has bytes")
    return int.from_bytes(name[-8:], "big")


def _lora_name(wire: _StoredFields) -> str | None:
    """An adapter known by number alone still gets a name: its blocks must never pass for the base model's."""
    if wire.lora_name:
        return wire.lora_name
    return str(wire.lora_id) if wire.lora_id else None


def _block_keys(keys: _WireKeys) -> BlockKeys:
    return tuple(_frozen(key) for key in keys) if keys else None


def _frozen(key: Any) -> ExtraKey:
    if isinstance(key, list | tuple):
        return tuple(_frozen(part) for part in key)
    if isinstance(key, str | bytes | int):
        return key
    return repr(key)  # nothing known sends this; it must still tell blocks apart


def _salt_in_keys(extra_keys: Sequence[_WireKeys] | None, lora_name: str | None) -> str | None:
    """vLLM's salt: among the first block's keys, the text that is not the adapter's name.

    The order there is adapter, multimodal items, salt; items were bare texts once, so the last text is the salt. Only
    one text can be the adapter: a salt that equals its name is still a salt. Newer engines tag: ("cache_salt", text).
    """
    if not extra_keys or not extra_keys[0]:
        return None
    first = extra_keys[0]
    for key in first:
        if isinstance(key, list) and len(key) == 2 and key[0] == "cache_salt" and isinstance(key[1], str):
            return key[1]
    texts = [key for key in first if isinstance(key, str)]
    if lora_name in texts:
        texts.remove(lora_name)
    return texts[-1] if texts else None


# ---- encoding --------------------------------------------------------------------------------------------------------


def encode_batch(batch: EventBatch, dialect: Dialect) -> bytes:
    """One message in an engine's dialect (`malformed` is not sent).

    For vLLM a salt and an adapter that `extra_keys` does not carry are put there, where vLLM puts them: the adapter in
    every block's keys, the salt in those of the first block.
    """
    write = _WRITERS[dialect]
    return _encode([batch.timestamp, [write(event) for event in batch.events], batch.rank])


def _vllm_map(event: KvEvent) -> _MapEvent:
    match event:
        case BlockStored():
            return _MapStored(**_vllm_stored(event))
        case BlockRemoved():
            return _MapRemoved(**_removed(event))
        case AllBlocksCleared():
            return _MapCleared()


def _vllm_array(event: KvEvent) -> _ArrayEvent:
    match event:
        case BlockStored():
            # Those that spoke arrays sent a number with every adapter name, and any will do.
            return _ArrayStored(**_vllm_stored(event), lora_id=None if event.lora_name is None else 1)
        case BlockRemoved():
            return _ArrayRemoved(**_removed(event))
        case AllBlocksCleared():
            return _ArrayCleared()


def _vllm_stored(event: BlockStored) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event)
    del fields["cache_salt"]
    return {**fields, "block_hashes": list(event.block_hashes), "extra_keys": _vllm_keys(event)}


def _removed(event: BlockRemoved) -> dict[str, Any]:
    return {**msgspec.structs.asdict(event), "block_hashes": list(event.block_hashes)}


def _sglang(event: KvEvent) -> _MapEvent:
    match event:
        case BlockStored():
            parent = event.parent_block_hash
            return _MapStored(
                [_signed(handle) for handle in event.block_hashes],
                None if parent is None else _signed(parent),
                list(event.token_ids),
                event.block_size,
                lora_id=event.lora_name,
                medium=event.medium,
                session_id=event.session_id,
                cache_salt=event.cache_salt,
            )
        case BlockRemoved():
            return _MapRemoved([_signed(handle) for handle in event.block_hashes], event.medium)
        case AllBlocksCleared():
            return _MapCleared()


_WRITERS: Final[dict[Dialect, Callable[[KvEvent], Any]]] = {
    Dialect.VLLM_MAP: _vllm_map,
    Dialect.VLLM_ARRAY: _vllm_array,
    Dialect.SGLANG: _sglang,
}


def _vllm_keys(event: BlockStored) -> list[Any] | None:
    if event.extra_keys is not None:
        return list(event.extra_keys)
    every = () if event.lora_name is None else (event.lora_name,)
    first = every if event.cache_salt is None else (*every, event.cache_salt)
    if not first:
        return None
    return [first or None] + [every or None] * (len(event.block_hashes) - 1)


def _signed(handle: int) -> int:
    return handle - 2**64 if handle >= 2**63 else handle


# ---- tiers -----------------------------------------------------------------------------------------------------------

_TIERS: Final[dict[str | None, Tier]] = {
    None: Tier.L0,
    "GPU": Tier.L0,
    "CPU": Tier.L1,
    "CPU_PINNED": Tier.L1,
    "CPU_TIER1": Tier.L1,
    "CPU_TIER2": Tier.L1,
    "DISK": Tier.L2,
    "STORAGE": Tier.L2,
    "FS": Tier.L2,
    "OBJ": Tier.L2,
    "EXTERNAL": Tier.L2,
}


def tier_of(medium: str | None) -> Tier | None:
    """The tier a medium belongs to (no medium means the device); None for one we do not know."""
    tier = _TIERS.get(medium)
    return _TIERS.get(medium.upper()) if tier is None and medium is not None else tier

"""KV events of every dialect: whatever an engine publishes, decoding ends, and what was read can be written again."""

import json
from random import Random
from typing import Any

import msgspec

from cachecore.events import AllBlocksCleared, BlockRemoved, Dialect, EventBatch, decode_batch, encode_batch
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.memory import MemoryIndex
from cachecore.rekey import Rekeyer
from cachecore.scope import IdentityScope, KeyId, Keyring, Naming, TenantId
from cachecore.trtllm_events import TrtllmEvents
from tests.fuzz.engine import Target

_KEYRING = Keyring({0: bytes(range(32))}, 0)
_NAMING = Naming.of(
    IdentityScope("m", KeyId(TenantId("t"), 0), block_size_tokens=2, tokenizer="", adapter="", client_salt=b""),
    _KEYRING,
)
_HOLDER = Worker(WorkerName("w"), Epoch(1), 0)
_PLACES = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "lora_id", "extra_keys"}


def _batches() -> list[EventBatch]:
    stored = {"type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    one = decode_batch(msgspec.msgpack.encode([1.5, [stored | {"block_size": 2, "medium": "GPU"}], 0]))
    return [one, EventBatch(2.5, (BlockRemoved((7,), "GPU"), AllBlocksCleared()), 0), EventBatch(0.0, (), None)]


def _corpus() -> list[bytes]:
    written = [encode_batch(batch, dialect) for batch in _batches() for dialect in Dialect]
    array = ["BlockStored", [b"\x01" * 32], None, [1, 2], 2, None, "GPU", None, [["salt"]]]
    by_hand: list[Any] = [
        [1.5, [array, ["BlockRemoved", [5], "GPU"], ["AllBlocksCleared"], ["Unknown", 1]], None],
        {"ts": 1.0, "events": [{"type": "BlockRemoved", "block_hashes": [2**64 - 1]}], "data_parallel_rank": 3},
        [
            1.5,
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [-1],
                    "parent_block_hash": 7,
                    "token_ids": [[1, 2]],
                    "block_size": 1,
                }
            ],
        ],
    ]
    return [*written, *map(msgspec.msgpack.encode, by_hand)]


_WORDS = (
    *(msgspec.msgpack.encode(word) for word in (*_PLACES, "BlockStored", "BlockRemoved", "AllBlocksCleared")),
    b"\xc0", b"\xc2", b"\x90", b"\x91", b"\x80", b"\x81", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\xc7\x00\x01", b"\xd9\x02\xff\xfe",
    b"\x91" * 600,
)  # fmt: skip


def check(data: bytes, random: Random) -> None:
    batch = decode_batch(data)
    _apply(batch)
    for dialect in Dialect:
        if batch.malformed:
            continue
        again = decode_batch(encode_batch(batch, dialect))
        if again.malformed:
            raise AssertionError(f"{dialect}: what was read cannot be read again: {batch}")
        if len(again.events) != len(batch.events):
            raise AssertionError(f"{dialect}: {batch.events} became {again.events}")


def _apply(batch: EventBatch) -> None:
    """As intake does."""
    index, rekeyer = MemoryIndex(blocks_max=1000), Rekeyer(2, lambda salt, adapter: _NAMING)
    for sequence in range(2):
        index.apply(_HOLDER, sequence, rekeyer.rekey(batch.events))


def _trtllm_corpus() -> list[bytes]:
    block = {"block_hash": 7, "tokens": [{"token_id": 1, "token_extra_id": 0}] * 2, "cache_level": 0, "lora_id": None}
    stored = {"type": "stored", "parent_hash": None, "blocks": [block, block | {"block_hash": 8}]}
    datas = [
        {"type": "created", "num_blocks_per_cache_level": [4, 2]},
        stored,
        {"type": "updated", "block_hash": 7, "cache_level": {"old_value": 0, "new_value": 1}},
        {"type": "removed", "block_hashes": [7, 8]},
    ]
    events = [{"event_id": number, "data": data, "window_size": 512} for number, data in enumerate(datas)]
    return [json.dumps(events).encode(), *(json.dumps([event]).encode() for event in events), b"[]"]


def check_trtllm(data: bytes, random: Random) -> None:
    decoder = TrtllmEvents(2, blocks_max=8)
    for payload in data.split(b"\x00"):
        _apply(decoder.decode(payload, 1.0).batch)
        if len(decoder) > 8:
            raise AssertionError(f"{len(decoder)} blocks are remembered, of 8 at most")


TARGETS = (
    Target("kv-events", _corpus, check, _WORDS),
    Target(
        "kv-events-trtllm",
        _trtllm_corpus,
        check_trtllm,
        (
            b"\x00",
            b'"stored"',
            b'"removed"',
            b'"updated"',
            b"null",
            b"[",
            b"]",
            b"{",
            b"}",
            b'"tokens":[]',
            b'"window_size":',
        ),
    ),
)

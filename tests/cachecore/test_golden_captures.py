"""What real engines announced, read and re-keyed: it finds of each prompt what the engine then said was cached.

The captures were recorded by tests/vllm/record_captures.py, which says what was asked of the engine.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from cachecore.blocks import pack_tokens
from cachecore.captures import Capture
from cachecore.events import BlockRemoved, BlockStored, KvEvent, decode_batch
from cachecore.holders import Epoch, Place, Tier, Worker, WorkerName
from cachecore.index.memory import MemoryIndex
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, KeyId, Keyring, Naming

CAPTURES = Path(__file__).parent / "captures"
NAMES = ("vllm-0.32-integers", "vllm-0.32-digests")
"""Recorded of the same requests: handles as 64-bit integers, as they are by default, and as whole digests."""
ENGINE_BLOCK_TOKENS = 32
KEYRING = Keyring({0: bytes(range(32))}, 0)
HOLDER = Worker(WorkerName("engine"), Epoch(1))


class Asked(NamedTuple):
    """A request, and what the engine said of it."""

    announced: int
    """Messages that had been sent before it."""
    tokens: Sequence[int]
    salt: str
    cached_tokens: int


class Gateway:
    """What a gateway does with a stream, without its sockets."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.index = MemoryIndex()
        self.rekeyer = Rekeyer(block_tokens, lambda salt, adapter: self.naming(salt or ""))

    def naming(self, salt: str) -> Naming:
        key_id = KeyId(DEFAULT_TENANT, 0)
        scope = IdentityScope("m", key_id, self._block_tokens, client_salt=KEYRING.client_salt_digest(key_id, salt))
        return Naming.of(scope, KEYRING)

    def take(self, sequence: int, events: Sequence[KvEvent]) -> None:
        assert self.index.apply(HOLDER, sequence, self.rekeyer.rekey(events))

    def matched_tokens(self, asked: Asked) -> int:
        naming = self.naming(asked.salt)
        chain = naming.hasher.chain(naming.root, pack_tokens(asked.tokens))
        depth = self.index.match(chain).depths.get(Place(HOLDER, Tier.L0, Fidelity.EXACT), 0)
        # An engine reuses whole blocks of its own, and gives up that of the last token, which it computes again.
        usable = min(depth * self._block_tokens, len(asked.tokens) - 1)
        return usable // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS


@pytest.fixture(scope="module")
def truth() -> list[Asked]:
    lines = (CAPTURES / "vllm-0.32.truth.jsonl").read_text().splitlines()
    return [Asked(**json.loads(line)) for line in lines]


def batches(name: str) -> list[Sequence[KvEvent]]:
    """The events of each message. All can be read, and none was lost."""
    messages = list(Capture(CAPTURES / f"{name}.jsonl"))
    assert [message.sequence for message in messages] == list(range(len(messages)))
    decoded = [decode_batch(message.payload) for message in messages]
    assert not any(batch.malformed for batch in decoded)
    return [batch.events for batch in decoded]


@pytest.mark.parametrize("block_tokens", [32, 16, 4])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_matched_is_what_the_engine_had(name: str, block_tokens: int, truth: list[Asked]) -> None:
    gateway = Gateway(block_tokens)
    stream, taken = batches(name), 0
    for asked in truth:
        for sequence in range(taken, asked.announced):
            gateway.take(sequence, stream[sequence])
        taken = asked.announced
        assert gateway.matched_tokens(asked) == asked.cached_tokens
    assert 0 < taken <= len(stream)
    stats = gateway.rekeyer.stats()
    assert (stats.unknown_parent, stats.unknown_handle, stats.refused) == (0, 0, {})


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_shows_something(name: str, truth: list[Asked]) -> None:
    """Hits of every size, in blocks, and blocks that came and went."""
    hits = {asked.cached_tokens for asked in truth}
    assert 0 in hits
    assert len(hits) >= 4
    assert all(hit % ENGINE_BLOCK_TOKENS == 0 for hit in hits)
    events = [event for batch in batches(name) for event in batch]
    assert sum(isinstance(event, BlockRemoved) for event in events) > 20
    salts = {event.cache_salt for event in events if isinstance(event, BlockStored)}
    assert salts == {asked.salt or None for asked in truth}
    assert len(salts) == 3


def test_a_capture_without_its_removals_promises_too_much(truth: list[Asked]) -> None:
    """The truth is not such that anything would do."""
    gateway = Gateway(ENGINE_BLOCK_TOKENS)
    for sequence, events in enumerate(batches(NAMES[0])):
        gateway.take(sequence, [event for event in events if not isinstance(event, BlockRemoved)])
    assert any(gateway.matched_tokens(asked) > asked.cached_tokens for asked in truth)


def test_digests_and_integers_say_the_same() -> None:
    hashes = [_first_hash(next(iter(Capture(CAPTURES / f"{name}.jsonl"))).payload) for name in NAMES]
    assert [type(one) for one in hashes] == [int, bytes]
    first, second = ([event for events in batches(name) for event in events] for name in NAMES)
    assert first == second


def _first_hash(payload: bytes) -> object:
    return msgspec.msgpack.decode(payload)[1][0]["block_hashes"][0]

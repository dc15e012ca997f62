"""Streams of SGLang, LMCache and TensorRT-LLM, made by hand (`handmade.py`), and read as a gateway reads."""

from collections.abc import Sequence

import msgspec
import pytest

from cachecore.blocks import pack_tokens
from cachecore.captures import Capture
from cachecore.events import BlockRemoved, BlockStored, KvEvent, decode_batch
from cachecore.holders import Epoch, Place, Tier, Worker, WorkerName
from cachecore.index.memory import MemoryIndex
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, Keyring, Naming
from cachecore.trtllm_events import TrtllmEvents
from tests.cachecore import handmade
from tests.cachecore.handmade import DIRECTORY, PAGE, STORIES, TRTLLM, TRTLLM_PROMPT, page

RING = Keyring({0: bytes(32)}, 0)
KEY = RING.key_id(DEFAULT_TENANT)
HOLDER = Worker(WorkerName("engine"), Epoch(1))


class Gateway:
    """What a gateway does with a stream, without its sockets."""

    def __init__(self, block_tokens: int = PAGE) -> None:
        self._block_tokens = block_tokens
        self.index = MemoryIndex()
        self.rekeyer = Rekeyer(block_tokens, lambda salt, adapter: self._naming(salt))

    def _naming(self, salt: str | None) -> Naming:
        client_salt = RING.client_salt_digest(KEY, salt) if salt else b""
        return Naming.of(IdentityScope("m", KEY, self._block_tokens, client_salt=client_salt), RING)

    def take(self, sequence: int, events: Sequence[KvEvent]) -> None:
        assert self.index.apply(HOLDER, sequence, self.rekeyer.rekey(events))

    def known(self, tokens: Sequence[int], salt: str | None = None) -> tuple[int, ...]:
        """Pages that can be reached in each tier and the nearer ones."""
        naming = self._naming(salt)
        depths = self.index.match(naming.hasher.chain(naming.root, pack_tokens(tokens))).depths
        reached = [depths.get(Place(HOLDER, tier, Fidelity.EXACT), 0) for tier in Tier]
        return tuple(max(reached[: tier + 1]) * self._block_tokens // PAGE for tier in Tier)


@pytest.mark.parametrize("name", [*STORIES, "tensorrt-llm"])
def test_the_files_are_the_stories(name: str) -> None:
    story = STORIES.get(name)
    expected = handmade.messages_of(story) if story is not None else handmade.trtllm_answers()
    assert list(Capture(DIRECTORY / f"{name}.jsonl")) == expected


@pytest.mark.parametrize("block_tokens", [PAGE, PAGE // 2, PAGE // 4])
@pytest.mark.parametrize("name", list(STORIES))
def test_after_each_message_is_known_what_the_engine_holds(name: str, block_tokens: int) -> None:
    story, gateway = STORIES[name], Gateway(block_tokens)
    for message, said in zip(Capture(DIRECTORY / f"{name}.jsonl"), story.messages, strict=True):
        batch = decode_batch(message.payload)
        assert (batch.malformed, batch.rank) == (0, said.rank)
        gateway.take(message.sequence, batch.events)
        known = {prompt: gateway.known(*story.prompts[prompt]) for prompt in said.known}
        assert known == said.known, f"after message {message.sequence}"
    assert gateway.rekeyer.stats().unknown_handle == 0


@pytest.mark.parametrize("name", list(STORIES))
def test_pages_that_are_parts_of_our_blocks(name: str) -> None:
    """Ours are twice as long: of an odd number of pages the last one is not yet known."""
    story, gateway = STORIES[name], Gateway(2 * PAGE)
    for message, said in zip(Capture(DIRECTORY / f"{name}.jsonl"), story.messages, strict=True):
        gateway.take(message.sequence, decode_batch(message.payload).events)
        for prompt, (device, _, _) in said.known.items():
            assert gateway.known(*story.prompts[prompt])[0] == device // 2 * 2


def test_what_was_not_understood_is_counted() -> None:
    gateway = Gateway()
    for message in Capture(DIRECTORY / "lmcache-offload.jsonl"):
        gateway.take(message.sequence, decode_batch(message.payload).events)
    stats = gateway.rekeyer.stats()
    assert (dict(stats.refused), stats.ignored) == ({"medium": 1}, 2)


# ---- TensorRT-LLM ----------------------------------------------------------------------------------------------------


def test_after_each_answer_is_known_what_tensorrt_llm_holds() -> None:
    decoder, gateway, expected_id = TrtllmEvents(PAGE), Gateway(), 0
    for message, answer in zip(Capture(DIRECTORY / "tensorrt-llm.jsonl"), TRTLLM, strict=True):
        pulled = decoder.decode(message.payload)
        assert (pulled.first_id, pulled.batch.malformed) == (expected_id, 0)
        assert pulled.last_id is not None
        expected_id = pulled.last_id + 1
        gateway.take(pulled.last_id, pulled.batch.events)
        assert gateway.known(TRTLLM_PROMPT) == answer.known, f"after event {pulled.last_id}"
    assert len(decoder) == 1
    assert gateway.rekeyer.stats().unknown_handle == 0


def pulled(decoder: TrtllmEvents, *data: object, **more: object) -> list[KvEvent]:
    events = [{"event_id": number, "data": each, **more} for number, each in enumerate(data)]
    batch = decoder.decode(msgspec.json.encode(events)).batch
    assert batch.malformed == 0
    return list(batch.events)


def block(name: int, *, level: int = 0, extra: int = 0) -> dict[str, object]:
    return handmade.trtllm_block(name, handmade.trtllm_tokens(name, extra=extra), level)


def test_a_run_ends_where_its_memory_or_its_chain_does() -> None:
    stored = handmade.trtllm_stored(9, block(-1), block(2), block(3, level=1), block(4, level=2), block(5, level=7))
    assert pulled(TrtllmEvents(PAGE), stored) == [
        BlockStored((2**64 - 1, 2), 9, [*page(-1), *page(2)], PAGE),
        BlockStored((3,), 2, page(3), PAGE, "CPU"),
        BlockStored((4,), 3, page(4), PAGE, "DISK"),
        BlockStored((5,), 4, page(5), PAGE, "DISK"),
    ]


def test_extra_ids_are_what_a_block_depends_on() -> None:
    stored = handmade.trtllm_stored(None, block(1), block(2, extra=6))
    (event,) = pulled(TrtllmEvents(PAGE), stored)
    assert isinstance(event, BlockStored)
    assert event.extra_keys == (None, (("trtllm:6", 0),))


def test_removals_say_where_the_blocks_were() -> None:
    decoder = TrtllmEvents(PAGE)
    pulled(decoder, handmade.trtllm_stored(None, block(1), block(2, level=1), block(3, level=1)))
    removed = pulled(decoder, {"type": "removed", "block_hashes": [3, 2, 77, 1]})
    assert removed == [BlockRemoved((3, 2), "CPU"), BlockRemoved((1,), "GPU")]
    assert pulled(decoder, {"type": "removed", "block_hashes": [1]}) == []


def test_ranks_are_told_apart_by_what_their_events_say() -> None:
    decoder = TrtllmEvents(PAGE, rank=1)
    events = [
        {"event_id": number, "data": handmade.trtllm_stored(None, block(name)), **more}
        for number, name, more in (
            (7, 1, {"attention_dp_rank": 0}),
            (3, 2, {"attention_dp_rank": 1}),
            (4, 3, {}),
            (8, 4, {"attention_dp_rank": 0}),
        )
    ]
    answer = decoder.decode(msgspec.json.encode(events))
    assert [event.block_hashes for event in answer.batch.events] == [(2,), (3,)]  # type: ignore[union-attr]
    assert (answer.first_id, answer.last_id, answer.other_rank, answer.batch.rank) == (3, 4, 2, None)


def test_what_it_remembers_is_bounded_and_what_it_forgets_counts_as_removed() -> None:
    decoder = TrtllmEvents(PAGE, blocks_max=32)
    events = [pulled(decoder, handmade.trtllm_stored(None, block(number))) for number in range(40)]
    assert len(decoder) <= 32
    assert [len(batch) for batch in events[:32]] == [1] * 32
    assert events[32][1:] == [BlockRemoved((0, 1, 2), "GPU")]
    assert pulled(decoder, handmade.trtllm_updated(0, 0, 1)) == []
    decoder.forget()
    assert len(decoder) == 0


@pytest.mark.parametrize(
    ("payload", "malformed"),
    [
        (b"", 1),
        (b"{}", 1),
        (b"\xff", 1),
        (b"[]", 0),
        (b"[7]", 1),
        (b'[{"event_id": 1}]', 1),
        (b'[{"event_id": 1, "data": {"type": "stored"}}]', 1),
        (b'[{"event_id": 1, "data": {"type": "removed", "block_hashes": ["x"]}}]', 1),
        (b'[{"event_id": 1, "data": {"type": "later", "x": 1}}]', 0),
        (
            b'[{"event_id": 1, "data": {"type": "stored", "parent_hash": null, "blocks": [{"block_hash": 1, "tokens": '
            b'[{"token_id": -1}, {"token_id": 1}, {"token_id": 1}, {"token_id": 1}]}]}}]',
            1,
        ),
    ],
)
def test_what_cannot_be_read_costs_itself_alone(payload: bytes, malformed: int) -> None:
    decoder = TrtllmEvents(PAGE)
    batch = decoder.decode(payload).batch
    assert (batch.events, batch.malformed) == ((), malformed)
    assert len(pulled(decoder, handmade.trtllm_stored(None, block(1)))) == 1


def test_a_bad_event_between_good_ones() -> None:
    good = [handmade.trtllm_stored(None, block(1)), None, handmade.trtllm_stored(1, block(2))]
    events = [{"event_id": number, "data": data} for number, data in enumerate(good)]
    answer = TrtllmEvents(PAGE).decode(msgspec.json.encode(events))
    assert [type(event) for event in answer.batch.events] == [BlockStored, BlockStored]
    assert (answer.first_id, answer.last_id, answer.batch.malformed) == (0, 2, 1)

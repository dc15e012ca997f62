"""Every spelling of KV events that engines have used, from hand-made bytes, and back."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Dialect,
    EventBatch,
    decode_batch,
    encode_batch,
    tier_of,
)
from cachecore.holders import Tier

pack = msgspec.msgpack.encode


def decode_one(event, *, malformed=0):
    batch = decode_batch(pack([1.5, [event], None]))
    assert batch.malformed == malformed
    assert batch.timestamp == 1.5
    (decoded,) = batch.events
    return decoded


def stored_map(**changes):
    fields = {
        "type": "BlockStored",
        "block_hashes": [7],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
    }
    return fields | changes


# ---- golden bytes, assembled by hand from the engines' sources -------------------------------------------------------

# [ts, [{"type": "BlockStored", hashes, parent, tokens, size, medium, extra_keys [["salt"], nil], group 0, full}], 0]
VLLM_MAP_HEX = (
    "93cb41d9f0a4c0800000918aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cfffeeddccbbaa998801"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401cd012c03ce00010000aa626c6f636b5f73697a6502"
    "a66d656469756da3475055aa65787472615f6b6579739291a473616c74c0a967726f75705f69647800b26b765f63616368655f73"
    "7065635f6b696e64ae66756c6c5f617474656e74696f6ea76c6f72615f6964c000"
)
# [ts, [["BlockStored", [..], nil, [..], 2, nil, "GPU"], ["BlockRemoved", [5], "GPU"], ["AllBlocksCleared"]]]
VLLM_ARRAY_HEX = (
    "92cb41d9f0a4c08000009397ab426c6f636b53746f72656491cfdab5e4d2c1a09f88c09201cd012c02c0a347505593ac426c6f636b"
    "52656d6f7665649105a347505591b0416c6c426c6f636b73436c6561726564"
)


def test_golden_vllm_map_batch():
    assert decode_batch(bytes.fromhex(VLLM_MAP_HEX)) == EventBatch(
        1740804866.0,
        (
            BlockStored(
                (0xFFEEDDCCBBAA9988, 1),
                None,
                [1, 300, 3, 65536],
                2,
                "GPU",
                extra_keys=(("salt",), None),
                cache_salt="salt",
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            ),
        ),
        0,
    )


def test_golden_vllm_array_batch_without_a_rank():
    assert decode_batch(bytes.fromhex(VLLM_ARRAY_HEX)) == EventBatch(
        1740804866.0,
        (BlockStored((0xDAB5E4D2C1A09F88,), None, [1, 300], 2), BlockRemoved((5,)), AllBlocksCleared()),
        None,
    )


# ---- one field or spelling each --------------------------------------------------------------------------------------

STORED = BlockStored((7,), None, [1, 2], 2)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        pytest.param(stored_map(), STORED, id="map, only the required fields"),
        pytest.param(stored_map(medium=None, lora_id=None, extra_keys=None), STORED, id="map, nil for absent"),
        pytest.param(stored_map(origin="x", remaining=[1]), STORED, id="map, unknown keys"),
        pytest.param(
            {k: v for k, v in stored_map().items() if k != "parent_block_hash"}, STORED, id="map without a parent"
        ),
        pytest.param(["BlockStored", [7], None, [1, 2], 2], STORED, id="array cut off after the size"),
        pytest.param(
            ["BlockStored", [7], None, [1, 2], 2, None, "CPU"], BlockStored((7,), None, [1, 2], 2, "CPU"), id="array"
        ),
        pytest.param(
            [
                "BlockStored",
                [7],
                6,
                [1, 2],
                2,
                3,
                "GPU",
                "ad",
                [["ad"]],
                1,
                "full_attention",
                None,
                "LOCAL",
                "kvcr",
                "s",
            ],
            BlockStored((7,), 6, [1, 2], 2, "GPU", "ad", (("ad",),), None, 1, "full_attention", "LOCAL", "kvcr", "s"),
            id="array, all slots",
        ),
        pytest.param(
            ["BlockStored", [7], None, [1, 2], 2, None, None, None, None, None, None, None, None, None, None, "new", 9],
            STORED,
            id="array with slots we do not know",
        ),
        pytest.param(["BlockRemoved", [7, 8], "CPU", 2], BlockRemoved((7, 8), "CPU", 2), id="removed array"),
        pytest.param(["BlockRemoved", [7]], BlockRemoved((7,)), id="removed array, hashes alone"),
        pytest.param(
            {"type": "BlockRemoved", "block_hashes": [7], "medium": None, "ownership": "kvcr", "locality": "REMOTE"},
            BlockRemoved((7,), "GPU", None, "REMOTE", "kvcr"),
            id="removed map",
        ),
        pytest.param({"type": "AllBlocksCleared"}, AllBlocksCleared(), id="cleared map"),
        pytest.param(["AllBlocksCleared"], AllBlocksCleared(), id="cleared array"),
        pytest.param(
            stored_map(block_hashes=[bytes(24) + b"\0\0\0\0\0\0\0\7"], parent_block_hash=b"\xff" * 32),
            BlockStored((7,), 2**64 - 1, [1, 2], 2),
            id="digests fold to their last 8 bytes",
        ),
        pytest.param(
            stored_map(block_hashes=[-1], parent_block_hash=-(2**63)),
            BlockStored((2**64 - 1,), 2**63, [1, 2], 2),
            id="signed hashes",
        ),
        pytest.param(stored_map(token_ids=[[1, 2], [2, 3]]), STORED, id="EAGLE bigrams count as their first token"),
        pytest.param(
            stored_map(lora_id=117, lora_name="adapter-116", extra_keys=[["adapter-116"]], group_idx=0, medium="GPU"),
            BlockStored((7,), None, [1, 2], 2, "GPU", "adapter-116", (("adapter-116",),), None, 0),
            id="adapter",
        ),
        pytest.param(stored_map(lora_id=3), BlockStored((7,), None, [1, 2], 2, lora_name="3"), id="adapter by number"),
        pytest.param(stored_map(lora_id=0), STORED, id="number 0 is no adapter"),
        pytest.param(
            stored_map(lora_id="ad"), BlockStored((7,), None, [1, 2], 2, lora_name="ad"), id="SGLang's adapter id"
        ),
        pytest.param(
            stored_map(extra_keys=["salt"]),
            BlockStored((7,), None, [1, 2], 2, extra_keys=(("salt",),), cache_salt="salt"),
            id="keys without a list",
        ),
    ],
)
def test_spellings(event, expected):
    assert decode_one(event) == expected


@pytest.mark.parametrize(
    ("keys", "lora_name", "salt"),
    [
        ([["salt"]], None, "salt"),
        ([["ad", "salt"]], "ad", "salt"),
        ([["ad"]], "ad", None),
        ([["X", "X"]], "X", "X"),
        ([["X"]], None, "X"),
        ([[["mmhash", 0], "salt"]], None, "salt"),
        ([["mmhash", "salt", b"\1\2"]], None, "salt"),
        ([[["lora", "ad", "/p"], ["cache_salt", "salt"], ["prompt_embeds", b"d"]]], "ad", "salt"),
        ([[["mmhash", -3]]], None, None),
        ([[b"digest"]], None, None),
        ([None], None, None),
        ([], None, None),
    ],
)
def test_the_salt_is_found_among_the_first_block_s_keys(keys, lora_name, salt):
    event = decode_one(stored_map(extra_keys=keys, lora_name=lora_name, lora_id=lora_name and 1))
    assert (event.cache_salt, event.lora_name) == (salt, lora_name)


@pytest.mark.parametrize(
    ("tail", "salt", "session"),
    [
        (["GPU", {"cache_salt": "s"}], "s", None),
        (["GPU", {"cache_salt": "s", "session_id": "t", "later": 1}], "s", "t"),
        (["GPU", "s"], "s", None),
        (["GPU", "s", "t"], "s", "t"),
        (["GPU", None, "t"], None, "t"),
        (["GPU"], None, None),
    ],
)
def test_sglang_s_array_tails(tail, salt, session):
    event = decode_one(["BlockStored", [-7], None, [1, 2], 2, None, *tail])
    assert event == BlockStored((2**64 - 7,), None, [1, 2], 2, "GPU", cache_salt=salt, session_id=session)


def test_a_salt_of_its_own_goes_before_one_among_keys():
    event = decode_one(stored_map(cache_salt="own", extra_keys=[["other"]], session_id="t"))
    assert (event.cache_salt, event.session_id) == ("own", "t")


GOOD = {"type": "BlockRemoved", "block_hashes": [9]}


@pytest.mark.parametrize(
    ("event", "malformed"),
    [
        pytest.param({"type": "BlockInactive", "block_hashes": [1]}, 0, id="unknown type"),
        pytest.param(["BlockInactive", 1], 0, id="unknown tag"),
        pytest.param(stored_map(block_size=0, token_ids=[]), 0, id="placeholder"),
        pytest.param(["BlockStored", [1], None, [], 0], 0, id="placeholder array"),
        pytest.param(stored_map(block_size=0), 1, id="size 0 with tokens"),
        pytest.param(stored_map(block_size=-16), 1, id="negative size"),
        pytest.param(stored_map(block_size=None), 1, id="size nil"),
        pytest.param(stored_map(block_hashes="x"), 1, id="hashes of a wrong type"),
        pytest.param(stored_map(block_hashes=[None]), 1, id="nil hash"),
        pytest.param(stored_map(block_hashes=[b""]), 1, id="empty digest"),
        pytest.param(stored_map(token_ids=["a"]), 1, id="text among tokens"),
        pytest.param(stored_map(token_ids=[[]]), 1, id="empty bigram"),
        pytest.param({"type": "BlockStored"}, 1, id="no fields"),
        pytest.param({"block_hashes": [1]}, 1, id="no type"),
        pytest.param({"type": 7}, 1, id="type not text"),
        pytest.param(["BlockStored"], 1, id="no slots"),
        pytest.param([], 1, id="empty array"),
        pytest.param([["BlockStored"]], 1, id="nested array"),
        pytest.param(None, 1, id="nil"),
        pytest.param(17, 1, id="number"),
        pytest.param("BlockStored", 1, id="text"),
    ],
)
def test_a_bad_or_unknown_event_costs_itself_only(event, malformed):
    batch = decode_batch(pack([1.0, [GOOD, event, ["BlockRemoved", [10]]], 3]))
    assert batch == EventBatch(1.0, (BlockRemoved((9,)), BlockRemoved((10,))), 3, malformed)


def test_maps_and_arrays_mix_in_one_batch():
    batch = decode_batch(pack([1.0, [stored_map(), ["AllBlocksCleared"], GOOD], None]))
    assert batch.events == (STORED, AllBlocksCleared(), BlockRemoved((9,)))


def test_a_batch_may_be_a_map():
    payload = pack({"ts": 2.0, "events": [stored_map(), ["AllBlocksCleared"]], "data_parallel_rank": 1, "version": 2})
    assert decode_batch(payload) == EventBatch(2.0, (STORED, AllBlocksCleared()), 1)


@pytest.mark.parametrize("rank", [None, 5])
def test_the_rank_may_be_absent_or_nil(rank):
    assert decode_batch(pack([1.0, [GOOD], rank, "more"])).rank == rank
    assert decode_batch(pack([1.0, [GOOD]])).rank is None


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"garbage", pack(7), pack({"a": 1}), pack([1.0]), pack(["x", []]), pack([1.0, [GOOD]])[:-3]],
)
def test_a_message_that_is_no_batch_is_counted(payload):
    assert decode_batch(payload) == EventBatch(0.0, (), None, malformed=1)


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_no_bytes_make_decoding_raise(payload):
    assert isinstance(decode_batch(payload), EventBatch)


plain = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=9) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
slots = st.sampled_from(["BlockStored", "BlockRemoved"]).flatmap(
    lambda tag: st.lists(plain, max_size=10).map(lambda s: [tag, *s])
)
maps = st.builds(
    lambda known, more: known | more,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])},
        optional=dict.fromkeys(("block_hashes", "token_ids", "block_size", "extra_keys", "medium"), plain),
    ),
    st.dictionaries(st.text(max_size=5), plain, max_size=2),
)


@settings(max_examples=50)
@given(st.lists(plain | slots | maps, max_size=4))
def test_no_event_makes_decoding_raise_or_costs_its_neighbours(events):
    batch = decode_batch(pack([1.0, [*events, GOOD], None]))
    assert batch.events[-1] == BlockRemoved((9,))
    assert len(batch.events) - 1 + batch.malformed <= len(events)


# ---- round trips -----------------------------------------------------------------------------------------------------

handles = st.integers(0, 2**64 - 1)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
media = st.sampled_from(["GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL"])


@st.composite
def stores(draw):
    size = draw(st.integers(1, 4))
    names = draw(st.lists(handles, min_size=1, max_size=4))
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size * len(names), max_size=size * len(names)))
    return BlockStored(
        tuple(names),
        draw(st.none() | handles),
        tokens,
        size,
        draw(media),
        draw(st.none() | texts),
        cache_salt=draw(st.none() | texts),
        group_idx=draw(st.none() | st.integers(0, 9)),
        kv_cache_spec_kind=draw(st.sampled_from([None, "full_attention", "sliding_window"])),
        session_id=draw(st.none() | texts),
    )


events = (
    stores() | st.builds(BlockRemoved, st.lists(handles, max_size=4).map(tuple), media) | st.just(AllBlocksCleared())
)
batches = st.builds(
    EventBatch, st.floats(0, 2e9), st.lists(events, max_size=4).map(tuple), st.none() | st.integers(0, 7)
)


def without_keys(batch):
    """The batch as far as a dialect carries it."""

    def carried(event):
        return msgspec.structs.replace(event, extra_keys=None) if isinstance(event, BlockStored) else event

    return msgspec.structs.replace(batch, events=tuple(map(carried, batch.events)))


@settings(max_examples=50)
@given(batches, st.sampled_from([Dialect.VLLM_MAP, Dialect.VLLM_ARRAY]))
def test_vllm_round_trip(batch, dialect):
    decoded = decode_batch(encode_batch(batch, dialect))
    assert without_keys(decoded) == without_keys(batch)


@settings(max_examples=50)
@given(batches)
def test_sglang_round_trip(batch):
    def carried(event):
        if isinstance(event, BlockStored):
            return msgspec.structs.replace(event, group_idx=None, kv_cache_spec_kind=None)
        return event

    known = msgspec.structs.replace(batch, events=tuple(map(carried, batch.events)))
    assert decode_batch(encode_batch(batch, Dialect.SGLANG)) == known


def test_vllm_map_wire_form():
    batch = EventBatch(2.0, (BlockStored((7, 8), None, [1, 2], 1, lora_name="ad", cache_salt="s"),), 1)
    assert msgspec.msgpack.decode(encode_batch(batch, Dialect.VLLM_MAP)) == [
        2.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7, 8],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 1,
                "medium": "GPU",
                "lora_name": "ad",
                "extra_keys": [["ad", "s"], ["ad"]],
            }
        ],
        1,
    ]


def test_vllm_array_wire_form():
    batch = EventBatch(2.0, (BlockStored((7,), 6, [1], 1), BlockRemoved((7,), "CPU", 3), AllBlocksCleared()), None)
    assert msgspec.msgpack.decode(encode_batch(batch, Dialect.VLLM_ARRAY)) == [
        2.0,
        [
            ["BlockStored", [7], 6, [1], 1, None, "GPU", None, None, None, None, None, None, None, None],
            ["BlockRemoved", [7], "CPU", 3, None, None],
            ["AllBlocksCleared"],
        ],
        None,
    ]


def test_sglang_wire_form():
    batch = EventBatch(2.0, (BlockStored((2**64 - 1,), 2**63, [1], 1, "CPU_PINNED", cache_salt="s"),), 0)
    assert msgspec.msgpack.decode(encode_batch(batch, Dialect.SGLANG)) == [
        2.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": [-1],
                "parent_block_hash": -(2**63),
                "token_ids": [1],
                "block_size": 1,
                "medium": "CPU_PINNED",
                "cache_salt": "s",
            }
        ],
        0,
    ]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.L0),
        ("GPU", Tier.L0),
        ("gpu", Tier.L0),
        ("CPU", Tier.L1),
        ("CPU_PINNED", Tier.L1),
        ("CPU_TIER2", Tier.L1),
        ("DISK", Tier.L2),
        ("STORAGE", Tier.L2),
        ("EXTERNAL", Tier.L2),
        ("MOON", None),
    ],
)
def test_tiers(medium, tier):
    assert tier_of(medium) is tier

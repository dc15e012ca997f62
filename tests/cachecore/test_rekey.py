"""Engine events become index events: names, scopes, sizes, copies, and what is refused."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.blocks import HASH_BYTES, Chain, Extra, canonical_extras, pack_tokens, split_chain
from cachecore.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Dialect,
    EventBatch,
    decode_batch,
    encode_batch,
)
from cachecore.holders import Epoch, Place, Tier, Worker, WorkerName
from cachecore.index.contract import Cleared, Removed, Stored
from cachecore.index.memory import MemoryIndex
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, KeyId, Keyring, Naming, Salt, TenantId

OURS = 4
RING = Keyring({0: bytes(range(32))}, 0)
HOLDER = Worker(WorkerName("w1"), Epoch(1))


def naming(tenant=DEFAULT_TENANT, adapter="", block_size=OURS):
    return Naming.of(IdentityScope("m", KeyId(tenant, 0), block_size, adapter=adapter), RING)


DEFAULT = naming()


def naming_for(salt, adapter):
    """No salt is the default tenant; a salt of ours names its tenant; adapter `unknown` and other salts are foreign."""
    if adapter == "unknown":
        return None
    if salt is None:
        return naming(adapter=adapter or "")
    read = RING.read_salt(salt)
    return None if read is None else naming(read.key_id.tenant, adapter or "")


def rekeyer(**options):
    return Rekeyer(OURS, naming_for, **options)


def tokens(count, start=0):
    return list(range(start, start + count))


def names(token_ids, of=DEFAULT, parent=None, extras=None):
    return of.hasher.chain(parent or of.root, pack_tokens(token_ids), extras)


def stored(handles, parent=None, *, start=None, size=OURS, **more):
    """A store whose tokens continue where the parent's ended, when handles are numbered by position from 1."""
    first = handles[0] - 1 if start is None else start
    return BlockStored(tuple(handles), parent, tokens(len(handles) * size, first * size), size, **more)


def held(emitted, tier=Tier.L0):
    """Names held after index events, by count, as an index would."""
    copies = Counter()
    for event in emitted:
        if isinstance(event, Cleared):
            copies.clear()
        elif event.tier == tier:
            copies.update({name: 1 if isinstance(event, Stored) else -1 for name in split_chain(event.chain)})
    assert all(count >= 0 for count in copies.values())
    return {name for name, count in copies.items() if count}


def bare(emitted):
    """Index events without what only a hand-over needs."""
    return [event._replace(handles=(), origin=None) if isinstance(event, Stored) else event for event in emitted]


def depth(index, chain):
    return max(index.match(chain).depths.values(), default=0)


def part(chain, *positions):
    return {chain[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in positions}


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_store_gets_our_names_and_a_child_continues_them():
    subject = rekeyer()
    chain = names(tokens(20))
    assert bare(subject.rekey([stored([1, 2])])) == [Stored(DEFAULT.root, chain[:32])]
    assert bare(subject.rekey([stored([3, 4, 5], 2)])) == [Stored(chain[16:32], chain[32:])]


def test_each_block_s_parent_is_its_predecessor():
    """E5: in a store of three under p, h2 hangs below h1, not below p."""
    subject, index = rekeyer(), MemoryIndex()
    index.apply(HOLDER, 0, subject.rekey([stored([1]), stored([2, 3, 4], 1)]))
    chain = names(tokens(16))
    assert depth(index, chain) == 4
    assert depth(index, Chain(chain[48:])) == 0


def test_blocks_are_matched_from_the_beginning_only():
    """E1: w1 holds A, w2 holds B; the query B, A finds one block on w2 and none on w1."""
    index, other = MemoryIndex(), Worker(WorkerName("w2"), Epoch(1))
    a, b = tokens(4), tokens(4, 100)
    index.apply(HOLDER, 0, rekeyer().rekey([BlockStored((1,), None, a, 4)]))
    index.apply(other, 0, rekeyer().rekey([BlockStored((2,), None, b, 4)]))
    depths = index.match(names(b + a)).depths
    assert {place.holder: depth for place, depth in depths.items()} == {other: 1}


def test_tokens_may_come_from_any_dialect():
    batch = EventBatch(0.0, (stored([1, 2]), stored([3], 2), BlockRemoved((3,))))
    for dialect in Dialect:
        emitted = rekeyer().rekey(decode_batch(encode_batch(batch, dialect)).events)
        assert held(emitted) == part(names(tokens(8)), 0, 1)


# ---- scopes ----------------------------------------------------------------------------------------------------------


def test_children_inherit_salt_and_adapter_from_the_root():
    tenant = TenantId("acme")
    salt = RING.mint_salt(Salt(KeyId(tenant, 0)))
    subject = rekeyer()
    emitted = subject.rekey([stored([1], cache_salt=salt, lora_name="ad"), stored([2], 1, lora_name="ad")])
    assert held(emitted) == part(names(tokens(8), naming(tenant, "ad")), 0, 1)
    assert subject.stats().namings == 1


def test_salt_and_adapter_of_one_spelling_differ():
    adapter_event = decode_batch(encode_batch(EventBatch(0, (stored([1], lora_name="X"),)), Dialect.VLLM_MAP)).events
    salt_event = decode_batch(encode_batch(EventBatch(0, (stored([1], cache_salt="X"),)), Dialect.VLLM_MAP)).events
    assert held(rekeyer().rekey(adapter_event)) == part(names(tokens(4), naming(adapter="X")), 0)
    assert rekeyer().rekey(salt_event) == []


def test_tenants_never_share_names():
    salts = [RING.mint_salt(Salt(KeyId(TenantId(tenant), 0))) for tenant in ("a", "b")]
    first, second = (held(rekeyer().rekey([stored([1, 2], cache_salt=salt)])) for salt in salts)
    assert len(first) == len(second) == 2
    assert first.isdisjoint(second)


def test_a_foreign_scope_is_followed_without_names():
    subject = rekeyer()
    assert subject.rekey([stored([1, 2], cache_salt="theirs"), stored([3], 2), stored([4], 3)]) == []
    stats = subject.stats()
    assert (stats.foreign, stats.pending, stats.handles, stats.stored) == (4, 0, 4, 0)
    assert subject.rekey([BlockRemoved((3, 4))]) == []
    assert (subject.stats().handles, subject.stats().unknown_handle) == (2, 0)


def test_a_scope_that_becomes_known_is_asked_for_again():
    known = []
    subject = Rekeyer(OURS, lambda salt, adapter: DEFAULT if known else None)
    assert subject.rekey([stored([1])]) == []
    known.append(True)
    assert len(subject.rekey([stored([11], start=0)])) == 1


def test_a_naming_of_another_block_size_is_a_programming_error():
    subject = Rekeyer(OURS, lambda salt, adapter: naming(block_size=8))
    with pytest.raises(ValueError, match="block size"):
        subject.rekey([stored([1])])


# ---- fidelity --------------------------------------------------------------------------------------------------------


def salt_of(fidelity, tenant=DEFAULT_TENANT):
    return RING.mint_salt(Salt(KeyId(tenant, 0), fidelity))


def fidelities(emitted):
    return [event.fidelity for event in emitted]


def test_a_salt_says_how_good_a_run_is_and_its_children_are_no_better():
    subject, chain = rekeyer(), names(tokens(20))
    emitted = subject.rekey(
        [
            stored([1]),
            stored([2], 1, cache_salt=salt_of(Fidelity.QUANTIZED)),
            stored([3], 2),
            stored([4], 3, cache_salt=salt_of(Fidelity.FUSED)),
            stored([5], 4, cache_salt=salt_of(Fidelity.EXACT)),
        ]
    )
    assert fidelities(emitted) == [Fidelity(number) for number in (0, 1, 1, 3, 3)]
    assert b"".join(event.chain for event in emitted) == chain
    assert {record.handle: record.fidelity for record in subject.handles()} == {1: 0, 2: 1, 3: 1, 4: 3, 5: 3}
    assert subject.rekey([BlockRemoved((5, 4, 3, 2, 1))]) == [
        Removed(chain[64:] + chain[48:64], fidelity=Fidelity.FUSED),
        Removed(chain[32:48] + chain[16:32], fidelity=Fidelity.QUANTIZED),
        Removed(chain[:16]),
    ]


def test_one_name_at_two_fidelities_under_two_handles():
    subject, index, chain = rekeyer(), MemoryIndex(), names(tokens(8))
    quantized = {"cache_salt": salt_of(Fidelity.QUANTIZED)}
    index.apply(HOLDER, 0, subject.rekey([stored([1, 2]), stored([102], 1, start=1, **quantized)]))
    index.apply(HOLDER, 1, subject.rekey([stored([103], 102, start=2)]))
    exact, worse = (Place(HOLDER, Tier.L0, fidelity) for fidelity in (Fidelity.EXACT, Fidelity.QUANTIZED))
    longer = names(tokens(12))
    assert index.match(longer).depths == {exact: 2, worse: 3}
    index.apply(HOLDER, 2, subject.rekey([BlockRemoved((2,))]))
    assert index.match(longer).depths == {exact: 1, worse: 3}
    index.apply(HOLDER, 3, subject.rekey([BlockRemoved((102, 103))]))
    assert index.match(chain).depths == {exact: 1}
    assert index.stats().unknown_removals == 0


def test_a_prompt_may_begin_quantized():
    [event] = rekeyer().rekey([stored([1], cache_salt=salt_of(Fidelity.QUANTIZED, TenantId("acme")))])
    assert (event.parent, event.fidelity) == (naming("acme").root, Fidelity.QUANTIZED)


@pytest.mark.parametrize("text", ["theirs", "rw1.", "rw1.default.0.9.-.AAAA", "rw1.default.0.x.-.AAAA", "rw1.1.1.1"])
def test_other_salts_behind_the_first_block_say_nothing(text):
    assert fidelities(rekeyer().rekey([stored([1]), stored([2], 1, cache_salt=text)])) == [Fidelity.EXACT] * 2


def test_a_run_that_waited_for_its_parent_is_no_better_than_it():
    subject, fused = rekeyer(), salt_of(Fidelity.FUSED)
    emitted = subject.rekey([stored([3], 2), stored([2], 1, cache_salt=fused), stored([1])])
    assert fidelities(emitted) == [Fidelity.EXACT, Fidelity.FUSED, Fidelity.FUSED]


def test_a_handle_that_comes_back_at_another_fidelity_replaces_the_old_one():
    subject, chain = rekeyer(), names(tokens(4))
    emitted = subject.rekey([stored([1]), stored([1]), stored([1], cache_salt=salt_of(Fidelity.QUANTIZED))])
    assert bare(emitted[:2]) == [Stored(DEFAULT.root, chain)] * 2
    assert emitted[3:] == [Removed(chain), Removed(chain)]
    assert subject.rekey([BlockRemoved((1,))]) == [Removed(chain, fidelity=Fidelity.QUANTIZED)]


def test_parts_of_blocks_are_as_good_as_the_worst():
    subject, chain = rekeyer(), names(tokens(12))
    quantized = {"cache_salt": salt_of(Fidelity.QUANTIZED)}
    emitted = subject.rekey([stored([1, 2, 3], size=2), stored([4], 3, size=2, **quantized), stored([5, 6], 4, size=2)])
    assert emitted == [
        Stored(DEFAULT.root, chain[:16]),
        Stored(chain[:16], chain[16:32], fidelity=Fidelity.QUANTIZED),
        Stored(chain[16:32], chain[32:], fidelity=Fidelity.QUANTIZED),
    ]
    assert subject.rekey([BlockRemoved((3, 1))]) == [
        Removed(chain[16:32], fidelity=Fidelity.QUANTIZED),
        Removed(chain[:16]),
    ]


@pytest.mark.parametrize("dialect", Dialect)
def test_every_dialect_carries_the_fidelity_of_a_later_run(dialect):
    batch = EventBatch(0.0, (stored([1]), stored([2], 1, cache_salt=salt_of(Fidelity.QUANTIZED))))
    emitted = rekeyer().rekey(decode_batch(encode_batch(batch, dialect)).events)
    assert held(emitted) == part(names(tokens(8)), 0, 1)
    assert fidelities(emitted) == [Fidelity.EXACT, Fidelity.QUANTIZED]


# ---- extras ----------------------------------------------------------------------------------------------------------


def test_images_change_names_from_the_block_they_begin_in():
    keys = (None, (("image-x", 1),), (("image-x", -3),))
    emitted = rekeyer().rekey([stored([1, 2, 3], extra_keys=keys)])
    extras = [b"", canonical_extras([Extra(1, b"image-x")]), canonical_extras([Extra(-3, b"image-x")])]
    assert bare(emitted) == [Stored(DEFAULT.root, names(tokens(12), extras=extras))]
    plain = names(tokens(12))
    assert held(emitted) & part(plain, 0, 1, 2) == part(plain, 0)


@pytest.mark.parametrize(
    ("key", "extra"),
    [
        (("mm", "id", 2), Extra(2, b"id")),
        (("id", 2), Extra(2, b"id")),
        ("text", Extra(0, b"text")),
        (b"digest", Extra(0, b"digest")),
        (("prompt_embeds", b"digest"), Extra(0, b"digest")),
        (17, Extra(0, b"17")),
    ],
)
def test_keys_as_extras(key, extra):
    emitted = rekeyer().rekey([stored([1, 2], extra_keys=((key,), None))])
    assert bare(emitted) == [Stored(DEFAULT.root, names(tokens(8), extras=[canonical_extras([extra]), b""]))]


@pytest.mark.parametrize("key", ["ad", ("lora", "ad", "/path"), ("cache_salt", "anything")])
def test_keys_that_repeat_the_scope_are_no_extras(key):
    emitted = rekeyer().rekey([stored([1], lora_name="ad", extra_keys=((key,),))])
    assert bare(emitted) == [Stored(naming(adapter="ad").root, names(tokens(4), naming(adapter="ad")))]


def test_an_offset_out_of_range_costs_its_event():
    subject = rekeyer()
    assert subject.rekey([stored([1], extra_keys=((("id", 2**40),),))]) == []
    assert subject.stats().refused == {"extra": 1}


# ---- block sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [2, 4])
def test_larger_engine_blocks_stand_for_several_of_ours(ratio):
    """E3: the engine's blocks are a multiple of ours."""
    size = OURS * ratio
    chain = names(tokens(size * 3))
    subject = rekeyer()
    emitted = subject.rekey([stored([1, 2], size=size), stored([3], 2, size=size)])
    assert bare(emitted)[0] == Stored(DEFAULT.root, chain[: 2 * ratio * HASH_BYTES])
    assert held(emitted) == part(chain, *range(3 * ratio))
    emitted += subject.rekey([BlockRemoved((2,))])
    assert held(emitted) == part(chain, *range(ratio), *range(2 * ratio, 3 * ratio))


def test_an_image_in_a_larger_engine_block():
    emitted = rekeyer().rekey([stored([1], size=12, extra_keys=((("id", 6),),))])
    extras = [b"", canonical_extras([Extra(2, b"id")]), canonical_extras([Extra(-2, b"id")])]
    assert bare(emitted) == [Stored(DEFAULT.root, names(tokens(12), extras=extras))]


@pytest.mark.parametrize("size", [1, 2])
def test_smaller_engine_blocks_make_one_of_ours_when_complete(size):
    parts = OURS // size
    subject = rekeyer()
    chain = names(tokens(8))
    first = list(range(1, parts))
    assert subject.rekey([stored(first, size=size)]) == []
    assert subject.rekey([stored([parts], parts - 1 or None, size=size)]) == [Stored(DEFAULT.root, chain[:16])]
    second = list(range(parts + 1, 2 * parts + 1))
    assert subject.rekey([stored(second, parts, size=size)]) == [Stored(chain[:16], chain[16:])]


def test_consecutive_completed_blocks_are_one_run():
    emitted = rekeyer().rekey([stored(list(range(1, 7)), size=2)])
    assert emitted == [Stored(DEFAULT.root, names(tokens(12)))]


@pytest.mark.parametrize("lost", [1, 2])
def test_losing_any_part_removes_our_block_once_and_its_return_restores_it(lost):
    subject = rekeyer()
    emitted = subject.rekey([stored([1, 2, 3, 4], size=2)])
    chain = names(tokens(8))
    assert subject.rekey([BlockRemoved((lost,))]) == [Removed(chain[:16])]
    back = stored([lost], 1 if lost == 2 else None, size=2)
    assert subject.rekey([back]) == [Stored(DEFAULT.root, chain[:16])]
    emitted += subject.rekey([BlockRemoved((1, 2))])
    assert emitted[1:] == [Removed(chain[:16])]
    assert subject.stats().handles == 2
    assert subject.rekey([BlockRemoved((4, 3))]) == [Removed(chain[16:])]
    assert subject.stats().handles == 0


def test_prompts_that_diverge_inside_one_of_our_blocks_share_parts():
    subject = rekeyer()
    left, right = [0, 1, 2, 3], [0, 1, 8, 9]
    emitted = subject.rekey([BlockStored((1, 2), None, left, 2), BlockStored((3,), 1, right[2:], 2)])
    assert held(emitted) == {*split_chain(names(left)), *split_chain(names(right))}
    emitted += subject.rekey([BlockRemoved((1,))])
    assert held(emitted) == set()


def test_parts_count_copies_and_tiers_apart():
    subject = rekeyer()
    emitted = subject.rekey([stored([1, 2], size=2), stored([1], size=2), stored([1], size=2, medium="CPU")])
    emitted += subject.rekey([BlockRemoved((1,))])
    assert len(held(emitted)) == 1
    assert held(emitted, Tier.L1) == set()
    emitted += subject.rekey([stored([2], 1, size=2, medium="CPU"), BlockRemoved((1,))])
    assert held(emitted) == set()
    assert len(held(emitted, Tier.L1)) == 1


def test_an_image_in_smaller_engine_blocks():
    keys = ((("id", 1),), (("id", -1),))
    emitted = rekeyer().rekey([stored([1, 2], size=2, extra_keys=keys)])
    assert emitted == [Stored(DEFAULT.root, names(tokens(4), extras=[canonical_extras([Extra(1, b"id")])]))]


@pytest.mark.parametrize("size", [3, 6])
def test_sizes_that_do_not_divide_are_refused_aloud(size):
    subject = rekeyer()
    emitted = subject.rekey([stored([1], size=size), stored([2], start=0)])
    assert bare(emitted) == [Stored(DEFAULT.root, names(tokens(4)))]
    assert subject.stats().refused == {"block_size": 1}


def test_an_engine_keeps_to_one_side_of_our_block_size():
    subject = rekeyer()
    subject.rekey([stored([1], size=2), stored([2], size=4), stored([3], size=1)])
    assert subject.stats().refused == {"block_size": 2}
    subject.clear()
    assert len(subject.rekey([stored([1], size=4), stored([2], 1, start=1, size=8)])) == 2


# ---- copies and removals ---------------------------------------------------------------------------------------------


def test_a_block_is_held_until_its_last_copy_is_removed():
    """E6: stored twice, removed twice."""
    subject, index, chain = rekeyer(), MemoryIndex(), names(tokens(4))
    seen = []
    steps = [stored([1]), stored([1]), BlockRemoved((1,)), BlockRemoved((1,)), BlockRemoved((1,)), stored([1])]
    for sequence, event in enumerate(steps):
        index.apply(HOLDER, sequence, subject.rekey([event]))
        seen.append(depth(index, chain))
    assert seen == [1, 1, 1, 0, 0, 1]
    assert subject.stats().unknown_handle == 1
    assert index.stats().unknown_removals == 0


def test_two_copies_removed_in_one_batch():
    subject = rekeyer()
    emitted = subject.rekey([stored([1]), stored([1]), BlockRemoved((1,)), BlockRemoved((1,))])
    assert [len(event.chain) for event in emitted] == [16, 16, 16, 16]
    assert held(emitted) == set()


def test_removals_that_follow_each_other_become_one_event():
    subject = rekeyer()
    subject.rekey([stored([1, 2, 3]), stored([4], 3, medium="CPU")])
    chain = names(tokens(16))
    emitted = subject.rekey([BlockRemoved((3,)), BlockRemoved((2,)), BlockRemoved((4,), "CPU"), BlockRemoved((1,))])
    assert emitted == [
        Removed(chain[32:48] + chain[16:32]),
        Removed(chain[48:], Tier.L1),
        Removed(chain[:16]),
    ]


def test_tiers_are_counted_apart_and_a_handle_lives_as_long_as_any_copy():
    """HiCache: GPU, then host, GPU gone, GPU again; a removal from a tier without a copy is nobody's."""
    subject = rekeyer()
    emitted = subject.rekey([stored([1]), stored([1], medium="CPU_PINNED"), BlockRemoved((1,))])
    assert held(emitted) == set()
    assert len(held(emitted, Tier.L1)) == 1
    assert subject.rekey([BlockRemoved((1,)), BlockRemoved((1,), "DISK")]) == []
    assert subject.stats().unknown_handle == 2
    assert [type(event) for event in subject.rekey([stored([2], 1)])] == [Stored]
    assert subject.rekey([BlockRemoved((1,), "CPU_PINNED")]) == [Removed(names(tokens(4)), Tier.L1)]
    assert subject.stats().handles == 1


def test_remote_blocks_are_as_far_as_a_pool():
    emitted = rekeyer().rekey([stored([1], medium="CPU", locality="REMOTE")])
    assert [event.tier for event in emitted] == [Tier.L2]


def test_clearing_drops_everything_of_this_rank():
    """E10."""
    subject = rekeyer()
    subject.rekey([stored([1, 2, 3]), stored([9], 8)])
    assert subject.rekey([AllBlocksCleared()]) == [Cleared()]
    assert (subject.stats().handles, subject.stats().pending, subject.stats().cleared) == (0, 0, 1)
    assert subject.rekey([stored([4], 3)]) == []


def test_store_remove_all_store_again():
    """E12."""
    subject = rekeyer()
    events = [stored([1, 2, 3]), *(BlockRemoved((handle,)) for handle in (1, 2, 3)), stored([1]), stored([2], 1)]
    assert held(subject.rekey(events)) == part(names(tokens(8)), 0, 1)


def test_a_partial_block_s_life_is_tolerated():
    """A partial block promoted to a full one, then announced once more."""
    subject = rekeyer()
    partial = BlockStored((50,), None, tokens(3), 4)
    emitted = subject.rekey([partial, BlockRemoved((50,)), stored([1]), partial])
    assert held(emitted) == part(names(tokens(4)), 0)
    assert subject.stats().refused == {"length": 2}


# ---- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        pytest.param(BlockStored((1,), None, tokens(12), 4), "length", id="E11 too many tokens"),
        pytest.param(BlockStored((1, 2, 3), None, tokens(4), 4), "length", id="E11 too few tokens"),
        pytest.param(BlockStored((), None, tokens(4), 4), "length", id="E11 no hashes"),
        pytest.param(BlockStored((), None, [], 4), "length", id="nothing"),
        pytest.param(stored([8, 8], start=0), "repeated_handle", id="twice in one store"),
        pytest.param(stored([8], 8), "repeated_handle", id="its own parent"),
        pytest.param(stored([9, 8], 8), "repeated_handle", id="its parent's parent"),
        pytest.param(BlockStored((8,), None, [1, 2, 3, -1], 4), "token", id="negative token"),
        pytest.param(BlockStored((8,), None, [1, 2, 3, 2**32], 4), "token", id="token too large"),
        pytest.param(stored([8], medium="MOON"), "medium", id="unknown medium"),
        pytest.param(BlockRemoved((8,), "MOON"), "medium", id="removed from an unknown medium"),
    ],
)
def test_what_contradicts_itself_costs_itself_only(event, reason):
    subject = rekeyer()
    emitted = subject.rekey([stored([21, 22], start=0), event, stored([23], 22, start=2)])
    assert held(emitted) == part(names(tokens(12)), 0, 1, 2)
    assert subject.stats().refused == {reason: 1}


def test_a_handle_that_comes_back_with_another_meaning_replaces_the_old_one():
    subject = rekeyer()
    other = tokens(4, 900)
    emitted = subject.rekey([stored([1]), stored([1]), BlockStored((1,), None, other, 4)])
    assert held(emitted) == set(split_chain(names(other)))
    emitted += subject.rekey([BlockStored((2,), 1, tokens(4), 4)])
    assert held(emitted) == set(split_chain(names(other + tokens(4))))


def test_only_attention_over_the_whole_prefix_counts():
    subject = rekeyer()
    sliding = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    emitted = subject.rekey([stored([1], **sliding), stored([1, 2], **full), stored([3], 2, group_idx=1)])
    assert held(emitted) == part(names(tokens(8)), 0, 1)
    assert subject.rekey([BlockRemoved((1,), group_idx=1)]) == []
    assert subject.rekey([BlockRemoved((2,), group_idx=0)]) == [Removed(names(tokens(8))[16:])]
    assert (subject.stats().ignored, subject.stats().unknown_handle) == (3, 0)


def test_one_of_several_full_groups_speaks_for_all():
    subject = rekeyer()
    group = [{"group_idx": number, "kv_cache_spec_kind": "mla_attention"} for number in (2, 5)]
    emitted = subject.rekey([stored([1], **group[0]), stored([1], **group[1]), BlockRemoved((1,), group_idx=2)])
    assert held(emitted) == set()


def test_a_kind_without_a_group():
    assert rekeyer().rekey([stored([1], kv_cache_spec_kind="mamba")]) == []


# ---- parents that were not seen --------------------------------------------------------------------------------------


def test_a_store_whose_parent_is_unknown_waits_and_is_never_a_root():
    """E13."""
    subject, index = rekeyer(), MemoryIndex()
    orphan = names(tokens(4, 8))
    index.apply(HOLDER, 0, subject.rekey([stored([4], 3), stored([3], 2)]))
    assert depth(index, orphan) == 0
    assert (subject.stats().pending, subject.stats().stored) == (2, 0)
    index.apply(HOLDER, 1, subject.rekey([stored([1, 2])]))
    assert depth(index, names(tokens(16))) == 4
    assert subject.stats().pending == 0


def test_waiting_blocks_can_be_removed():
    subject = rekeyer()
    subject.rekey([stored([2, 3, 4], 1), BlockRemoved((3,)), stored([2], 1, medium="CPU")])
    assert (subject.stats().pending, subject.stats().unknown_handle) == (2, 0)
    emitted = subject.rekey([BlockRemoved((2,), "CPU"), stored([1])])
    assert held(emitted) == part(names(tokens(8)), 0, 1)
    assert held(emitted, Tier.L1) == set()
    subject.rekey([BlockRemoved((4,))])
    assert subject.stats().unknown_handle == 1


def test_waiting_is_bounded_and_the_oldest_go_first():
    subject = rekeyer(pending_blocks_max=4)
    subject.rekey([stored([12, 13], 11), stored([22, 23], 21), stored([32], 31)])
    assert (subject.stats().pending, subject.stats().unknown_parent) == (3, 2)
    assert len(subject.rekey([stored([11], start=0)])) == 1
    assert len(subject.rekey([stored([21], start=0)])) == 2
    subject.rekey([stored(list(range(52, 60)), 51)])
    assert subject.stats().unknown_parent == 10


def test_a_second_copy_of_a_waiting_block_is_not_kept():
    subject = rekeyer()
    subject.rekey([stored([2], 1), stored([2], 1), BlockRemoved((2,))])
    assert held(subject.rekey([stored([1])])) == part(names(tokens(4)), 0)
    assert subject.stats().unknown_parent == 1


@pytest.mark.parametrize("size", [4, 2])
def test_handles_are_bounded(size):
    subject = rekeyer(handles_max=32)
    emitted = []
    for start in range(0, 400, 4):
        emitted += subject.rekey([BlockStored(tuple(range(start, start + 4)), None, tokens(4 * size, start), size)])
    assert subject.stats().handles <= 32
    assert len(held(emitted)) == subject.stats().handles * size // OURS


def test_handles_are_listed():
    subject = rekeyer()
    subject.rekey([stored([1, 2]), stored([1]), stored([1], medium="CPU"), stored([9], cache_salt="theirs", start=0)])
    chain = names(tokens(8))
    assert [(record.handle, record.names, record.copies) for record in subject.handles()] == [
        (1, chain[:16], (2, 1, 0)),
        (2, chain[16:], (1, 0, 0)),
        (9, b"", (1, 0, 0)),
    ]
    assert [record.naming is None for record in subject.handles()] == [False, False, True]


# ---- a naive model beside it -----------------------------------------------------------------------------------------


class Engine:
    """An engine's prefix cache over a tree of prompts, evicting leaves first."""

    def __init__(self, size):
        self.size = size
        self.copies = Counter()

    def store(self, path, known):
        handles = [hash(path[: depth + 1]) % 2**64 for depth in range(len(path))]
        fresh = handles[known:]
        self.copies.update(path[: depth + 1] for depth in range(known, len(path)))
        ids = [token for block in path[known:] for token in self.block(block)]
        return BlockStored(tuple(fresh), handles[known - 1] if known else None, ids, self.size)

    def remove(self, path):
        self.copies[path] -= 1
        return BlockRemoved((hash(path) % 2**64,))

    def block(self, number):
        return [number * 100 + place for place in range(self.size)]

    def names(self):
        """Our blocks whose every engine block is held."""
        held = {path for path, copies in self.copies.items() if copies}
        found = set()
        for path in held:
            ids = [token for block in path for token in self.block(block)]
            chain = list(split_chain(names(ids)))
            parts = max(1, OURS // self.size)
            if len(path) % parts == 0 and all(path[: len(path) - lost] in held for lost in range(parts)):
                found.update(chain[-max(1, self.size // OURS) :])
        return found


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([2, 4, 8]), st.lists(st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=6), st.booleans()))
)
def test_against_a_naive_engine(size, steps):
    engine, subject, emitted = Engine(size), rekeyer(), []
    for path, removing in steps:
        path = tuple(path)
        known = next((depth for depth in range(len(path)) if not engine.copies[path[: depth + 1]]), len(path))
        leaf = not any(copies and other[:-1] == path for other, copies in engine.copies.items())
        if not removing and known < len(path):
            emitted += subject.rekey([engine.store(path, known)])
        elif removing and engine.copies[path] and leaf:
            emitted += subject.rekey([engine.remove(path)])
        assert held(emitted) == engine.names()
    assert not subject.stats().refused
    assert subject.stats().pending == 0

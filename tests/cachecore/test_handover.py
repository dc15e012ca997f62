"""One rekeyer goes on where another stopped, from what an index has kept of the first one's events."""

from collections import Counter

import pytest

from cachecore.blocks import HASH_BYTES, PrefixHash, pack_tokens, split_chain
from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored
from cachecore.holders import Tier
from cachecore.index.contract import Cleared, Origin, Removed, Stored
from cachecore.ledgers import RestoredRun
from cachecore.rekey import Rekeyer
from cachecore.scope import Fidelity, TenantId
from tests.cachecore.handover import DEFAULT, OURS, Engine, Kept, chain_of, minted, naming, naming_for, tokens_of

EXACT = Tier.L0, Fidelity.EXACT


def rekeyer(names_for=naming_for, **options):
    return Rekeyer(OURS, names_for, **options)


def stored(numbers, parent=None, *, size=OURS, handles=None, **more):
    """A store of blocks whose handles are their numbers, unless said otherwise."""
    ids = [token for number in numbers for token in tokens_of(number, size)]
    return BlockStored(tuple(handles or numbers), parent, ids, size, **more)


def handed_over(kept, **options):
    subject = rekeyer(**options)
    subject.restore(kept.restored_runs())
    return subject


def kept_of(*batches, subject=None):
    kept, subject = Kept(), subject or rekeyer()
    for events in batches:
        kept.apply(subject.rekey(events))
    return kept


# ---- what stores say -------------------------------------------------------------------------------------------------


def test_a_store_says_its_handles_and_how_its_chain_is_named():
    salt = minted("acme")
    of = naming(TenantId("acme"), "ad")
    chain, origin = chain_of([1, 2, 3], of), Origin(salt, "ad", None, of.root)
    emitted = rekeyer().rekey([stored([1, 2], cache_salt=salt, lora_name="ad"), stored([3], 2, medium="CPU")])
    assert emitted == [
        Stored(of.root, chain[:32], handles=(1, 2), origin=origin),
        Stored(chain[16:32], chain[32:], Tier.L1, handles=(3,), origin=origin),
    ]


def test_runs_that_waited_for_their_parent_say_it_too():
    emitted = rekeyer().rekey([stored([3], 2), stored([1, 2])])
    assert [event.handles for event in emitted] == [(1, 2), (3,)]
    assert {event.origin for event in emitted} == {Origin(None, None, None, DEFAULT.root)}


def test_a_handle_may_stand_for_several_blocks():
    [event] = rekeyer().rekey([stored([1, 2], size=12)])
    assert (len(event.chain) // HASH_BYTES, event.handles) == (6, (1, 2))


def test_parts_of_blocks_have_no_handles():
    [event] = rekeyer().rekey([stored([1, 2, 3, 4], size=2)])
    assert (len(event.chain) // HASH_BYTES, event.handles, event.origin) == (2, (), None)
    assert not kept_of([stored([1, 2], size=2)]).persistable


def test_the_group_that_speaks_for_all_is_part_of_the_origin():
    full = {"group_idx": 3, "kv_cache_spec_kind": "full_attention"}
    [event] = rekeyer().rekey([stored([1], **full)])
    assert event.origin.group == 3


# ---- going on --------------------------------------------------------------------------------------------------------


def test_removals_by_handle_are_understood():
    subject = handed_over(kept_of([stored([1, 2, 3])]))
    assert subject.rekey([BlockRemoved((3, 1))]) == [Removed(chain_of([1, 2, 3])[32:] + chain_of([1])[:16])]
    assert (subject.stats().handles, subject.stats().unknown_handle) == (1, 0)


def test_children_go_on_under_the_naming_of_their_root():
    salt = minted("acme")
    of = naming(TenantId("acme"), "ad")
    subject = handed_over(kept_of([stored([1, 2], cache_salt=salt, lora_name="ad")]))
    chain = chain_of([1, 2, 3], of)
    assert subject.rekey([stored([3], 2)]) == [
        Stored(chain[16:32], chain[32:], handles=(3,), origin=Origin(salt, "ad", None, of.root))
    ]


def test_copies_are_counted_in_each_tier():
    kept = kept_of([stored([1, 2]), stored([1]), stored([2], 1, medium="CPU"), stored([2], 1, medium="CPU")])
    subject = handed_over(kept)
    assert {record.handle: record.copies for record in subject.handles()} == {1: (2, 0, 0), 2: (1, 2, 0)}
    subject.rekey([BlockRemoved((1,)), BlockRemoved((2,)), BlockRemoved((2,), "CPU")])
    assert {record.handle: record.copies for record in subject.handles()} == {1: (1, 0, 0), 2: (0, 1, 0)}
    assert subject.rekey([BlockRemoved((2,))]) == []


def test_several_names_a_handle():
    subject = handed_over(kept_of([stored([1, 2], size=8), stored([1], size=8)]))
    chain = chain_of([1, 2, 3], size=8)
    assert [record.names for record in subject.handles()] == [chain[:32], chain[32:64]]
    assert [record.copies[Tier.L0] for record in subject.handles()] == [2, 1]
    assert subject.rekey([BlockRemoved((2,))]) == [Removed(chain[32:64])]
    assert subject.rekey([stored([2, 3], 1, size=8)])[0].chain == chain[32:]


def test_two_handles_for_the_same_blocks():
    """An engine may tell apart what we do not: no salt, and a salt of the same tenant."""
    runs = [RestoredRun(chain_of([1]), (handle,), Origin(None, None, None, DEFAULT.root)) for handle in (1, 2)]
    subject = rekeyer()
    subject.restore(runs)
    assert subject.rekey([BlockRemoved((1,))]) == subject.rekey([BlockRemoved((2,))]) == [Removed(chain_of([1]))]


def test_removals_of_the_group_that_speaks_are_heard_before_its_next_store():
    full = {"group_idx": 3, "kv_cache_spec_kind": "full_attention"}
    subject = handed_over(kept_of([stored([1, 2], **full)]))
    assert subject.rekey([BlockRemoved((1,), group_idx=2)]) == []
    assert subject.rekey([BlockRemoved((2,), group_idx=3)]) == [Removed(chain_of([1, 2])[16:])]
    assert subject.rekey([stored([7], group_idx=2, kv_cache_spec_kind="full_attention")]) == []
    assert subject.rekey([stored([2], 1, group_idx=3)])[0].origin.group == 3


def test_clearing_forgets_what_was_restored():
    subject = handed_over(kept_of([stored([1, 2])]))
    assert subject.rekey([AllBlocksCleared(), BlockRemoved((1,)), stored([2], 1)]) == [Cleared()]


def test_nothing_restored_is_a_beginning():
    subject = rekeyer()
    subject.restore([])
    assert subject.rekey([stored([1, 2], size=2)]) == [Stored(DEFAULT.root, chain_of([1], size=4)[:0] + parts([1, 2]))]


def parts(numbers):
    ids = [token for number in numbers for token in tokens_of(number, 2)]
    return DEFAULT.hasher.chain(DEFAULT.root, pack_tokens(ids))


def test_a_handle_that_comes_back_with_another_meaning():
    subject = handed_over(kept_of([stored([1]), stored([1])]))
    kept = kept_of([stored([1]), stored([1])])
    kept.apply(subject.rekey([stored([5], handles=[1])]))
    assert +kept.copies == Counter({(EXACT, PrefixHash(chain_of([5]))): 1})


def test_handles_stay_bounded():
    kept = kept_of([stored([number]) for number in range(40)])
    subject = handed_over(kept, handles_max=32)
    kept.apply(subject.rekey([stored([77])]))
    assert subject.stats().handles == len(kept.copies) <= 32


def test_fidelities_and_what_inherits_them():
    """A quantized run behind an exact block, whose own quantized twin lies beside it."""
    salt, quantized = minted("acme"), minted("acme", Fidelity.QUANTIZED)
    kept = kept_of(
        [stored([1, 2], cache_salt=salt), stored([2, 3], 1, handles=[102, 103], cache_salt=quantized)],
    )
    chain = chain_of([1, 2, 3, 4], naming("acme"))
    subject = handed_over(kept)
    assert {record.handle: record.fidelity for record in subject.handles()} == {
        1: Fidelity.EXACT,
        2: Fidelity.EXACT,
        102: Fidelity.QUANTIZED,
        103: Fidelity.QUANTIZED,
    }
    [child] = subject.rekey([stored([4], 103)])
    assert (child.chain, child.fidelity, child.origin.salt) == (chain[48:], Fidelity.QUANTIZED, salt)
    assert subject.rekey([BlockRemoved((102, 2))]) == [
        Removed(chain[16:32], fidelity=Fidelity.QUANTIZED),
        Removed(chain[16:32]),
    ]


def test_a_prompt_that_began_quantized():
    """Its first salt says so, and is as good an origin as any: names do not depend on fidelity."""
    salt = minted("acme", Fidelity.QUANTIZED)
    subject = handed_over(kept_of([stored([1], cache_salt=salt)]))
    of, quantized = naming("acme"), Fidelity.QUANTIZED
    chain, origin = chain_of([1, 2], of), Origin(salt, None, None, of.root)
    assert subject.rekey([stored([2], 1), BlockRemoved((1,))]) == [
        Stored(chain[:16], chain[16:], fidelity=quantized, handles=(2,), origin=origin),
        Removed(chain[:16], fidelity=quantized),
    ]


# ---- namings that have changed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", [None, naming(model="m2")], ids=["no longer ours", "another name"])
def test_a_run_whose_naming_has_changed_can_be_removed_and_has_no_children(now):
    salt = minted("acme")
    kept = kept_of([stored([1, 2], cache_salt=salt), stored([8])])
    subject = rekeyer(lambda salt, adapter: now if salt else DEFAULT)
    subject.restore(kept.restored_runs())
    assert subject.rekey([stored([3], 2), stored([4], 3)]) == []
    assert (subject.stats().foreign, subject.stats().pending) == (2, 0)
    kept.apply(subject.rekey([BlockRemoved((2,)), BlockRemoved((3,)), stored([9], 8)]))
    assert {name for _, name in kept.copies} == {*split_chain(chain_of([1], naming("acme")) + chain_of([8, 9]))}


def test_a_block_stored_again_under_a_new_naming_is_renamed():
    renamed = naming(model="m2")
    kept = kept_of([stored([1, 2]), stored([8], cache_salt=minted("acme"))])
    subject = rekeyer(lambda salt, adapter: naming_for(salt, adapter) if salt else renamed)
    subject.restore(kept.restored_runs())
    kept.apply(subject.rekey([stored([1, 2])]))
    assert {name for _, name in kept.copies} == {
        *split_chain(chain_of([1, 2], renamed) + chain_of([8], naming("acme")))
    }


def test_where_no_naming_is_as_it_was_there_is_nothing_to_go_on_with():
    kept = kept_of([stored([1, 2])])
    subject = rekeyer(lambda salt, adapter: naming(model="m2"))
    with pytest.raises(ValueError, match="as it would be now"):
        subject.restore(kept.restored_runs())
    assert subject.stats().handles == 0


# ---- runs that contradict themselves ---------------------------------------------------------------------------------

ORIGIN = Origin(None, None, None, DEFAULT.root)


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        pytest.param([((1,), ())], "0 handles", id="no handles"),
        pytest.param([((), (1,))], "1 handles", id="no names"),
        pytest.param([((1, 2, 3), (1, 2))], "2 handles", id="too few handles"),
        pytest.param([((1, 2, 3), (1, 1, 2))], "numbers of blocks", id="half an engine block at the end"),
        pytest.param([((1, 2, 3), (1, 2, 2))], "numbers of blocks", id="half an engine block at the beginning"),
        pytest.param([((1, 2), (1, 1)), ((5,), (5,))], "numbers of blocks", id="half an engine block by itself"),
        pytest.param([((1, 2, 3), (1, 2, 1))], "numbers of blocks", id="a handle in two places"),
        pytest.param([((1,), (1,)), ((2,), (1,))], "different blocks", id="a handle in two runs"),
        pytest.param([((1, 2), (1, 1), (1, 2))], "numbers of copies", id="copies of half an engine block"),
        pytest.param([((1, 2), (1, 2), (1,))], "numbers of copies", id="too few copies"),
        pytest.param([((1,), (1,), (1, 1, 1))], "numbers of copies", id="too many copies"),
        pytest.param([((1,), (1,), (0,))], "at least one", id="no copy"),
        pytest.param([((1,), (1,), (2**32,))], "at least one", id="copies beyond reason"),
        pytest.param([((1,), (1,)), ((1,), (1,), (), Fidelity.FUSED)], "different blocks", id="two fidelities"),
    ],
)
def test_runs_that_contradict_themselves_restore_nothing(runs, reason):
    subject = rekeyer()
    with pytest.raises(ValueError, match=reason):
        subject.restore(
            RestoredRun(chain_of(numbers), handles, ORIGIN, Tier.L0, *copies) for numbers, handles, *copies in runs
        )
    assert subject.stats().handles == 0
    assert subject.rekey([BlockRemoved((1,)), BlockRemoved((2,)), stored([7], 1)]) == []


# ---- an uninterrupted one beside it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [OURS, 3 * OURS])
@pytest.mark.parametrize("seed", range(12))
def test_a_hand_over_after_every_batch_changes_nothing(seed, size):
    """Where each block's parent is held when it is stored, the events are the very same."""
    engine, whole, subject, kept = Engine(seed, size, orphans=False), rekeyer(), rekeyer(), Kept()
    for _ in range(200):
        batch = engine.batch()
        expected, emitted = whole.rekey(batch), subject.rekey(batch)
        assert emitted == expected
        kept.apply(emitted)
        assert size > OURS or kept.copies == engine.truth()
        subject = rekeyer()
        subject.restore(kept.restored_runs(engine.rng))
    stats = whole.stats()
    assert (stats.pending, stats.unknown_parent, stats.unknown_handle) == (0, 0, 0)
    assert min(stats.stored, stats.removed, stats.foreign) > 10


def test_the_seeded_streams_go_through_every_fidelity():
    engine, subject, kept = Engine(3, OURS, orphans=False), rekeyer(), Kept()
    for _ in range(60):
        kept.apply(subject.rekey(engine.batch()))
    seen = {fidelity for (_, fidelity), _ in kept.copies}
    assert seen == {Fidelity.EXACT, Fidelity.QUANTIZED, Fidelity.FUSED}


@pytest.mark.parametrize("seed", range(12))
def test_a_hand_over_may_lose_blocks_that_waited_and_never_keeps_any(seed):
    engine, subject, kept, pending, most = Engine(seed, OURS, orphans=True), rekeyer(), Kept(), 0, 0
    for step in range(120):
        kept.apply(subject.rekey(engine.batch()))
        assert kept.copies <= engine.truth()
        if step % 5 == 0:
            pending += subject.stats().pending
            subject = rekeyer()
            subject.restore(kept.restored_runs(engine.rng))
        most = max(most, len(kept.copies))
    assert pending > 0
    assert most > 10

"""What of an engine's blocks is known again after events were lost, or not believed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.blocks import split_chain
from cachecore.events import BlockRemoved
from cachecore.holders import Tier
from cachecore.index.contract import Stored
from tests.cachecore.test_rekey import DEFAULT, Engine, bare, held, names, part, rekeyer, stored, tokens


def test_what_is_stored_behind_a_block_in_doubt_proves_it_and_all_before_it():
    subject = rekeyer()
    subject.rekey([stored([1, 2, 3]), stored([4], 3)])
    subject.doubt()
    assert subject.rekey([BlockRemoved((2,))]) == []
    emitted = subject.rekey([stored([11], 3, start=9)])
    chain = names(tokens(12))
    assert bare(emitted) == [
        Stored(DEFAULT.root, chain, Tier.L0),
        Stored(chain[-16:], names(tokens(4, 36), parent=chain[-16:]), Tier.L0),
    ]
    assert emitted[0].handles == (1, 2, 3)
    assert subject.stats().proven == 3
    assert held(emitted + subject.rekey([BlockRemoved((3, 11))])) == part(chain, 0, 1)


def test_a_proof_goes_as_far_as_what_is_held():
    subject = rekeyer()
    subject.rekey([stored([1, 2, 3])])
    subject.doubt()
    subject.rekey([stored([1])])
    emitted = subject.rekey([stored([4], 3)])
    assert emitted[0].handles == (2, 3)
    assert emitted[0].parent == names(tokens(4))
    assert subject.stats().proven == 2


def test_a_farther_tier_proves_nothing():
    subject = rekeyer()
    subject.rekey([stored([1]), stored([1], medium="CPU")])
    subject.doubt()
    assert subject.rekey([stored([2], 1, medium="CPU")]) == []
    assert subject.stats().pending == 1


def test_a_restart_leaves_nothing_to_prove():
    subject = rekeyer()
    subject.rekey([stored([1])])
    subject.clear()
    assert subject.rekey([stored([2], 1)]) == []
    assert subject.stats().pending == 1


def test_blocks_that_name_each_other_as_parents_prove_nothing():
    subject = rekeyer()
    subject.rekey([stored([1]), stored([2], 1), stored([1], 2)])
    subject.doubt()
    assert subject.rekey([stored([3], 2)]) == []


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=6), st.sampled_from(["store", "remove", "lose"]))
    ),
)
def test_in_doubt_no_more_is_held_than_by_a_naive_engine_and_no_beginning_is_missed(size, steps):
    engine, subject, emitted = Engine(size), rekeyer(), []
    for path, step in steps:
        path = tuple(path)
        known = next((depth for depth in range(len(path)) if not engine.copies[path[: depth + 1]]), len(path))
        leaf = not any(copies and other[:-1] == path for other, copies in engine.copies.items())
        if step == "lose":
            if engine.copies[path] and leaf:
                engine.remove(path)
            subject.doubt()
            emitted = []
        elif step == "store" and known < len(path):
            emitted += subject.rekey([engine.store(path, known)])
            chain = names([token for block in path for token in engine.block(block)])
            assert set(split_chain(chain)) <= held(emitted)
        elif step == "remove" and engine.copies[path] and leaf:
            emitted += subject.rekey([engine.remove(path)])
        assert held(emitted) <= engine.names()
    assert subject.stats().pending == 0

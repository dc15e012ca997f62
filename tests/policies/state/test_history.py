from random import Random

import pytest

from policies.state.history import RoutingHistory

A, B = ("a", 0), ("b", 0)


def test_remembers_where_prompts_went(store, chain):
    history = RoutingHistory(store)
    history.record(A, chain("hello"))
    history.record(B, chain("help"))
    assert history.depths(chain("helper")) == {A: 3, B: 4}


def test_a_conversation_is_stored_once_however_many_turns(store, chain):
    history = RoutingHistory(store)
    text = "abcdefghijklmnopqrst"
    for turn in range(1, len(text) + 1):
        history.record(A, chain(text[:turn]))
    assert history.blocks(A) == 20
    assert set(store.counts[A].values()) == {1}
    assert history.depths(chain(text)) == {A: 20}


def test_forks_keep_their_common_beginning(store, chain):
    history = RoutingHistory(store, worker_blocks_max=8)
    history.record(A, chain("sysX"))
    history.record(A, chain("sysY"))
    history.record(A, chain("sysZ"))
    assert history.depths(chain("sysX")) == {A: 3}
    assert history.depths(chain("sysY")) == {A: 4}
    assert history.depths(chain("sysZ")) == {A: 4}


def test_the_least_recently_sent_goes_first(store, chain):
    history = RoutingHistory(store, worker_blocks_max=6)
    history.record(A, chain("one"))
    history.record(A, chain("two"))
    history.record(A, chain("one"))
    history.record(A, chain("six"))
    assert history.depths(chain("two")) == {}
    assert history.depths(chain("one")) == {A: 3}
    assert history.blocks(A) == 6


def test_of_a_chain_beyond_the_bound_the_beginning_is_kept(store, chain):
    history = RoutingHistory(store, worker_blocks_max=4)
    history.record(A, chain("abcdefgh"))
    assert history.depths(chain("abcdefgh")) == {A: 4}


def test_asking_changes_nothing(store, chain):
    history = RoutingHistory(store, worker_blocks_max=4)
    history.record(A, chain("one"))
    before = repr(history), dict(store.counts[A])
    for _ in range(100):
        history.depths(chain("onward"))
    assert (repr(history), dict(store.counts[A])) == before
    assert repr(history) == "RoutingHistory((chains, blocks) by worker: {('a', 0): (1, 3)})"


def test_a_worker_that_restarts_is_forgotten(store, chain):
    history = RoutingHistory(store)
    history.record(A, chain("one"))
    history.record(B, chain("one"))
    history.forget(A)
    history.forget(("never", 0))
    assert history.depths(chain("one")) == {B: 3}
    assert history.blocks(A) == 0


def test_bounds_and_counts_hold_on_random_traffic(store, chain):
    random, history = Random(5), RoutingHistory(store, worker_blocks_max=40)
    for _ in range(2000):
        text = "".join(random.choice("ab") for _ in range(random.randrange(1, 14)))
        key = random.choice([A, B])
        history.record(key, chain(text))
        assert history.depths(chain(text))[key] == len(text)
        assert history.blocks(key) <= 40
    assert store.unknown_removals == 0
    assert sum(store.counts[A].values()) == history.blocks(A)


def test_an_empty_chain_and_a_nonsense_bound(store):
    history = RoutingHistory(store)
    history.record(A, b"")
    assert history.blocks(A) == 0
    with pytest.raises(ValueError, match="must be positive"):
        RoutingHistory(store, 0)


def test_what_was_noted_is_recorded_once_it_is_asked_for(store, chain):
    history = RoutingHistory(store, worker_blocks_max=8)
    for text in ("one", "other", "further", "six", "sevens"):
        history.note(A, chain(text))
    history.note(B, chain("one"))
    assert history.depths(chain("sevens")) == {}
    history.recall(A)
    assert history.depths(chain("sevens")) == {A: 6}
    assert history.depths(chain("one")) == {}, "what a worker is noted to have is bounded as its history is"
    history.recall(A)
    assert history.blocks(A) == 6


def test_a_note_beyond_the_bound_is_no_note(store, chain):
    history = RoutingHistory(store, worker_blocks_max=2)
    history.note(A, chain("abc"))
    history.note(A, chain("ab"))
    history.recall(A)
    assert history.blocks(A) == 2


def test_notes_of_a_worker_that_is_gone_are_forgotten(store, chain):
    history = RoutingHistory(store)
    history.note(A, chain("one"))
    history.forget(A)
    history.recall(A)
    assert history.depths(chain("one")) == {}

from random import Random

import pytest

from policies import POLICIES, create
from policies.contract import Query
from policies.replay import Replay, freeze

QUERY = Query(1000)


def moments(workers, count=20):
    """Decisions of a fleet in which a has most of the prompt, and b a request more with each."""
    workers.matched = {"a": 800}
    kept = []
    for number in range(count):
        kept.append(freeze(QUERY, workers.snapshot(float(number))))
        workers.busy("b", 1)
    return kept


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_held_against_itself_changes_nothing(fleet, policy):
    replay = Replay(create(policy), create(policy))
    for moment in moments(fleet("abc")):
        replay.take(moment)
    document = replay.document()
    assert (document["decisions"], document["elsewhere"]) == (20, 0)
    assert document["predicted_start_ms_mean_change"] == 0.0
    assert document["present"] == document["proposed"]


def test_what_another_policy_would_have_changed(fleet):
    """Blind turns send two of three prompts where nothing of them is."""
    workers = fleet("abc")
    replay = Replay(create("kv-aware"), create("round-robin"))
    for moment in moments(workers):
        replay.take(moment)
    document = replay.document()
    assert document["decisions"] == 20
    assert 13 <= document["elsewhere"] <= 14
    hit = workers.model.prefill_seconds(200, 800) * 1e3
    assert document["present"]["predicted_start_ms_mean"] == pytest.approx(hit)
    assert document["present"]["predicted_start_ms_p99"] == pytest.approx(hit)
    assert document["proposed"]["predicted_start_ms_p50"] > hit
    change = document["proposed"]["predicted_start_ms_mean"] - document["present"]["predicted_start_ms_mean"]
    assert document["predicted_start_ms_mean_change"] == pytest.approx(change)


def test_a_moment_stays_as_it_was(fleet):
    """Views and loads are live: what was kept of them must not move with them."""
    workers = fleet("ab")
    workers.matched = {"a": 800}
    workers.busy("a", 2, prefill_seconds=0.1)
    snapshot = workers.snapshot(0.0)
    moment = freeze(QUERY, snapshot)
    chosen = create("kv-aware").decide(QUERY, moment.snapshot, Random(1)).costs
    workers.busy("a", 30)
    snapshot.workers[0].matched_tokens = 0
    kept = moment.snapshot.workers[0]
    assert (kept.load.inflight, kept.load.wait_seconds(99.0), kept.matched_tokens) == (2, 0.2, 800)
    assert create("kv-aware").decide(QUERY, moment.snapshot, Random(1)).costs == chosen


def test_nothing_kept_says_nothing():
    document = Replay(create("session"), create("kv-aware")).document()
    assert (document["decisions"], document["proposed"]["predicted_start_ms_p99"]) == (0, 0.0)

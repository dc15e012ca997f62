from random import Random

import pytest

from policies import create
from policies.contract import Query
from policies.peers import create_peer
from policies.peers.contract import Asked
from policies.shadow import Shadows

BLOCK = 16
UNNAMED = Asked(b"", 1000, BLOCK)


def test_agreement_leaves_no_regret(fleet):
    workers = fleet("abc")
    workers.matched = {"a": 800}
    shadows = Shadows([create("kv-aware")], Random(1))
    snapshot = workers.snapshot()
    for _ in range(5):
        served = create("prefix-aware").decide(Query(1000), snapshot, workers.random)
        shadows.judge(Query(1000), UNNAMED, snapshot, served)
    assert shadows.document() == [
        {
            "policy": "kv-aware",
            "decisions": 5,
            "agreed": 5,
            "regret_ms_mean": 0.0,
            "regret_tokens_mean": 0.0,
            "regret_cost_share_mean": None,
        }
    ]


def test_regret_is_what_the_other_choice_would_have_saved(fleet):
    """Served blindly by b, which has nothing and a queue, where a has 800 tokens and none. One more is agreed on."""
    workers = fleet("ab")
    workers.matched = {"a": 800}
    workers.busy("b", 1, prefill_seconds=0.2)
    snapshot, query = workers.snapshot(), Query(1000)
    shadows = Shadows([create("kv-aware"), create_peer("production-stack-prefix", lambda: None)], Random(1))
    policy = create("round-robin")
    chosen = {}
    while len(chosen) < 2:
        served = policy.decide(query, snapshot, workers.random)
        chosen[served.worker.name] = served
    for served in chosen.values():
        shadows.judge(query, UNNAMED, snapshot, served)
    model = workers.model
    saved = 0.2 + model.prefill_seconds(1000, 0) - model.prefill_seconds(200, 800)
    ours, other = shadows.document()
    assert (ours["decisions"], ours["agreed"]) == (2, 1)
    assert ours["regret_ms_mean"] == pytest.approx(saved / 2 * 1e3)
    assert ours["regret_tokens_mean"] == 400.0
    costs = create("kv-aware").decide(query, snapshot, workers.random).costs
    assert ours["regret_cost_share_mean"] == pytest.approx(costs[1] / costs[0] - 1)
    assert other["regret_ms_mean"] == ours["regret_ms_mean"]
    assert other["regret_cost_share_mean"] is None


def test_a_shadow_may_do_worse(fleet):
    workers = fleet("ab")
    workers.matched = {"a": 800}
    snapshot, query = workers.snapshot(), Query(1000)
    served = create("kv-aware").decide(query, snapshot, workers.random)
    workers.busy("a", 1, prompt_tokens=1, prefill_seconds=0.0)
    shadows = Shadows([create("least-loaded")], Random(1))
    shadows.judge(query, UNNAMED, snapshot, served)
    assert shadows.document()[0]["regret_ms_mean"] < 0
    assert shadows.document()[0]["regret_tokens_mean"] == -800


def test_observers_are_told_what_really_happened(fleet, store, chain):
    """Dynamo's blocks follow the worker that was served by, whatever it would have chosen itself."""
    workers = fleet("ab")
    policy = create_peer("dynamo", lambda: store)
    shadows = Shadows([policy], Random(1))
    asked, query = Asked(chain("abcd"), 64, BLOCK), Query(64)
    for number in range(3):
        snapshot = workers.snapshot()
        view = snapshot.workers[0]
        served = create("kv-aware").decide(query, snapshot, workers.random)
        shadows.judge(query, asked, snapshot, served)
        shadows.dispatched(f"r{number}", asked, view, 0.0)
    assert policy.decide(Query(64), workers.snapshot(), Random(1)).costs == [3 * 4 + 4 + 4, 4 + 4]
    for number in range(3):
        shadows.first_token(f"r{number}", 1.0)
        shadows.finished(f"r{number}", 2.0)
    assert store.counts == {}


def test_what_is_served_does_not_depend_on_shadows(fleet):
    """Ties are broken by the same random numbers with and without."""

    def served(shadowed):
        workers, policy, names = fleet("abcdef"), create("kv-aware"), []
        shadows = Shadows([create("kv-aware"), create("round-robin")], Random(5)) if shadowed else None
        for number in range(60):
            snapshot = workers.snapshot()
            decision = policy.decide(Query(300), snapshot, workers.random)
            if shadows is not None:
                shadows.judge(Query(300), UNNAMED, snapshot, decision)
            workers.inflight.dispatch(f"r{number}", decision.worker.name, 0, 0.0, 300, 0.01)
            names.append(decision.worker.name)
        return names

    assert served(True) == served(False)

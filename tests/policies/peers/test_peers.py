"""Each rival by its formula, with numbers worked out by hand."""

from random import Random

import pytest

from policies.contract import Query
from policies.peers import PEERS, create_peer
from policies.peers.contract import Asked, observes
from policies.peers.picking import cheapest

BLOCK = 16


@pytest.fixture
def peer(store):
    return lambda name: create_peer(name, type(store))


def chosen(policy, query, workers, rounds=60):
    snapshot = workers.snapshot()
    return {policy.decide(query, snapshot, workers.random).worker.name for _ in range(rounds)}


@pytest.mark.parametrize("name", PEERS)
def test_every_one_is_a_policy_by_its_name(peer, fleet, name):
    policy, workers = peer(name), fleet("abc")
    workers.matched = {"a": 640, "b": 320}
    workers.busy("c", 2)
    asked = Asked(b"", 1000, BLOCK)
    if observes(policy):
        policy.asked(asked)
    snapshot = workers.snapshot()
    decision = policy.decide(Query(1000), snapshot, workers.random)
    assert policy.name == name
    assert decision.worker in snapshot.workers
    assert decision.reason
    assert len(decision.costs) in (0, 3)


def test_an_unknown_one_is_named(peer):
    with pytest.raises(ValueError, match="unknown policy 'llmd'; there are sglang, dynamo,"):
        peer("llmd")


def test_equals_are_picked_alike():
    random = Random(1)
    picked = [cheapest([2.0, 1.0, 1.0, 1.0], random) for _ in range(300)]
    assert all(70 <= picked.count(place) <= 130 for place in (1, 2, 3))


class TestSglang:
    def test_a_match_above_the_threshold_is_followed(self, peer, fleet):
        workers = fleet("abc")
        workers.busy("a", 20)
        workers.matched = {"a": 310, "b": 100}
        assert chosen(peer("sglang"), Query(1000), workers) == {"a"}

    def test_a_shorter_one_goes_to_the_fewest_requests(self, peer, fleet):
        workers = fleet("abc")
        workers.busy("a", 1)
        workers.matched = {"a": 300}
        assert chosen(peer("sglang"), Query(1000), workers) == {"b", "c"}

    @pytest.mark.parametrize(("most", "least", "balanced"), [(64, 0, True), (65, 0, False), (300, 200, True)])
    def test_balance_takes_both_bounds(self, peer, fleet, most, least, balanced):
        workers = fleet("ab")
        workers.busy("a", most)
        workers.busy("b", least)
        workers.matched = {"a": 900}
        assert chosen(peer("sglang"), Query(1000), workers) == {"a" if balanced else "b"}


class TestDynamo:
    def test_cost_is_prefill_and_active_blocks(self, peer, fleet, chain):
        policy, workers = peer("dynamo"), fleet("ab")
        view = workers.snapshot().workers[0]
        policy.dispatched("r1", Asked(chain("abcd"), 70, BLOCK), view, 0.0)  # 4 blocks and a part of one
        asked = Asked(chain("abxy"), 64, BLOCK)
        workers.matched = {"a": 32, "b": 16}
        policy.asked(asked)
        costs = policy.decide(Query(64), workers.snapshot(), workers.random).costs
        # a: 70 + 64 - 32 tokens to prefill; 5 blocks active and 2 more, since 2 are shared. b: 48 tokens, 4 blocks.
        assert costs == pytest.approx([102 / 16 + 7, 48 / 16 + 4])
        policy.first_token("r1", 1.0)
        policy.asked(asked)
        costs = policy.decide(Query(64), workers.snapshot(), workers.random).costs
        assert costs == pytest.approx([32 / 16 + 7, 48 / 16 + 4])
        policy.finished("r1", 2.0)
        policy.asked(asked)
        costs = policy.decide(Query(64), workers.snapshot(), workers.random).costs
        assert costs == pytest.approx([32 / 16 + 4, 48 / 16 + 4])

    def test_the_tuned_one_weighs_prefill_more(self, peer, fleet, chain):
        asked = Asked(chain("abcd"), 64, BLOCK)
        workers, costs = fleet("ab"), {}
        workers.matched = {"a": 48}
        for name in ("dynamo", "dynamo-tuned"):
            policy = peer(name)
            policy.asked(asked)
            costs[name] = policy.decide(Query(64), workers.snapshot(), workers.random).costs
        assert costs == {"dynamo": [1 + 4, 4 + 4], "dynamo-tuned": [32 + 4, 128 + 4]}

    def test_siblings_count_once_and_everything_returns_to_zero(self, peer, fleet, chain):
        policy, workers, random = peer("dynamo"), fleet("ab"), Random(2)
        views, live = workers.snapshot().workers, []
        for number in range(200):
            if len(live) > 5:
                policy.finished(live.pop(random.randrange(len(live))), 0.0)
            text = "".join(random.choice("ab") for _ in range(random.randrange(5)))
            policy.dispatched(f"r{number}", Asked(chain(text), BLOCK * len(text) + 3, BLOCK), random.choice(views), 0.0)
            live.append(f"r{number}")
        for request_id in [*live, *live, "unheard"]:
            policy.first_token(request_id, 0.0)
            policy.finished(request_id, 0.0)
        policy.asked(Asked(b"", 0, BLOCK))
        assert policy.decide(Query(0), workers.snapshot(), random).costs == [0.0, 0.0]

    def test_a_request_sent_again_counts_once(self, peer, fleet, chain):
        policy, workers = peer("dynamo"), fleet("ab")
        views, asked = workers.snapshot().workers, Asked(chain("abcd"), 64, BLOCK)
        policy.dispatched("r", asked, views[0], 0.0)
        policy.dispatched("r", asked, views[1], 1.0)
        policy.asked(Asked(b"", 0, BLOCK))
        assert policy.decide(Query(0), workers.snapshot(), workers.random).costs == [0.0, 4 + 4]


class TestLlmD:
    def test_sticky_until_the_holder_would_start_18_seconds_later(self, peer, fleet):
        workers = fleet("ab")
        workers.matched = {"a": 800}
        workers.busy("a", 2, prompt_tokens=143_000)
        assert chosen(peer("llm-d"), Query(1000), workers) == {"a"}
        workers.busy("a", 1, prompt_tokens=2_000)  # 288,000 / 15,928 = 18.08 s
        workers.matched = {"a": 800, "b": 799}
        assert chosen(peer("llm-d"), Query(1000), workers) == {"b"}

    def test_scores_weigh_prefix_queue_and_memory(self, peer, fleet):
        workers = fleet("abc")
        workers.matched = {"a": 700}
        workers.busy("a", 4)
        workers.busy("b", 1)
        policy = peer("llm-d")
        # a: 3 * .7 + 0 + 2 = 4.1; b: 0 + 1.5 + 2 = 3.5; c: 0 + 2 + 2 = 4.0
        assert chosen(policy, Query(1000), workers) == {"a"}
        for name, tokens in (("a", 10_000), ("b", 10_000), ("c", 10_000)):
            workers.inflight.account(name).new_life(0, tokens)
        # a needs 4 * 1,256 of 10,000 tokens of memory: 3.1
        assert chosen(policy, Query(1000), workers) == {"c"}


class TestProductionStack:
    def test_match_less_relative_load(self, peer, fleet):
        workers = fleet("ab")
        workers.busy("a", 3)
        workers.busy("b", 1)
        workers.matched = {"a": 1010}
        decision = peer("production-stack").decide(Query(1000), workers.snapshot(), workers.random)
        assert decision.costs == pytest.approx([0.5 - 1.01, -0.5])
        assert decision.worker.name == "a"

    def test_prefix_alone_piles_up(self, peer, fleet):
        workers = fleet("abc")
        workers.busy("a", 500)
        workers.matched = {"a": 1}
        assert chosen(peer("production-stack-prefix"), Query(1000), workers) == {"a"}


class TestAibrix:
    def test_the_longest_match_within_a_deviation(self, peer, fleet):
        workers = fleet("abc")
        workers.matched = {"a": 500, "b": 400}
        workers.busy("a", 8)
        workers.busy("b", 3)
        # mean 3.67, deviation 3.3: a is beyond
        assert chosen(peer("aibrix"), Query(1000), workers) == {"b"}
        workers.busy("a", 1)
        assert chosen(peer("aibrix"), Query(1000), workers) == {"c"}  # nine apart: imbalanced


class TestPreble:
    def test_exploits_a_match_of_more_than_half(self, peer, fleet):
        policy, workers = peer("preble"), fleet("abc")
        workers.matched = {"a": 501, "b": 501}
        view = workers.snapshot().workers[0]
        policy.dispatched("r", Asked(b"", 20_000, BLOCK), view, 0.0)
        assert chosen(policy, Query(1000), workers) == {"b"}

    def test_explores_by_the_work_of_three_minutes(self, peer, fleet):
        policy, workers = peer("preble"), fleet("ab")
        workers.matched = {"a": 500}
        view = workers.snapshot().workers[0]
        policy.dispatched("r", Asked(b"", 1000, BLOCK), view, 0.0)
        assert chosen(policy, Query(1000), workers) == {"b"}
        later = workers.snapshot(180.0)
        assert policy.decide(Query(1000), later, workers.random).worker.name == "a"

    def test_learns_how_long_answers_are(self, peer, fleet):
        policy, workers = peer("preble"), fleet("ab")
        for number in range(200):
            policy.first_token(f"r{number}", 0.0)
            policy.finished(f"r{number}", 10.0)
        policy.dispatched("last", Asked(b"", 0, BLOCK), workers.snapshot().workers[0], 0.0)
        costs = policy.decide(Query(0), workers.snapshot(), workers.random).costs
        assert costs[0] - costs[1] == pytest.approx(10.0, rel=0.01)


def test_least_tokens_counts_memory_in(peer, fleet):
    workers = fleet("ab")
    workers.busy("a", 1, prompt_tokens=2000)
    workers.busy("b", 1, prompt_tokens=2100)
    policy = peer("least-tokens")
    assert policy.decide(Query(9), workers.snapshot(), workers.random).costs == pytest.approx([1.0, 1.05])
    workers.inflight.account("a").new_life(0, 4512)
    costs = policy.decide(Query(9), workers.snapshot(), workers.random).costs
    assert costs == pytest.approx([1.0 + 0.15, 1.05])


def test_greedy_knows_no_price(peer, fleet):
    workers = fleet("ab")
    workers.matched = {"a": 900}
    workers.busy("a", 1, prefill_seconds=0.2)
    decision = peer("greedy-ttft").decide(Query(1000), workers.snapshot(), workers.random)
    model = workers.model
    expected = [0.2 + model.prefill_seconds(100, 900), model.prefill_seconds(1000, 0)]
    assert decision.costs == pytest.approx(expected)
    assert decision.predicted_ttft_ms == pytest.approx(expected[1] * 1e3)

"""Siblings of one new prompt, over workers that can pull from each other."""

from collections import Counter
from random import Random

import pytest

from policies import create
from policies.bursts import HOLD_SECONDS_MAX, HOLD_SECONDS_MIN
from policies.contract import Query
from policies.state.beliefs import Beliefs, Inquiry
from policies.transfer import DeadlineBounds, Pulls, Supply

BLOCK = 16
PROMPT = "a" * 40 + "b" * 216
TOKENS = BLOCK * len(PROMPT) + 8
BYTES_PER_TOKEN = 327_680
WORKERS = [(name, 0) for name in "abcdefgh"]


class Link:
    def __init__(self, seconds_per_byte):
        self.seconds_per_byte = seconds_per_byte

    def transfer_seconds(self, size_bytes):
        return 0.005 + size_bytes * self.seconds_per_byte

    def spread(self, size_bytes):
        return 0.1


class Fleet:
    """Workers that hold what they have been told of, and a gateway's beliefs."""

    def __init__(self, store, chain, seconds_per_byte=1 / 45e9):
        self.beliefs = Beliefs(type(store))
        self.workers = [self.beliefs.worker([key]) for key in WORKERS]
        self.inquiry = Inquiry(chain(PROMPT), TOKENS, BLOCK)
        self.confirmed = {}
        self.policy, self.random = create("kv-aware"), Random(3)
        self.link = Link(seconds_per_byte)

    def pull_seconds(self, tokens):
        return self.link.transfer_seconds(tokens * BYTES_PER_TOKEN)

    def offers(self, view):
        return [
            (Supply(key, depths[0] * BLOCK, 0, "raw", BYTES_PER_TOKEN), self.link)
            for key, depths in self.confirmed.items()
            if key[0] != view.name
        ]

    def decide(self, now, held_seconds=0.0):
        snapshot = self.beliefs.answer(self.inquiry, self.workers, self.confirmed, now)
        burst = self.beliefs.burst(self.inquiry, snapshot.workers, now, self.pull_seconds)
        deepest = max((depths[0] * BLOCK for depths in self.confirmed.values()), default=0)
        pulls = Pulls(TOKENS, deepest, self.offers, DeadlineBounds()) if deepest else None
        query = Query(TOKENS, held_seconds=held_seconds)
        return self.policy.decide(query, snapshot._replace(pulls=pulls, burst=burst), self.random)

    def send(self, request_id, decision, now):
        view = decision.worker
        seconds = decision.pull.prefill_seconds if decision.pull else decision.prefill_seconds
        self.beliefs.lease(request_id, decision.burst, decision, seconds, now)
        self.beliefs.accounting.dispatch(request_id, view.name, 0, now, TOKENS, seconds)
        self.beliefs.predictions.predict(request_id, (view.name, 0), self.inquiry.chain, now)
        return view.name


@pytest.fixture
def fleet(store, chain):
    return Fleet(store, chain)


def test_two_compute_and_the_others_wait(fleet):
    decisions = []
    for number in range(8):
        decision = fleet.decide(0.0)
        decisions.append(decision)
        if not decision.hold_seconds:
            fleet.send(f"r{number}", decision, 0.0)
    assert len({decision.worker.name for decision in decisions[:2]}) == 2
    assert [bool(decision.hold_seconds) for decision in decisions] == [False, False] + [True] * 6
    assert decisions[2].hold_seconds == pytest.approx(decisions[0].prefill_seconds)


def test_who_has_waited_pulls_once_it_is_there_and_spreads(fleet):
    builders = [fleet.send(f"r{number}", fleet.decide(0.0), 0.0) for number in range(2)]
    ready = fleet.decide(0.0).hold_seconds
    late = fleet.decide(0.99 * ready, 0.99 * ready)
    assert late.worker.name in builders or late.hold_seconds == HOLD_SECONDS_MIN  # not announced yet
    for number, name in enumerate(builders):
        fleet.confirmed[name, 0] = [len(PROMPT)] * 3
        fleet.beliefs.release_leases(f"r{number}")
        fleet.beliefs.accounting.first_token(f"r{number}", ready)
    decision = fleet.decide(ready, ready)
    assert not decision.hold_seconds
    # Whoever computed it is asked first; with work in the way there, somebody else pulls it.
    for name in builders:
        fleet.beliefs.accounting.dispatch(f"busy-{name}", name, 0, ready, 4000, 0.3)
    decision = fleet.decide(ready, ready)
    assert decision.worker.name not in builders
    assert decision.pull is not None
    target = fleet.send("r2", decision, ready)
    # And who would come after it at the same worker waits until it has come.
    served = Counter()
    for number in range(20):
        decision = fleet.decide(ready + 0.001, ready)
        if decision.hold_seconds:
            assert decision.hold_seconds <= 1.01 * fleet.pull_seconds(len(PROMPT) * BLOCK)
            served["held"] += 1
        else:
            served[fleet.send(f"s{number}", decision, ready + 0.001)] += 1
    assert target not in served
    assert served["held"] > 0


def test_a_builder_is_joined_while_that_is_sooner_than_a_pull(fleet):
    """Where all others are dear. What joins it makes the prompt come later, for everybody."""
    builders = {fleet.send(f"r{number}", fleet.decide(0.0), 0.0) for number in range(2)}
    for name, rank in WORKERS:
        if name not in builders:
            fleet.beliefs.accounting.dispatch(f"busy-{name}", name, rank, 0.0, 40_000, 10.0)
    joined = 0
    while not (decision := fleet.decide(0.0)).hold_seconds:
        assert fleet.send(f"s{joined}", decision, 0.0) in builders
        joined += 1
    assert joined >= 2
    assert decision.worker.name in builders
    ready_in, pull = decision.hold_seconds, fleet.pull_seconds(len(PROMPT) * BLOCK)
    waits = [worker.views[0].load.wait_seconds(0.0) for worker in fleet.workers if worker.views[0].name in builders]
    step = max(fleet.beliefs.worker([(name, 0)]).views[0].prefill.prefill_seconds(8, TOKENS - 8) for name in builders)
    assert ready_in + pull < min(waits) <= ready_in + pull + 2 * step
    # Where nothing is sooner pulled, there is nothing to wait for.
    fleet.link.seconds_per_byte = 1.0
    assert not fleet.decide(0.0).hold_seconds


def test_who_has_waited_long_is_asked_again_less_often(fleet):
    for number in range(2):
        name = fleet.send(f"r{number}", fleet.decide(0.0), 0.0)
        fleet.beliefs.accounting.dispatch(f"behind-{name}", name, 0, 0.0, 40_000, 10.0)
    ready = fleet.decide(0.0).hold_seconds
    assert fleet.decide(ready, 0.0).hold_seconds == HOLD_SECONDS_MIN
    for late in (0.5, 1.0):
        assert fleet.decide(ready + late, ready + late).hold_seconds == (ready + late) / 16


def test_nobody_is_held_for_ever_nor_where_it_cannot_be(fleet):
    builders = {fleet.send(f"r{number}", fleet.decide(0.0), 0.0) for number in range(2)}
    assert fleet.decide(0.0, None).worker.name in builders
    assert not fleet.decide(0.0, None).hold_seconds
    patient = fleet.decide(0.0, HOLD_SECONDS_MAX)
    assert (patient.worker.name in builders, patient.hold_seconds) == (True, 0.0)


def test_a_builder_that_never_ends_is_not_waited_for(fleet):
    for number in range(2):
        fleet.send(f"r{number}", fleet.decide(0.0), 0.0)
    late = fleet.decide(60.0, 0.0)
    assert not late.hold_seconds
    assert not late.burst.builders


def test_what_is_sooner_computed_than_pulled_is_computed(store, chain):
    """At a hundredth of the bandwidth nobody waits for anybody."""
    fleet = Fleet(store, chain, seconds_per_byte=1 / 45e7)
    names = [fleet.send(f"r{number}", fleet.decide(0.0), 0.0) for number in range(8)]
    assert set(names) == set("abcdefgh")


def test_what_somebody_has_is_no_burst(fleet):
    fleet.confirmed["a", 0] = [len(PROMPT)] * 3
    decision = fleet.decide(0.0)
    assert decision.worker.name == "a"
    fleet.send("r", decision, 0.0)
    assert len(fleet.beliefs.prefills) == 0

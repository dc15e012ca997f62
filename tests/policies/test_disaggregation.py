"""One leg or two: `d` answers, `p`, `q` and `r` compute prompts for it."""

from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest

from policies.contract import FleetRates, Query
from policies.disaggregation import PATIENCE, Whole, divide, need_of
from policies.estimates import Calibration, LinkModel, LinkPrior, PrefillModel
from policies.legs import Legs, Outcome
from policies.transfer import DeadlineBounds, PullOption, Supply, arrival, promised_pull

BOUNDS = DeadlineBounds(0.01, 100.0)
PROMPT = 8_000
BLOCKS_TOKENS = 7_984
NOTHING_ELSE = FleetRates()
FAST = LinkModel(LinkPrior(0.005, 1e10))
SLOW = LinkModel(LinkPrior(0.005, 1e8))


class Given(NamedTuple):
    """What is known, with nothing under way unless a test says so."""

    fleet: object
    prefills: str = "p"
    decodes_alone: bool = True
    pull: PullOption | None = None
    link: LinkModel = FAST
    tokens: int = BLOCKS_TOKENS
    bytes_per_token: float = 100_000
    bounds: DeadlineBounds = BOUNDS
    rates: FleetRates | None = NOTHING_ELSE
    unable: str = ""
    """Prefill workers whose KV cannot come."""
    trials: str = ""

    def divide(self) -> Legs:
        snapshot = self.fleet.snapshot(0.0, self.rates)
        views = {view.name: view for view in snapshot.workers}
        sources = [views[name] for name in self.prefills]

        def offer(view):
            if view.name in self.unable:
                return None
            return Supply(view.name, self.tokens, 0, "raw", self.bytes_per_token), self.link

        whole = Whole(views["d"], self.pull, self.decodes_alone)
        prefills = snapshot._replace(workers=sources) if sources else None
        return divide(Query(PROMPT), whole, prefills, offer, self.bounds, Random(3), self.trials)


def test_a_worker_that_decodes_alone_is_kept_free_of_a_long_prompt(fleet):
    legs = Given(fleet("dp")).divide()
    prefill = PrefillModel().prefill_seconds(PROMPT, 0)
    rest = PrefillModel().prefill_seconds(PROMPT - BLOCKS_TOKENS, BLOCKS_TOKENS)
    load = FAST.transfer_seconds(BLOCKS_TOKENS * 100_000)
    assert (legs.outcome, legs.worker) == (Outcome.TWO_LEGS, "p")
    assert legs.predicted_seconds == legs.prefill_seconds == pytest.approx(prefill)
    assert legs.whole_cost_seconds == pytest.approx(2 * prefill)
    # What is left to compute delays one request more, and the last layer's share of it follows the load.
    assert legs.divided_cost_seconds == pytest.approx(prefill + load + rest, rel=0.02)


def test_a_worker_of_both_roles_that_stands_idle_computes_itself(fleet):
    legs = Given(fleet("dp"), decodes_alone=False).divide()
    assert legs.outcome is Outcome.BYPASS
    assert legs.whole_cost_seconds == pytest.approx(PrefillModel().prefill_seconds(PROMPT, 0))


def test_each_request_that_decodes_makes_computing_there_dearer(fleet):
    costs = []
    for decoding in range(4):
        workers = fleet("dp")
        workers.busy("d", decoding)
        for number in range(1, decoding + 1):
            workers.inflight.first_token(f"busy-{number}", 0.01)
        costs.append(Given(workers, decodes_alone=False).divide().whole_cost_seconds)
    prefill = PrefillModel().prefill_seconds(PROMPT, 0)
    assert [cost / prefill for cost in costs] == pytest.approx([1, 2, 3, 4], rel=0.01)


def test_two_legs_pay_once_somebody_decodes(fleet):
    workers = fleet("dp")
    workers.busy("d", 1)
    workers.inflight.first_token("busy-1", 0.01)
    assert Given(workers, decodes_alone=False).divide().outcome is Outcome.TWO_LEGS


def test_what_is_there_already_is_not_fetched(fleet):
    workers = fleet("dp")
    for matched in (BLOCKS_TOKENS, BLOCKS_TOKENS - 160):
        workers.matched = {"d": matched}
        assert Given(workers).divide().outcome is Outcome.BYPASS
    workers.matched = {"d": 800}
    assert Given(workers).divide().outcome is Outcome.TWO_LEGS


def test_a_short_prompt_is_computed_at_once(fleet):
    workers = fleet("dp")
    legs = Given(workers)._replace(tokens=32)
    snapshot = workers.snapshot(0.0, NOTHING_ELSE)
    d, p = snapshot.workers
    found = divide(
        Query(40),
        Whole(d, None, True),
        snapshot._replace(workers=[p]),
        lambda view: (Supply("p", legs.tokens, 0, "raw", 100_000), FAST),
        BOUNDS,
        Random(3),
    )
    assert found.outcome is Outcome.BYPASS


def test_a_slow_link_is_not_worth_it(fleet):
    assert Given(fleet("dp"), link=SLOW).divide().outcome is Outcome.BYPASS


def test_a_queue_at_the_prefill_worker_sends_prompts_to_the_other(fleet):
    workers = fleet("dpq")
    workers.busy("p", 10)
    assert Given(workers, prefills="pq").divide().worker == "q"
    assert Given(workers, prefills="p").divide().outcome is Outcome.BYPASS


def test_a_queue_where_it_is_answered_is_passed_in_the_meantime(fleet):
    """The backlog falls while the first leg runs, and while KV comes."""
    workers = fleet("dp")
    idle = Given(workers).divide()
    workers.busy("d", 1, prefill_seconds=0.2)
    busy = Given(workers).divide()
    assert busy.whole_cost_seconds == pytest.approx(idle.whole_cost_seconds + 0.2)
    assert busy.divided_cost_seconds == pytest.approx(idle.divided_cost_seconds)


def test_the_one_that_has_most_of_it_is_taken(fleet):
    workers = fleet("dpqr")
    workers.matched = {"q": 4000}
    legs = Given(workers, prefills="pqr").divide()
    assert legs.worker == "q"
    assert legs.prefill_seconds == pytest.approx(PrefillModel().prefill_seconds(PROMPT - 4000, 4000))
    assert legs.prior_seconds == pytest.approx(PrefillModel().prior_seconds(PROMPT - 4000, 4000))


def test_equals_get_as_much(fleet):
    workers = fleet("dpqr")
    snapshot = workers.snapshot(0.0, NOTHING_ELSE)
    d, *sources = snapshot.workers
    random, chosen = Random(5), []
    for number in range(300):
        legs = divide(
            Query(PROMPT),
            Whole(d, None, True),
            snapshot._replace(workers=sources),
            lambda view: (Supply(view.name, BLOCKS_TOKENS, 0, "raw", 100_000), FAST),
            BOUNDS,
            random,
        )
        chosen.append(legs.worker)
        workers.inflight.dispatch(f"r{number}", legs.worker, 0, 0.0, PROMPT, legs.prefill_seconds)
    assert [chosen.count(name) for name in "pqr"] == pytest.approx([100, 100, 100], abs=3)


def test_a_pull_that_was_decided_already_makes_one_leg_cheaper(fleet):
    pull = PullOption("peer", 0, 7_900, "raw", 0, 1, 0, 0.02, 0.01, 0.25, 1.0)
    assert Given(fleet("dp"), pull=pull).divide().outcome is Outcome.BYPASS


def test_a_saturated_fleet_prices_both_legs_alike(fleet):
    """The price of work counts wherever it is done; a prefill worker's queue is its own."""
    busy = FleetRates(5.0, 0.9, 150.0)
    workers = fleet("dp")
    legs = Given(workers, rates=busy).divide()
    calm = Given(workers).divide()
    assert legs.outcome is Outcome.TWO_LEGS
    growth = legs.whole_cost_seconds - calm.whole_cost_seconds
    assert growth == pytest.approx(legs.divided_cost_seconds - calm.divided_cost_seconds, rel=0.1)


def test_without_anybody_who_could_give_it_there_is_one_leg(fleet):
    assert Given(fleet("dp"), prefills="").divide() == Legs(Outcome.NO_SOURCE)
    assert Given(fleet("dp"), unable="p").divide() == Legs(Outcome.NO_SOURCE)
    assert Given(fleet("dpq"), prefills="pq", unable="p").divide().worker == "q"


def test_a_first_leg_gets_twice_what_it_should_take_or_what_one_leg_costs(fleet):
    legs = Given(fleet("dp")).divide()
    assert legs.deadline_seconds == max(legs.whole_cost_seconds, PATIENCE * legs.predicted_seconds)
    assert Given(fleet("dp"), bounds=DeadlineBounds(5.0, 9.0)).divide().deadline_seconds == 5.0
    assert Given(fleet("dp"), bounds=DeadlineBounds(0.0, 0.1)).divide().deadline_seconds == 0.1


def test_a_slow_prefill_worker_is_known_by_its_own_estimate(fleet):
    snapshot = fleet("dp").snapshot(0.0, NOTHING_ELSE)
    d, p = snapshot.workers
    slow = replace(p, prefill=PrefillModel(None, Calibration(5.0, 5.0)))
    offer = Supply("p", BLOCKS_TOKENS, 0, "raw", 100_000), FAST
    found = divide(
        Query(PROMPT), Whole(d, None, True), snapshot._replace(workers=[slow]), lambda _: offer, BOUNDS, Random(1)
    )
    assert found.outcome is Outcome.BYPASS


# Trials


def test_one_of_whom_nothing_is_known_is_tried(fleet):
    workers = fleet("dpq")
    given = Given(workers, prefills="pq", link=SLOW)
    assert given.divide().outcome is Outcome.BYPASS
    legs = given._replace(trials="q").divide()
    assert (legs.outcome, legs.worker, legs.trial) == (Outcome.TWO_LEGS, "q", True)
    assert legs.divided_cost_seconds > legs.whole_cost_seconds
    assert f"{legs}".startswith("two legs: q computes the prompt first, to see how fast it is, ")


def test_trials_are_one_at_a_time_and_with_cold_prompts(fleet):
    workers = fleet("dp")
    given = Given(workers, link=SLOW, trials="p")
    workers.matched = {"d": BLOCKS_TOKENS // 2 + 1}
    assert given.divide().outcome is Outcome.BYPASS
    workers.matched = {}
    assert given.divide().outcome is Outcome.TWO_LEGS
    workers.busy("p", 1)
    assert given.divide().outcome is Outcome.BYPASS


def test_who_cannot_give_is_not_tried(fleet):
    assert Given(fleet("dp"), unable="p", trials="p").divide().outcome is Outcome.NO_SOURCE


# The pull of what was computed for it


def test_what_was_computed_is_pulled_even_where_computing_were_sooner(fleet):
    (view,) = fleet("d").snapshot().workers
    need, supply = need_of(Query(PROMPT), view, 0.0), Supply("p", BLOCKS_TOKENS, 0, "raw", 100_000)
    expected = arrival(need, supply, SLOW)
    option = promised_pull(need, supply, expected, DeadlineBounds(0.5, 30.0))
    assert expected.first_token_seconds > PrefillModel().prefill_seconds(PROMPT, 0)
    assert (option.saved_seconds, option.load_seconds) == (0.0, expected.load_seconds)
    assert option.deadline_seconds == 2 * expected.load_seconds
    assert (option.first_token, option.end_token, option.source) == (0, BLOCKS_TOKENS, "p")


def test_a_promised_pull_saves_what_it_is_sooner_by(fleet):
    workers = fleet("d")
    workers.matched = {"d": 1600}
    (view,) = workers.snapshot().workers
    need, supply = need_of(Query(PROMPT), view, 0.3), Supply("p", BLOCKS_TOKENS, 0, "raw", 100_000)
    expected = arrival(need, supply, FAST)
    option = promised_pull(need, supply, expected, DeadlineBounds(0.01, 30.0))
    computed = 0.3 + PrefillModel().prefill_seconds(PROMPT - 1600, 1600)
    assert option.saved_seconds == pytest.approx(computed - expected.first_token_seconds)
    assert option.size_bytes == (BLOCKS_TOKENS - 1600) * 100_000
    assert option.deadline_seconds == pytest.approx(computed - expected.tail_seconds)


# In words


@pytest.mark.parametrize(
    ("legs", "words"),
    [
        (Legs(Outcome.NO_SOURCE), "one leg: no prefill worker can give it KV"),
        (
            Legs(Outcome.BYPASS, "p", 0, 0.004, 0.25),
            "one leg: computing here costs 4.0 ms, by way of p 250 ms",
        ),
        (Legs(Outcome.TWO_LEGS, "p", predicted_seconds=0.2), "two legs: p computes the prompt first, 200 ms"),
        (
            Legs(Outcome.TWO_LEGS, "p", predicted_seconds=0.2, seconds=1.234),
            "two legs: p computed the prompt in 1,234 ms (predicted 200 ms)",
        ),
        (
            Legs(Outcome.REFUSED, "p", problem="answered 500", seconds=0.05),
            "one leg: p answered 500 (50 ms lost)",
        ),
        (Legs(Outcome.CLIENT_GONE, "p", seconds=1.0), "the client left while p computed the prompt"),
    ],
)
def test_legs_in_words(legs, words):
    assert f"{legs}" == words


def test_legs_in_numbers():
    legs = Legs(Outcome.DEADLINE, "p", 0, 2.0, 1.5, 0.5, 0.4, 0.3, 160, 1.0, False, 1.5, "did not answer in time")
    assert legs.document() == {
        "outcome": "fallback_deadline",
        "prefill_worker": "p",
        "prefill_matched_tokens": 160,
        "whole_cost_ms": 2000.0,
        "divided_cost_ms": 1500.0,
        "predicted_ms": 500.0,
        "trial": False,
        "deadline_ms": 1000.0,
        "seen_ms": 1500.0,
        "decode_ms": None,
        "problem": "did not answer in time",
    }

from math import exp, sqrt
from random import Random
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.state.inflight import AnswerSample, InflightAccounting, PrefillSample
from policies.state.pins import PinnedChains


@pytest.fixture
def inflight():
    return InflightAccounting()


def send(inflight, request_id, now=0.0, seconds=1.0, worker="w", tokens=100, prior=None):
    inflight.dispatch(request_id, worker, 0, now, tokens, seconds, 0, prior)


def test_a_request_from_dispatch_to_finish(inflight):
    inflight.dispatch("r", "w", 1, 0.0, 1000, 0.5, 100)
    account = inflight.account("w", 1)
    assert repr(account) == "WorkerAccount(w/1: inflight=1 waiting=1 outstanding=0.500s tokens=1000 context=0)"
    inflight.first_token("r", 0.5)
    assert repr(account) == "WorkerAccount(w/1: inflight=1 waiting=0 outstanding=0.000s tokens=1000 context=1050)"
    inflight.first_token("r", 0.6)
    inflight.finish("r", 2.0, 80)
    assert repr(account) == "WorkerAccount(w/1: inflight=0 waiting=0 outstanding=0.000s tokens=0 context=0)"
    assert (inflight.unknown, inflight.dropped, len(inflight)) == (0, 0, 0)
    assert account.dispatched == 1


def test_ranks_are_separate_accounts(inflight):
    inflight.dispatch("r", "w", 1, 0.0, 10, 0.1)
    assert (inflight.account("w", 0).inflight, inflight.account("w", 1).inflight) == (0, 1)


class TestWait:
    def test_idle_is_no_wait(self, inflight):
        assert inflight.account("w").wait_seconds(5.0) == 0.0

    def test_falls_with_the_clock(self, inflight):
        send(inflight, "a", 0.0, 2.0)
        send(inflight, "b", 0.5, 1.0)
        account = inflight.account("w")
        assert account.wait_seconds(0.5) == pytest.approx(2.5)
        assert account.wait_seconds(1.5) == pytest.approx(1.5)

    def test_a_stalled_engine_keeps_its_backlog(self, inflight):
        """No first token for 100 s: all but the oldest request must still be computed."""
        send(inflight, "a", 0.0, 2.0)
        send(inflight, "b", 0.0, 1.0)
        send(inflight, "c", 0.0, 1.5)
        account = inflight.account("w")
        assert account.wait_seconds(100.0) == pytest.approx(2.5)
        inflight.first_token("a", 100.0)
        assert account.wait_seconds(100.0) == pytest.approx(1.5)

    def test_an_early_first_token_shortens_it(self, inflight):
        send(inflight, "a", 0.0, 10.0)
        send(inflight, "b", 0.0, 1.0)
        inflight.first_token("a", 0.1)
        assert inflight.account("w").wait_seconds(0.1) == pytest.approx(1.0)

    def test_a_cancelled_request_leaves_the_queue(self, inflight):
        send(inflight, "a", 0.0, 10.0)
        send(inflight, "b", 0.0, 1.0)
        inflight.finish("a", 0.1)
        assert inflight.account("w").wait_seconds(0.1) == pytest.approx(1.0)
        inflight.finish("b", 0.1)
        assert inflight.account("w").wait_seconds(0.1) == 0.0

    def test_first_tokens_out_of_order(self, inflight):
        for name in "abc":
            send(inflight, name, 0.0, 1.0)
        inflight.first_token("b", 0.5)
        assert inflight.account("w").wait_seconds(50.0) == pytest.approx(1.0)
        inflight.first_token("a", 51.0)
        assert inflight.account("w").wait_seconds(51.0) == pytest.approx(0.0)


class TestRates:
    def test_steady_arrivals_match_the_closed_form(self, inflight):
        """2 a second, .25 s each, on 4 workers: a geometric sum, near lam = .5 and rho = .125."""
        for number in range(600):
            send(inflight, f"r{number}", number * 0.5, 0.25)
        rates = inflight.rates(299.5, 4)
        total = (1 - exp(-600 * 0.5 / 30)) / (1 - exp(-0.5 / 30))
        assert rates.arrivals_in_window == pytest.approx(total / 4)
        assert rates.arrivals_per_second == pytest.approx(total / 4 / 30)
        assert rates.utilisation == pytest.approx(total * 0.25 / 4 / 30)
        assert rates.arrivals_per_second == pytest.approx(0.5, rel=0.02)
        assert rates.utilisation == pytest.approx(0.125, rel=0.02)
        assert rates.tau_seconds == 30.0

    def test_decay_with_tau_alone(self, inflight):
        send(inflight, "r", 0.0, 3.0)
        assert inflight.rates(30.0, 1).utilisation == pytest.approx(3.0 / 30 * exp(-1))
        assert inflight.rates(90.0, 1).arrivals_in_window == pytest.approx(exp(-3))

    def test_asking_often_changes_nothing(self, inflight):
        send(inflight, "r", 0.0)
        for tick in range(1000):
            inflight.rates(tick * 0.03, 1)
        assert inflight.rates(30.0, 1).arrivals_in_window == pytest.approx(exp(-1))

    def test_no_workers_no_rates(self, inflight):
        send(inflight, "r", 0.0)
        assert inflight.rates(1.0, 0)[:3] == (0.0, 0.0, 0.0)

    def test_a_clock_that_steps_back_is_harmless(self, inflight):
        send(inflight, "a", 10.0)
        send(inflight, "b", 9.0)
        assert inflight.rates(10.0, 1).arrivals_in_window == pytest.approx(2.0)


class TestRobustness:
    def test_unknown_ids_are_counted_and_ignored(self, inflight):
        inflight.first_token("nobody", 0.0)
        inflight.finish("nobody", 0.0)
        send(inflight, "r")
        inflight.finish("r", 1.0)
        inflight.finish("r", 1.0)
        assert inflight.unknown == 3
        assert inflight.account("w").inflight == 0

    def test_a_retry_moves_the_request(self, inflight):
        send(inflight, "r", worker="a")
        inflight.first_token("r", 0.5)
        send(inflight, "r", 1.0, worker="b")
        assert [(each.name, each.inflight, each.waiting) for each in inflight.accounts()] == [("a", 0, 0), ("b", 1, 1)]
        inflight.finish("r", 2.0)
        assert [each.inflight for each in inflight.accounts()] == [0, 0]
        assert inflight.unknown == 0

    def test_bounded(self):
        inflight = InflightAccounting(requests_max=10)
        for number in range(25):
            send(inflight, f"r{number}")
        assert (len(inflight), inflight.dropped, inflight.account("w").inflight) == (10, 15, 10)
        inflight.finish("r0", 1.0)
        assert inflight.unknown == 1

    def test_a_removed_worker_starts_from_nothing(self, inflight):
        send(inflight, "old")
        inflight.remove_worker("w")
        send(inflight, "new")
        inflight.first_token("old", 1.0)
        inflight.finish("old", 1.0)
        assert (inflight.account("w").inflight, inflight.account("w").waiting) == (1, 1)
        assert inflight.unknown == 0

    def test_a_long_queue_drains_in_order_without_rescanning(self, inflight):
        for number in range(20_000):
            send(inflight, f"r{number}", 0.0, 0.001)
        for number in range(20_000):
            inflight.first_token(f"r{number}", 1.0)
        assert inflight.account("w").waiting == 0
        assert inflight.account("w").outstanding_prefill_seconds == 0.0

    @pytest.mark.parametrize("arguments", [{"tau_seconds": 0.0}, {"requests_max": 0}])
    def test_refuses_nonsense(self, arguments):
        with pytest.raises(ValueError, match="must be positive"):
            InflightAccounting(**arguments)


def test_output_length_is_learned_and_capped_by_what_the_client_allows(inflight):
    for number in range(200):
        send(inflight, f"r{number}")
        inflight.finish(f"r{number}", 1.0, 1000)
    assert inflight.output_tokens_mean == pytest.approx(1000, rel=0.01)
    send(inflight, "free", tokens=50)
    inflight.first_token("free", 1.0)
    assert inflight.account("w").running_context_tokens == 50 + 499
    inflight.dispatch("short", "v", 0, 1.0, 50, 0.1, 20)
    inflight.first_token("short", 1.0)
    assert inflight.account("v").running_context_tokens == 60


class TestPrefillSamples:
    def test_a_lone_request(self, inflight):
        send(inflight, "r", 10.0, prior=0.4)
        assert inflight.first_token("r", 11.5) == PrefillSample("w", 0, 1, 0.4, 1.5)

    def test_a_batch_is_one_stretch(self, inflight):
        """Four prompts share a step: the first one's first token alone would look four times too slow."""
        for name in "abcd":
            send(inflight, name, 1.0, prior=0.5)
        samples = [inflight.first_token(name, 3.0) for name in "abcd"]
        assert samples == [None, None, None, PrefillSample("w", 0, 4, 2.0, 2.0)]

    def test_idle_time_is_not_work(self, inflight):
        send(inflight, "a", 0.0, prior=1.0)
        inflight.first_token("a", 1.0)
        send(inflight, "b", 60.0, prior=1.0)
        assert inflight.first_token("b", 61.0) == PrefillSample("w", 0, 1, 1.0, 1.0)

    def test_a_queue_that_never_empties_is_cut_between_steps(self, inflight):
        for number in range(30):
            send(inflight, f"r{number}", 0.0, 1.0, prior=1.0)
        samples = [inflight.first_token(f"r{number}", 2.0 * (number + 1)) for number in range(30)]
        seen = [sample for sample in samples if sample]
        assert [(sample.requests, sample.prior_seconds, sample.observed_seconds) for sample in seen] == [
            (8, 8.0, 16.0),
            (8, 8.0, 16.0),
            (8, 8.0, 16.0),
            (6, 6.0, 12.0),
        ]

    def test_abandoned_work_spoils_its_stretch_only(self, inflight):
        for name in "abc":
            send(inflight, name, 0.0, prior=1.0)
        inflight.finish("a", 0.7)
        assert inflight.first_token("b", 1.75) is None
        assert inflight.first_token("c", 2.75) == PrefillSample("w", 0, 1, 1.0, 1.0)

    def test_without_a_prior_nothing_is_learned(self, inflight):
        send(inflight, "r")
        assert inflight.first_token("r", 1.0) is None


class TestSlots:
    @staticmethod
    def answer(inflight, name, start, seconds):
        send(inflight, name, start, 0.0)
        inflight.finish(name, start + seconds, answered=True)

    def test_with_all_slots_taken_one_becomes_free_every_nth_of_an_answers_time(self, inflight):
        account = inflight.account("w")
        account.new_life(4)
        self.answer(inflight, "first", 0.0, 2.0)
        waits = []
        for number in range(7):
            waits.append(account.wait_seconds(5.0))
            send(inflight, f"r{number}", 5.0, 0.0)
        assert waits == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.5])

    def test_the_longer_of_both_waits_counts(self, inflight):
        account = inflight.account("w")
        account.new_life(1)
        self.answer(inflight, "first", 0.0, 2.0)
        send(inflight, "a", 5.0, 3.0)
        assert account.wait_seconds(5.0) == pytest.approx(3.0)
        assert account.wait_seconds(8.0) == pytest.approx(2.0)

    def test_waiting_for_a_slot_is_not_holding_one(self, inflight):
        """Four slots, eight at once: those that found none take twice as long and teach the same."""
        inflight.account("w").new_life(4)
        for number in range(8):
            send(inflight, f"r{number}", 0.0, 0.0)
        for number in range(8):
            crowding = 1 + max(number + 1 - 4, 0) / 4
            inflight.finish(f"r{number}", 2.0 * crowding, answered=True)
        assert inflight.account("w").slot_seconds == pytest.approx(2.0)

    def test_what_was_not_answered_teaches_nothing(self, inflight):
        send(inflight, "r", 0.0)
        inflight.finish("r", 9.0)
        assert inflight.account("w").slot_seconds == 0.0

    def test_a_new_worker_starts_from_the_fleet(self, inflight):
        inflight.account("old")
        self.answer(inflight, "r", 0.0, 2.0)
        assert (inflight.account("old").slot_seconds, inflight.account("new").slot_seconds) == (2.0, 2.0)

    def test_requests_of_others_take_slots_while_the_report_is_fresh(self, inflight):
        account = inflight.account("w")
        account.new_life(4)
        self.answer(inflight, "first", 0.0, 2.0)
        send(inflight, "ours", 5.0, 0.0)
        account.report(running=4, waiting=1, inflight_max=1, until=11.0)
        assert account.wait_seconds(6.0) == 0.0 + 0.5 * 2  # five there, one to come, four slots
        assert account.wait_seconds(11.0) == 0.0

    def test_a_report_of_our_own_requests_changes_nothing(self, inflight):
        account = inflight.account("w")
        account.new_life(2)
        self.answer(inflight, "first", 0.0, 2.0)
        send(inflight, "ours", 5.0, 0.0)
        account.report(running=1, waiting=0, inflight_max=1, until=99.0)
        assert account.wait_seconds(6.0) == 0.0

    def test_capacity_is_seen_in_two_reports_of_requests_that_wait(self, inflight):
        account = inflight.account("w")
        for running, waiting, capacity in ((5, 1, 0), (9, 0, 0), (7, 2, 0), (8, 3, 8), (6, 1, 8), (10, 0, 10)):
            account.report(running, waiting, 99, 99.0)
            assert account.capacity_requests == capacity
        account.new_life(0)
        assert account.capacity_requests == 0


class TestPlaced:
    def test_decays_against_the_unit(self, inflight):
        send(inflight, "a", 0.0, worker="v")
        send(inflight, "b", 30.0, worker="w")
        unit = inflight.rates(30.0, 2).placed_unit
        assert inflight.account("w").placed == pytest.approx(unit)
        assert inflight.account("v").placed == pytest.approx(unit * exp(-1))

    @pytest.mark.parametrize("pause", [30 * 20.0, 30 * 26.0, 30 * 5000.0])
    def test_a_pause_of_any_length_leaves_finite_numbers(self, inflight, pause):
        for number in range(50):
            send(inflight, f"r{number}", number * pause)
        rates, account = inflight.rates(49 * pause, 1), inflight.account("w")
        assert account.placed == pytest.approx(rates.placed_unit, rel=1e-6)
        assert rates.placed_unit < 1e12


class TestWholeAnswers:
    @staticmethod
    def send(inflight, in_one_piece=True, prior=0.4):
        inflight.dispatch("r", "w", 0, 1.0, 900, 0.1, 0, prior, in_one_piece)

    def test_one_is_a_sample(self, inflight):
        self.send(inflight)
        assert inflight.finish("r", 3.0, 32, True) == AnswerSample("w", 0, 0.4, 900, 32, 2.0)

    @pytest.mark.parametrize("arguments", [{"in_one_piece": False}, {"prior": None}])
    def test_a_stream_is_not_and_a_history_is_not(self, inflight, arguments):
        self.send(inflight, **arguments)
        assert inflight.finish("r", 3.0, 32, True) is None

    def test_nor_is_one_that_broke_or_that_counts_no_tokens(self, inflight):
        for output_tokens, answered in ((0, False), (0, True)):
            self.send(inflight)
            assert inflight.finish("r", 3.0, output_tokens, answered) is None


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["dispatch", "first_token", "finish", "remove"]),
        st.integers(0, 7),
        st.sampled_from("abc"),
        st.floats(0, 5),
        st.integers(0, 10_000),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_accounts_balance(operations):
    inflight, now, seen = InflightAccounting(requests_max=6), 0.0, []
    for action, number, worker, number_of, tokens in operations:
        now += number_of / 3
        if action == "dispatch":
            inflight.dispatch(f"r{number}", worker, 0, now, tokens, number_of)
        elif action == "first_token":
            inflight.first_token(f"r{number}", now)
        elif action == "finish":
            inflight.finish(f"r{number}", now, tokens)
        else:
            inflight.remove_worker(worker)
        seen.extend(account for account in inflight.accounts() if account not in seen)
        assert sum(account.inflight for account in seen) == len(inflight) <= 6
        for account in seen:
            assert 0 <= account.waiting <= account.inflight
            assert 0 <= account.wait_seconds(now) <= account.outstanding_prefill_seconds + 1e-9
            assert account.running_context_tokens >= 0
    for number in range(8):
        inflight.finish(f"r{number}", now)
    for account in seen:
        assert repr(account).endswith("inflight=0 waiting=0 outstanding=0.000s tokens=0 context=0)")
        assert account.outstanding_prefill_seconds == 0.0
        assert account.wait_seconds(now) == 0.0
    rates = inflight.rates(now + 30 * 50, 3)
    assert rates.utilisation < 1e-12


class TestKvMemory:
    """What requests in flight need of a worker's memory: 10,000 tokens, blocks of 16."""

    @pytest.fixture
    def inflight(self, store):
        accounting = InflightAccounting(pins=PinnedChains(store))
        accounting.account("w").new_life(0, 10_000)
        return accounting

    def test_from_dispatch_to_end_with_the_usual_output(self, inflight):
        account = inflight.account("w")
        inflight.dispatch("r", "w", 0, 0.0, 1000, 0.1)
        assert (account.kv_held_tokens, account.kv_share) == (1256, 0.1256)
        inflight.first_token("r", 1.0)
        assert account.kv_held_tokens == 1256
        inflight.dispatch("short", "w", 0, 0.0, 1000, 0.1, output_tokens_max=10)
        assert account.kv_held_tokens == 2266
        inflight.finish("r", 2.0)
        inflight.finish("short", 2.0)
        assert (account.kv_held_tokens, account.kv_pressure()) == (0, 0.0)

    def test_what_siblings_share_counts_once_until_the_last_has_ended(self, inflight, chain):
        account = inflight.account("w")
        for name, text in (("a", "abcd"), ("b", "abcx"), ("c", "ab")):
            inflight.dispatch(name, "w", 0, 0.0, 16 * len(text), 0.1, output_tokens_max=1)
            inflight.pin(name, chain(text), 16)
        assert account.kv_held_tokens == 16 * 5 + 3
        for name, left in (("a", 16 * 4 + 2), ("c", 16 * 4 + 1), ("b", 0)):
            inflight.finish(name, 1.0)
            assert account.kv_held_tokens == left

    def test_what_has_no_names_counts_whole(self, inflight, chain):
        inflight.dispatch("a", "w", 0, 0.0, 32, 0.1, output_tokens_max=1)
        inflight.pin("a", chain("ab"))
        assert inflight.account("w").kv_held_tokens == 33  # the size of a block is not known yet
        inflight.dispatch("b", "w", 0, 0.0, 32, 0.1, output_tokens_max=1)
        inflight.pin("b", chain("ab"), 16)
        inflight.dispatch("c", "w", 0, 0.0, 32, 0.1, output_tokens_max=1)
        inflight.pin("c", chain("ab"))
        assert inflight.account("w").kv_held_tokens == 33 + 33 + 1

    def test_nothing_is_pinned_where_memory_is_not_known(self, inflight, chain, store):
        inflight.dispatch("a", "v", 0, 0.0, 32, 0.1)
        inflight.pin("a", chain("ab"), 16)
        inflight.pin("unheard", chain("ab"), 16)
        assert store.counts == {}
        assert (inflight.account("v").kv_share, inflight.account("v").kv_pressure()) == (0.0, 0.0)

    @pytest.mark.parametrize("running", [1, 6, 7, 12])
    def test_pressure_is_the_closed_form(self, inflight, running):
        account = inflight.account("w")
        for number in range(running):
            inflight.dispatch(f"r{number}", "w", 0, 0.0, 1000, 0.1)
            inflight.first_token(f"r{number}", 0.1)
        inflight.dispatch("waiting", "w", 0, 0.0, 500, 0.1)
        needed = 1256 * running + 756
        free = max(1 - needed / 10_000, 0.0)
        z = free * 10_000 / sqrt(running * 1256**2 + 756**2)
        expected = running * NormalDist().cdf(-z) / (free + 1 / running)
        assert account.kv_pressure() == pytest.approx(expected)
        inflight.finish("waiting", 1.0)
        assert account.kv_pressure() <= expected

    def test_random_histories_end_empty(self, inflight, chain, store):
        random, live, now = Random(3), [], 0.0
        account = inflight.account("w")
        for number in range(600):
            now += 0.1
            text = "".join(random.choice("ab") for _ in range(random.randrange(1, 6)))
            if len(live) < 5 or random.random() < 0.5:
                live.append((f"r{number}", text))
                inflight.dispatch(f"r{number}", "w", 0, now, 16 * len(text), 0.1, output_tokens_max=1)
                inflight.pin(f"r{number}", chain(text), 16)
            else:
                inflight.finish(live.pop(random.randrange(len(live)))[0], now)
            distinct = {text[:end] for _, text in live for end in range(1, len(text) + 1)}
            assert account.kv_held_tokens == 16 * len(distinct) + len(live)
        for name, _ in live:
            inflight.finish(name, now)
        assert account.kv_held_tokens == 0
        assert store.counts == {}

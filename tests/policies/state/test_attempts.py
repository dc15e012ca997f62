"""A budget of attempts: a share of the requests of a window, and some besides."""

from policies.state.attempts import WINDOW_SECONDS, AttemptBudget


def test_a_share_of_the_requests_of_the_window() -> None:
    budget = AttemptBudget(0.2, 0.0)
    budget.requests += 100
    assert sum(budget.spend(5.0) for _ in range(30)) == 20
    assert (budget.spent, budget.denied) == (20, 10)


def test_some_a_second_whatever_is_asked() -> None:
    budget = AttemptBudget(0.0, 1.0)
    assert sum(budget.spend(5.0) for _ in range(30)) == WINDOW_SECONDS


def test_what_was_spent_comes_back_when_it_leaves_the_window() -> None:
    budget = AttemptBudget(0.0, 1.0)
    for _ in range(WINDOW_SECONDS):
        assert budget.spend(5.0)
    assert not budget.spend(5.0 + WINDOW_SECONDS - 0.5)
    assert sum(budget.spend(5.0 + WINDOW_SECONDS) for _ in range(30)) == WINDOW_SECONDS


def test_old_requests_earn_nothing() -> None:
    budget = AttemptBudget(0.5, 0.0)
    for second in range(100):
        budget.advance(float(second))
        budget.requests += 10
    assert budget.left(99.5) == 50.0
    assert budget.left(99.0 + WINDOW_SECONDS) == 0.0
    assert not budget.spend(1000.0)


def test_a_storm_of_failures_costs_a_share_of_the_load_and_no_more() -> None:
    """Every attempt fails, and every failure asks for another."""
    budget, attempts, requests = AttemptBudget(0.2, 1.0), 0, 0
    for tick in range(6000):
        now = tick / 100
        budget.requests += 1
        requests += 1
        attempts += 1 + (budget.spend(now) and 1) + (budget.spend(now) and 1)
    assert attempts <= 1.2 * requests + 1.0 * (60 + WINDOW_SECONDS)
    assert attempts > 1.15 * requests


def test_a_clock_that_starts_late_and_stands_still() -> None:
    budget = AttemptBudget(1.0, 0.0)
    budget.requests += 3
    assert [budget.spend(1e9) for _ in range(4)] == [False] * 4  # they came before anyone looked
    budget.requests += 3
    assert [budget.spend(1e9) for _ in range(4)] == [True] * 3 + [False]


def test_what_was_not_made_is_not_spent() -> None:
    budget = AttemptBudget(0.0, 0.1)
    assert budget.spend(5.0)
    assert not budget.spend(5.0)
    budget.refund()
    assert budget.spend(6.0)
    assert budget.spent == 1

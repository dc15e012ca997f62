from math import inf
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.contract import Query, Snapshot, WorkerView
from policies.estimates import FleetEstimates, LinkModel, LinkPrior, PrefillModel, PrefillPrior
from policies.kv_aware import KvAware
from policies.state.inflight import WorkerAccount
from policies.transfer import LAYERS, DeadlineBounds, Need, PullOption, Pulls, Supply, best_pull

UNBOUNDED = DeadlineBounds(0.0, inf)
PREFILL = PrefillModel()
BLOCK = 16


class Link(NamedTuple):
    """A link whose speed is known as well as the test says."""

    latency_seconds: float = 0.005
    bytes_per_second: float = 1e9
    uncertainty: float = 0.3

    def transfer_seconds(self, size_bytes: int) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second

    def spread(self, size_bytes: int) -> float:
        return self.uncertainty


def supply(tokens: int, bytes_per_token: float = 10_000, **fields) -> Supply:
    return Supply("peer", tokens, 1, "i8", bytes_per_token, **fields)


def need(prompt: int, matched: int = 0, confirmed: int | None = None, wait: float = 0.0, prefill=PREFILL) -> Need:
    return Need(prompt, matched, matched if confirmed is None else confirmed, wait, prefill)


def pull(the_need: Need, the_supply: Supply, link=None, bounds: DeadlineBounds = UNBOUNDED) -> PullOption | None:
    return best_pull(the_need, [(the_supply, link or Link())], bounds)


def computing(the_need: Need) -> float:
    prompt, matched, _, wait, prefill, decoding = the_need
    return wait + prefill.prefill_seconds(prompt - matched, matched, decoding)


needs = st.builds(
    lambda blocks, share, sure, wait, speed, tail: Need(
        blocks * BLOCK + tail,
        int(blocks * share) * BLOCK,
        int(blocks * share * sure) * BLOCK,
        wait,
        PrefillModel(PrefillPrior(0.004 * speed, 35.4e-6 * speed, 6.6e-10 * speed)),
    ),
    st.integers(1, 4000),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 10),
    st.floats(0.01, 100),
    st.integers(1, BLOCK),
)
links = st.builds(Link, st.floats(0, 1), st.floats(1e5, 1e12), st.floats(0.2, 2))
shares = st.floats(0, 1)
costs = st.floats(1, 1e6)


def held(the_need: Need, share: float, bytes_per_token: float = 10_000, ahead: int = 0) -> Supply:
    blocks = (the_need.prompt_tokens - 1) // BLOCK
    return supply(int(blocks * share) * BLOCK, bytes_per_token, ahead_bytes=ahead)


@given(needs, links, shares, costs, st.integers(0, 10**9))
def test_never_worse_than_computing_and_never_for_nothing(the_need, link, share, bytes_per_token, ahead) -> None:
    option = pull(the_need, held(the_need, share, bytes_per_token, ahead), link)
    if option is None:
        return
    assert option.saved_seconds > 0
    assert option.first_token == the_need.confirmed_tokens < option.end_token < the_need.prompt_tokens
    assert option.end_token > the_need.matched_tokens
    assert option.size_bytes == round(option.tokens * bytes_per_token)
    expected = computing(the_need) - option.saved_seconds
    assert expected >= option.prefill_seconds
    # Nobody is promised the first token before the load can have ended.
    assert option.load_seconds > option.deadline_seconds or expected >= min(option.load_seconds, 1e9) * 0.5 - 1e-9


@given(needs, links, shares, st.floats(1.01, 100))
def test_a_faster_link_is_never_worth_less(the_need, link, share, factor) -> None:
    slow = pull(the_need, held(the_need, share), link)
    fast = pull(the_need, held(the_need, share), link._replace(bytes_per_second=link.bytes_per_second * factor))
    near = pull(the_need, held(the_need, share), link._replace(latency_seconds=link.latency_seconds / factor))
    if slow is not None:
        assert fast is not None
        assert near is not None
        assert fast.saved_seconds >= slow.saved_seconds - 1e-9
        assert near.saved_seconds >= slow.saved_seconds - 1e-9


@given(needs, links, shares, st.integers(0, 10**9), st.integers(1, 10**9))
def test_what_goes_first_makes_a_pull_worth_less(the_need, link, share, ahead, more) -> None:
    free = pull(the_need, held(the_need, share, ahead=ahead), link)
    busy = pull(the_need, held(the_need, share, ahead=ahead + more), link)
    if busy is not None:
        assert free is not None
        assert free.saved_seconds >= busy.saved_seconds - 1e-9


@given(needs, links, shares, costs)
def test_deadline_and_computing_are_at_most_twice_the_computing(the_need, link, share, bytes_per_token) -> None:
    option = pull(the_need, held(the_need, share, bytes_per_token), link)
    if option is not None:
        before = computing(the_need) - the_need.wait_seconds
        worst = max(the_need.wait_seconds, option.deadline_seconds) + before
        assert worst <= 2 * computing(the_need) + 1e-9


@given(needs, st.lists(st.tuples(shares, links, costs), min_size=1, max_size=5))
def test_the_best_source_is_taken(the_need, offers) -> None:
    supplies = [(held(the_need, share, cost)._replace(source=number), link) for number, (share, link, cost) in
                enumerate(offers)]  # fmt: skip
    best = best_pull(the_need, supplies, UNBOUNDED)
    alone = [option for one in supplies if (option := best_pull(the_need, [one], UNBOUNDED)) is not None]
    if best is None:
        assert alone == []
    else:
        assert best.saved_seconds == max(option.saved_seconds for option in alone)


def test_small_prompts_and_small_overlaps_fall_out_of_the_arithmetic() -> None:
    link = Link(0.005, 12.5e9)
    assert pull(need(100), supply(96), link) is None
    assert pull(need(16_000, matched=15_920), supply(15_984), link) is None
    assert pull(need(16_000), supply(64), link) is None
    option = pull(need(16_000), supply(15_984), link)
    assert option is not None
    assert option.saved_seconds > 0.5 * computing(need(16_000))


def test_the_break_even_bandwidth_is_bytes_per_token_times_tokens_per_second() -> None:
    prefill = PrefillModel(PrefillPrior(0.0, 1e-4, 0.0))
    for share, worth in ((0.7, False), (1.5, True)):
        link = Link(0.0, share * 10_000 * 1e4, uncertainty=0.01)
        assert (pull(need(16_001, prefill=prefill), supply(16_000), link) is not None) is worth


def test_nothing_is_pulled_that_is_there_or_on_its_way() -> None:
    link = Link(0.0, 1e12)
    assert pull(need(16_000, matched=8000), supply(8000), link) is None
    # What is only on its way is pulled again from where the confirmed part ends, if more comes with it.
    option = pull(need(16_000, matched=8000, confirmed=4000), supply(15_984), link)
    assert option is not None
    assert (option.first_token, option.end_token) == (4000, 15_984)


def test_a_load_hides_behind_the_backlog_and_behind_computing() -> None:
    prefill = PrefillModel(PrefillPrior(0.0, 1e-4, 0.0))
    link = Link(0.0, 1e8, uncertainty=0.001)
    alone = pull(need(20_000, prefill=prefill), supply(10_000, 10_000), link)
    assert alone is not None
    # One second to load, one to compute the rest: a layer is loaded while the one before it is computed.
    assert computing(need(20_000, prefill=prefill)) - alone.saved_seconds == pytest.approx(1 + 1 / LAYERS, abs=0.001)
    queued = need(20_000, wait=5.0, prefill=prefill)
    waiting = pull(queued, supply(10_000, 10_000), link)
    assert waiting is not None
    assert computing(queued) - waiting.saved_seconds == pytest.approx(6.0, abs=0.01)


def test_a_link_that_nobody_measured_must_promise_more() -> None:
    link = Link(0.0, 6e8, uncertainty=0.2)
    assert pull(need(16_001), supply(16_000), link) is not None
    assert pull(need(16_001), supply(16_000, 20_000), link._replace(uncertainty=1.0)) is None


def test_the_deadline_keeps_within_its_bounds() -> None:
    bounds = DeadlineBounds(0.2, 0.3)
    link = Link(0.0, 1e12)
    short, long = pull(need(1_000), supply(992), link, bounds), pull(need(100_000), supply(99_984), link, bounds)
    assert short is not None
    assert long is not None
    assert (short.deadline_seconds, long.deadline_seconds) == (0.2, 0.3)


class View(NamedTuple):
    """A candidate."""

    name: str
    load: WorkerAccount
    matched_tokens: int = 0
    confirmed_tokens: int = 0
    rank: int = 0
    prefill: PrefillModel = PREFILL


class Offers:
    """Everybody may pull the same; who was asked about."""

    def __init__(self, offer: Supply, link: Link) -> None:
        self.asked: list[str] = []
        self._offered = [(offer, link)]

    def __call__(self, view: View) -> list[tuple[Supply, Link]]:
        self.asked.append(view.name)
        return self._offered


def lowered(views: list[View], waits: list[float], offers: Offers, tokens_max: int = 15_984):
    """Costs before and after, and the pulls."""
    works = [PREFILL.prefill_seconds(16_000 - view.matched_tokens, view.matched_tokens) for view in views]
    costs = [wait + work for wait, work in zip(waits, works, strict=True)]
    before = list(costs)
    options = Pulls(16_000, tokens_max, offers, UNBOUNDED).lower(views, waits, works, costs)
    return before, costs, options


def test_a_pull_can_make_another_worker_the_best() -> None:
    views = [View("warm", WorkerAccount("warm", 0), 15_984, 15_984), View("idle", WorkerAccount("idle", 0))]
    offers = Offers(supply(15_984), Link(0.005, 12.5e9))
    before, after, options = lowered(views, [0.4, 0.0], offers)
    assert before[0] < before[1]
    assert after[1] < after[0] == before[0]
    assert options[1].saved_seconds == pytest.approx(before[1] - after[1])
    assert list(options) == [1]


def test_nobody_is_asked_about_who_cannot_become_the_best() -> None:
    names = [f"w{number}" for number in range(64)]
    views = [View(name, WorkerAccount(name, 0)) for name in names]
    offers = Offers(supply(15_984), Link(0.005, 12.5e9))
    _, after, _ = lowered(views, [0.1 * number for number in range(64)], offers)
    assert after.index(min(after)) == 0
    assert offers.asked == ["w0"]


@given(
    st.lists(st.tuples(st.integers(0, 999), st.floats(0, 2)), min_size=1, max_size=8),
    st.integers(0, 999),
    links,
)
def test_the_best_is_the_one_that_asking_everybody_would_find(candidates, held_blocks, link) -> None:
    views = [View(str(n), WorkerAccount(str(n), 0), m * BLOCK, m * BLOCK) for n, (m, _) in enumerate(candidates)]
    waits = [wait for _, wait in candidates]
    offer = supply(held_blocks * BLOCK)
    before, after, options = lowered(views, waits, Offers(offer, link), offer.tokens)
    everybody = []
    for view, wait, cost in zip(views, waits, before, strict=True):
        option = pull(need(16_000, view.matched_tokens, wait=wait), offer, link)
        everybody.append(cost - (option.saved_seconds if option is not None else 0.0))
    assert min(after) == pytest.approx(min(everybody))
    assert all(cost <= known for cost, known in zip(after, before, strict=True))
    assert all(after[index] < before[index] for index in options)


class Waiting(WorkerAccount):
    """A worker with a backlog that is said."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name, 0)
        self.seconds = seconds

    def wait_seconds(self, now: float) -> float:
        return self.seconds


class TestPolicies:
    """What a policy makes of it."""

    QUERY = Query(16_000)

    def snapshot(self, waits_seconds: dict[str, float], warm: str, offers: Offers | None) -> Snapshot:
        views = []
        for name, wait in waits_seconds.items():
            account = Waiting(name, wait)
            matched = 15_984 if name == warm else 0
            views.append(WorkerView(name, 0, account, PREFILL, matched, matched))
        pulls = Pulls(16_000, 15_984, offers, UNBOUNDED) if offers is not None else None
        return Snapshot(0.0, views, pulls=pulls)

    def test_kv_aware_sends_it_to_who_can_pull_and_says_so(self) -> None:
        waits = {"warm": 0.4, "idle": 0.0}
        without = KvAware().decide(self.QUERY, self.snapshot(waits, "warm", None), Random(1))
        assert (without.worker.name, without.pull) == ("warm", None)
        offers = Offers(supply(15_984), Link(0.005, 12.5e9))
        decision = KvAware().decide(self.QUERY, self.snapshot(waits, "warm", offers), Random(1))
        assert decision.worker.name == "idle"
        assert decision.pull is not None
        assert decision.predicted_ttft_ms is not None
        assert without.predicted_ttft_ms is not None
        assert decision.predicted_ttft_ms < without.predicted_ttft_ms
        assert "; pull 15,984 tokens from peer as i8, 18 ms" in decision.reason
        assert decision.pull.document()["predicted_ms"] == pytest.approx(17.8, abs=0.1)

    def test_what_is_cached_at_an_idle_worker_is_not_pulled_elsewhere(self) -> None:
        offers = Offers(supply(15_984), Link(0.005, 12.5e9))
        decision = KvAware().decide(self.QUERY, self.snapshot({"warm": 0.0, "idle": 0.0}, "warm", offers), Random(1))
        assert (decision.worker.name, decision.pull) == ("warm", None)


def test_learned_links_decide() -> None:
    """The same need, before and after the link has shown what it is."""
    estimates = FleetEstimates(link=LinkPrior(0.005, 1e9))
    wanted, offer = need(16_001), supply(16_000)

    def decide() -> PullOption | None:
        return best_pull(wanted, [(offer, estimates.link("a", "b"))], UNBOUNDED)

    assert isinstance(estimates.link("a", "b"), LinkModel)
    assert decide() is not None
    for _ in range(20):
        estimates.observe_link("a", "b", 160_000_000, 3.0, 0.0)
    assert decide() is None
    for _ in range(60):
        estimates.observe_link("a", "b", 160_000_000, 0.02, 0.0)
    assert decide() is not None


@pytest.mark.parametrize(("fill", "spared"), [(1.0, 0.0), (0.25, 0.75), (0.0, 1.0)])
def test_what_is_pulled_into_an_empty_cache_is_spared_the_price_of_work(fill: float, spared: float) -> None:
    """Work is dear: its weight is three. What the pull leaves to compute stays dear."""
    account = WorkerAccount("idle", 0)
    account.fill = fill
    work = PREFILL.prefill_seconds(16_000, 0)
    costs = [3.0 * work]
    pulls = Pulls(16_000, 15_984, Offers(supply(15_984), Link(0.005, 12.5e9)), UNBOUNDED)
    option = pulls.lower([View("idle", account)], [0.0], [work], costs)[0]
    price = 2.0 * (work - spared * (work - option.prefill_seconds))
    assert costs[0] == pytest.approx(work - option.saved_seconds + price)

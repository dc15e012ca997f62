"""Two workers, a queue before them and a virtual clock: a flood beside a quiet tenant, and three times too much of all.

Workers compute one prompt after another, a tenth faster or slower than was predicted. The gateway's own accounting says
who has room, as in `gateway.admission`.
"""

from collections import Counter, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random

import pytest

from policies.state.admission import AdmissionQueue, Lateness, Limits, Reason, Refusal, Ticket
from policies.state.inflight import InflightAccounting
from policies.state.shares import TenantShares

WORKERS = ("a", "b")
SECONDS_PER_TOKEN = 1e-4
PROMPT_TOKENS = 1000
SERVICE_SECONDS = PROMPT_TOKENS * SECONDS_PER_TOKEN
CAPACITY = len(WORKERS) / SERVICE_SECONDS
"""Requests a second."""
BUDGET_SECONDS = 1.0
BACKLOG_SECONDS = 0.25
POLL_SECONDS = 0.01


@dataclass(eq=False)
class Sent:
    tenant: str
    at: float
    gateway: int
    service_seconds: float = 0.0
    worker: str = ""
    dispatched_at: float = 0.0
    predicted_seconds: float = 0.0
    answered_at: float | None = None
    refused: Reason | None = None
    refused_at: float | None = None

    @property
    def good(self) -> bool:
        return self.answered_at is not None and self.answered_at - self.at <= BUDGET_SECONDS


class Waiting(Ticket):
    __slots__ = ("sent",)


class World:
    """Gateways that share workers, and what they know of these."""

    def __init__(self, gateways: int = 1, weights: dict[str, float] | None = None, limits: Limits | None = None):
        weight_of = lambda tenant: (weights or {}).get(tenant, 1.0)  # noqa: E731
        self.random = Random(7)
        self.lateness = Lateness()
        self.accounting = InflightAccounting()
        self.queues = [AdmissionQueue(limits or Limits(), weight_of) for _ in range(gateways)]
        self.shares = [TenantShares(weight_of) for _ in range(gateways)]
        self.events: list[tuple[float, int, str, object]] = []
        self.numbers = count()
        self.engines: dict[str, deque[Sent]] = {worker: deque() for worker in WORKERS}
        self.now = 0.0
        self.polled = [False] * gateways

    def run(self, requests: list[Sent], shared: bool = False) -> None:
        for request in requests:
            self.at(request.at, "arrival", request)
        if shared:
            self.at(0.0, "report", None)
        last = max(request.at for request in requests)
        while self.events:
            self.now, _, kind, what = heappop(self.events)
            if self.now > last and kind in ("report",):
                continue
            getattr(self, kind)(what)

    def at(self, when: float, kind: str, what: object) -> None:
        heappush(self.events, (when, next(self.numbers), kind, what))

    # As in `gateway.admission`

    def room(self, tenant: str, gateway: int) -> bool:
        most = BACKLOG_SECONDS * (0.25 if tenant in self.shares[gateway].held_back else 1.0)
        return min(self.accounting.account(w).wait_seconds(self.now) for w in WORKERS) <= most

    def arrival(self, sent: Sent) -> None:
        queue = self.queues[sent.gateway]
        if not queue.count and self.room(sent.tenant, sent.gateway):
            return self.dispatch(sent)
        start_by = sent.at + BUDGET_SECONDS - SERVICE_SECONDS - self.lateness.seconds(self.now)
        ticket = Waiting(sent.tenant, PROMPT_TOKENS, 100, start_by, self.now)
        ticket.sent = sent
        answer = queue.offer(ticket, self.now, BACKLOG_SECONDS)
        lost = [] if isinstance(answer, Refusal) else answer
        if isinstance(answer, Refusal):
            self.refuse(sent, answer.reason)
        for victim in lost:
            self.refuse(victim.sent, Reason.QUEUE_FULL)
        self.look(sent.gateway)
        return None

    def look(self, gateway: int) -> None:
        queue = self.queues[gateway]
        for expired in queue.expire(self.now):
            self.refuse(expired.sent, Reason.DEADLINE)
        while ticket := queue.take(self.now, lambda tenant, _: self.room(tenant, gateway)):
            wait = min(self.accounting.account(w).wait_seconds(self.now) for w in WORKERS)
            wait += self.lateness.seconds(self.now)
            if self.now + wait + SERVICE_SECONDS > ticket.sent.at + BUDGET_SECONDS:
                queue.refund(ticket)
                self.refuse(ticket.sent, Reason.DEADLINE)
            else:
                self.dispatch(ticket.sent)
        if queue.count and not self.polled[gateway]:
            self.polled[gateway] = True
            self.at(self.now + POLL_SECONDS, "poll", gateway)

    def poll(self, gateway: int) -> None:
        self.polled[gateway] = False
        self.look(gateway)

    def report(self, _: object) -> None:
        for index, shares in enumerate(self.shares):
            shares.roll(self.now)
            told = shares.standings(self.queues[index].waiting_tokens(), 100)
            for other, queue in enumerate(self.queues):
                if other != index:
                    for tenant, tokens in self.shares[other].hear(f"g{index}", "run", told, self.now).items():
                        queue.charge(tenant, tokens)
        for shares in self.shares:
            shares.settle(self.now)
        self.at(self.now + 0.25, "report", None)

    def refuse(self, sent: Sent, reason: Reason) -> None:
        sent.refused, sent.refused_at = reason, self.now

    def dispatch(self, sent: Sent) -> None:
        sent.worker = min(WORKERS, key=lambda w: self.accounting.account(w).wait_seconds(self.now))
        sent.predicted_seconds = self.accounting.account(sent.worker).wait_seconds(self.now) + SERVICE_SECONDS
        sent.dispatched_at = self.now
        sent.service_seconds = SERVICE_SECONDS * self.random.uniform(0.9, 1.1)
        self.accounting.dispatch(str(id(sent)), sent.worker, 0, self.now, PROMPT_TOKENS, SERVICE_SECONDS)
        self.shares[sent.gateway].count(sent.tenant, PROMPT_TOKENS)
        engine = self.engines[sent.worker]
        engine.append(sent)
        if len(engine) == 1:
            self.at(self.now + sent.service_seconds, "first_token", sent)

    def first_token(self, sent: Sent) -> None:
        sent.answered_at = self.now
        self.lateness.observe(sent.predicted_seconds, self.now - sent.dispatched_at, self.now)
        self.accounting.first_token(str(id(sent)), self.now)
        self.accounting.finish(str(id(sent)), self.now)
        engine = self.engines[sent.worker]
        engine.popleft()
        if engine:
            self.at(self.now + engine[0].service_seconds, "first_token", engine[0])
        for gateway in range(len(self.queues)):
            self.look(gateway)


def poisson(tenant: str, rate: float, seconds: float, seed: int, gateway: int = 0) -> list[Sent]:
    random, at, sent = Random(seed), 0.0, []
    while (at := at + random.expovariate(rate)) < seconds:
        sent.append(Sent(tenant, at, gateway))
    return sent


def goodput(requests: list[Sent], tenant: str) -> float:
    own = [request.good for request in requests if request.tenant == tenant]
    return sum(own) / len(own)


@pytest.mark.parametrize("load", [0.2, 0.4])
@pytest.mark.parametrize("seed", range(2))
def test_a_flood_of_ten_times_leaves_a_quiet_tenant_what_it_has_alone(seed: int, load: float) -> None:
    """Up to four fifths of its share."""
    quiet = poisson("quiet", load * CAPACITY, 60.0, seed)
    alone = World()
    alone.run(quiet)
    solo = goodput(quiet, "quiet")
    assert solo >= 0.98

    flood = poisson("flood", 10 * load * CAPACITY, 60.0, seed + 100)
    beside = poisson("quiet", load * CAPACITY, 60.0, seed) + flood
    World().run(beside)
    assert goodput(beside, "quiet") >= 0.95 * solo
    # What the quiet one leaves is used: nobody idles for fairness.
    answered = sum(request.answered_at is not None for request in beside)
    told = Counter(request.refused for request in flood if request.refused is not None)
    assert told[Reason.OVER_SHARE] >= 0.25 * told.total()
    assert answered >= 0.93 * CAPACITY * 60.0


@pytest.mark.parametrize("seed", range(2))
def test_three_times_too_much_is_refused_early_and_what_is_accepted_is_in_time(seed: int) -> None:
    requests = [
        sent
        for number, tenant in enumerate(("x", "y", "z"))
        for sent in poisson(tenant, CAPACITY, 60.0, seed * 10 + number)
    ]
    World().run(requests)
    accepted = [request for request in requests if request.refused is None]
    assert all(request.answered_at is not None for request in accepted)
    assert sum(request.good for request in accepted) >= 0.95 * len(accepted)
    assert len(accepted) >= 0.93 * CAPACITY * 60.0
    waited = [request.refused_at - request.at for request in requests if request.refused_at is not None]
    assert max(waited) <= BUDGET_SECONDS
    # Most of what is refused is refused on arrival, not after a useless wait.
    assert sum(seconds < 0.05 for seconds in waited) >= 0.8 * len(waited)
    served = Counter(request.tenant for request in accepted)
    assert max(served.values()) <= 1.1 * min(served.values())


def test_weights_divide_what_there_is() -> None:
    requests = poisson("heavy", 3 * CAPACITY, 60.0, 1) + poisson("light", 3 * CAPACITY, 60.0, 2)
    World(weights={"heavy": 3.0}).run(requests)
    served = Counter(request.tenant for request in requests if request.answered_at is not None)
    assert served["heavy"] / served["light"] == pytest.approx(3.0, rel=0.2)


def test_a_tenants_share_is_one_over_all_gateways() -> None:
    def served(shared: bool) -> Counter[str]:
        requests = (
            poisson("wide", 2 * CAPACITY, 60.0, 1, gateway=0)
            + poisson("wide", 2 * CAPACITY, 60.0, 2, gateway=1)
            + poisson("narrow", 2 * CAPACITY, 60.0, 3, gateway=1)
        )
        World(gateways=2).run(requests, shared)
        return Counter(request.tenant for request in requests if request.answered_at is not None)

    apart, together = served(False), served(True)
    assert apart["narrow"] / apart.total() < 0.4
    assert together["narrow"] / together.total() == pytest.approx(0.5, abs=0.05)
    assert together.total() >= 0.93 * CAPACITY * 60.0

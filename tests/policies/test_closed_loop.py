"""Policies and their state in a closed loop with workers of our own: forty conversations under one system prompt.

The engine here is not the estimator: prefill is serial, first come first served, and slower than the priors say by a
factor that the loop must find out for itself.
"""

from collections import Counter, deque
from heapq import heappop, heappush
from itertools import count
from random import Random

import pytest

from policies import create
from policies.contract import Evidence, Query, Snapshot, WorkerView
from policies.estimates import FleetEstimates, PrefillModel, PrefillPrior
from policies.pricing import prefill_seconds
from policies.state.history import RoutingHistory
from policies.state.inflight import InflightAccounting
from policies.state.predictions import PredictedInsertions

BLOCK = 16
SYSTEM_TOKENS = 1000
WORKERS = [(f"worker-{number}", 0) for number in range(4)]
TRUTH = PrefillModel(PrefillPrior(0.01, 4e-4, 1e-8))
DECODE_SECONDS = 0.5
THINK_SECONDS = 1.2
TURNS = 14
EVENT_DELAY_SECONDS = 0.02


class Conversation:
    def __init__(self, number: int, random: Random) -> None:
        self.number = number
        self.turns = TURNS
        self.tokens = SYSTEM_TOKENS + random.randrange(60, 200)
        self.cached_tokens = 0
        """What the best placement finds cached: the system prompt, then everything up to the last turn's end."""

    def chain(self) -> bytes:
        shared = SYSTEM_TOKENS // BLOCK
        names = [b"system-%09d" % block for block in range(shared)]
        return b"".join(names + [b"%04d-%011d" % (self.number, block) for block in range(shared, self.tokens // BLOCK)])


class Simulation:
    """Virtual time; the gateway's part is `arrive`, `first_token` and `finish`."""

    def __init__(self, policy, seed, store_type, evidence=Evidence.EXACT, start_seconds=0.05) -> None:
        self.policy, self.random = create(policy), Random(seed)
        self.inflight, self.estimates = InflightAccounting(), FleetEstimates(PrefillPrior(0.005, 2e-4, 0.0))
        self.engine_cache, self.index = store_type(), store_type()
        self.predicted, self.history = PredictedInsertions(store_type()), RoutingHistory(store_type())
        self.evidence = evidence
        self.queues = {key: deque() for key in WORKERS}
        self.served, self.busy = Counter(), Counter()
        self.prompt_tokens = self.hit_tokens = self.best_tokens = 0
        self.events, self.order, self.now = [], count(), 0.0
        self.full_load = 0.0
        for number in range(40):
            self.at(self.random.uniform(0, start_seconds), self.arrive, Conversation(number, self.random))

    def at(self, when, action, *arguments):
        heappush(self.events, (when, next(self.order), action, arguments))

    def run(self):
        while self.events:
            self.now, _, action, arguments = heappop(self.events)
            action(*arguments)
        return self

    def views(self, chain):
        confirmed, guessed = self.index.depths(chain), self.predicted.depths(chain, self.now)
        if self.evidence is Evidence.HISTORY:
            confirmed, guessed = {}, self.history.depths(chain)
        for key in WORKERS:
            known, guess = BLOCK * confirmed.get(key, 0), BLOCK * guessed.get(key, 0)
            evidence = Evidence.PREDICTED if guess > known else Evidence.EXACT
            if self.evidence is Evidence.HISTORY:
                evidence = Evidence.HISTORY
            load, model = self.inflight.account(*key), self.estimates.prefill(key)
            yield WorkerView(*key, load, model, max(known, guess), known, evidence=evidence)

    def arrive(self, conversation):
        chain, tokens = conversation.chain(), conversation.tokens
        snapshot = Snapshot(self.now, list(self.views(chain)), self.inflight.rates(self.now, len(WORKERS)))
        view = self.policy.decide(Query(tokens), snapshot, self.random).worker
        key, request = (view.name, view.rank), f"{conversation.number}-{conversation.turns}"
        seconds = prefill_seconds(Query(tokens), view)
        uncached, context = tokens - view.matched_tokens, view.load.running_context_tokens
        told = self.estimates.prefill(key).prior_seconds(uncached, view.matched_tokens, context)
        self.inflight.dispatch(request, *key, self.now, tokens, seconds, 0, told)
        self.predicted.predict(request, key, chain, self.now)
        self.history.record(key, chain)
        self.served[key] += 1
        self.queues[key].append((conversation, request, chain))
        if len(self.queues[key]) == 1:
            self.start(key)

    def start(self, key):
        conversation, request, chain = self.queues[key][0]
        hit = BLOCK * self.engine_cache.depths(chain).get(key, 0)
        seconds = TRUTH.prefill_seconds(conversation.tokens - hit, hit)
        self.prompt_tokens += conversation.tokens
        self.hit_tokens += hit
        self.best_tokens += conversation.cached_tokens or SYSTEM_TOKENS // BLOCK * BLOCK
        self.busy[key] += seconds
        self.at(self.now + seconds, self.first_token, key, request, chain)

    def first_token(self, key, request, chain):
        self.engine_cache.store(key, chain)
        conversation = self.queues[key].popleft()[0]
        if self.queues[key]:
            self.start(key)
        sample = self.inflight.first_token(request, self.now)
        if sample:
            self.estimates.observe_prefill(sample)
        self.at(self.now + EVENT_DELAY_SECONDS, self.index.store, key, chain)
        self.at(self.now + DECODE_SECONDS, self.finish, conversation, request, key)

    def finish(self, conversation, request, key):
        self.inflight.finish(request, self.now, 60)
        conversation.tokens += 60
        answered = conversation.chain()
        self.engine_cache.store(key, answered)
        self.at(self.now + EVENT_DELAY_SECONDS, self.index.store, key, answered)
        conversation.cached_tokens = len(answered) // 16 * BLOCK
        conversation.turns -= 1
        if not conversation.turns:
            self.full_load = self.full_load or self.utilisation
        else:
            conversation.tokens += self.random.randrange(60, 400)
            self.at(self.now + self.random.expovariate(1 / THINK_SECONDS), self.arrive, conversation)

    @property
    def utilisation(self):
        return sum(self.busy.values()) / len(WORKERS) / self.now

    @property
    def hit_rate(self):
        return self.hit_tokens / self.prompt_tokens

    @property
    def best_hit_rate(self):
        """Of a placement that computes the system prompt once per worker and finds every own history again."""
        return (self.best_tokens - len(WORKERS) * SYSTEM_TOKENS) / self.prompt_tokens

    @property
    def smallest_share(self):
        return min(self.served[key] for key in WORKERS) / sum(self.served.values())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_forty_conversations_at_once_are_kept_together_and_balanced(store, seed):
    simulation = Simulation("kv-aware", seed, type(store)).run()
    assert sum(simulation.served.values()) == 40 * TURNS
    assert 0.55 < simulation.full_load < 0.7
    assert simulation.smallest_share >= 0.15
    assert simulation.best_hit_rate > 0.9
    assert simulation.hit_rate >= simulation.best_hit_rate - 0.03


@pytest.mark.parametrize("seed", [1, 2])
def test_a_staggered_start_copies_the_system_prompt_to_every_worker(store, seed):
    """The harder start: the first conversations find one warm worker, and no queue drives the others away from it."""
    simulation = Simulation("kv-aware", seed, type(store), start_seconds=4.0).run()
    assert simulation.smallest_share >= 0.12
    assert simulation.hit_rate >= simulation.best_hit_rate - 0.03


@pytest.mark.parametrize(("evidence", "error_max"), [(Evidence.EXACT, 0.1), (Evidence.HISTORY, 0.25)])
def test_the_loop_finds_out_how_fast_the_workers_are(store, evidence, error_max):
    """Twice as slow as the priors say. History does not know of cached answers, so it takes workers for faster."""
    simulation = Simulation("kv-aware", 4, type(store), evidence).run()
    for key in WORKERS:
        told = simulation.estimates.prefill(key).prefill_seconds(300, 1500)
        assert told == pytest.approx(TRUTH.prefill_seconds(300, 1500), rel=error_max)


@pytest.mark.parametrize("policy", ["kv-aware", "prefix-aware"])
def test_history_serves_where_workers_publish_no_events(store, policy):
    simulation = Simulation(policy, 5, type(store), Evidence.HISTORY).run()
    assert simulation.hit_rate >= simulation.best_hit_rate - 0.03


def test_a_policy_blind_to_caches_does_worse(store):
    """The yardstick can tell: round robin loses what the others keep."""
    simulation = Simulation("round-robin", 1, type(store)).run()
    assert simulation.hit_rate < simulation.best_hit_rate - 0.1


def test_everything_is_accounted_for_in_the_end(store):
    simulation = Simulation("kv-aware", 6, type(store)).run()
    assert simulation.inflight.unknown == simulation.inflight.dropped == len(simulation.inflight) == 0
    for account in simulation.inflight.accounts():
        assert (account.inflight, account.waiting, account.inflight_tokens, account.running_context_tokens) == (0,) * 4
        assert account.outstanding_prefill_seconds == 0.0

"""What the gateway itself has sent where: load, predicted wait and rates, from its own dispatches alone.

Everything is counted at the moment of decision, before any await, so that a burst sees itself. What engines report of
their queues is seconds old and only completes the picture: it tells of requests that are not ours.

The wait of a worker is an event-bounded backlog. A clock alone would let a backlog run out while the engine stands
still (its KV pool is full, say); first tokens alone would not let it fall between events. So

    backlog falls with the clock:   B = wait + S at each dispatch, then B - (now - dispatched)
    first tokens bound it:          outstanding - S(oldest) <= wait <= outstanding

with S the predicted prefill of a request and `outstanding` the sum of S over requests without a first token.

An engine also has slots: it runs `capacity_requests` at once and lets others wait, however short their prefill. With
all slots taken one becomes free every R / capacity seconds, R being how long a request holds its slot, and so

    wait >= R / capacity * (requests in the engine + 1 - capacity)

R is learned from durations, which hold the same wait: duration = R * (1 + excess at dispatch / capacity). It needs no
first token, so answers in one piece teach it too.

And it has KV memory, C tokens. A request needs its prompt and its output from dispatch to end; what siblings share
counts once (`pin`). With u the share of C that is needed, b each request's tokens and n requests that decode, the
memory is short with probability Q (normal, the requests independent), and a queue for it drains at the rate 1 - u.
Work delays the n, so their memory comes back later, and holds up

    kv pressure = n * Q(z) / (1 - u + 1/n)        z = (1 - u) * C / sqrt(sum b^2)        Q(z) = erfc(z / sqrt 2) / 2

requests for each relative unit of delay (docs/decisions/policy.md).

Calibration reads the same records. Engines batch: eight prompts may get their first tokens in one step, so the service
time of ONE request means little. What is observed is a stretch of uninterrupted prefill work: its duration beside the
sum of what the uncalibrated prior says of its requests (`PrefillSample`). The prior and not the prediction, because the
calibration has moved on since a queued request was dispatched.

An answer that comes in one piece hides its first token. It is taken to come when it was predicted: to wait for the
whole answer would make a worker that decodes look like one that is busy prefilling. For as long as a worker has shown
no first token, the durations of whole answers teach the scale of the priors (`AnswerSample`).
"""

from heapq import heappop, heappush
from math import erfc, exp, sqrt
from typing import TYPE_CHECKING, NamedTuple

from policies.contract import FleetRates

if TYPE_CHECKING:
    from policies.state.pins import PinnedChains

WorkerKey = tuple[str, int]
"""Name and data-parallel rank."""

REQUESTS_MAX = 100_000
OUTPUT_TOKENS_PRIOR = 256.0
_OUTPUT_WEIGHT = 0.05
_SLOT_WEIGHT = 0.1
_UNIT_MAX = 1e12
_DECAY_SECONDS_MIN = 0.001
"""Not more often than this: a busy gateway decides several times in a millisecond."""
_STRETCH_REQUESTS = 8
"""A stretch is cut after this many first tokens: under steady load the queue never runs empty."""


class PrefillSample(NamedTuple):
    """A stretch of uninterrupted prefill work on one worker."""

    worker: str
    rank: int
    requests: int
    prior_seconds: float
    """Sum of `PrefillModel.prior_seconds` of its requests."""
    observed_seconds: float


class AnswerSample(NamedTuple):
    """An answer that came in one piece: how long it took altogether, waiting for a slot apart."""

    worker: str
    rank: int
    prior_seconds: float
    """`PrefillModel.prior_seconds` of its prompt."""
    prompt_tokens: int
    output_tokens: int
    observed_seconds: float


class _Request:
    """One dispatch. `context_tokens` is what it holds of the worker's decode load; zero until its first token.
    `crowding` is one, and the slots it waits for at its dispatch as a share of all."""

    __slots__ = (
        "account",
        "block_size_tokens",
        "chain",
        "context_tokens",
        "crowding",
        "dispatched_at",
        "in_one_piece",
        "kv_tokens",
        "output_tokens_max",
        "prefill_seconds",
        "prior_seconds",
        "prompt_tokens",
        "waiting",
    )

    def __init__(
        self,
        account: "WorkerAccount",
        prompt_tokens: int,
        prefill_seconds: float,
        output_tokens_max: int,
        prior_seconds: float | None,
        now: float,
        in_one_piece: bool,
        kv_tokens: int,
    ) -> None:
        self.account = account
        self.kv_tokens = kv_tokens
        self.chain = b""
        self.block_size_tokens = 0
        self.in_one_piece = in_one_piece
        self.dispatched_at = now
        self.crowding = account._crowding(now) if account.capacity_requests else 1.0
        self.prompt_tokens = prompt_tokens
        self.prefill_seconds = prefill_seconds
        self.output_tokens_max = output_tokens_max
        self.prior_seconds = prior_seconds
        self.context_tokens = 0
        self.waiting = True


class WorkerAccount:
    """One worker's load (`policies.contract.WorkerLoad`). Changed by `InflightAccounting` alone, read by policies."""

    __slots__ = (
        "_backlog_ends_at",
        "_first_token_at",
        "_foreign",
        "_foreign_until",
        "_kv_pressure",
        "_kv_squares",
        "_queue",
        "_reported_full",
        "_stretch_at",
        "_stretch_requests",
        "_stretch_seconds",
        "_wait_seconds_min",
        "block_size_tokens",
        "capacity_requests",
        "dispatched",
        "fill",
        "inflight",
        "inflight_tokens",
        "kv_held_tokens",
        "kv_tokens",
        "name",
        "outstanding_prefill_seconds",
        "placed",
        "rank",
        "running_context_tokens",
        "slot_seconds",
        "waiting",
    )

    def __init__(self, name: str, rank: int, slot_seconds: float = 0.0) -> None:
        self.name = name
        self.rank = rank
        self.inflight = 0
        self.waiting = 0
        self.outstanding_prefill_seconds = 0.0
        self.inflight_tokens = 0
        self.running_context_tokens = 0
        self.dispatched = 0
        self.placed = 0.0
        self.capacity_requests = 0
        """Requests it runs at once; 0 while unknown."""
        self.slot_seconds = slot_seconds
        """How long a request holds its slot; 0 while unknown."""
        self.kv_tokens = 0
        """Its KV memory; 0 while unknown."""
        self.kv_held_tokens = 0
        """What its requests in flight need of that, until they have ended."""
        self.block_size_tokens = 0
        """Of the chains that are pinned; 0 before the first."""
        self.fill = 1.0
        self._kv_squares = 0
        self._kv_pressure: float | None = 0.0
        self._foreign = 0
        self._foreign_until = 0.0
        self._reported_full = 0
        self._backlog_ends_at = 0.0
        self._wait_seconds_min = 0.0
        self._queue: dict[_Request, None] = {}
        self._stretch_at: float | None = None
        self._stretch_seconds = 0.0
        self._stretch_requests = 0
        self._first_token_at = 0.0

    def __repr__(self) -> str:
        return (
            f"WorkerAccount({self.name}/{self.rank}: inflight={self.inflight} waiting={self.waiting} "
            f"outstanding={self.outstanding_prefill_seconds:.3f}s tokens={self.inflight_tokens} "
            f"context={self.running_context_tokens})"
        )

    def wait_seconds(self, now: float) -> float:
        """Predicted time until a request dispatched now would start its prefill. See the module's opening."""
        wait = 0.0
        if self.waiting:  # else both bounds are zero
            wait = self._backlog_ends_at - now
            if wait >= self.outstanding_prefill_seconds:
                wait = self.outstanding_prefill_seconds
            elif wait < self._wait_seconds_min:
                wait = self._wait_seconds_min
        if self.capacity_requests and self.inflight + self._foreign >= self.capacity_requests:
            wait = max(wait, self.slot_seconds * (self._crowding(now) - 1.0))
        return wait

    @property
    def kv_share(self) -> float:
        return self.kv_held_tokens / self.kv_tokens if self.kv_tokens else 0.0

    def kv_pressure(self) -> float:
        """See the module's opening. Computed once after each change."""
        pressure = self._kv_pressure
        if pressure is None:
            pressure = self._kv_pressure = self._compute_kv_pressure()
        return pressure

    def _compute_kv_pressure(self) -> float:
        running = self.inflight - self.waiting
        if not self.kv_tokens or running < 1:
            return 0.0
        free = max(1.0 - self.kv_held_tokens / self.kv_tokens, 0.0)
        short = 0.5 * erfc(free * self.kv_tokens / sqrt(2.0 * max(self._kv_squares, 1.0)))
        return running * short / (free + 1.0 / running)

    def new_life(self, capacity_requests: int, kv_tokens: int = 0) -> None:
        """The engine has started (again), runs so many requests at once and has so much KV memory; 0 when it does not
        say."""
        self.capacity_requests = capacity_requests
        self.kv_tokens = kv_tokens
        self.fill = 1.0
        self._kv_pressure = None
        self._foreign = self._reported_full = 0

    def report(self, running: int, waiting: int, inflight_max: int, until: float) -> None:
        """What the engine says of itself, believed until a time. `inflight_max`: our requests while it was asked.

        What it has beyond those came from elsewhere. Where its capacity is not known, an engine that lets requests wait
        in two reports running shows it; one report may have caught a request between arrival and the next step.
        """
        self._foreign = max(running + waiting - inflight_max, 0)
        self._foreign_until = until
        full = running if waiting else 0
        if running > self.capacity_requests > 0:
            self.capacity_requests = running
        elif not self.capacity_requests and full and self._reported_full:
            self.capacity_requests = max(full, self._reported_full)
        self._reported_full = full

    def _crowding(self, now: float) -> float:
        """One, and the slots that a request dispatched now would wait for, as a share of all."""
        capacity = self.capacity_requests
        if not capacity:
            return 1.0
        if self._foreign and now >= self._foreign_until:
            self._foreign = 0
        excess = self.inflight + self._foreign + 1 - capacity
        return 1.0 + excess / capacity if excess > 0 else 1.0

    def _dispatch(self, request: _Request, now: float, wait_seconds: float) -> None:
        self._backlog_ends_at = now + wait_seconds + request.prefill_seconds
        if self.waiting:
            self._wait_seconds_min += request.prefill_seconds
        else:
            self._start_stretch(now)
        self._queue[request] = None
        self.inflight += 1
        self.waiting += 1
        self.dispatched += 1
        self.outstanding_prefill_seconds += request.prefill_seconds
        self.inflight_tokens += request.prompt_tokens
        self.kv_held_tokens += request.kv_tokens
        self._kv_squares += request.kv_tokens * request.kv_tokens
        self._kv_pressure = None

    def _leave_queue(self, request: _Request) -> None:
        request.waiting = False
        del self._queue[request]
        self.waiting -= 1
        self._kv_pressure = None
        if self.waiting:
            outstanding = max(self.outstanding_prefill_seconds - request.prefill_seconds, 0.0)
            self.outstanding_prefill_seconds = outstanding
            self._wait_seconds_min = max(outstanding - next(iter(self._queue)).prefill_seconds, 0.0)
        else:  # exactly empty: float sums drift
            self.outstanding_prefill_seconds = self._wait_seconds_min = 0.0

    def _first_token(self, request: _Request, now: float) -> PrefillSample | None:
        self._leave_queue(request)
        self.running_context_tokens += request.context_tokens
        if self._stretch_at is None or request.prior_seconds is None:
            self._start_stretch(now)
            return None
        # Cut only between steps: first tokens of one step arrive together, and their work belongs together.
        pause = now - self._first_token_at
        cut = self._stretch_requests >= _STRETCH_REQUESTS and pause > request.prefill_seconds / 4
        sample = self._end_stretch(self._first_token_at) if cut else None
        self._stretch_seconds += request.prior_seconds
        self._stretch_requests += 1
        self._first_token_at = now
        return sample if self.waiting else self._end_stretch(now)

    def _presume_first_token(self, request: _Request) -> None:
        self._leave_queue(request)
        self.running_context_tokens += request.context_tokens
        self._stretch_at = None  # when its prefill was done is a guess: nothing to learn from

    def _finish(self, request: _Request) -> None:
        if request.waiting:
            self._leave_queue(request)
            self._stretch_at = None  # nobody knows how much of its prefill was done
        self.inflight -= 1
        self.inflight_tokens -= request.prompt_tokens
        self.running_context_tokens -= request.context_tokens
        self.kv_held_tokens -= request.kv_tokens
        self._kv_squares -= request.kv_tokens * request.kv_tokens
        self._kv_pressure = None

    def _start_stretch(self, now: float) -> None:
        self._stretch_at, self._stretch_seconds, self._stretch_requests = now, 0.0, 0
        self._first_token_at = now

    def _end_stretch(self, now: float) -> PrefillSample | None:
        started, seconds, requests = self._stretch_at, self._stretch_seconds, self._stretch_requests
        self._start_stretch(now)
        if started is None or not requests or now <= started:
            return None
        return PrefillSample(self.name, self.rank, requests, seconds, now - started)


class InflightAccounting:
    """Every request from dispatch to finish, by worker, and the rates of the fleet.

    Request ids that are not in flight are counted (`unknown`) and otherwise ignored. At most `requests_max` requests
    are tracked; beyond that the oldest is dropped (`dropped`): a caller that never finishes its requests cannot fill
    the memory or keep a worker looking busy for ever.
    """

    def __init__(
        self, tau_seconds: float = 30.0, requests_max: int = REQUESTS_MAX, pins: "PinnedChains | None" = None
    ) -> None:
        """`pins`: what tells shared blocks apart; without, every request is taken to have all of its own."""
        if tau_seconds <= 0 or requests_max < 1:
            raise ValueError("tau_seconds and requests_max must be positive")
        self.tau_seconds = tau_seconds
        self.requests_max = requests_max
        self.pins = pins
        self.unknown = 0
        self.dropped = 0
        self.output_tokens_mean = OUTPUT_TOKENS_PRIOR
        self.slot_seconds_mean = 0.0
        self._unit = 1.0
        """What a second placed now counts: weights grow instead of sums decaying, so that nobody is visited."""
        self._accounts: dict[WorkerKey, WorkerAccount] = {}
        self._requests: dict[str, _Request] = {}
        self._hidden: list[tuple[float, str]] = []
        """(predicted first token, request) of answers that come in one piece: a heap."""
        self._arrivals = 0.0
        self._work_seconds = 0.0
        self._decayed_at = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def own_requests(self) -> int:
        """Those that this gateway has sent itself, where accounts are kept of others' as well."""
        return len(self._requests)

    def __repr__(self) -> str:
        return f"InflightAccounting({len(self)} in flight, {list(self._accounts.values())})"

    def account(self, worker: str, rank: int = 0) -> WorkerAccount:
        """The worker's live record, made on first use. The same object until `remove_worker`."""
        key = (worker, rank)
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = WorkerAccount(worker, rank, self.slot_seconds_mean)
        return account

    def accounts(self) -> list[WorkerAccount]:
        return list(self._accounts.values())

    def remove_worker(self, worker: str, rank: int = 0) -> None:
        """Forget the worker. Its requests still in flight finish against the old record, which nobody reads."""
        self._accounts.pop((worker, rank), None)

    def dispatch(
        self,
        request_id: str,
        worker: str,
        rank: int,
        now: float,
        prompt_tokens: int,
        prefill_seconds: float,
        output_tokens_max: int = 0,
        prior_seconds: float | None = None,
        in_one_piece: bool = False,
    ) -> None:
        """A request has been given to a worker. An id already in flight (a retry) ends its earlier attempt first.

        `prefill_seconds` is its predicted prefill there (`policies.pricing.prefill_seconds`); `prior_seconds` what the
        prior says if the match holds (`PrefillModel.prior_seconds`): without it nothing is learned from the request.
        `in_one_piece`: the answer is not streamed, so its first token will not be seen.
        """
        requests = self._requests
        if request_id in requests:
            self._retire(requests.pop(request_id))
        elif len(requests) >= self.requests_max:
            self.dropped += 1
            self._retire(requests.pop(next(iter(requests))))
        account = self._accounts.get((worker, rank)) or self.account(worker, rank)
        if now - self._decayed_at >= _DECAY_SECONDS_MIN:
            self._decay(now)
        wait_seconds = account.wait_seconds(now)
        if in_one_piece:
            heappush(self._hidden, (now + wait_seconds + prefill_seconds, request_id))
        kv_tokens = prompt_tokens + self._output_tokens(output_tokens_max)
        request = _Request(
            account, prompt_tokens, prefill_seconds, output_tokens_max, prior_seconds, now, in_one_piece, kv_tokens
        )
        requests[request_id] = request
        account._dispatch(request, now, wait_seconds)
        self._arrivals += 1.0
        self._work_seconds += prefill_seconds
        slots = account.capacity_requests
        slot_seconds = account.slot_seconds / slots if slots else 0.0
        account.placed += self._unit * (prefill_seconds if prefill_seconds > slot_seconds else slot_seconds)

    def pin(self, request_id: str, chain: bytes, block_size_tokens: int = 0) -> None:
        """What a request in flight needs is known by name: what its worker's others share counts once. Of no use where
        its KV memory is not known, and done nothing there. `block_size_tokens`: the worker's last one when 0."""
        request = self._requests.get(request_id)
        if request is None or request.chain or self.pins is None or not chain:
            return
        account = request.account
        if block_size_tokens:
            account.block_size_tokens = block_size_tokens
        if account.kv_tokens and account.block_size_tokens:
            request.chain, request.block_size_tokens = chain, account.block_size_tokens
            shared = self.pins.pin((account.name, account.rank), chain) * request.block_size_tokens
            account.kv_held_tokens -= min(shared, request.prompt_tokens)
            account._kv_pressure = None

    def _unpin(self, request: _Request) -> None:
        """What it has shared is the others' now."""
        if self.pins is not None:
            account = request.account
            shared = self.pins.unpin((account.name, account.rank), request.chain) * request.block_size_tokens
            account.kv_held_tokens += min(shared, request.prompt_tokens)

    def first_token(self, request_id: str, now: float) -> PrefillSample | None:
        """The first token of a request has arrived; later calls change nothing.

        Returns what a finished stretch of work taught about the worker's speed, for `FleetEstimates.observe_prefill`.
        """
        request = self._requests.get(request_id)
        if request is None:
            self.unknown += 1
            return None
        if not request.waiting:
            return None
        self._set_context(request)
        return request.account._first_token(request, now)

    def _presume_first_tokens(self, now: float) -> None:
        hidden = self._hidden
        while hidden and hidden[0][0] <= now:
            request = self._requests.get(heappop(hidden)[1])
            if request is not None and request.waiting:
                self._set_context(request)
                request.account._presume_first_token(request)

    def _set_context(self, request: _Request) -> None:
        # No call per token: a decoding request is taken to be half-way through the output that is usual here.
        request.context_tokens = request.prompt_tokens + self._output_tokens(request.output_tokens_max) // 2

    def _output_tokens(self, output_tokens_max: int) -> int:
        """What is usual here, within what the client allows."""
        output = int(self.output_tokens_mean)
        return output_tokens_max if 0 < output_tokens_max < output else output

    def finish(
        self, request_id: str, now: float, output_tokens: int = 0, answered: bool = False
    ) -> AnswerSample | None:
        """A request has ended, however it ended. `output_tokens`, when known, teaches how long outputs are; that it was
        `answered` to its end teaches how long a request holds its slot.

        Returns what an answer in one piece taught, for `FleetEstimates.observe_answer`.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            self.unknown += 1
            return None
        self._retire(request)
        if output_tokens:
            self.output_tokens_mean += _OUTPUT_WEIGHT * (output_tokens - self.output_tokens_mean)
        if not (answered or output_tokens):
            return None
        account, seconds = request.account, (now - request.dispatched_at) / request.crowding
        self._learn_slot(account, seconds)
        prior = request.prior_seconds
        if not request.in_one_piece or not output_tokens or prior is None:
            return None
        return AnswerSample(account.name, account.rank, prior, request.prompt_tokens, output_tokens, seconds)

    def _learn_slot(self, account: WorkerAccount, seconds: float) -> None:
        known = account.slot_seconds
        account.slot_seconds = known + _SLOT_WEIGHT * (seconds - known) if known else seconds
        known = self.slot_seconds_mean
        self.slot_seconds_mean = known + _SLOT_WEIGHT * (seconds - known) if known else seconds
        if not known:
            for account in self._accounts.values():
                account.slot_seconds = account.slot_seconds or seconds

    def rates(self, now: float, worker_count: int) -> FleetRates:
        """Arrivals and dispatched work per worker and second: sums that decay with tau, divided by tau.

        For the first tau seconds of a gateway they read low, as if the fleet had been idle before: it had.
        """
        self._decay(now)
        if worker_count < 1:
            return FleetRates(tau_seconds=self.tau_seconds)
        arrivals = self._arrivals / worker_count
        return FleetRates(
            arrivals / self.tau_seconds,
            self._work_seconds / (worker_count * self.tau_seconds),
            arrivals,
            self.tau_seconds,
            self._unit,
        )

    def _retire(self, request: _Request) -> None:
        if request.chain:
            self._unpin(request)
        request.account._finish(request)

    def _decay(self, now: float) -> None:
        """Bring everything that moves with the clock up to now, or almost."""
        elapsed = now - self._decayed_at
        if elapsed < _DECAY_SECONDS_MIN:
            return
        self._presume_first_tokens(now)
        self._decayed_at = now
        if self._arrivals:
            factor = exp(-elapsed / self.tau_seconds)
            self._arrivals *= factor
            self._work_seconds *= factor
            # After a pause that forgets everything the factor is zero.
            self._unit = self._unit / factor if factor * _UNIT_MAX > 1.0 else self._unit * _UNIT_MAX
            if self._unit >= _UNIT_MAX:
                self._shrink_placed()

    def _shrink_placed(self) -> None:
        for account in self._accounts.values():
            account.placed /= self._unit
        self._unit = 1.0

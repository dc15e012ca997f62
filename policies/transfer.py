"""Pull or compute: what each way to a first token is expected to take, in seconds.

A worker that lacks a part of a prompt can compute it, or pull it from whoever holds it. With m tokens there already,
n in the prompt, d held by the source, w the worker's backlog and S its prefill,

    computing    w + S(n - m after m)                                              = w + before
    pulling      max(w, head) + S(n - d after d), but no sooner than load + tail

since KV comes layer by layer: a layer's suffix is computed while the next one arrives, and the load begins at once,
while the request still waits its turn. `load` is the link's latency, what goes first on it, and the run's own bytes;
`head` is when the first layer has come; `tail` is what follows when the last one has, that layer's computing and the
constant part of a prefill. Small prompts and small overlaps need no threshold: S falls by less than the latency.

A pull may fail, and then everything is computed after all. So it gets a deadline, the moment from which it could no
longer win: w + before - tail. Then deadline and computing together are at most twice the computing and the wait (the
ski rental bound), however wrong the estimate was. How likely the deadline is missed depends on how well the link is
known (`LinkEstimate.spread`: load is taken to be lognormal), and both outcomes are weighed:

    expected = P(load <= deadline) * pulling + P(load > deadline) * (max(w, deadline) + before)

A link that nobody has measured must therefore promise more than one that is known.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import erfc, log, sqrt
from typing import Any, NamedTuple, Protocol

LAYERS = 16
"""Of the smallest models; others have more, and overlap better."""
LOOKS_MAX = 8
"""Candidates of which it is asked what they could pull, those first that have most to win: in a large fleet many are
alike."""
_SQRT_2 = sqrt(2.0)


class PrefillSeconds(Protocol):
    """As `policies.contract.PrefillEstimate`."""

    def prefill_seconds(self, new_tokens: int, context_tokens: int, decoding_tokens: int = 0) -> float: ...


class LinkEstimate(Protocol):
    """Predicts how long KV takes from one holder to another (`policies.estimates.LinkModel`)."""

    def transfer_seconds(self, size_bytes: int) -> float: ...

    def spread(self, size_bytes: int) -> float:
        """Standard deviation of the logarithm of one transfer's seconds."""
        ...


class Supply(NamedTuple):
    """What one holder can give of a prompt. Confirmed: nothing is pulled on a guess."""

    source: Hashable
    """Who it is; means nothing here."""
    tokens: int
    """Leading tokens of the prompt that it holds, in whole blocks."""
    fidelity: int
    """As it arrives: the worse of what is held and what the codec leaves of it."""
    codec: str
    bytes_per_token: float
    """On the way, after the codec."""
    ahead_bytes: int = 0
    """Of pulls from it that are under way: they go first."""


class Need(NamedTuple):
    """What one candidate lacks of a prompt."""

    prompt_tokens: int
    matched_tokens: int
    """Leading tokens that it will not compute, by the best evidence."""
    confirmed_tokens: int
    """Of those, what it is known to have: from here on a run is pulled."""
    wait_seconds: float
    prefill: PrefillSeconds
    decoding_tokens: int = 0


class PullOption(NamedTuple):
    """A pull that is expected to be worth it."""

    source: Hashable
    first_token: int
    """The run to pull begins here."""
    end_token: int
    """And ends before this one."""
    codec: str
    fidelity: int
    size_bytes: int
    ahead_bytes: int
    """Of other pulls from the source, which go first."""
    load_seconds: float
    """Predicted, with what goes first."""
    prefill_seconds: float
    """What is left to compute."""
    saved_seconds: float
    """How much sooner than by computing alone the first token is expected; positive."""
    deadline_seconds: float

    @property
    def tokens(self) -> int:
        return self.end_token - self.first_token

    def __str__(self) -> str:
        return f"pull {self.tokens:,} tokens from {self.source} as {self.codec}, {self.load_seconds * 1e3:,.0f} ms"

    def document(self) -> dict[str, Any]:
        """For receipts."""
        return {
            "source": str(self.source),
            "first_token": self.first_token,
            "tokens": self.tokens,
            "codec": self.codec,
            "bytes": self.size_bytes,
            "predicted_ms": self.load_seconds * 1e3,
            "saved_ms": self.saved_seconds * 1e3,
            "deadline_ms": self.deadline_seconds * 1e3,
        }


class PullReport(NamedTuple):
    """What a worker says became of a pull."""

    outcome: str
    reason: str = ""
    tokens: int = 0
    """Of the prompt, that came and were used."""
    size_bytes: int = 0
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "reason": self.reason,
            "pulled_tokens": self.tokens,
            "pulled_bytes": self.size_bytes,
            "seen_ms": self.seconds * 1e3,
        }


class DeadlineBounds(NamedTuple):
    """Of what the arithmetic says."""

    seconds_min: float = 0.5
    seconds_max: float = 30.0


class Load(Protocol):
    """As `policies.contract.WorkerLoad`."""

    @property
    def running_context_tokens(self) -> int: ...
    @property
    def fill(self) -> float: ...

    def wait_seconds(self, now: float) -> float: ...


class Candidate(Protocol):
    """As `policies.contract.WorkerView`."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def load(self) -> Load: ...
    @property
    def prefill(self) -> PrefillSeconds: ...
    @property
    def matched_tokens(self) -> int: ...
    @property
    def confirmed_tokens(self) -> int: ...


Offers = Callable[[Candidate], Sequence[tuple[Supply, LinkEstimate]]]
"""What a candidate could pull from whom."""


class Pulls:
    """What could be pulled for one request, whoever gets it: `Snapshot.pulls`. Offers are asked for as late as can be,
    since there may be many candidates and few that a pull can make the best."""

    __slots__ = ("_bounds", "_offers", "_prompt_tokens", "_tokens_max")

    def __init__(self, prompt_tokens: int, tokens_max: int, offers: Offers, bounds: DeadlineBounds) -> None:
        """`tokens_max`: no offer goes deeper."""
        self._prompt_tokens = prompt_tokens
        self._tokens_max = tokens_max
        self._offers = offers
        self._bounds = bounds

    def option(self, view: Candidate, wait_seconds: float) -> PullOption | None:
        """What the candidate had best pull."""
        load = view.load
        matched, confirmed, decoding = view.matched_tokens, view.confirmed_tokens, load.running_context_tokens
        if matched >= self._tokens_max:
            return None
        need = Need(self._prompt_tokens, matched, confirmed, wait_seconds, view.prefill, decoding)
        return best_pull(need, self._offers(view), self._bounds)

    def lower(
        self, workers: Sequence[Candidate], waits: Sequence[float], works: Sequence[float], costs: list[float]
    ) -> Mapping[int, PullOption]:
        """Take from the costs, which are wait + weight * work, what pulls save, wherever that can bring out another
        best; which pulls, by candidate.

        What is saved is the request's own time. The price of the work, weight - 1, is saved as far as the cache there
        is empty: what is pulled takes the room that computing it would have taken, and drives out as much.
        """
        best = min(costs)
        hopes: list[tuple[float, int]] = []
        for index, view in enumerate(workers):
            before, cost, fill = works[index], costs[index], view.load.fill
            spared = (1.0 - fill) * ((cost - waits[index]) / before - 1.0) if fill < 1.0 and before > 0.0 else 0.0
            if cost - before * (1.0 + spared) < best:  # else not even all of it would help
                hopes.append((cost - self._hope(view, before) * (1.0 + spared), index))
        options: dict[int, PullOption] = {}
        hopes.sort()
        for hope, index in hopes[:LOOKS_MAX]:
            if hope >= best:
                break
            option = self.option(workers[index], waits[index])
            if option is not None:
                options[index] = option
                before, fill = works[index], workers[index].load.fill
                if fill < 1.0 and before > 0.0:
                    price = (costs[index] - waits[index]) / before - 1.0
                    costs[index] -= price * (1.0 - fill) * max(before - option.prefill_seconds, 0.0)
                costs[index] -= option.saved_seconds
                best = min(best, costs[index])
        return options

    def _hope(self, view: Candidate, work_seconds: float) -> float:
        """What a pull would save that took no time."""
        prompt, deepest = self._prompt_tokens, self._tokens_max
        if view.matched_tokens >= deepest:
            return 0.0
        after = view.prefill.prefill_seconds(prompt - deepest, deepest, view.load.running_context_tokens)
        return max(work_seconds - after, 0.0)


def best_pull(need: Need, supplies: Iterable[tuple[Supply, LinkEstimate]], bounds: DeadlineBounds) -> PullOption | None:
    """The pull that is expected to bring the first token soonest; None where computing does, or there is none."""
    prompt, matched, _, _, prefill, decoding = need
    before = prefill.prefill_seconds(prompt - matched, matched, decoding)
    best: PullOption | None = None
    for supply, link in supplies:
        if supply.tokens <= matched:
            continue
        option = _weigh(need, before, supply, link, bounds)
        if option is not None and (best is None or option.saved_seconds > best.saved_seconds):
            best = option
    return best


class Arrival(NamedTuple):
    """How a pull goes if it goes as predicted; seconds."""

    size_bytes: int
    load_seconds: float
    """With what goes first on the link."""
    after_seconds: float
    """What is left to compute."""
    tail_seconds: float
    """What of that follows when the last layer is there."""
    first_token_seconds: float


def arrival(need: Need, supply: Supply, link: LinkEstimate) -> Arrival:
    """See the module's opening."""
    prompt, _, confirmed, wait, prefill, decoding = need
    _, depth, _, _, bytes_per_token, ahead = supply
    size = round((depth - confirmed) * bytes_per_token)
    after = prefill.prefill_seconds(prompt - depth, depth, decoding)
    constant = prefill.prefill_seconds(0, depth, decoding)
    tail = constant + (after - constant) / LAYERS
    load, latency = link.transfer_seconds(ahead + size), link.transfer_seconds(0)
    head = latency + (load - latency) / LAYERS
    return Arrival(size, load, after, tail, max(max(wait, head) + after, load + tail))


def promised_pull(need: Need, supply: Supply, expected: Arrival, bounds: DeadlineBounds) -> PullOption:
    """The pull of what its source has computed for it. That is paid for: it gets twice what it should take, even where
    computing would be sooner by itself."""
    prompt, matched, confirmed, wait, prefill, decoding = need
    computed = wait + prefill.prefill_seconds(prompt - matched, matched, decoding)
    patience = max(computed - expected.tail_seconds, 2.0 * expected.load_seconds)
    return PullOption(
        supply.source,
        confirmed,
        supply.tokens,
        supply.codec,
        supply.fidelity,
        expected.size_bytes,
        supply.ahead_bytes,
        expected.load_seconds,
        expected.after_seconds,
        max(computed - expected.first_token_seconds, 0.0),
        min(max(patience, bounds.seconds_min), bounds.seconds_max),
    )


def _weigh(need: Need, before: float, supply: Supply, link: LinkEstimate, bounds: DeadlineBounds) -> PullOption | None:
    source, depth, fidelity, codec, _, ahead = supply
    confirmed, wait = need.confirmed_tokens, need.wait_seconds
    size, load, after, tail, pulled = arrival(need, supply, link)
    computed = wait + before
    if pulled >= computed:
        return None
    deadline = min(max(computed - tail, bounds.seconds_min), bounds.seconds_max)
    success = _success(load, deadline, link.spread(ahead + size))
    saved = computed - success * pulled - (1.0 - success) * (max(wait, deadline) + before)
    if saved <= 0.0:
        return None
    return PullOption(source, confirmed, depth, codec, fidelity, size, ahead, load, after, saved, deadline)


def _success(load: float, deadline: float, spread: float) -> float:
    """P(load <= deadline) of a lognormal load around its estimate."""
    if load <= 0.0:
        return 1.0
    return 0.5 * erfc(log(load / deadline) / (spread * _SQRT_2)) if spread > 0.0 else float(load <= deadline)

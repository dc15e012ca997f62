"""How long prefill, decode and transfers take: priors, corrected online by what is seen. The one source for routing,
deadlines and break-even.

Every model here is a sum of a fixed and a variable part,

    seconds = fixed * f + variable * v        f, v: the priors' terms

and what is learned are the logarithms of the two multipliers, by a Kalman filter of two states that drift slowly. In
logarithms errors are relative (a 2 s prompt does not outvote a hundred of 20 ms), too slow and too fast are alike, and
no part can turn negative. One scale would not do: where the prior's fixed part is right and its price per token ten
times too low, short and long prompts would drag it to and fro. What an observation cannot tell apart moves in
proportion to its share.

What bites: an observation can be off by a factor of a hundred (a compilation, a stalled client), so each counts as at
most three times off the present prediction. A true change of a factor of ten gets through all the same: every
observation moves the model, the next is judged by where it stands then, and a surprise makes the filter less sure of
itself. Without calibration, priors off by a factor
of two cost 30 % of mean TTFT and more in simulation; with it nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import median
from typing import Any, Protocol, TypeVar

from policies.state.inflight import AnswerSample, PrefillSample, WorkerKey

OBSERVATION_RATIO_MAX = 3.0
MULTIPLIER_MAX = 1000.0
"""Priors are believed to within this factor, either way."""

# Variances of logarithms: of one observation, of the prior (a factor of 2.7), of the drift between two observations.
# In the long run one observation counts for sqrt(drift / observation), a tenth.
_OBSERVATION_VARIANCE = 0.05
_PRIOR_VARIANCE = 1.0
_DRIFT_VARIANCE = 0.0005
_SURPRISE_VARIANCE = 0.05
_UNSEEN_ROUNDS = 16
"""Observations of a fleet after each of which workers never seen are told what their peers are like."""
_ANSWERS_TAKEN = 64
_ANSWERS_STRIDE = 4
"""Of whole answers beyond the first, every so many are taken: they are weak evidence, and come with every request."""
_LINK_STRIDE = 16
"""Observations of one link after which it is asked anew what links are like."""
_LINK_ROUND_SECONDS = 30.0
_LINK_ROUND_SHARE = 0.1
"""Of the way back, each round: half of it in three and a half minutes."""
_SCALE_VARIANCE = 0.5
"""Of the guess that prefill is off by as much as a whole answer is: engines differ in the ratio of the two."""


class Calibration:
    """Two multipliers fitted online. See the module's opening."""

    __slots__ = ("_covariance", "fixed", "observations", "variable")

    def __init__(self, fixed: float = 1.0, variable: float = 1.0) -> None:
        self.fixed = fixed
        self.variable = variable
        self.observations = 0
        self._covariance = (_PRIOR_VARIANCE, 0.0, _PRIOR_VARIANCE)

    def __repr__(self) -> str:
        return f"Calibration(fixed={self.fixed:.3f}, variable={self.variable:.3f}, observations={self.observations})"

    def predict(self, fixed_seconds: float, variable_seconds: float) -> float:
        return self.fixed * fixed_seconds + self.variable * variable_seconds

    def observe(self, fixed_seconds: float, variable_seconds: float, observed_seconds: float) -> None:
        """One observation, beside the priors' two terms for it. Nonsense (zero, negative, NaN) is ignored."""
        if self.adjust(fixed_seconds, variable_seconds, observed_seconds, _OBSERVATION_VARIANCE):
            self.observations += 1

    def adjust(self, fixed_seconds: float, variable_seconds: float, observed_seconds: float, variance: float) -> bool:
        """As `observe`, for what is inferred with this variance (of its logarithm). False for nonsense."""
        predicted = self.predict(fixed_seconds, variable_seconds)
        if not (observed_seconds > 0 and predicted > 0):
            return False
        ratio = min(max(observed_seconds / predicted, 1 / OBSERVATION_RATIO_MAX), OBSERVATION_RATIO_MAX)
        share = self.fixed * fixed_seconds / predicted
        surprised = ratio in (1 / OBSERVATION_RATIO_MAX, OBSERVATION_RATIO_MAX)
        gain_fixed, gain_variable = self._update(share, 1.0 - share, variance, _SURPRISE_VARIANCE if surprised else 0.0)
        self.fixed = _clamp(self.fixed * ratio**gain_fixed)
        self.variable = _clamp(self.variable * ratio**gain_variable)
        return True

    def relax(self, fixed: float, variable: float, share: float) -> None:
        """Move by `share` of the way (in logarithms) towards these multipliers, and be as much less sure."""
        self.fixed = exp((1 - share) * log(self.fixed) + share * log(fixed))
        self.variable = exp((1 - share) * log(self.variable) + share * log(variable))
        ff, fv, vv = self._covariance
        keep = 1 - share
        self._covariance = (keep * ff + share * _PRIOR_VARIANCE, keep * fv, keep * vv + share * _PRIOR_VARIANCE)

    def variance(self, fixed_seconds: float, variable_seconds: float) -> float:
        """Of the logarithm of the next observation, around what `predict` says."""
        predicted = self.predict(fixed_seconds, variable_seconds)
        share = self.fixed * fixed_seconds / predicted if predicted > 0 else 1.0
        ff, fv, vv = self._covariance
        rest = 1.0 - share
        return _OBSERVATION_VARIANCE + ff * share * share + 2 * fv * share * rest + vv * rest * rest

    def _update(self, fixed_share: float, variable_share: float, variance: float, doubt: float) -> tuple[float, float]:
        """The filter's gains for an observation with these shares; the shares are its gradient in logarithms."""
        ff, fv, vv = self._covariance
        fixed = ff * fixed_share + fv * variable_share
        variable = fv * fixed_share + vv * variable_share
        total = variance + fixed * fixed_share + variable * variable_share
        drift = _DRIFT_VARIANCE + doubt
        ff, fv, vv = ff - fixed * fixed / total + drift, fv - fixed * variable / total, vv - variable**2 / total + drift
        # Never less sure than the prior. Scaled as a whole: cut entry by entry, the matrix would freeze the filter.
        excess = max(ff, vv, _PRIOR_VARIANCE) / _PRIOR_VARIANCE
        self._covariance = (ff / excess, fv / excess, vv / excess)
        return fixed / total, variable / total


def _clamp(multiplier: float) -> float:
    return min(max(multiplier, 1 / MULTIPLIER_MAX), MULTIPLIER_MAX)


class _Calibrated(Protocol):
    calibration: Calibration


@dataclass(frozen=True, slots=True)
class PrefillPrior:
    """Prefill before anything was seen. The defaults are Llama-3-70B on eight H100; calibration does the rest."""

    base_seconds: float = 0.004
    token_seconds: float = 35.4e-6
    quadratic_seconds: float = 6.6e-10
    """For each new token and token before it: attention."""
    decoding_token_seconds: float = 17.4e-9
    """For each context token of the requests that decode meanwhile, once a step: steps are shared."""
    step_tokens: int = 8192
    """Tokens that one step takes."""


class PrefillModel:
    """Prefill time on one worker (`policies.contract.PrefillEstimate`).

    seconds = base + token * t + quadratic * t * (context + t / 2) + decoding_token * decoding * (1 + t / step)
    for t new tokens after `context` cached ones, with `decoding` context tokens being decoded meanwhile.
    """

    __slots__ = ("_base", "_decoding", "_decoding_token", "_quadratic", "_token", "calibration", "prior")

    def __init__(self, prior: PrefillPrior | None = None, calibration: Calibration | None = None) -> None:
        self.prior = prior or PrefillPrior()
        self.calibration = calibration or Calibration()
        self.apply_calibration()

    def __repr__(self) -> str:
        return f"PrefillModel({self._base * 1e3:.3g} ms + {self._token * 1e6:.3g} us/token, {self.calibration})"

    def prefill_seconds(self, new_tokens: int, context_tokens: int, decoding_tokens: int = 0) -> float:
        seconds = self._base + new_tokens * (self._token + self._quadratic * (context_tokens + 0.5 * new_tokens))
        if decoding_tokens:
            seconds += decoding_tokens * (self._decoding + self._decoding_token * new_tokens)
        return seconds

    def prior_seconds(self, new_tokens: int, context_tokens: int, decoding_tokens: int = 0) -> float:
        """What the prior alone says: the unit in which observations are handed in."""
        prior = self.prior
        return (
            prior.base_seconds
            + new_tokens * (prior.token_seconds + prior.quadratic_seconds * (context_tokens + 0.5 * new_tokens))
            + prior.decoding_token_seconds * decoding_tokens * (1 + new_tokens / prior.step_tokens)
        )

    def observe(self, requests: int, prior_seconds: float, observed_seconds: float) -> None:
        """A stretch of prefill work for so many requests (`policies.state.inflight.PrefillSample`)."""
        fixed = min(requests * self.prior.base_seconds, prior_seconds)
        self.calibration.observe(fixed, prior_seconds - fixed, observed_seconds)
        self.apply_calibration()

    def apply_calibration(self) -> None:
        """Recompute the coefficients: `prefill_seconds` runs for every candidate of every decision."""
        prior, calibration = self.prior, self.calibration
        self._base = prior.base_seconds * calibration.fixed
        self._token = prior.token_seconds * calibration.variable
        self._quadratic = prior.quadratic_seconds * calibration.variable
        self._decoding = prior.decoding_token_seconds * calibration.variable
        self._decoding_token = self._decoding / prior.step_tokens

    def document(self) -> dict[str, Any]:
        return {
            "base_ms": self._base * 1e3,
            "token_us": self._token * 1e6,
            "quadratic_ns": self._quadratic * 1e9,
            "tokens_per_second": 1 / self._token if self._token else None,
            "observations": self.calibration.observations,
        }


@dataclass(frozen=True, slots=True)
class DecodePrior:
    """A decode step before anything was seen; defaults as for `PrefillPrior`."""

    step_seconds: float = 0.0105
    context_token_seconds: float = 17.4e-9


class DecodeModel:
    """One decode step on one worker: seconds = step + context_token * (context tokens of the running requests)."""

    __slots__ = ("calibration", "prior")

    def __init__(self, prior: DecodePrior | None = None, calibration: Calibration | None = None) -> None:
        self.prior = prior or DecodePrior()
        self.calibration = calibration or Calibration()

    def step_seconds(self, running_context_tokens: int) -> float:
        prior = self.prior
        return self.calibration.predict(prior.step_seconds, prior.context_token_seconds * running_context_tokens)

    def observe(self, running_context_tokens: int, observed_seconds: float) -> None:
        """Seconds per output token seen by one request, with this much context running beside it."""
        prior = self.prior
        self.calibration.observe(
            prior.step_seconds, prior.context_token_seconds * running_context_tokens, observed_seconds
        )

    def document(self) -> dict[str, Any]:
        return {
            "step_ms": self.prior.step_seconds * self.calibration.fixed * 1e3,
            "context_token_ns": self.prior.context_token_seconds * self.calibration.variable * 1e9,
            "observations": self.calibration.observations,
        }


USABLE_SHARE = 0.9
"""Of a link's nominal rate, after framing."""


@dataclass(frozen=True, slots=True)
class LinkPrior:
    """A way from one holder to another before anything was moved over it. Rather too fast: whoever is taken for slow is
    never tried, while one pull that misses its deadline shows the contrary."""

    latency_seconds: float = 0.005
    bytes_per_second: float = 1.0e10

    @classmethod
    def of_network(cls, gigabits_per_second: float) -> "LinkPrior":
        """Of a network that is sold as so fast, `USABLE_SHARE` of which carries KV."""
        return cls(bytes_per_second=gigabits_per_second * 1e9 / 8 * USABLE_SHARE)


class LinkModel:
    """Moving KV over one link (`policies.transfer.LinkEstimate`): seconds = latency + bytes / bandwidth."""

    __slots__ = ("calibration", "prior", "seen_at")

    def __init__(self, prior: LinkPrior | None = None, calibration: Calibration | None = None) -> None:
        self.prior = prior or LinkPrior()
        self.calibration = calibration or Calibration()
        self.seen_at = 0.0

    def transfer_seconds(self, size_bytes: int) -> float:
        return self.calibration.predict(self.prior.latency_seconds, size_bytes / self.prior.bytes_per_second)

    def spread(self, size_bytes: int) -> float:
        prior = self.prior
        return sqrt(self.calibration.variance(prior.latency_seconds, size_bytes / prior.bytes_per_second))

    def observe(self, size_bytes: int, observed_seconds: float) -> None:
        self.calibration.observe(self.prior.latency_seconds, size_bytes / self.prior.bytes_per_second, observed_seconds)

    def document(self) -> dict[str, Any]:
        return {
            "latency_ms": self.prior.latency_seconds * self.calibration.fixed * 1e3,
            "bytes_per_second": self.prior.bytes_per_second / self.calibration.variable,
            "observations": self.calibration.observations,
        }


Key = TypeVar("Key")
Model = TypeVar("Model", bound=_Calibrated)


def _from_peers(models: dict[Key, Model]) -> Calibration:
    """Where a newcomer starts: the median of those that have seen something."""
    seen = [model.calibration for model in models.values() if model.calibration.observations]
    if not seen:
        return Calibration()
    return Calibration(median(peer.fixed for peer in seen), median(peer.variable for peer in seen))


class FleetEstimates:
    """The estimates of a fleet of like workers, and of the links between its holders.

    A worker starts from its peers and goes by them until something is known of it, and one that is no longer seen
    drifts back to them: who is believed slow gets no requests, and without requests could never prove the contrary.
    """

    _SWEEP_OBSERVATIONS = 64
    _SWEEP_SHARE = 0.2

    def __init__(
        self,
        prefill: PrefillPrior | None = None,
        decode: DecodePrior | None = None,
        link: LinkPrior | None = None,
    ) -> None:
        self._prefill_prior = prefill or PrefillPrior()
        self._decode_prior = decode or DecodePrior()
        self._link_prior = link or LinkPrior()
        self._prefill: dict[WorkerKey, PrefillModel] = {}
        self._decode: dict[WorkerKey, DecodeModel] = {}
        self._links: dict[tuple[str, str], LinkModel] = {}
        self._unseen_link = LinkModel(self._link_prior)
        self._links_relaxed_at = 0.0
        self._seen: set[WorkerKey] = set()
        self._since_sweep = 0
        self._unseen_rounds = 0
        self._answers = 0
        self._scale = Calibration()

    def prefill(self, key: WorkerKey) -> PrefillModel:
        """The worker's prefill model, made on first use. The same object until `forget`."""
        model = self._prefill.get(key)
        if model is None:
            likely = self._likely()
            model = PrefillModel(self._prefill_prior, Calibration(likely.fixed, likely.variable))
            self._prefill[key] = model
        return model

    def decode(self, key: WorkerKey) -> DecodeModel:
        return _get(self._decode, key, lambda start: DecodeModel(self._decode_prior, start))

    def link(self, source: str, target: str) -> LinkModel:
        """The link's model once something was moved over it; before that one that all such links share: what the
        others are like."""
        return self._links.get((source, target), self._unseen_link)

    def observe_link(self, source: str, target: str, size_bytes: int, observed_seconds: float, now: float) -> None:
        """A transfer took so long, or was given up after so long. `size_bytes` with what went before it."""
        self.relax_links(now)
        link = self._links.get((source, target))
        if link is None:
            start = self._unseen_link.calibration
            link = self._links[source, target] = LinkModel(self._link_prior, Calibration(start.fixed, start.variable))
        link.observe(size_bytes, observed_seconds)
        link.seen_at = now
        if link.calibration.observations == 1 or not link.calibration.observations % _LINK_STRIDE:
            self._unseen_link = LinkModel(self._link_prior, _from_peers(self._links))

    def relax_links(self, now: float) -> None:
        """Links that nothing moves over drift back to what the others are like, or to the prior where that is faster:
        who is believed slow is asked for nothing, and could never prove the contrary. Cheap to call often."""
        if now - self._links_relaxed_at < _LINK_ROUND_SECONDS:
            return
        self._links_relaxed_at = now
        typical = self._unseen_link.calibration
        for link in self._links.values():
            if now - link.seen_at > _LINK_ROUND_SECONDS:
                link.calibration.relax(min(typical.fixed, 1.0), min(typical.variable, 1.0), _LINK_ROUND_SHARE)

    def observe_prefill(self, sample: PrefillSample) -> None:
        """What `InflightAccounting.first_token` returned."""
        key = (sample.worker, sample.rank)
        self.prefill(key).observe(sample.requests, sample.prior_seconds, sample.observed_seconds)
        self._seen.add(key)
        self._inform_unseen()
        self._since_sweep += 1
        if self._since_sweep >= self._SWEEP_OBSERVATIONS:
            self._sweep()

    def wants_answer(self) -> bool:
        """Whether the next whole answer is one of those to be learned from; asked once for each."""
        self._answers += 1
        return self._answers <= _ANSWERS_TAKEN or self._answers % _ANSWERS_STRIDE == 0

    def observe_answer(self, sample: AnswerSample) -> None:
        """What `InflightAccounting.finish` returned: prefill and decode in one duration.

        Prefill is likely to be off by as much as both together. That is a guess about the whole fleet, and goes for
        workers of which no first token was ever seen. Once there have been some, a part of them will do.
        """
        if self.prefill((sample.worker, sample.rank)).calibration.observations:
            return
        prior, decode = sample.prior_seconds, self._decode_prior
        step_seconds = decode.step_seconds + decode.context_token_seconds * sample.prompt_tokens
        ratio = sample.observed_seconds / (prior + sample.output_tokens * step_seconds)
        fixed = min(self._prefill_prior.base_seconds, prior)
        self._scale.adjust(fixed, prior - fixed, ratio * prior, _SCALE_VARIANCE)
        self._inform_unseen()

    def forget(self, key: WorkerKey) -> None:
        """The worker has left the fleet. Links are forgotten with the name of either end."""
        self._prefill.pop(key, None)
        self._decode.pop(key, None)
        self._seen.discard(key)
        for link in [link for link in self._links if key[0] in link]:
            del self._links[link]

    def document(self) -> dict[str, Any]:
        """For `/status`."""
        return {
            "prefill": {f"{name}/{rank}": model.document() for (name, rank), model in self._prefill.items()},
            "decode": {f"{name}/{rank}": model.document() for (name, rank), model in self._decode.items()},
            "links": {f"{source}>{target}": model.document() for (source, target), model in self._links.items()},
        }

    def _inform_unseen(self) -> None:
        """Workers that nothing is known of go by the others. Else the first one that proves slower than the priors say
        would lose its conversations to them. Asked for often only while the fleet is new."""
        self._unseen_rounds += 1
        if self._unseen_rounds > _UNSEEN_ROUNDS and self._unseen_rounds % self._SWEEP_OBSERVATIONS:
            return
        unseen = [model for model in self._prefill.values() if not model.calibration.observations]
        likely = self._likely() if unseen else self._scale
        for model in unseen:
            model.calibration.fixed, model.calibration.variable = likely.fixed, likely.variable
            model.apply_calibration()

    def _likely(self) -> Calibration:
        """What a worker is like of which nothing is known."""
        seen = any(model.calibration.observations for model in self._prefill.values())
        return _from_peers(self._prefill) if seen else self._scale

    def _sweep(self) -> None:
        peers = _from_peers(self._prefill)
        for key, model in self._prefill.items():
            if key not in self._seen:
                model.calibration.relax(peers.fixed, peers.variable, self._SWEEP_SHARE)
                model.apply_calibration()
        self._seen.clear()
        self._since_sweep = 0


def _get(models: dict[Key, Model], key: Key, make: Callable[[Calibration], Model]) -> Model:
    model = models.get(key)
    if model is None:
        model = models[key] = make(_from_peers(models))
    return model

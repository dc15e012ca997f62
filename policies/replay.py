"""Decisions taken again: what another policy would have made of what was known at the time.

A `Moment` is a decision's query and its snapshot with the workers' loads as they were, so that it can be decided anew
when they have moved on. Both policies start without memory, decide on the same moments in their order and draw the same
random numbers: a policy held against itself changes nothing. Predictions are those of the present estimates. What a
choice would have changed for the requests after it is not followed; `ropeway audit` does that, in virtual time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import starmap
from random import Random
from typing import Any, NamedTuple

from policies.contract import Decision, Policy, Query, Snapshot, WorkerLoad, WorkerView
from policies.shadow import start_seconds

_SEED = 0


@dataclass(slots=True)
class StillLoad:
    """`policies.contract.WorkerLoad` of one moment."""

    inflight: int
    waiting: int
    outstanding_prefill_seconds: float
    inflight_tokens: int
    running_context_tokens: int
    placed: float
    kv_tokens: int
    fill: float
    kv_share: float
    pressure: float
    wait: float

    @classmethod
    def of(cls, load: WorkerLoad, now: float) -> "StillLoad":
        return cls(
            load.inflight,
            load.waiting,
            load.outstanding_prefill_seconds,
            load.inflight_tokens,
            load.running_context_tokens,
            load.placed,
            load.kv_tokens,
            load.fill,
            load.kv_share,
            load.kv_pressure(),
            load.wait_seconds(now),
        )

    def kv_pressure(self) -> float:
        return self.pressure

    def wait_seconds(self, now: float) -> float:
        return self.wait


class Moment(NamedTuple):
    """A decision, as it can be taken again."""

    query: Query
    snapshot: Snapshot


def freeze(query: Query, snapshot: Snapshot) -> Moment:
    """To be called before the decision has been counted anywhere. Of siblings' bursts nothing is kept."""
    workers = [_frozen(view, snapshot.now) for view in snapshot.workers]
    return Moment(query, snapshot._replace(workers=workers, burst=None))


def _frozen(view: WorkerView, now: float) -> WorkerView:
    return WorkerView(
        view.name,
        view.rank,
        StillLoad.of(view.load, now),
        view.prefill,
        view.matched_tokens,
        view.confirmed_tokens,
        view.tier_tokens,
        view.evidence,
        view.capacity_requests,
        view.context_tokens_max,
    )


class Replay:
    """Two policies over the same moments."""

    def __init__(self, present: Policy, other: Policy) -> None:
        """Fresh ones, which serve nobody."""
        self._policies = ((present, Random(_SEED)), (other, Random(_SEED)))
        self._starts_ms: tuple[list[float], list[float]] = ([], [])
        self._elsewhere = 0

    def take(self, moment: Moment) -> None:
        query, snapshot = moment
        decisions = [_decide(policy, moment, random) for policy, random in self._policies]
        for starts, decision in zip(self._starts_ms, decisions, strict=True):
            starts.append(start_seconds(query, snapshot, decision) * 1e3)
        present, other = decisions
        self._elsewhere += present.worker is not other.worker

    def document(self) -> dict[str, Any]:
        """`elsewhere`: how many of the decisions the other policy takes otherwise; of each policy the predicted start
        of its choices, in milliseconds."""
        (present, _), (other, _) = self._policies
        named = zip((present.name, other.name), self._starts_ms, strict=True)
        before, after = starmap(_start, named)
        return {
            "decisions": len(self._starts_ms[0]),
            "elsewhere": self._elsewhere,
            "present": before,
            "proposed": after,
            "predicted_start_ms_mean_change": after["predicted_start_ms_mean"] - before["predicted_start_ms_mean"],
        }


def _decide(policy: Policy, moment: Moment, random: Random) -> Decision:
    query, snapshot = moment
    decision = policy.decide(query, snapshot, random)
    if snapshot.pulls is not None and decision.pull is None:
        decision.pull = snapshot.pulls.option(decision.worker, decision.worker.load.wait_seconds(snapshot.now))
    return decision


def _start(name: str, starts_ms: Iterable[float]) -> dict[str, Any]:
    ordered = sorted(starts_ms)
    return {
        "policy": name,
        "predicted_start_ms_mean": sum(ordered) / len(ordered) if ordered else 0.0,
        "predicted_start_ms_p50": _quantile(ordered, 0.5),
        "predicted_start_ms_p99": _quantile(ordered, 0.99),
    }


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0

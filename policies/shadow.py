"""What another policy would have done: it decides on what the serving one has seen, and is never followed.

Two yardsticks that are the same for every policy, summed over decisions, the serving policy's less the shadow's:

    regret seconds      predicted time to first token, by the gateway's own estimates, pulls counted in
    regret tokens       prompt tokens to compute, pulls counted in

and a third in the shadow's own units where it scores: by how much the worker chosen is worse than its own choice, as a
share. Positive means that the shadow would have done better. A policy that gives up a little of each request's time for
those that come after it has a small positive regret of seconds against a greedy one, and pays it back in both.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from policies.contract import Decision, Policy, Query, Snapshot, WorkerView
from policies.peers.contract import Asked, Observer, observes
from policies.pricing import prefill_seconds


class Shadow:
    """One policy that is only asked, and what came of it."""

    __slots__ = ("agreed", "decisions", "policy", "regret_seconds", "regret_share", "regret_tokens", "scored")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.decisions = 0
        self.agreed = 0
        self.regret_seconds = 0.0
        self.regret_tokens = 0
        self.scored = 0
        self.regret_share = 0.0
        """Sum over the decisions that it `scored`."""

    def judge(self, query: Query, snapshot: Snapshot, served: Decision, random: Random) -> None:
        own = self.policy.decide(query, snapshot, random)
        self.decisions += 1
        if own.worker is served.worker:
            self.agreed += 1
            return
        self.regret_seconds += start_seconds(query, snapshot, served) - start_seconds(query, snapshot, own)
        self.regret_tokens += _tokens(query, served) - _tokens(query, own)
        if own.costs:
            least = own.costs[snapshot.workers.index(own.worker)]
            if least > 0.0:
                self.scored += 1
                self.regret_share += own.costs[snapshot.workers.index(served.worker)] / least - 1.0

    def document(self) -> dict[str, Any]:
        """For `/status`. Means are over all decisions, those agreed on counted in as zero."""
        decisions = self.decisions or 1
        return {
            "policy": self.policy.name,
            "decisions": self.decisions,
            "agreed": self.agreed,
            "regret_ms_mean": self.regret_seconds / decisions * 1e3,
            "regret_tokens_mean": self.regret_tokens / decisions,
            "regret_cost_share_mean": self.regret_share / self.scored if self.scored else None,
        }


class Shadows:
    """The shadows of one gateway. Random numbers are their own: a shadow changes nothing for those that are served."""

    def __init__(self, policies: Sequence[Policy], random: Random) -> None:
        self.shadows = [Shadow(policy) for policy in policies]
        self._observers: list[Observer] = [policy for policy in policies if observes(policy)]
        self._random = random

    def judge(self, query: Query, asked: Asked, snapshot: Snapshot, served: Decision) -> None:
        """What each would have done with a request. To be called when it has been decided and not been counted yet."""
        for observer in self._observers:
            observer.asked(asked)
        for shadow in self.shadows:
            shadow.judge(query, snapshot, served, self._random)

    def dispatched(self, request_id: str, asked: Asked, view: WorkerView, now: float) -> None:
        for observer in self._observers:
            observer.dispatched(request_id, asked, view, now)

    def first_token(self, request_id: str, now: float) -> None:
        for observer in self._observers:
            observer.first_token(request_id, now)

    def finished(self, request_id: str, now: float) -> None:
        for observer in self._observers:
            observer.finished(request_id, now)

    def document(self) -> list[dict[str, Any]]:
        return [shadow.document() for shadow in self.shadows]


def start_seconds(query: Query, snapshot: Snapshot, decision: Decision) -> float:
    """Predicted time to first token of a choice, with what a pull saves."""
    view, pull = decision.worker, decision.pull
    seconds = view.load.wait_seconds(snapshot.now) + prefill_seconds(query, view)
    return seconds - (pull.saved_seconds if pull is not None else 0.0)


def _tokens(query: Query, decision: Decision) -> int:
    view, pull = decision.worker, decision.pull
    return query.prompt_tokens - max(view.matched_tokens, pull.end_token if pull is not None else 0)

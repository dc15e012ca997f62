"""When a request that is slow to be answered is put to a second worker, and how often that may be.

Tail at scale: the slowest of many answers are slow for reasons of their worker's, and another would have been done
sooner. It costs a second computation, so it is off unless configured, waits for most answers to have begun, and has a
budget. `gateway.edge.hedge` has the two legs, `gateway.journey` their accounts.
"""

import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from gateway.config import HedgingConfig
from policies.state.attempts import AttemptBudget
from policies.state.quantiles import RecentQuantile


class Outcome(StrEnum):
    """What became of a request that was slow enough to be hedged."""

    WON = "won"
    """The second worker answered."""
    LOST = "lost"
    """It was asked for nothing."""
    DENIED = "denied"
    """The budget did not allow it."""
    NOBODY = "nobody"
    """There was no other worker for it."""


class Hedging:
    """Of one gateway."""

    def __init__(self, config: HedgingConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._after_seconds = None if config.after_ms is None else config.after_ms / 1e3
        self._first_tokens, self._answers = RecentQuantile(config.quantile), RecentQuantile(config.quantile)
        self.clock = clock
        self.budget = AttemptBudget(config.budget_share, config.budget_per_second_min)
        self.outcomes: Counter[Outcome] = Counter()

    def after_seconds(self, streams: bool) -> float | None:
        """How long an answer is waited for; None while too few have been seen to tell."""
        if self._after_seconds is not None:
            return self._after_seconds
        return (self._first_tokens if streams else self._answers).value

    def observe(self, seconds: float, streams: bool) -> None:
        """An answer has begun (in one piece: has come) so long after it was asked for."""
        (self._first_tokens if streams else self._answers).observe(seconds)

    def granted(self) -> bool:
        granted = self.budget.spend(self.clock())
        if not granted:
            self.outcomes[Outcome.DENIED] += 1
        return granted

    def document(self) -> dict[str, Any]:
        """For `/status`."""
        return {
            "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
            "after_ms": {
                "streams": _milliseconds(self.after_seconds(streams=True)),
                "whole": _milliseconds(self.after_seconds(streams=False)),
            },
            "left": self.budget.left(self.clock()),
        }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3

"""What became of a request in a pool whose workers divide prefill from decode: one leg or two, and why.

It begins as a prediction (`policies.disaggregation.divide`) and ends as a part of the receipt.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """Unless it is `two_legs`, the worker that answers computes the prompt, too."""

    TWO_LEGS = "two_legs"
    """A prefill worker computes the prompt, and the worker that answers pulls its KV."""
    BYPASS = "bypass"
    """That was not expected to be worth it."""
    NO_SOURCE = "fallback_no_source"
    """No prefill worker is well whose KV the worker that answers could take."""
    UNREACHABLE = "fallback_unreachable"
    """The prefill worker could not be reached, or it died over the prompt."""
    REFUSED = "fallback_refused"
    """It answered with an error."""
    DEADLINE = "fallback_deadline"
    """It did not answer in time."""
    CLIENT_GONE = "client_gone"
    """The client left during the first leg."""

    # Enum's own hash is a Python function, and outcomes are counted by key.
    __hash__ = str.__hash__


@dataclass(slots=True)
class Legs:
    """Seconds, all of them. Costs are a request's own time to its first token and the delay to others."""

    outcome: Outcome
    worker: str = ""
    """The prefill worker; empty where there is none to consider."""
    rank: int = 0
    whole_cost_seconds: float = 0.0
    """Of computing the prompt where it is answered."""
    divided_cost_seconds: float = 0.0
    """Of computing it at the prefill worker, and pulling it."""
    predicted_seconds: float = 0.0
    """Of the first leg: its turn, and its prefill."""
    prefill_seconds: float = 0.0
    """Of that, its prefill."""
    prior_seconds: float = 0.0
    """What the uncalibrated prior says of it."""
    matched_tokens: int = 0
    """Leading tokens of the prompt that the prefill worker need not compute, by the best evidence."""
    deadline_seconds: float = 0.0
    """After so long a first leg has lost."""
    trial: bool = False
    """Too little is known of the prefill worker to say what is worth it: it is tried."""
    seconds: float | None = None
    """That the first leg took, or was given; None where none was sent."""
    problem: str = ""
    """Why the first leg came to nothing."""
    decode_seconds: float | None = None
    """From the second leg's beginning to its first token, where the answer is streamed."""

    def __str__(self) -> str:
        whole, divided = _milliseconds(self.whole_cost_seconds), _milliseconds(self.divided_cost_seconds)
        if self.outcome is Outcome.NO_SOURCE:
            return "one leg: no prefill worker can give it KV"
        if self.outcome is Outcome.BYPASS:
            return f"one leg: computing here costs {whole}, by way of {self.worker} {divided}"
        if self.outcome is Outcome.CLIENT_GONE:
            return f"the client left while {self.worker} computed the prompt"
        if self.outcome is not Outcome.TWO_LEGS:
            return f"one leg: {self.worker} {self.problem} ({_milliseconds(self.seconds or 0.0)} lost)"
        predicted = _milliseconds(self.predicted_seconds)
        if self.seconds is None:
            tried = ", to see how fast it is" if self.trial else ""
            return f"two legs: {self.worker} computes the prompt first{tried}, {predicted}"
        return f"two legs: {self.worker} computed the prompt in {_milliseconds(self.seconds)} (predicted {predicted})"

    def document(self) -> dict[str, Any]:
        """For receipts."""
        return {
            "outcome": self.outcome.value,
            "prefill_worker": self.worker or None,
            "prefill_matched_tokens": self.matched_tokens,
            "whole_cost_ms": self.whole_cost_seconds * 1e3,
            "divided_cost_ms": self.divided_cost_seconds * 1e3,
            "predicted_ms": self.predicted_seconds * 1e3,
            "trial": self.trial,
            "deadline_ms": self.deadline_seconds * 1e3,
            "seen_ms": None if self.seconds is None else self.seconds * 1e3,
            "decode_ms": None if self.decode_seconds is None else self.decode_seconds * 1e3,
            "problem": self.problem,
        }


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"

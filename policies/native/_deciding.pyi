from collections.abc import Mapping, Sequence

from policies.contract import Evidence, FleetRates, WorkerView

def learn(
    view: type,
    load: type,
    model: type,
    credits: Mapping[Evidence, float],
    slack_requests: float,
    pressure_min: float,
    tie_share: float,
    tie_seconds: float,
    /,
) -> None:
    """The classes whose slots are read, and the numbers of `policies.pricing`; the first credit is that of confirmed
    matches. Raises TypeError for a class that does not keep what is read in slots."""

def weigh(
    prompt_tokens: int, workers: Sequence[WorkerView], now: float, rates: FleetRates, pulled: bool, /
) -> tuple[list[float], list[float], list[float]] | None:
    """As `policies.pricing.python_weigh`; None for records of other classes, for numbers of other
    kinds, and where `workers` is no list."""

def tied(workers: Sequence[WorkerView], costs: Sequence[float], /) -> list[int] | None:
    """As `policies.pricing.python_tied`, or None as `weigh`."""

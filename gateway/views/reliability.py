"""Metrics of what fails, and of what keeps it from spreading."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet.worker import WorkerRecord
from gateway.reliability.failures import FAILURES
from gateway.reliability.hedging import Hedging, Outcome
from gateway.reliability.safeguards import Safeguards
from policies.state.attempts import AttemptBudget
from policies.state.breakers import Circuit


class ReliabilityCollector(Collector):
    """Labels are bounded: rows of the table of failures, states, workers."""

    def __init__(self, safeguards: Safeguards, workers: Mapping[str, WorkerRecord]) -> None:
        self._safeguards = safeguards
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        safeguards = self._safeguards
        failures = CounterMetricFamily(
            "ropeway_failures",
            "Attempts and requests that failed, by the row of docs/reliability.md.",
            labels=("failure",),
        )
        for failure in FAILURES:
            failures.add_metric((failure.name,), safeguards.failures[failure.name])
        yield failures
        yield from self._worker_states()
        yield CounterMetricFamily("ropeway_ejections", "Ejections of workers.", value=safeguards.ejections.total)
        yield CounterMetricFamily(
            "ropeway_panic_decisions",
            "Requests given to workers that should have been left alone, for want of others.",
            value=safeguards.panics,
        )
        yield from _budget("retry", safeguards.budget, safeguards.clock())
        if safeguards.hedging is not None:
            yield from _hedges(safeguards.hedging)

    def _worker_states(self) -> Iterator[Metric]:
        circuits = GaugeMetricFamily(
            "ropeway_worker_circuit", "1 for the state that its circuit breaker is in.", labels=("worker", "state")
        )
        opened = CounterMetricFamily(
            "ropeway_worker_circuit_opened", "How often its circuit breaker has opened.", labels=("worker",)
        )
        ejected = GaugeMetricFamily("ropeway_worker_ejected", "1 while it is left out for a while.", labels=("worker",))
        for name, record in self._workers.items():
            for state in Circuit:
                circuits.add_metric((name, state.value), float(record.breaker.circuit is state))
            opened.add_metric((name,), record.breaker.opened_total)
            ejected.add_metric((name,), float(bool(record.ejected)))
        yield from (circuits, opened, ejected)


def _budget(name: str, budget: AttemptBudget, now: float) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"ropeway_{name}_budget_left", "Further attempts that could be made now.", value=budget.left(now)
    )
    yield CounterMetricFamily(
        f"ropeway_{name}_budget_denied", "Further attempts that were not made for want of budget.", value=budget.denied
    )


def _hedges(hedging: Hedging) -> Iterator[Metric]:
    outcomes = CounterMetricFamily(
        "ropeway_hedges", "Requests slow enough to be put to a second worker.", labels=("outcome",)
    )
    for outcome in Outcome:
        outcomes.add_metric((outcome.value,), hedging.outcomes[outcome])
    yield outcomes
    yield from _budget("hedge", hedging.budget, hedging.clock())

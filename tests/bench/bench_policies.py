"""What a decision and its bookkeeping cost: `python tests/bench/bench_policies.py [--json FILE]`.

Decisions are over a busy fleet with different matches on every worker; each figure is a median over batches.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from time import thread_time

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from policies import POLICIES, create
from policies.contract import Evidence, Query, Snapshot, WorkerView
from policies.estimates import FleetEstimates
from policies.state.inflight import InflightAccounting

FLEETS = (2, 8, 64)


def microseconds(work: Callable[[], object], calls: int = 200, batches: int = 25) -> float:
    """Median over batches of the mean CPU time of one call: other work on the machine is not counted."""
    times = []
    for _ in range(batches):
        started = thread_time()
        for _ in range(calls):
            work()
        times.append((thread_time() - started) / calls * 1e6)
    return median(times)


def busy_fleet(workers: int, random: Random) -> Snapshot:
    inflight, estimates = InflightAccounting(), FleetEstimates()
    for number in range(workers * 6):
        name = f"worker-{number % workers}"
        inflight.dispatch(f"r{number}", name, 0, number * 0.01, 2000, 0.05)
        if number % 3:
            inflight.first_token(f"r{number}", number * 0.01 + 0.005)
    now = workers * 0.06
    views = [
        WorkerView(
            name=f"worker-{number}",
            rank=0,
            load=inflight.account(f"worker-{number}"),
            prefill=estimates.prefill((f"worker-{number}", 0)),
            matched_tokens=(matched := 16 * random.randrange(100)),
            confirmed_tokens=matched,
            evidence=Evidence.EXACT,
        )
        for number in range(workers)
    ]
    return Snapshot(now, views, inflight.rates(now, workers))


def decisions() -> dict[str, float]:
    random = Random(1)
    figures = {}
    for workers in FLEETS:
        snapshot = busy_fleet(workers, random)
        for name in POLICIES:
            policy, query = create(name), Query(2000, session="user-1" if name == "session" else "")
            figures[f"{name}_{workers}_workers_us"] = microseconds(lambda: policy.decide(query, snapshot, random))  # noqa: B023
    return figures


def bookkeeping() -> dict[str, float]:
    inflight = InflightAccounting()
    for number in range(500):
        inflight.dispatch(f"standing-{number}", f"worker-{number % 8}", 0, 0.0, 1000, 0.02)
    clock = 0.0

    def request() -> None:
        nonlocal clock
        clock += 0.001
        inflight.dispatch("request", "worker-1", 0, clock, 1000, 0.02, 100, 0.02)
        inflight.first_token("request", clock + 0.0005)
        inflight.finish("request", clock + 0.0008, 80)

    account = inflight.account("worker-1")
    return {
        "dispatch_first_token_finish_us": microseconds(request),
        "wait_seconds_us": microseconds(lambda: account.wait_seconds(clock)),
        "rates_us": microseconds(lambda: inflight.rates(clock, 8)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_args()
    figures = {**decisions(), **bookkeeping()}
    if arguments.json:
        arguments.json.write_text(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    for name, value in figures.items():
        print(f"{name:<40} {value:8.2f}")


if __name__ == "__main__":
    main()

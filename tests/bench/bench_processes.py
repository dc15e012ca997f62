"""What a request costs where several gateways of one machine share a port, beside one alone, in one run.

    python tests/bench/bench_processes.py --tokenizer DIR [--processes 2] [--rounds 3] [--seconds 5] [--json FILE]

Two canned workers and `wrk` are on the machine as well. Each round runs one gateway and then several, over the same
shapes. Two figures:

* CPU per request, of the gateways, the process that keeps them and their Valkey, as a ratio to one gateway's.
* Of what the machine's cores could do in the time, how much was done: processor time of gateways, workers and wrk, over
  cores times seconds. What is missing was waited away; requests per second could be higher by as much.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_edge import (
    HERE,
    TICKS_PER_SECOND,
    announce_prompt_tokens,
    cpu_ticks,
    free_ports,
    milliseconds,
    process,
    requests_of,
    wait_until_serving,
    wrk,
)


@dataclass
class Row:
    processes: int
    shape: str
    round: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    gateway_us_per_request: float
    busy_share: float
    """Of the machine, by all that takes part."""


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with tokenizer and chat template")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--shapes", default="small,stream")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    ports = free_ports(4)
    canned = [sys.executable, str(HERE / "edge/canned_worker.py")]
    with process([*canned, str(ports[0])]) as first, process([*canned, str(ports[1])]) as second:
        for number in range(arguments.rounds):
            for count, port in ((1, ports[2]), (arguments.processes, ports[3])):
                rows += measure(arguments, ports[:2], [first.pid, second.pid], count, port, number)
    summary = summarize(rows, arguments.processes)
    for row in rows:
        print(
            f"{row.processes} processes  {row.shape:<8} round {row.round}  {row.requests_per_second:>7.0f}/s  p50 "
            f"{row.p50_ms:.2f}  p99 {row.p99_ms:.2f} ms  {row.gateway_us_per_request:.0f} us  busy {row.busy_share:.2f}"
        )
    for entry in summary:
        print(
            f"{entry['shape']}: CPU per request {entry['cpu_ratio']:.2f}x of one process (bar 1.1); "
            f"{entry['busy_share']:.2f} of the machine's time used (bar 0.85); {entry['rate_ratio']:.2f}x the rate"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "summary": summary}, indent=1))


def measure(
    arguments: argparse.Namespace, workers: list[int], canned: list[int], count: int, port: int, number: int
) -> list[Row]:
    command = [sys.executable, "-m", "ropeway", "serve", "--port", str(port), "--processes", str(count)]
    command += ["--tokenizer", f"m={arguments.tokenizer}"]
    for worker in workers:
        command += ["--worker", f"http://127.0.0.1:{worker}"]
    rows = []
    with (
        tempfile.TemporaryDirectory() as directory,
        process(command, {"ROPEWAY_SHARING_DIRECTORY": directory}) as child,
    ):
        wait_until_serving(port, child)
        for shape in arguments.shapes.split(","):
            announce_prompt_tokens(port, shape, workers)
            wrk(port, shape, 1, 0)
            before, loads = cpu_ticks(child.pid), children_seconds()
            served = sum(map(cpu_ticks, canned))
            report = wrk(port, shape, arguments.seconds, 500_000)
            ticks = cpu_ticks(child.pid) - before
            others = (sum(map(cpu_ticks, canned)) - served) / TICKS_PER_SECOND + children_seconds() - loads
            requests = requests_of(report)
            rows.append(
                Row(
                    count,
                    shape,
                    number,
                    requests / arguments.seconds,
                    milliseconds(report, "50"),
                    milliseconds(report, "99"),
                    ticks / TICKS_PER_SECOND / max(requests, 1) * 1e6,
                    (ticks / TICKS_PER_SECOND + others) / (len(os.sched_getaffinity(0)) * arguments.seconds),
                )
            )
    return rows


def summarize(rows: list[Row], processes: int) -> list[dict[str, object]]:
    def median(count: int, shape: str, what: str) -> float:
        return statistics.median(getattr(row, what) for row in rows if (row.processes, row.shape) == (count, shape))

    def ratio(shape: str, what: str) -> float:
        return median(processes, shape, what) / median(1, shape, what)

    return [
        {
            "shape": shape,
            "cpu_ratio": median(processes, shape, "gateway_us_per_request")
            / median(1, shape, "gateway_us_per_request"),
            "rate_ratio": median(processes, shape, "requests_per_second") / median(1, shape, "requests_per_second"),
            "busy_share": median(processes, shape, "busy_share"),
        }
        for shape in dict.fromkeys(row.shape for row in rows)
    ]


if __name__ == "__main__":
    main()

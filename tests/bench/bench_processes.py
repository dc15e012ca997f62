"""What a request costs where several gateways of one machine share a port, beside one alone, in one run.

    python tests/bench/bench_processes.py --tokenizer DIR [--processes 2] [--rounds 3] [--seconds 5] [--json FILE]

Two canned workers and `wrk` are on the machine as well. Each round runs one gateway, then several that know of each
other, then as many that know nothing of each other and share nothing but the port, over the same shapes. Figures:

* CPU per request, of the gateways, the process that keeps them and their Valkey, as a ratio to one gateway's.
* The same as a ratio to the strangers': what it costs to know of each other. The rest is what a machine makes of more
  work at once (one gateway leaves a part of it idle), and would be paid for any two programs.
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
import time
from contextlib import ExitStack
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

ARRANGEMENTS = ("one", "several", "strangers")


@dataclass
class Row:
    arrangement: str
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
    ports = free_ports(5)
    canned = [sys.executable, str(HERE / "edge/canned_worker.py")]
    with process([*canned, str(ports[0])]) as first, process([*canned, str(ports[1])]) as second:
        for number in range(arguments.rounds):
            for arrangement, port in zip(ARRANGEMENTS, ports[2:], strict=True):
                rows += measure(arguments, ports[:2], [first.pid, second.pid], arrangement, port, number)
    summary = summarize(rows)
    for row in rows:
        print(
            f"{row.arrangement:<10}{row.shape:<8} round {row.round}  {row.requests_per_second:>7.0f}/s  p50 "
            f"{row.p50_ms:.2f}  p99 {row.p99_ms:.2f} ms  {row.gateway_us_per_request:.0f} us  busy {row.busy_share:.2f}"
        )
    for entry in summary:
        print(
            f"{entry['shape']}: CPU per request {entry['cpu_ratio']:.2f}x of one process (bar 1.1), "
            f"{entry['cpu_ratio_to_strangers']:.2f}x of strangers; "
            f"{entry['busy_share']:.2f} of the machine's time used (bar 0.85); {entry['rate_ratio']:.2f}x the rate"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "summary": summary}, indent=1))


def commands(arguments: argparse.Namespace, workers: list[int], arrangement: str, port: int) -> list[list[str]]:
    command = [sys.executable, "-m", "ropeway", "serve", "--port", str(port)]
    command += ["--tokenizer", f"m={arguments.tokenizer}"]
    for worker in workers:
        command += ["--worker", f"http://127.0.0.1:{worker}"]
    if arrangement == "strangers":
        return [command] * arguments.processes
    return [[*command, "--processes", str(arguments.processes if arrangement == "several" else 1)]]


def measure(
    arguments: argparse.Namespace, workers: list[int], canned: list[int], arrangement: str, port: int, number: int
) -> list[Row]:
    rows = []
    with ExitStack() as running:
        environment = {"ROPEWAY_SHARING_DIRECTORY": running.enter_context(tempfile.TemporaryDirectory())}
        if arrangement == "strangers":
            environment["ROPEWAY_HANDOVER_REUSE_PORT"] = "true"
        children = [
            running.enter_context(process(command, environment))
            for command in commands(arguments, workers, arrangement, port)
        ]
        for child in children:
            wait_until_serving(port, child)
        # Of those that share a port nobody can tell which has answered.
        time.sleep(2.0 * (len(children) - 1))
        pids = [child.pid for child in children]
        for shape in arguments.shapes.split(","):
            announce_prompt_tokens(port, shape, workers)
            wrk(port, shape, 1, 0)
            before, loads = sum(map(cpu_ticks, pids)), children_seconds()
            served = sum(map(cpu_ticks, canned))
            report = wrk(port, shape, arguments.seconds, 500_000)
            ticks = sum(map(cpu_ticks, pids)) - before
            others = (sum(map(cpu_ticks, canned)) - served) / TICKS_PER_SECOND + children_seconds() - loads
            requests = requests_of(report)
            rows.append(
                Row(
                    arrangement,
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


def summarize(rows: list[Row]) -> list[dict[str, object]]:
    def median(arrangement: str, shape: str, what: str) -> float:
        found = [getattr(row, what) for row in rows if (row.arrangement, row.shape) == (arrangement, shape)]
        return statistics.median(found)

    def ratio(shape: str, what: str, other: str) -> float:
        return median("several", shape, what) / median(other, shape, what)

    return [
        {
            "shape": shape,
            "cpu_ratio": ratio(shape, "gateway_us_per_request", "one"),
            "cpu_ratio_to_strangers": ratio(shape, "gateway_us_per_request", "strangers"),
            "rate_ratio": ratio(shape, "requests_per_second", "one"),
            "busy_share": median("several", shape, "busy_share"),
        }
        for shape in dict.fromkeys(row.shape for row in rows)
    ]


if __name__ == "__main__":
    main()

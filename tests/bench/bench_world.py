"""Does the audit agree with the world? Simulated workers on HTTP behind the gateway, beside the audit's prediction.

    .venv/bin/python tests/bench/bench_world.py --trace conversation_trace.jsonl [--start S] [--duration S] [--load X]
                                                [--policy NAME] [--blocks N] [--json FILE]

The same slice of the trace, spread off its grid by the same seed, is sent by `ropeway loadtest` to a gateway with eight
workers that keep the time of Llama-3-70B TP8, and replayed by the audit over eight such engines. Told are hit rate and
TTFT of both, and the share of this machine's CPU that the run took: beyond 60 % the world is this machine, and not the
engines. Eviction needs longer traces than a few minutes: `--blocks` makes caches small.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtest.audit.prepared import prepare
from loadtest.audit.runs import Scenario, replay
from loadtest.traces import arrivals
from loadtest.traces.reading import read_trace
from tests.gateway.end_to_end.processes import Fleet, Gateway, new_keyring
from workers.timing import LLAMA_3_70B_TP8

NODES = 8
FIGURES = ("hit_rate", "ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p90")


def world(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        keyring = str(new_keyring(directory))
        engine = [
            "--profile",
            LLAMA_3_70B_TP8.name,
            "--block-size",
            str(options.block),
            "--blocks",
            str(options.blocks),
        ]
        with (
            Fleet(directory, *engine, count=NODES) as fleet,
            Gateway(directory, fleet.urls, {"keyring": keyring, "policy": options.policy}) as gateway,
        ):
            source = ["--trace", str(options.trace), "--start", str(options.start), "--duration", str(options.duration)]
            command = ["ropeway", "loadtest", *source, "--speedup", str(options.load), "--url", gateway.url, "--json"]
            began, idle = time.monotonic(), idle_seconds()
            done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
            if not done.stdout:
                raise SystemExit(done.stderr)
            row: dict[str, Any] = json.loads(done.stdout)["rows"][0]
            cores = idle_seconds(cores=True)
            row["cpu_share"] = round(1 - (idle_seconds() - idle) / ((time.monotonic() - began) * cores), 3)
            return row


def idle_seconds(cores: bool = False) -> float:
    """Of all cores together since the machine started; or how many cores there are."""
    lines = Path("/proc/stat").read_text().splitlines()
    if cores:
        return sum(line[:3] == "cpu" and line[3].isdigit() for line in lines)
    fields = lines[0].split()
    return (int(fields[4]) + int(fields[5])) / 100


def predicted(options: argparse.Namespace) -> dict[str, Any]:
    trace = arrivals.dequantised(read_trace(options.trace), 0)
    trace = arrivals.sped_up(arrivals.sliced(trace, options.start, options.duration), options.load)
    scenario = Scenario(options.policy, NODES, profile=LLAMA_3_70B_TP8, capacity_blocks=options.blocks)
    return replay(prepare(trace), scenario).row()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--start", type=float, default=600.0)
    parser.add_argument("--duration", type=float, default=180.0)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--policy", default="kv-aware")
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=2_500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    told, real = predicted(options), world(options)
    rows = [
        {
            "figure": figure,
            "audit": round(told[figure], 4),
            "world": round(real[figure], 4),
            "ratio": round(real[figure] / told[figure], 4) if told[figure] else None,
        }
        for figure in FIGURES
    ]
    result = {
        "requests": real["requests"],
        "failed": real["failed"],
        "cpu_share": real["cpu_share"],
        "sent_late_ms_p99": round(real["late_ms_p99"], 1),
        "rows": rows,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

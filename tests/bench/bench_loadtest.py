"""Do our load generators tell the truth? Their times to first token beside those of simulated workers.

    .venv/bin/python tests/bench/bench_loadtest.py [--json FILE] [--seconds S]

`ropeway up --simulated` serves; plain locust and `ropeway loadtest` ask for a while, one after the other. The workers'
log says when each request came in and when its first content left: `truth`. The difference is the gateway, two sockets
and the generator itself.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
PORT = 8_790


@contextmanager
def stack(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """URL of the gateway, and of its workers."""
    up = [
        "ropeway",
        "up",
        "--simulated",
        "--workers",
        "4",
        "--port",
        str(PORT),
        "--state-dir",
        str(directory),
        "--json",
    ]
    process = subprocess.Popen([sys.executable, "-m", *up], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        decoder, text = json.JSONDecoder(), ""
        while True:
            line = process.stdout.readline()
            if not line:
                raise SystemExit("`ropeway up` ended before it served")
            text += line
            try:
                document, _ = decoder.raw_decode(text.lstrip())
                break
            except json.JSONDecodeError:
                continue
        yield f"http://127.0.0.1:{PORT}", document["workers"]
    finally:
        process.terminate()
        process.wait(30)


def truth_ms(workers: list[str], path: str) -> list[float]:
    """Since last asked."""
    waits: list[float] = []
    for worker in workers:
        log = httpx.get(f"{worker}/simulate/log", trust_env=False).json()["requests"]
        httpx.delete(f"{worker}/simulate/log", trust_env=False)
        waits += [
            (exchange["content_at"] - exchange["arrived_at"]) * 1e3
            for exchange in log
            if exchange["path"] == path and exchange["content_at"] is not None
        ]
    return waits


def locust(url: str, seconds: int) -> tuple[float, int]:
    """Mean TTFT of its completion users in milliseconds, and failures of all."""
    arguments = ["-f", "loadtest/locustfile.py", "--headless", "-u", "12", "-r", "6", "-t", f"{seconds}s", "-H", url]
    command = [sys.executable, "-m", "locust", *arguments, "--json", "--loglevel", "ERROR"]
    entries = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    told = next(entry for entry in entries if (entry["method"], entry["name"]) == ("TTFT", "completion"))
    return told["total_response_time"] / told["num_requests"], sum(entry["num_failures"] for entry in entries)


def loadtest(url: str, seconds: int) -> dict[str, Any]:
    source = ["--workload", "fan-out-small", "--requests", str(4 * seconds), "--rate", "1"]
    command = [sys.executable, "-m", "ropeway", "loadtest", *source, "--url", url, "--json"]
    row: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)["rows"][
        0
    ]
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, stack(Path(directory)) as (url, workers):
        locust_ms, locust_failures = locust(url, options.seconds)
        locust_truth = truth_ms(workers, "/v1/completions")
        row = loadtest(url, options.seconds)
        loadtest_truth = truth_ms(workers, "/v1/completions")
    rows = [
        report("locust", locust_ms, locust_truth, locust_failures, None),
        report("ropeway loadtest", row["ttft_ms_mean"], loadtest_truth, row["failed"], row["late_ms_mean"]),
    ]
    for one in rows:
        print(json.dumps(one))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


def report(name: str, told_ms: float, truth: list[float], failures: int, late_ms: float | None) -> dict[str, Any]:
    mean = sum(truth) / len(truth)
    return {
        "generator": name,
        "requests": len(truth),
        "failures": failures,
        "ttft_ms_mean": round(told_ms, 2),
        "truth_ms_mean": round(mean, 2),
        "difference_ms": round(told_ms - mean, 2),
        "sent_late_ms_mean": late_ms,
    }


if __name__ == "__main__":
    main()

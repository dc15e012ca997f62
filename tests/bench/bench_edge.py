"""CPU per request of the gateway beside other routers, in one run on one machine.

Two canned workers, `wrk` in front, the gateway measured with all the processes that it has started (user and system
time from /proc). Rounds are interleaved, so that a slow minute of the machine falls on all; medians are reported, and
ratios to the best peer within the run. Compare within a run only.

    python tests/bench/bench_edge.py --tokenizer DIR [--rounds 3] [--seconds 4] [--only ropeway,sglang] [--json FILE]

Needs `wrk` (Debian's package) and the peers in an environment of their own (`--peers-python`, made by `make bench`).
"""

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SHAPES = ("small", "stream", "big", "conversation", "cold")
CONNECTIONS = 16
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
BARS = {"small": 0.8, "stream": 0.5, "big": 1.0}


@dataclass
class Row:
    gateway: str
    shape: str
    round: int
    requests: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us_per_request: float
    errors: str


def gateways(arguments: argparse.Namespace, workers: Sequence[str]) -> dict[str, tuple[int, list[str]]]:
    """(port, command) of each contestant."""
    ours = [sys.executable, "-m", "ropeway", "serve", "--policy", "kv-aware", "--tokenizer", f"m={arguments.tokenizer}"]
    for url in workers:
        ours += ["--worker", url]
    peer = str(arguments.peers_python)
    ports = free_ports(5)
    sglang = [peer, "-m", "sglang_router.launch_router", "--worker-urls", *workers, "--log-level", "warn"]
    vllm = [str(arguments.peers_python.parent / "vllm-router"), "--worker-urls", *workers, "--log-level", "warning"]
    return {
        "ropeway": (ports[0], [*ours, "--port", str(ports[0])]),
        "sglang cache_aware": (
            ports[1],
            [*sglang, "--policy", "cache_aware", "--port", str(ports[1]), "--prometheus-port", str(ports[3])],
        ),
        "vllm cache_aware": (
            ports[2],
            [*vllm, "--policy", "cache_aware", "--port", str(ports[2]), "--prometheus-port", str(ports[4])],
        ),
    }


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@contextmanager
def process(command: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **(environment or {})}
        )
        try:
            yield child
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(child.pid, number)
                except ProcessLookupError:
                    break
                try:
                    child.wait(timeout=3)
                except subprocess.TimeoutExpired:
                    continue
            child.wait()


def post(port: int, path: str, body: bytes, method: str = "POST", timeout: float = 2.0) -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read()


def wait_until_serving(port: int, child: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise SystemExit(f"{child.args} ended with {child.returncode}")
        try:
            post(port, "/v1/chat/completions", body)
        except (OSError, urllib.error.URLError):
            time.sleep(0.25)
        else:
            return
    raise SystemExit(f"{child.args} did not serve within {seconds:.0f} s")


def cpu_ticks(root: int) -> int:
    """User and system time of a process and of all that it has started, and they in turn."""
    own: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        own[int(entry)] = int(fields[11]) + int(fields[12])
        children.setdefault(int(fields[1]), []).append(int(entry))
    ticks, pending = 0, [root]
    while pending:
        process = pending.pop()
        ticks += own.get(process, 0)
        pending += children.get(process, [])
    return ticks


def wrk(port: int, shape: str, seconds: float, first: int) -> str:
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "-s", str(HERE / "edge/post.lua"), "--latency"]
    out = subprocess.run(
        [*command, f"http://127.0.0.1:{port}/v1/chat/completions"],
        env={**os.environ, "SHAPE": shape, "FIRST": str(first)},
        capture_output=True,
        text=True,
        check=True,
    )
    return out.stdout


def milliseconds(report: str, percentile: str) -> float:
    match = re.search(rf"^\s+{percentile}%\s+([\d.]+)(us|ms|s)\s*$", report, re.MULTILINE)
    return float(match[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[match[2]] if match else float("nan")


def requests_of(report: str) -> int:
    return int(re.search(r"(\d+) requests in", report)[1])  # type: ignore[index]


def measure(name: str, port: int, child: subprocess.Popen[bytes], shape: str, number: int, seconds: float) -> Row:
    first = 10_000_000 + number * 1_000_000
    wrk(port, shape, 1, first)
    before = cpu_ticks(child.pid)
    report = wrk(port, shape, seconds, first + 500_000)
    ticks = cpu_ticks(child.pid) - before
    requests = requests_of(report)
    errors = " ".join(re.findall(r"^\s*(Non-2xx.*|Socket errors.*)$", report, re.MULTILINE))
    return Row(
        name,
        shape,
        number,
        requests,
        requests / seconds,
        milliseconds(report, "50"),
        milliseconds(report, "99"),
        ticks / TICKS_PER_SECOND / max(requests, 1) * 1e6,
        errors,
    )


def announce_prompt_tokens(port: int, shape: str, worker_ports: Sequence[int]) -> None:
    """Tell the canned workers how long the shape's prompts are, so that their usage is true. By our own count."""
    tokens: object = None
    if shape in ("small", "stream", "big"):
        captured = captured_body(shape)
        receipt = json.loads(post(port, "/route/explain", captured))
        tokens = receipt["prompt_tokens"]
    for worker in worker_ports:
        post(worker, "/prompt_tokens", json.dumps(tokens).encode(), method="PUT")


def captured_body(shape: str) -> bytes:
    """One body as wrk sends it, caught by a socket of our own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        command = ["wrk", "-t1", "-c1", "-d1s", "-s", str(HERE / "edge/post.lua")]
        with process([*command, f"http://127.0.0.1:{server.getsockname()[1]}/"], {"SHAPE": shape}):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(5)
                    body = read_body(connection)
                if body:
                    return body


def read_body(connection: socket.socket) -> bytes:
    data = b""
    while True:
        piece = connection.recv(65536)
        if not piece:
            return b""
        data += piece
        head, separator, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head.lower())
        if separator and length and len(body) >= int(length[1]):
            return body


def summarize(rows: list[Row]) -> list[dict[str, object]]:
    """Medians over rounds, and the ratio of ours to the better peer."""
    summary: list[dict[str, object]] = []
    for shape in dict.fromkeys(row.shape for row in rows):
        medians = {
            name: statistics.median(row.cpu_us_per_request for row in rows if (row.gateway, row.shape) == (name, shape))
            for name in dict.fromkeys(row.gateway for row in rows)
        }
        peers = [value for name, value in medians.items() if name != "ropeway"]
        ratio = medians["ropeway"] / min(peers) if peers and "ropeway" in medians else None
        summary.append({"shape": shape, "cpu_us_per_request": medians, "ratio_to_best_peer": ratio})
    return summary


def print_table(rows: list[Row], summary: list[dict[str, object]]) -> None:
    print(f"\n{'gateway':<20}{'shape':<14}{'round':>5}{'req/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'cpu us':>9}  errors")
    for row in rows:
        print(
            f"{row.gateway:<20}{row.shape:<14}{row.round:>5}{row.requests_per_second:>9.0f}{row.p50_ms:>9.2f}"
            f"{row.p99_ms:>9.2f}{row.cpu_us_per_request:>9.0f}  {row.errors}"
        )
    print("\nmedians, CPU microseconds per request")
    for entry in summary:
        medians = "   ".join(f"{name} {value:.0f}" for name, value in entry["cpu_us_per_request"].items())  # type: ignore[attr-defined]
        ratio = entry["ratio_to_best_peer"]
        bar = BARS.get(str(entry["shape"]))
        verdict = f"   ratio {ratio:.2f}" + (f" (bar {bar})" if bar else "") if ratio is not None else ""
        print(f"{entry['shape']:<14}{medians}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with tokenizer and chat template")
    parser.add_argument("--peers-python", type=Path, default=ROOT / ".venv-bench/bin/python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", default="", help="comma-separated beginnings of contestants' names")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shapes = arguments.shapes.split(",")
    rows: list[Row] = []
    worker_ports = free_ports(2)
    canned = [sys.executable, str(HERE / "edge/canned_worker.py")]
    with process([*canned, str(worker_ports[0])]), process([*canned, str(worker_ports[1])]):
        contestants = gateways(arguments, [f"http://127.0.0.1:{port}" for port in worker_ports])
        wanted = [name for name in contestants if name.startswith(tuple(arguments.only.split(",")))]
        for number in range(arguments.rounds):
            for name in wanted:
                port, command = contestants[name]
                with process(command) as child:
                    wait_until_serving(port, child)
                    for shape in shapes:
                        if name == "ropeway":
                            announce_prompt_tokens(port, shape, worker_ports)
                        rows.append(measure(name, port, child, shape, number, arguments.seconds))
                        print(".", end="", flush=True, file=sys.stderr)
    summary = summarize(rows)
    print_table(rows, summary)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"rows": [asdict(row) for row in rows], "summary": summary}, indent=1))


if __name__ == "__main__":
    main()

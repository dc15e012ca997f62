"""What small requests suffer while 200k-token prompts flow through the same gateway.

Two canned workers, one gateway with a tokenizer. A client sends small chats, one after the other, and measures each;
first alone, then while another client sends a fresh prompt of about 200,000 tokens every `--every` seconds. Rounds
alternate between the two; the figure is the difference of the 99th percentiles over all rounds.

    python tests/bench/bench_long_prompts.py --tokenizer DIR [--rounds 3] [--seconds 10] [--json FILE]
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path

import httpx
from bench_edge import HERE, free_ports, process, wait_until_serving

WORDS = [
    "river",
    "stone",
    "north",
    "seven",
    "paper",
    "light",
    "early",
    "market",
    "signal",
    "garden",
    "copper",
    "weigh",
    "value",
    "return",
    "import",
    "class",
]
LONG_PROMPT_WORDS = 180_000
PAUSE_SECONDS = 0.005


def chat(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


async def small_requests(client: httpx.AsyncClient, seconds: float, latencies_ms: list[float]) -> None:
    deadline = time.perf_counter() + seconds
    number = 0
    while time.perf_counter() < deadline:
        number += 1
        body = chat(f"question {number:08d} please")
        started = time.perf_counter()
        answer = await client.post("/v1/chat/completions", content=body)
        latencies_ms.append((time.perf_counter() - started) * 1e3)
        assert answer.status_code == 200, answer.text
        await asyncio.sleep(PAUSE_SECONDS)


async def measure(url: str, seconds: float) -> list[float]:
    latencies_ms: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await small_requests(client, seconds, latencies_ms)
    return latencies_ms


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def long_prompt(seed: int) -> bytes:
    draw = random.Random(seed)
    return chat(" ".join(draw.choices(WORDS, k=LONG_PROMPT_WORDS)))


async def send_long_prompts(url: str, every_seconds: float, seed: int) -> None:
    """Runs in a process of its own, so that the client measured does not wait for its making of prompts."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while True:
            seed += 1
            body = long_prompt(seed)
            started = time.perf_counter()
            answer = await client.post("/v1/chat/completions", content=body)
            receipt = answer.headers.get("x-ropeway-worker")
            print(json.dumps({"status": answer.status_code, "worker": receipt}), flush=True)
            await asyncio.sleep(max(every_seconds - (time.perf_counter() - started), 0.05))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=1.0, help="seconds from one long prompt to the next")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--send-to", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send_to:
        asyncio.run(send_long_prompts(arguments.send_to, arguments.every, arguments.seed))
        return
    gateway_port, *workers = free_ports(3)
    serve = [
        sys.executable,
        "-m",
        "ropeway",
        "serve",
        "--port",
        str(gateway_port),
        "--tokenizer",
        f"m={arguments.tokenizer}",
    ]
    canned = [sys.executable, str(HERE / "edge/canned_worker.py")]
    for port in workers:
        serve += ["--worker", f"http://127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{gateway_port}"
    alone: list[float] = []
    beside: list[float] = []
    with process([*canned, str(workers[0])]), process([*canned, str(workers[1])]), process(serve) as child:
        wait_until_serving(gateway_port, child)
        asyncio.run(measure(url, 2.0))
        for number in range(arguments.rounds):
            alone += asyncio.run(measure(url, arguments.seconds))
            sender = [
                sys.executable,
                __file__,
                "--send-to",
                url,
                "--every",
                str(arguments.every),
                "--seed",
                str(number * 1000),
            ]
            with process(sender):
                time.sleep(1.5)
                beside += asyncio.run(measure(url, arguments.seconds))
    result = {
        "requests": [len(alone), len(beside)],
        "p50_ms": [statistics.median(alone), statistics.median(beside)],
        "p99_ms": [percentile(alone, 0.99), percentile(beside, 0.99)],
        "p99_rise_ms": percentile(beside, 0.99) - percentile(alone, 0.99),
        "max_ms": [max(alone), max(beside)],
    }
    print(f"{'':<28}{'alone':>10}{'beside':>10}")
    for name in ("requests", "p50_ms", "p99_ms", "max_ms"):
        print(f"{name:<28}{result[name][0]:>10.2f}{result[name][1]:>10.2f}")
    print(f"p99 rises by {result['p99_rise_ms']:.2f} ms (bar 5)")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

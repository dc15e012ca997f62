"""Fair shares and kept promises, on a gateway before simulated workers.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_admission.py [--json FILE] [--seconds S] [--seed N]

Two simulated workers (Llama-3-70B on eight H100), prompts that nobody has seen before, a budget for the first token.
Three runs, each on a gateway of its own that has been warmed up:

* `solo`: a tenant alone, with a quarter of what the workers can do;
* `beside`: the same requests at the same moments, and a second tenant that sends ten times as many;
* `overload`: both together send three times what the workers can do.

Goodput is the share of the requests sent whose first token came within the budget, as the client saw it. What the
machine adds to everything is asked of `/healthz` all the while; on a busy one it is allowed for where refusals are
timed. `--without` repeats the last two with `admission.enabled: false`. Exit code 1 where a promise was not kept.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gateway.api_keys import add_api_key
from tests.gateway.end_to_end.processes import HOST, Fleet, Gateway, chat
from workers.timing import LLAMA_3_70B_TP8

WORKERS = 2
PROMPT_TOKENS = 8000
"""As many characters: the simulated workers' tokens are bytes."""
BUDGET_SECONDS = 2.0
OUTPUT_TOKENS = 8
TENANTS = ("quiet", "flood")
CAPACITY = WORKERS / LLAMA_3_70B_TP8.prompt_seconds(PROMPT_TOKENS)
"""Requests a second, decode left out."""
WARM_UP_SECONDS = 5.0
HUNG_AFTER_SECONDS = 60.0
ON_ARRIVAL_SECONDS = 0.05


@dataclass
class Sent:
    tenant: str
    at: float
    status: int = 0
    """0: no answer."""
    ttft_seconds: float | None = None
    ended_seconds: float = 0.0
    retry_after: int = 0

    @property
    def good(self) -> bool:
        return self.ttft_seconds is not None and self.ttft_seconds <= BUDGET_SECONDS


texts = count(int(time.time()) * 1000)


async def send(port: int, key: str, sent: Sent) -> None:
    """One request on a connection of its own. Times count from before the connection."""
    text = f"{next(texts)} " + "the cabin rises to the ridge at noon " * (PROMPT_TOKENS // 37)
    body = json.dumps(chat(text[: PROMPT_TOKENS - 40], max_tokens=OUTPUT_TOKENS, stream=True)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\nx-ropeway-ttft-budget-ms: {int(BUDGET_SECONDS * 1e3)}\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        sent.status = int(lines[0].split()[1])
        fields = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
        sent.retry_after = int(fields.get(b"retry-after", b"0"))
        await reader.readuntil(b"data: ") if sent.status == 200 else await reader.read()
        if sent.status == 200:
            sent.ttft_seconds = time.perf_counter() - began
            await reader.read()
    finally:
        sent.ended_seconds = time.perf_counter() - began
        writer.close()


def poisson(tenant: str, rate: float, seconds: float, random: Random) -> list[Sent]:
    at, sent = 0.0, []
    while (at := at + random.expovariate(rate)) < seconds:
        sent.append(Sent(tenant, at))
    return sent


async def watch(port: int, seconds: list[float]) -> None:
    """What an answer takes that is no work at all: what this machine adds to everything."""
    while True:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        await reader.read()
        seconds.append(time.perf_counter() - began)
        writer.close()
        await asyncio.sleep(0.1)


async def load(port: int, keys: dict[str, str], requests: Sequence[Sent]) -> list[float]:
    """Send them, and say what the machine added meanwhile."""
    idle: list[float] = []
    watching = asyncio.create_task(watch(port, idle))
    began = time.perf_counter()
    tasks: list[asyncio.Task[None]] = []
    for sent in sorted(requests, key=lambda sent: sent.at):
        await asyncio.sleep(max(sent.at - (time.perf_counter() - began), 0.0))
        tasks.append(asyncio.create_task(send(port, keys[sent.tenant], sent)))
    await asyncio.wait(tasks, timeout=HUNG_AFTER_SECONDS)
    for task in (*tasks, watching):
        task.cancel()
    await asyncio.gather(*tasks, watching, return_exceptions=True)
    return sorted(idle)


def measure(directory: Path, name: str, requests: list[Sent], enabled: bool = True) -> dict[str, Any]:
    directory = directory / name.replace(" ", "-")
    directory.mkdir()
    keys = {tenant: add_api_key(directory / "keys.jsonl", tenant) for tenant in TENANTS}
    config = {"tenants": {"api_keys_file": str(directory / "keys.jsonl")}, "admission": {"enabled": enabled}}
    with (
        Fleet(directory, "--profile", LLAMA_3_70B_TP8.name, count=WORKERS) as fleet,
        Gateway(directory, fleet.urls, config) as gateway,
    ):
        port = int(gateway.url.rpartition(":")[2])
        asyncio.run(load(port, keys, poisson("quiet", CAPACITY / 2, WARM_UP_SECONDS, Random(0))))
        gateway.wait_idle()
        load_before = os.getloadavg()[0]
        idle = asyncio.run(load(port, keys, requests))
        status = gateway.status()
    machine_seconds = (percentile(idle, 0.99) or 0.0) / 1e3
    result = {
        **{tenant: summary([s for s in requests if s.tenant == tenant], machine_seconds) for tenant in TENANTS},
        "all": summary(requests, machine_seconds),
        "lateness_ms": status["admission"]["lateness_ms"] if enabled else None,
        "refused": status["admission"]["refused"] if enabled else None,
        "load_average": [load_before, os.getloadavg()[0]],
        "healthz_ms": {"p50": percentile(idle, 0.5), "p99": percentile(idle, 0.99)},
    }
    print(f"{name:22}", json.dumps(result["all"]), json.dumps(result["healthz_ms"]))
    for tenant in TENANTS:
        if result[tenant]:
            print(f"{tenant:>22}", json.dumps(result[tenant]))
    return result


def summary(requests: Sequence[Sent], machine_seconds: float) -> dict[str, Any]:
    if not requests:
        return {}
    accepted = [sent for sent in requests if sent.status == 200]
    refused = sorted(sent.ended_seconds for sent in requests if sent.status in (429, 503))
    ttfts = sorted(sent.ttft_seconds for sent in accepted if sent.ttft_seconds is not None)
    return {
        "sent": len(requests),
        "goodput": share(sum(sent.good for sent in requests), len(requests)),
        "accepted": len(accepted),
        "accepted_in_time": share(sum(sent.good for sent in accepted), len(accepted)),
        "ttft_ms_p50": percentile(ttfts, 0.5),
        "ttft_ms_p95": percentile(ttfts, 0.95),
        "statuses": dict(Counter(sent.status for sent in requests)),
        "refused_ms_p50": percentile(refused, 0.5),
        "refused_within_50_ms": share(sum(seconds < ON_ARRIVAL_SECONDS for seconds in refused), len(refused)),
        "refused_within_50_ms_of_healthz": share(
            sum(seconds < ON_ARRIVAL_SECONDS + machine_seconds for seconds in refused), len(refused)
        ),
        "refused_ms_max": percentile(refused, 1.0),
        "retry_after_max": max((sent.retry_after for sent in requests), default=0),
    }


def share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def percentile(ordered: Sequence[float], at: float) -> float | None:
    return round(ordered[min(int(len(ordered) * at), len(ordered) - 1)] * 1e3, 1) if ordered else None


def tenants_alike(seconds: float, load: float, seed: int) -> list[Sent]:
    return [
        sent
        for number, tenant in enumerate(TENANTS)
        for sent in poisson(tenant, load * CAPACITY / len(TENANTS), seconds, Random(seed + number))
    ]


def judge(results: dict[str, Any]) -> dict[str, bool]:
    """The promises, and whether they were kept."""
    overload = results["overload"]["all"]
    on_arrival = sum(results["overload"]["refused"]["on_arrival"].values())
    refused = sum(count for status, count in overload["statuses"].items() if status in (429, 503))
    return {
        "a flood leaves the quiet tenant 0.95 of its goodput": (
            results["beside"]["quiet"]["goodput"] >= 0.95 * results["solo"]["quiet"]["goodput"]
        ),
        "0.95 of what is accepted is in time": overload["accepted_in_time"] >= 0.95,
        "what is refused on arrival is refused within 50 ms": (
            (overload["refused_within_50_ms_of_healthz"] or 0.0) * refused >= 0.98 * on_arrival
        ),
        "what waited is refused by its budget": (
            (overload["refused_ms_max"] or 0.0) <= (BUDGET_SECONDS + ON_ARRIVAL_SECONDS) * 1e3
        ),
        "nothing hangs": all(not results[run]["all"]["statuses"].get(0) for run in ("solo", "beside", "overload")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of each run (default: 60)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--without", action="store_true", help="also with admission switched off")
    arguments = parser.parse_args()
    seconds, seed = arguments.seconds, arguments.seed

    def quiet() -> list[Sent]:
        return poisson("quiet", CAPACITY / 4, seconds, Random(seed))

    def both() -> list[Sent]:
        return quiet() + poisson("flood", 10 * CAPACITY / 4, seconds, Random(seed + 1))

    results: dict[str, Any] = {"capacity_requests_per_second": CAPACITY, "budget_seconds": BUDGET_SECONDS}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        results["solo"] = measure(directory, "solo", quiet())
        results["beside"] = measure(directory, "beside", both())
        results["overload"] = measure(directory, "overload", tenants_alike(seconds, 3.0, seed))
        if arguments.without:
            results["beside_without"] = measure(directory, "beside, without", both(), False)
            results["overload_without"] = measure(
                directory, "overload, without", tenants_alike(seconds, 3.0, seed), False
            )
    results["kept"] = judge(results)
    for promise, kept in results["kept"].items():
        print("kept:  " if kept else "BROKEN:", promise)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0 if all(results["kept"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

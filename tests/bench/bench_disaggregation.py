"""A prefill and a decode worker beside two workers of both roles, under the same load.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_disaggregation.py [--json FILE] [--requests N] [--profile NAME]

Simulated workers (Llama-3-70B on eight H100 by default) behind a gateway each. Conversations stream all the time; long
prompts, which nobody has seen before, come in between. What matters is how long a stream stands still: `gap`, between
two of its pieces. `ttft` is that of the long prompts. Both fleets get the same texts at the same moments.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gateway.end_to_end.processes import Fleet, Gateway, chat, new_keyring

FLEETS = {"1 prefill + 1 decode": ("prefill", "decode"), "2 of both roles": ("both", "both")}
STREAMS = 12
STREAM_TOKENS = 64
LONG_CHARACTERS = 12_000
LONG_EVERY_SECONDS = 0.8


@dataclass
class Seen:
    gaps: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    legs: Counter[str] = field(default_factory=Counter)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def stream(http: httpx.AsyncClient, url: str, body: dict[str, Any], seen: Seen, is_long: bool) -> None:
    began = previous = time.perf_counter()
    async with http.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        if is_long:
            seen.legs[answer.headers.get("x-ropeway-legs", "none").partition(";")[0].removeprefix("outcome=")] += 1
        pieces = 0
        async for _ in answer.aiter_bytes():
            now = time.perf_counter()
            pieces += 1
            if pieces == 1 and is_long:
                seen.ttfts.append(now - began)
            elif pieces > 1 and not is_long:
                seen.gaps.append(now - previous)
            previous = now


async def converse(http: httpx.AsyncClient, url: str, number: int, seen: Seen, ended: asyncio.Event) -> None:
    turn = 0
    while not ended.is_set():
        turn += 1
        await stream(http, url, chat(f"{number}/{turn}: how is the weather?", max_tokens=STREAM_TOKENS), seen, False)


async def load(url: str, requests: int) -> Seen:
    seen, ended = Seen(), asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as http:
        talking = [asyncio.create_task(converse(http, url, number, seen, ended)) for number in range(STREAMS)]
        await asyncio.sleep(1.0)
        asking = []
        for number in range(requests):
            text = f"document {number}: " + "the cabin rises to the ridge at noon " * (LONG_CHARACTERS // 37)
            asking.append(asyncio.create_task(stream(http, url, chat(text, max_tokens=8), seen, True)))
            await asyncio.sleep(LONG_EVERY_SECONDS)
        await asyncio.gather(*asking)
        ended.set()
        await asyncio.gather(*talking)
    return seen


def measure(roles: tuple[str, str], profile: str, requests: int) -> dict[str, Any]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keyring = str(new_keyring(directory))
        flags = ("--profile", profile, "--keyring", keyring, "--kv-link", "400")
        fleet = stack.enter_context(Fleet(directory, *flags, count=2))
        workers = [{"url": url, "role": role} for url, role in zip(fleet.urls, roles, strict=True)]
        gateway = stack.enter_context(Gateway(directory, workers, {"keyring": keyring}))  # type: ignore[arg-type]
        seen = asyncio.run(load(gateway.url, requests))
    return {
        "gap_ms_p50": median(seen.gaps) * 1e3,
        "gap_ms_p99": percentile(seen.gaps, 0.99) * 1e3,
        "gap_ms_max": max(seen.gaps) * 1e3,
        "ttft_ms_p50": median(seen.ttfts) * 1e3,
        "ttft_ms_p95": percentile(seen.ttfts, 0.95) * 1e3,
        "legs": dict(seen.legs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--requests", type=int, default=50, metavar="N", help="long prompts (default: 50)")
    parser.add_argument("--profile", default="llama-3-70b-tp8", help="default: %(default)s")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    for name, roles in FLEETS.items():
        found = results[name] = measure(roles, arguments.profile, arguments.requests)
        print(f"{name:22}", *(f"{key} {value:,.1f}" for key, value in found.items() if key != "legs"), found["legs"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

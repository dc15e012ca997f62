"""What gateways that share an index gain and wait for: real gateways, simulated workers, a real Valkey.

    PYTHONPATH=. .venv/bin/python tests/bench/bench_shared.py [--json FILE] [--only propagation,hand-over,hits,siblings]

propagation   from the end of an answer until each of two gateways confirms what the worker stored for it; without
              load and under it. The gateways are asked every two milliseconds or so, which is the resolution.
hand-over     from SIGKILL of a gateway under load until the other one has confirmed a store of every worker that the
              dead one followed, made after its death; then both copies are compared with the workers' own lists.
hits          conversations whose every turn goes to a random one of four gateways, beside one gateway alone.
siblings      64 prompts with one beginning, at once, through four gateways and through one: requests per worker.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.cachecore.store.servers import start_server
from tests.faults.load import Connection, LoadClient, Prompts
from tests.gateway.end_to_end import test_placement as placement
from tests.gateway.end_to_end.processes import Fleet, Gateway, candidate, chat, full_hit, new_keyring
from tests.gateway.end_to_end.sharing import LEASE_SECONDS, Member, SharingStack

WORKERS = 8
POLL_SECONDS = 0.002
GIVE_UP_SECONDS = 10.0
SIBLINGS = 64
PLACED_WORKERS = 4

Row = dict[str, Any]


@contextmanager
def sharing(
    flags: Sequence[str], members: str, workers: int = WORKERS, lease_seconds: float = LEASE_SECONDS
) -> Iterator[SharingStack]:
    """Workers, a server and gateways, ready to be measured."""
    with tempfile.TemporaryDirectory() as name, start_server(Path(name)) as server:
        directory = Path(name)
        with Fleet(directory, *flags, count=workers) as fleet:
            ring = new_keyring(directory)
            with SharingStack(directory, server, ring, [fleet], members, lease_seconds=lease_seconds) as stack:
                stack.wait_settled()
                yield stack


@contextmanager
def alone(flags: Sequence[str], workers: int) -> Iterator[Gateway]:
    """One gateway that keeps its index to itself."""
    with (
        tempfile.TemporaryDirectory() as name,
        Fleet(Path(name), *flags, count=workers) as fleet,
        Gateway(Path(name), fleet.urls) as gateway,
    ):
        yield gateway


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p99 = ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]
    return {"p50": round(statistics.median(ordered), 2), "p99": round(p99, 2), "max": round(ordered[-1], 2)}


# Propagation


class Asker:
    """Asks one gateway over a connection of its own."""

    def __init__(self, gateway: Member, connection: Connection) -> None:
        self.member = gateway.member
        self._connection = connection

    @classmethod
    async def of(cls, gateway: Member) -> "Asker":
        url = httpx.URL(gateway.url)
        return cls(gateway, await Connection.open(url.host, url.port or 80))

    async def post(self, body: Mapping[str, Any]) -> str:
        """The worker that answered."""
        status, headers, answer = await self._connection.post("/v1/chat/completions", json.dumps(body).encode())
        if status != 200:
            raise SystemExit(f"{status}: {answer!r}")
        return headers["x-ropeway-worker"]

    async def confirms(self, body: Mapping[str, Any], worker: str) -> float:
        """When it first confirmed the whole prompt there."""
        data, wanted = json.dumps(body).encode(), full_hit(body)
        limit = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < limit:
            _, _, answer = await self._connection.post("/route/explain", data)
            if candidate(json.loads(answer), worker)["confirmed_tokens"] == wanted:
                return time.monotonic()
            await asyncio.sleep(POLL_SECONDS)
        raise SystemExit(f"{self.member} has not heard of a store at {worker} within {GIVE_UP_SECONDS:g} s")


async def propagation(stack: SharingStack, samples: int, rate: float) -> Row:
    askers = [await Asker.of(gateway) for gateway in stack.gateways]
    client = LoadClient([gateway.url for gateway in stack.gateways], Prompts(seed=2), rate or 1.0)
    if rate:
        client.start()
        await asyncio.sleep(2.0)
    owners = await asyncio.to_thread(stack.prover.copy.owners)
    follower_ms, other_ms, behind_ms = list[float](), list[float](), list[float]()
    for number in range(samples):
        body = chat(f"{number} {time.monotonic_ns()} " + "of the same length, all of them. " * 8, max_tokens=2)
        worker = await askers[number % 2].post(body)
        answered_at = time.monotonic()
        moments = await asyncio.gather(*(asker.confirms(body, worker) for asker in askers))
        seen = dict(zip([asker.member for asker in askers], moments, strict=True))
        follower_at = seen.pop(owners[worker])
        (other_at,) = seen.values()
        follower_ms.append((follower_at - answered_at) * 1e3)
        other_ms.append((other_at - answered_at) * 1e3)
        behind_ms.append((other_at - follower_at) * 1e3)
    await client.stop()
    return {
        "case": "propagation",
        "samples": samples,
        "load_per_second": rate,
        "follower_ms": percentiles(follower_ms),
        "other_ms": percentiles(other_ms),
        "other_behind_follower_ms": percentiles(behind_ms),
        "failed": len([answer for answer in client.answers if answer.failure]),
    }


def bench_propagation(options: argparse.Namespace) -> Iterator[Row]:
    with sharing(("--speed", "500", "--blocks", "4000"), "ab") as stack:
        for rate in (0.0, options.rate):
            yield asyncio.run(propagation(stack, options.samples, rate))


# Hand-over


async def hand_over(stack: SharingStack, rate: float, number: int) -> Row:
    owner = stack.owner_of(stack.workers[number % len(stack.workers)])
    heir = stack.other(owner)
    orphans = [worker for worker, member in stack.prover.copy.owners().items() if member == owner.member]
    client = LoadClient([heir.url], Prompts(seed=100 + number), rate)
    client.start()
    await asyncio.sleep(2.0)
    killed_at = time.monotonic()
    await asyncio.to_thread(owner.kill)
    seconds = await asyncio.gather(*(heard_of(heir, worker, number) for worker in orphans))
    await asyncio.sleep(1.0)
    await client.stop()
    bodies = client.prompts.sample(100)
    left = await asyncio.to_thread(differences_left, stack, heir, bodies)
    return {
        "case": "hand-over",
        "load_per_second": rate,
        "streams": len(orphans),
        "seconds": percentiles([at - killed_at for at in seconds]),
        "lease_seconds": stack.lease_seconds,
        "failed": len([answer for answer in client.answers if answer.failure]),
        "left": left,
    }


async def heard_of(heir: Member, worker: str, number: int) -> float:
    """When the heir confirms a prompt that the worker is given now, by nobody whom it could know of."""
    body = chat(f"{number} {time.monotonic_ns()} said to the worker itself. " * 8, max_tokens=1)
    async with httpx.AsyncClient(trust_env=False) as http:
        (await http.post(f"http://{worker}/v1/chat/completions", json=body)).raise_for_status()
    return await (await Asker.of(heir)).confirms(body, worker)


def differences_left(stack: SharingStack, heir: Member, bodies: Sequence[Mapping[str, Any]]) -> list[str]:
    try:
        stack.prover.wait_exact([heir], stack.workers, bodies)
    except AssertionError as error:
        return str(error).split("; ")
    return []


def bench_hand_over(options: argparse.Namespace) -> Iterator[Row]:
    for lease_seconds in (LEASE_SECONDS, 1.2):
        with sharing(("--speed", "500", "--blocks", "1200"), "ab", lease_seconds=lease_seconds) as stack:
            for number in range(options.rounds):
                yield asyncio.run(hand_over(stack, options.rate, number))
                dead = next(gateway for gateway in stack.gateways if gateway.process.poll() is not None)
                stack.restart_gateway(dead)
                stack.wait_settled()
                time.sleep(6 * lease_seconds)  # until the streams are divided again


# Hits and siblings


class Scattered:
    """Sends each request to a random one of several gateways; for whoever expects one client."""

    def __init__(self, clients: Sequence[httpx.AsyncClient], seed: int) -> None:
        self._clients = clients
        self._random = Random(seed)

    async def post(self, path: str, **arguments: Any) -> httpx.Response:
        return await self._random.choice(self._clients).post(path, **arguments)


async def with_clients(urls: Sequence[str], seed: int, use: Callable[[Scattered], Awaitable[Any]]) -> Any:
    limits = httpx.Limits(max_connections=SIBLINGS)
    clients = [httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) for url in urls]
    try:
        return await use(Scattered(clients, seed))
    finally:
        for client in clients:
            await client.aclose()


async def converse(http: Scattered) -> placement.Run:
    run = placement.Run()
    period_seconds = placement.CONVERSATIONS / (placement.LOAD * PLACED_WORKERS * placement.capacity_per_second())
    async with asyncio.TaskGroup() as conversations:
        for number in range(placement.CONVERSATIONS):
            talk = placement.converse(http, number, period_seconds, True, False, run)  # type: ignore[arg-type]
            conversations.create_task(talk)
    return run


async def ask_siblings(http: Scattered, seed: int) -> Counter[str]:
    beginning = f"{seed} " + "A long beginning that all of them share. " * 40
    bodies = [chat(f"{beginning}{number}", max_tokens=placement.OUTPUT_TOKENS) for number in range(SIBLINGS)]
    answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bodies))
    return Counter(answer.raise_for_status().headers["x-ropeway-worker"] for answer in answers)


def placed_flags() -> tuple[str, ...]:
    """The workers of the placement test, slow enough that the load is theirs and not this machine's."""
    sequences = str(placement.SEQUENCES_MAX)
    return "--speed", str(placement.SPEED), "--profile", placement.PROFILE, "--max-sequences", sequences


def beside(use: Callable[[Sequence[str], int], Any], rounds: int) -> dict[str, list[Any]]:
    """The same with four gateways and with one, turn by turn, each time on new workers."""
    found: dict[str, list[Any]] = {"four": [], "one": []}
    for number in range(rounds):
        with sharing(placed_flags(), "abcd", PLACED_WORKERS) as stack:
            found["four"].append(use([gateway.url for gateway in stack.gateways], number))
        with alone(placed_flags(), PLACED_WORKERS) as gateway:
            found["one"].append(use([gateway.url], number))
    return found


def bench_hits(options: argparse.Namespace) -> Iterator[Row]:
    found = beside(lambda urls, number: asyncio.run(with_clients(urls, number, converse)), options.rounds)
    shares = {name: [round(100 * run.hit_share, 2) for run in runs] for name, runs in found.items()}
    best = {name: [round(100 * run.best_share, 2) for run in runs] for name, runs in found.items()}
    means = {name: statistics.mean(values) for name, values in shares.items()}
    yield {
        "case": "hits",
        "turns": len(found["one"][0].turns),
        "hit_percent": shares,
        "best_percent": best,
        "points_below_one_gateway": round(means["one"] - means["four"], 2),
    }


def bench_siblings(options: argparse.Namespace) -> Iterator[Row]:
    def ask(urls: Sequence[str], number: int) -> list[list[int]]:
        bursts = range(number * 4, number * 4 + 4)
        return [
            sorted(asyncio.run(with_clients(urls, burst, lambda http, burst=burst: ask_siblings(http, burst))).values())
            for burst in bursts
        ]

    found = beside(ask, options.rounds)
    bursts = {name: [burst for round_ in rounds for burst in round_] for name, rounds in found.items()}
    most = {name: round(statistics.mean(burst[-1] for burst in counted), 1) for name, counted in bursts.items()}
    yield {"case": "siblings", "siblings": SIBLINGS, "requests_per_worker": bursts, "most_at_one_worker_mean": most}


BENCHES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "propagation": bench_propagation,
    "hand-over": bench_hand_over,
    "hits": bench_hits,
    "siblings": bench_siblings,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--only", default=",".join(BENCHES), help="comma-separated; default: all")
    parser.add_argument("--samples", type=int, default=300, help="stores whose way is measured (default 300)")
    parser.add_argument(
        "--rate", type=float, default=100.0, help="requests a second, where there is load (default 100)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of hand-overs, hits and siblings (default 3)")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.only.split(","):
        for row in BENCHES[name](options):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()

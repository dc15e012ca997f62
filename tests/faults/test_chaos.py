"""Requests without end while everything around the gateway fails: none is lost, none is anybody else's.

A gateway, eight simulated workers, a Valkey, each behind a network of its own. Workers are killed and begin again, or
stop for a while; the Valkey freezes, dies, comes back without its data; networks are cut, silent, narrow or slow, and
end in the middle of answers. Three tenants ask about the same documents; half of the answers are streams, and every
fifth client gives up: in its head, in its body, while it waits, in the middle of the answer. What must hold:

* every request ends in time, and in one of the ways that `accounts` calls good;
* no tenant finds cached what only others have sent, and what workers are sent carries its own tenant's salt;
* each request that a worker received was one of the client's, no more often than the gateway may try, and never at two
  workers at once; each complete answer was received; what got lost on its way had a failed attempt;
* when all is over, everything that is kept for requests under way is zero, and the books balance again one by one.

Sizes, by variables: ROPEWAY_CHAOS_REQUESTS (10,000), ROPEWAY_CHAOS_WORKERS (8), ROPEWAY_CHAOS_SEED (1),
ROPEWAY_CHAOS_RATE (60 a second). The figures go to the terminal (`pytest -s`), and to the directory that
ROPEWAY_RESULTS names, if any.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.chaos import FREEZE, KILL, Bounds, Chaos, Span, Victim, schedule
from tests.faults.accounts import End
from tests.faults.asker import Asked, Asker
from tests.faults.books import Books, total
from tests.faults.questions import ABORTED_SHARE, first_blocks_differ, questions
from tests.faults.reports import publish
from tests.faults.stage import CUT, EMPTY, END, NARROW, REFUSE, SILENCE, SLOW, Stage

pytestmark = pytest.mark.faults

REQUESTS = int(os.environ.get("ROPEWAY_CHAOS_REQUESTS", 10_000))
WORKERS = int(os.environ.get("ROPEWAY_CHAOS_WORKERS", 8))
SEED = int(os.environ.get("ROPEWAY_CHAOS_SEED", 1))
RATE = float(os.environ.get("ROPEWAY_CHAOS_RATE", 60))
SMALL = REQUESTS < 1_000
BOUNDS = Bounds(Span(2.0, 8.0), Span(0.2, 1.0)) if SMALL else Bounds(Span(6.0, 24.0), Span(0.3, 3.0))
CALM_REQUESTS = 60
HUNG_AFTER_SECONDS = 90.0
"""All deadlines below together are a third of it; the rest is for machines that are busy with something else."""
CONFIG: dict[str, Any] = {
    "timeouts": {"connect_seconds": 1.0, "first_byte_seconds": 6.0, "idle_seconds": 6.0},
    "probes": {"interval_seconds": 0.5, "timeout_seconds": 1.0},
    "admission": {"wait_seconds_max": 10.0},
}
FLAGS = ("--speed", "2", "--blocks", "6000")
SETTLED_SECONDS_MAX = 10.0
EXPIRED_SECONDS_MAX = 40.0
"""Predictions live for half a minute."""
COMPLETE_SHARE_MIN = 0.6
"""Of the requests that were not given up: with everything failing all the time, most must be answered all the same."""
ZERO_SAMPLES = (
    "ropeway_worker_inflight_requests",
    "ropeway_worker_waiting_requests",
    "ropeway_worker_outstanding_prefill_seconds",
    "ropeway_accounted_requests",
    "ropeway_admission_waiting",
    "ropeway_admission_waiting_bytes",
    "ropeway_leases",
)
ZERO_STATUS = ("inflight", "waiting", "inflight_tokens", "outstanding_prefill_ms", "kv_held_tokens")


def victims() -> list[Victim]:
    names = [f"worker-{number}" for number in range(1, WORKERS + 1)]
    workers = [Victim(name, (KILL, KILL, FREEZE), "workers", 2.0) for name in names]
    links = [Victim(f"link-{name}", (CUT, END, REFUSE, SILENCE, NARROW, SLOW), "links") for name in names]
    store = [Victim("valkey", (KILL, EMPTY, FREEZE)), Victim("link-valkey", (CUT, SILENCE, SLOW, END))]
    return [*workers, *links, *store]


async def test_every_request_is_accounted_for(tmp_path: Path) -> None:
    asked = list(questions(SEED, REQUESTS))
    assert first_blocks_differ(asked)
    async with Stage(tmp_path, WORKERS, FLAGS, CONFIG) as stage:
        asker = Asker(stage.gateway.url, stage.keys, HUNG_AFTER_SECONDS)
        faults: Counter[str] = Counter()
        await under_chaos(stage, asker.ask_all(asked, RATE), faults)
        await stage.heal()
        lingering = await asyncio.to_thread(leftovers, stage)
        books = await asyncio.to_thread(books_of, stage, asker)
        calm = await calm_differences(stage, asker)
        lingering += await asyncio.to_thread(expired_leftovers, stage)
        await asker.close()
        report = figures(asker, faults, books) | {"lingering": lingering, "calm": calm}
        report["gateway_cpu_seconds"] = stage.gateway_cpu_seconds()
        publish(f"chaos-{SEED}", report)

    assert books.violations == []
    assert books.wrong == []
    assert lingering == []
    assert calm == []
    # That nothing was found wrong says something only where there was something to be found.
    assert len(asker.asked) == REQUESTS + CALM_REQUESTS
    assert report["ends"]["given up"] >= ABORTED_SHARE * REQUESTS * 0.6
    assert report["foreign_texts"] > 0
    assert report["cached_tokens"] > 0
    assert report["ends"]["complete"] >= COMPLETE_SHARE_MIN * (REQUESTS - report["ends"]["given up"])
    if REQUESTS >= 5_000:
        assert all(member.kills for member in stage.members)
        assert {kind for kind, _ in (fault.split(" ", 1) for fault in faults)} >= {KILL, FREEZE, EMPTY, CUT, SILENCE}


async def under_chaos(stage: Stage, work: Coroutine[Any, Any, None], faults: Counter[str]) -> None:
    """Do the work while things befall the stage; afterwards nothing lasts."""

    def say(line: str) -> None:
        print(line)
        _, _, what = line.partition(" s: ")
        if what:
            kind, name, *_ = what.split()
            faults[f"{kind} {name.rstrip('-0123456789')}"] += 1

    chaos = Chaos(SEED, schedule(SEED, victims(), BOUNDS), stage.targets, say)

    async def go_on() -> None:
        while True:
            chaos.tick()
            await asyncio.sleep(0.02)

    ticking = asyncio.create_task(go_on(), name="chaos")
    try:
        await work
    finally:
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking
        chaos.end()


def books_of(stage: Stage, asker: Asker) -> Books:
    return Books(stage.attempts(), stage.tenant_of, stage.metrics(), asker.asked)


def leftovers(stage: Stage) -> list[str]:
    """What is not back to zero though no request is under way."""
    return settled(lambda: list(_leftovers(stage)), SETTLED_SECONDS_MAX)


def _leftovers(stage: Stage) -> Iterator[str]:
    samples, status = stage.metrics(), stage.gateway.status()
    known = {sample.partition("{")[0] for sample in samples}
    yield from (f"{name}: not among the metrics" for name in ZERO_SAMPLES if name not in known)
    yield from (f"{name}: {total(samples, name)}" for name in ZERO_SAMPLES if total(samples, name))
    if status["requests"]["inflight"]:
        yield f"/status: {status['requests']}"
    for worker in status["workers"]:
        yield from (f"{worker['name']}: {key} {worker[key]}" for key in ZERO_STATUS if worker[key])
        idle = samples[f'ropeway_worker_idle_connections{{worker="{worker["name"]}"}}']
        if worker["connections"] != idle:
            yield f"{worker['name']}: {worker['connections']} connections, {idle} of them idle"
    yield from (f"{m.name}: has {stage.running(m)} requests still" for m in stage.members if stage.running(m))


def expired_leftovers(stage: Stage) -> list[str]:
    if SMALL:
        return []
    return settled(lambda: _predictions(stage), EXPIRED_SECONDS_MAX)


def _predictions(stage: Stage) -> list[str]:
    left = total(stage.metrics(), "ropeway_predictions")
    return [f"{left} predictions"] if left else []


def settled(left: Callable[[], list[str]], seconds_max: float) -> list[str]:
    limit = time.monotonic() + seconds_max
    while (found := left()) and time.monotonic() < limit:
        time.sleep(0.2)
    return found


async def calm_differences(stage: Stage, asker: Asker) -> list[str]:
    """With nothing failing, each question is sent once, received once and answered."""
    before, asked_before = await asyncio.to_thread(_sent_and_received, stage), len(asker.asked)
    calm = [q._replace(id=f"calm{n}", abort=None) for n, q in enumerate(questions(SEED + 1, CALM_REQUESTS))]
    await asker.ask_all(calm, RATE)
    await asyncio.to_thread(stage.gateway.wait_idle)
    after = await asyncio.to_thread(_sent_and_received, stage)
    sent, received = after[0] - before[0], after[1] - before[1]
    wrong = [] if sent == received == CALM_REQUESTS else [f"{sent} sent and {received} received, of {CALM_REQUESTS}"]
    return wrong + [f"{each.question.id}: {each.verdict}" for each in asker.asked[asked_before:] if _failed(each)]


def _failed(asked: Asked) -> bool:
    return asked.verdict.end is not End.COMPLETE


def _sent_and_received(stage: Stage) -> tuple[int, int]:
    return int(total(stage.metrics(), "ropeway_worker_sent_requests_total")), len(stage.attempts())


def figures(asker: Asker, faults: Counter[str], books: Books) -> dict[str, Any]:
    seconds = sorted(each.seconds for each in asker.asked)
    slowest = sorted(asker.asked, key=lambda each: -each.seconds)[:5]
    return {
        "seed": SEED,
        "violations": books.violations[:20],
        "wrong": books.wrong[:20],
        "ends": {end.value: asker.count(end) for end in End},
        "refused": dict(asker.details(End.REFUSED)),
        "broken": dict(asker.details(End.BROKEN)),
        "given_up": dict(asker.details(End.GIVEN_UP)),
        "foreign_texts": asker.sent.foreign,
        "cached_tokens": sum(each.verdict.cached_tokens for each in asker.asked),
        "sent": books.sent,
        "received": books.received,
        "lost": books.lost,
        "seconds_p50_p99_max": [round(seconds[int(share * (len(seconds) - 1))], 2) for share in (0.5, 0.99, 1.0)],
        "slowest": [books.told(each) for each in slowest],
        "faults": dict(sorted(faults.items())),
    }

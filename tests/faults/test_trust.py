"""A worker's events fail under load, in three ways: it is noticed, and costs nobody anything.

Two fleets of two workers get the same requests, one behind `kv-aware` and one behind `prefix-aware`, which reads no
events. After a while the first worker's events fail in both. What must hold:

* the doubt stands within ten seconds, in the log, in the metrics, in `/status` and on the answers;
* no request fails, and as many prompt tokens are found cached as behind `prefix-aware`;
* once the fault is over, the worker is believed again without anybody's doing.

The figures go to the terminal (`pytest -s`).
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.faults.load import Answered, LoadClient, Prompts
from tests.gateway.end_to_end.processes import Fleet, Gateway, new_keyring

pytestmark = pytest.mark.faults

RATE = 25.0
WARM_UP_SECONDS = 10.0
FAULT_SECONDS = 25.0
AFTERWARDS_SECONDS = 10.0
RAISED_SECONDS_MAX = 10.0
RECOVERY_SECONDS_MAX = 60.0
SHARE_MARGIN = 0.03
"""Of all prompt tokens: what two runs of the same load on a busy machine differ by."""
FLAGS = ("--speed", "100")


class Side(NamedTuple):
    fleet: Fleet
    gateway: Gateway
    load: LoadClient


@pytest.fixture
def sides(tmp_path: Path, blocks: int) -> Iterator[list[Side]]:
    keyring = str(new_keyring(tmp_path))
    with ExitStack() as stack:
        found = []
        for policy in ("kv-aware", "prefix-aware"):
            directory = tmp_path / policy
            directory.mkdir()
            fleet = stack.enter_context(
                Fleet(directory, *FLAGS, "--blocks", str(blocks), "--keyring", keyring, name=policy)
            )
            config = {"keyring": keyring, "policy": policy}
            gateway = stack.enter_context(Gateway(directory, fleet.urls, config, name=f"gateway-{policy}"))
            found.append(Side(fleet, gateway, LoadClient([gateway.url], Prompts(7), RATE)))
        yield found


async def eventually(condition: Callable[[], Any], what: str, seconds_max: float) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() - began < seconds_max, f"not within {seconds_max} seconds: {what}"
        await asyncio.sleep(0.1)
    return time.monotonic() - began


def cached_share(answers: list[Answered], prompt_tokens: float) -> float:
    return sum(answer.cached_tokens for answer in answers) / (prompt_tokens * max(len(answers), 1))


@pytest.mark.parametrize(
    ("fault", "doubt", "blocks"),
    [
        pytest.param("close", "silent", 4000, id="its socket is closed"),
        pytest.param("drop", "silent", 4000, id="it is alive but silent"),
        # What nobody can tell again is known once it has been evicted and computed anew.
        pytest.param("silence", "silent", 700, id="it is silent and forgets what it had to say"),
        pytest.param("mute", "unannounced", 4000, id="it speaks and says nothing"),
        # Of what is asked for, less has room: the workers evict all the time.
        pytest.param("hoard", "phantom", 1500, id="it never says what is gone"),
    ],
)
async def test_events_fail_under_load(sides: list[Side], fault: str, doubt: str, tmp_path: Path) -> None:
    subject, _ = sides
    gateway, victim = subject.gateway, subject.fleet.names[0]
    for side in sides:
        side.load.start()
    await asyncio.sleep(WARM_UP_SECONDS)
    assert (await asyncio.to_thread(gateway.worker, victim))["trust"]["level"] == "exact"

    failed_at = time.monotonic()
    for side in sides:
        await asyncio.to_thread(side.fleet.simulate, side.fleet.names[0], {"events": fault})
        if fault == "hoard":
            # All that it held is gone, and nobody is told.
            await asyncio.to_thread(httpx.post, f"http://{side.fleet.names[0]}/reset_prefix_cache", trust_env=False)

    def stands() -> bool:
        return doubt in [each["doubt"] for each in gateway.worker(victim)["trust"]["doubts"]]

    raised_seconds = await eventually(stands, f"{doubt} stands", RAISED_SECONDS_MAX)
    marked = await asyncio.to_thread(gateway.worker, victim)
    scraped = await asyncio.to_thread(lambda: gateway.operator.get("/metrics").text)
    await asyncio.sleep(max(failed_at + FAULT_SECONDS - time.monotonic(), 0.0))
    mended_at = time.monotonic()
    for side in sides:
        await asyncio.to_thread(side.fleet.simulate, side.fleet.names[0], {})

    def believed() -> bool:
        return gateway.worker(victim)["trust"]["level"] == "exact"

    recovery_seconds = await eventually(believed, "it is believed again", RECOVERY_SECONDS_MAX)
    await asyncio.sleep(AFTERWARDS_SECONDS)
    ended_at = time.monotonic()
    for side in sides:
        await side.load.stop()

    tokens = await asyncio.to_thread(lambda: subject.gateway.status()["tokens"])
    mean = tokens["prompt"] / max(len(subject.load.answers), 1)
    shares = {
        phase: [round(cached_share(side.load.between(start, end).answers, mean), 4) for side in sides]
        for phase, start, end in (
            ("before", failed_at - WARM_UP_SECONDS / 2, failed_at),
            ("fault", failed_at, mended_at),
            ("after", mended_at, ended_at),
        )
    }
    figures = {
        "fault": fault,
        "raised_seconds": round(raised_seconds, 1),
        "recovery_seconds": round(recovery_seconds, 1),
        "cached_share (kv-aware, prefix-aware)": shares,
        "phantom_tokens": tokens["phantom"],
    }
    print(json.dumps(figures))

    assert marked["trust"]["level"] == "history"
    assert marked["trust"]["alarm"] == (doubt == "silent")
    assert marked["events_trusted"] is False
    assert f'ropeway_worker_trust{{level="history",worker="{victim}"}} 1.0' in scraped
    assert f'ropeway_worker_doubt{{doubt="{doubt}",worker="{victim}"}} 1.0' in scraped
    assert f'ropeway_worker_events_silent{{worker="{victim}"}} {float(doubt == "silent")}' in scraped
    assert f"worker {victim}: {doubt}: " in gateway.said()
    assert f"worker {victim}: {doubt} no longer; " in gateway.said()
    assert f"worker {victim}: its events are believed again" in gateway.said()
    for side in sides:
        assert side.load.between(0, ended_at).failures == []
    # Where little has room, `kv-aware` finds less than `prefix-aware` in the best of times: it copies.
    behind = {phase: theirs - ours for phase, (ours, theirs) in shares.items()}
    assert behind["fault"] <= max(behind["before"], 0.0) + SHARE_MARGIN, figures

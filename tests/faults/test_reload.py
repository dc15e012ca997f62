"""A gateway's configuration changes under 200 requests a second, and nobody who asks notices.

Nothing is tried again: a single answer that is not right fails the test. RELOAD_RATE and RELOAD_SECONDS make it smaller
or longer.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.faults.instances import until
from tests.faults.load import LoadClient, Prompts
from tests.faults.reports import publish
from tests.gateway.end_to_end.processes import Fleet, Gateway

pytestmark = pytest.mark.faults

REQUESTS_PER_SECOND = float(os.environ.get("RELOAD_RATE", "200"))
SECONDS = float(os.environ.get("RELOAD_SECONDS", "3"))
"""Between two changes."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, "--speed", "50", count=5) as fleet:
        yield fleet


@pytest.fixture
def gateway(tmp_path: Path, fleet: Fleet) -> Iterator[Gateway]:
    with Gateway(tmp_path, fleet.urls[:4]) as gateway:
        yield gateway


async def test_policy_workers_weights_and_limits_change_under_load(gateway: Gateway, fleet: Fleet) -> None:
    path = gateway.log.with_suffix(".yaml")
    right = path.read_text()

    def write(**keys: Any) -> None:
        path.write_text(yaml.safe_dump({**yaml.safe_load(right), **keys}))
        os.kill(gateway.process.pid, signal.SIGHUP)

    async def changed(what: str, condition: Callable[[], Any], **keys: Any) -> None:
        await asyncio.to_thread(write, **keys)
        await until(condition, what)
        await asyncio.sleep(SECONDS)

    client = LoadClient([gateway.url], Prompts(seed=7), REQUESTS_PER_SECOND)
    client.start()
    began = time.monotonic()
    await asyncio.sleep(SECONDS)
    first, last = fleet.names[0], fleet.names[4]
    for policy in ("round-robin", "prefix-aware", "kv-aware"):
        await changed(policy, lambda policy=policy: gateway.status()["policy"] == policy, policy=policy)
    workers = list(fleet.urls)
    await changed("one more worker", lambda: gateway.worker(last)["healthy"], workers=workers)
    draining = [{"url": workers[0], "draining": True}, *workers[1:]]
    await changed("one drains", lambda: gateway.worker(first)["draining"], workers=draining)
    await changed("one is gone", lambda: gateway.healthy() == 4, workers=workers[1:])
    again = {"workers": workers, "admission": {"weights": {"default": 2}}, "limits": {"connections_max": 4000}}
    await changed("it is back", lambda: gateway.healthy() == 5, **again)
    path.write_text(right.replace("workers:", "werkers:"))
    await until(lambda: gateway.status()["configuration"]["refusals"] >= 1, "a wrong file is refused")
    await asyncio.sleep(SECONDS)
    await client.stop()
    seconds = time.monotonic() - began
    failures = [answer.failure for answer in client.answers if answer.failure]
    ms = sorted(answer.seconds * 1e3 for answer in client.answers)
    report = {
        "seconds": round(seconds, 1),
        "requests": len(client.answers),
        "requests_per_second": round(len(client.answers) / seconds, 1),
        "failed": len(failures),
        "reloads": gateway.status()["configuration"]["reloads"],
        "p50_ms": round(ms[len(ms) // 2], 1),
        "p99_ms": round(ms[len(ms) * 99 // 100], 1),
        "max_ms": round(ms[-1], 1),
        "client_late_ms_max": round(client.late_ms_max, 1),
    }
    publish("reload", report)
    assert failures == []
    assert "unknown key 'werkers'; did you mean 'workers'?" in gateway.status()["configuration"]["problem"]
    assert report["reloads"] >= 7

"""A gateway under unique prompts of 8k tokens while workers, adapters and clients come and go: nothing goes on growing.

Its caches are bounded so tightly that they fill within the warm-up. `SOAK_SECONDS` is how long it takes, `SOAK_RATE`
the requests a second.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.instances import GatewayInstance, until
from tests.faults.reports import publish
from tests.gateway.end_to_end.processes import free_ports
from tests.soak.driving import Driver, resident_bytes
from tests.soak.verdict import Sample, verdict

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("SOAK_SECONDS", "1800"))
RATE = float(os.environ.get("SOAK_RATE", "20"))
WARM_UP_SECONDS = max(SECONDS / 5, 60.0)
SAMPLE_SECONDS = 10.0
CHURN_SECONDS = 10.0
WORKERS = 4
INDEX_BLOCKS_MAX = 20_000
FLAGS = ("--speed", "100", "--blocks", "8192", "--announce-seconds", "1", "--finish-seconds", "5")
CONFIG: dict[str, Any] = {
    "index": {"blocks_max": INDEX_BLOCKS_MAX},
    "prompts": {"cache_bytes_max": 8 * 2**20},
    "samples": {"bodies_bytes_max": 2**20},
    "limits": {"connections_max": 512},
    "probes": {"interval_seconds": 0.5},
    "timeouts": {"write_seconds": 4.0},
}
GAUGES = ("ropeway_index_blocks", "ropeway_index_runs", "ropeway_client_unsent_bytes", "ropeway_client_received_bytes")
EMPTY_IN_THE_END = (
    'ropeway_client_connections{state="busy"}',
    "ropeway_worker_inflight_requests",
    "ropeway_worker_waiting_requests",
    'ropeway_entries{of="InflightAccounting._requests"}',
)


def read_metrics(gateway: GatewayInstance) -> dict[str, float]:
    """Every gauge, with its labels as Prometheus writes them."""
    text = gateway.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def sample(gateway: GatewayInstance, seconds: float) -> Sample:
    assert gateway.process is not None
    metrics = read_metrics(gateway)
    sizes = {name: value for name, value in metrics.items() if name.startswith(("ropeway_entries", *GAUGES))}
    return Sample(seconds, resident_bytes(gateway.process.process.pid), sizes)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[tuple[GatewayInstance, Driver]]:
    ports = free_ports(WORKERS + 1)
    gateway = GatewayInstance(tmp_path, "gateway", ports[-1], (), **CONFIG)
    driver = Driver(gateway, tmp_path, ports[:WORKERS], FLAGS, RATE)
    yield gateway, driver
    for instance in (gateway, *driver.workers):
        if instance.process is not None:
            instance.process.kill()


async def test_nothing_goes_on_growing(stage: tuple[GatewayInstance, Driver]) -> None:
    gateway, driver = stage
    await start(gateway, driver)
    began, samples = time.monotonic(), []
    await driver.start(CHURN_SECONDS)
    while (seconds := time.monotonic() - began) < SECONDS:
        samples.append(await asyncio.to_thread(sample, gateway, seconds))
        print(f"{seconds:6.0f} s  {samples[-1].resident_bytes / 2**20:7.1f} MiB  {dict(driver.endings)}", flush=True)
        await asyncio.sleep(SAMPLE_SECONDS)
    await driver.stop()
    latencies = [(each.sent_at - began, each.seconds * 1e3) for each in driver.answered]
    report = verdict(samples, latencies, WARM_UP_SECONDS, SECONDS)
    left = await left_over(gateway)
    publish("soak", {**report, "left": left, **figures(driver, samples)})
    assert not left, "what was counted did not come back to zero"
    assert driver.endings["hung"] == 0
    assert max(sample.sizes["ropeway_index_blocks"] for sample in samples) <= INDEX_BLOCKS_MAX
    assert report["verdict"] == "stable", report["reasons"]


async def start(gateway: GatewayInstance, driver: Driver) -> None:
    for worker in driver.workers:
        worker.flags = (*worker.flags, *driver.adapter_flags())
        worker.start()
    gateway.start()
    for worker in driver.workers:
        await worker.ready()
    await until(lambda: gateway.get("/healthz").status_code == 200, "the gateway listens")
    for worker in driver.workers:
        httpx.post(f"{gateway.url}/admin/workers", json={"url": worker.url}, trust_env=False).raise_for_status()
    await gateway.ready()


async def left_over(gateway: GatewayInstance) -> dict[str, float]:
    """What should be nothing by now, and is not."""

    def rest() -> dict[str, float]:
        metrics = read_metrics(gateway)
        return {name: value for name, value in metrics.items() if value and name.startswith(EMPTY_IN_THE_END)}

    for _ in range(50):
        if not (left := await asyncio.to_thread(rest)):
            return {}
        await asyncio.sleep(0.2)
    return left


def figures(driver: Driver, samples: list[Sample]) -> dict[str, Any]:
    return {
        "seconds": SECONDS,
        "warm_up_seconds": WARM_UP_SECONDS,
        "requests_per_second": RATE,
        "endings": dict(driver.endings),
        "churned": dict(driver.churned),
        "resident_mib": [round(sample.resident_bytes / 2**20, 1) for sample in samples],
        "index_blocks": [sample.sizes["ropeway_index_blocks"] for sample in samples],
        "entries": {
            name: [round(sample.sizes.get(name, 0.0)) for sample in samples]
            for name in sorted({name for sample in samples for name in sample.sizes})
            if max(sample.sizes.get(name, 0.0) for sample in samples) >= 10
        },
    }

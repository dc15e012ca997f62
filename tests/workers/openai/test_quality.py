"""A worker's journal of reused KV's quality over HTTP, and as metrics."""

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from cachecore.scope import Fidelity
from workers.kv_quality import Approximation, QualityJournal, QualitySample
from workers.openai.quality import QualityCollector, mount_quality

I8 = Approximation("acme", "i8", Fidelity.QUANTIZED)
FUSED = Approximation("acme", "raw", Fidelity.FUSED, 0.15)


def journal_of(count: int) -> QualityJournal:
    journal = QualityJournal()
    for number in range(count):
        journal.record(QualitySample(FUSED if number % 2 else I8, number / 8, 0.5))
    return journal


async def ask(journal: QualityJournal, query: str) -> httpx.Response:
    app = FastAPI()
    mount_quality(app, journal)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker") as client:
        return await client.get(f"/kv_quality{query}")


async def test_samples_are_told_once() -> None:
    journal = journal_of(2)
    first = (await ask(journal, "?since=0")).json()
    used = {"tenant": "acme", "codec": "i8", "fidelity": "quantized", "recompute_fraction": 0.0}
    fused = {"tenant": "acme", "codec": "raw", "fidelity": "fused", "recompute_fraction": 0.15}
    assert first == {"next": 2, "samples": [{**used, "kl": 0.0, "top1": 0.5}, {**fused, "kl": 0.125, "top1": 0.5}]}
    assert (await ask(journal, "?since=2")).json() == {"next": 2, "samples": []}
    assert (await ask(journal, "?since=1")).json()["samples"] == first["samples"][1:]
    assert (await ask(journal, "")).json() == first


async def test_a_number_of_a_worker_before_this_one_brings_everything() -> None:
    assert len((await ask(journal_of(3), "?since=77")).json()["samples"]) == 3


def test_old_samples_are_forgotten_and_their_number_is_not() -> None:
    journal = journal_of(1500)
    told = journal.since(1000)
    assert (told.next, len(told.samples), told.samples[0].kl) == (1500, 500, 125.0)
    assert len(journal.since(3).samples) == 1024


@pytest.mark.parametrize("query", ["?since=-1", "?since=x", "?since=" + "9" * 30, "?since=²"])
async def test_other_questions_are_refused(query: str) -> None:
    answer = await ask(journal_of(1), query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "since"


def test_metrics_are_sums_by_codec_and_fidelity() -> None:
    journal, registry = journal_of(4), CollectorRegistry()
    journal.skip()
    registry.register(QualityCollector(journal))
    text = generate_latest(registry).decode()
    assert 'ropeway_worker_kv_quality_samples_total{codec="i8",fidelity="quantized"} 2.0' in text
    assert 'ropeway_worker_kv_quality_kl_total{codec="raw",fidelity="fused"} 0.5' in text
    assert 'ropeway_worker_kv_quality_top1_total{codec="raw",fidelity="fused"} 1.0' in text
    assert "ropeway_worker_kv_quality_skipped_total 1.0" in text

"""What a worker tells of the quality of reused KV: `GET /kv_quality?since=N`, and metrics."""

from collections.abc import Iterator

from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from workers.kv_quality import QualityJournal
from workers.openai.errors import InvalidRequest
from workers.openai.responses import JsonResponse, error_response

_PREFIX = "ropeway_worker_kv_quality"
_LABELS = ("codec", "fidelity")
_NUMBER_CHARACTERS_MAX = 18


def mount_quality(app: FastAPI, journal: QualityJournal) -> None:
    """Serve samples from number N on, and the number to ask for next. Without `since`, all that are kept."""

    async def quality(http: Request) -> Response:
        text = http.query_params.get("since", "0")
        if not text.isdecimal() or len(text) > _NUMBER_CHARACTERS_MAX:
            return error_response(InvalidRequest(f"since must be a number, not {text!r}", param="since"))
        told = journal.since(int(text))
        return JsonResponse({"next": told.next, "samples": [sample.document() for sample in told.samples]})

    app.add_route("/kv_quality", quality, methods=["GET"])


class QualityCollector(Collector):
    """Reads the journal when scraped. Means are the sums' growth over that of the samples."""

    def __init__(self, journal: QualityJournal) -> None:
        self._journal = journal

    def collect(self) -> Iterator[Metric]:
        samples = CounterMetricFamily(f"{_PREFIX}_samples", "Answers compared with exact KV.", labels=_LABELS)
        kl = CounterMetricFamily(f"{_PREFIX}_kl", "Their mean KL divergences in nats, summed.", labels=_LABELS)
        top1 = CounterMetricFamily(f"{_PREFIX}_top1", "Their shares of equal likeliest tokens, summed.", labels=_LABELS)
        for (codec, fidelity), totals in self._journal.snapshot().items():
            labels = (codec, fidelity.name.lower())
            samples.add_metric(labels, totals.samples)
            kl.add_metric(labels, totals.kl)
            top1.add_metric(labels, totals.top1)
        skipped = CounterMetricFamily(f"{_PREFIX}_skipped", "Answers drawn and not compared.")
        skipped.add_metric((), self._journal.skipped)
        yield from (samples, kl, top1, skipped)

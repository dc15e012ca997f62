"""The pages of what a running gateway shows: metrics, headers and routes, read off one that has every part."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import NamedTuple

from fastapi.routing import APIRoute
from prometheus_client.core import Metric

from cachecore.scope import Keyring
from gateway.app import Surfaces
from gateway.config import BatchesConfig, GatewayConfig, HedgingConfig, RoutingConfig, TransferConfig
from gateway.headers import HEADERS
from gateway.requests import POSTED_PATHS, Kind
from gateway.server import Gateway
from policies.legs import Outcome
from tests.reference.tables import HEADER, first_paragraph, plain, table
from workers.engine import EngineMetrics, HostMetrics, TransferMetrics
from workers.kv_quality import QualityJournal
from workers.openai.leaving import Presence, PresenceCollector
from workers.openai.metrics import EngineCollector
from workers.openai.pools import PoolCollector
from workers.openai.quality import QualityCollector

METRICS = f"""# Metrics

{HEADER}

`GET /metrics` of a gateway, in Prometheus' text format. Counters end in `_total`; histograms have `_bucket`, `_sum` and
`_count`. What belongs to a part that is not configured (shared index, moving KV, shadows, ...) is absent.
"""

WORKER_METRICS = """## Of our own workers

`GET /metrics` of a reference or simulated worker: under vLLM's names what vLLM tells as well, so that one scraper reads
every engine, and under ours what moves KV. The connector in vLLM serves the latter at its sidecar.
"""

HEADERS_OPENING = f"""# Headers

{HEADER}

Requests' headers travel to the worker as they came, but for those of the hop and those that are meant for the gateway
alone (`x-ropeway-...`; an API key of ours). Answers' headers come as the worker sent them, and with the gateway's own.
"""

ROUTES = f"""# Routes

{HEADER}

Inference needs an API key where there are keys (`tenants`), operators' routes the admin key (`admin.key_file`),
`/metrics` its own (`metrics.key_file`). With `admin.port` and `metrics.port` these have a listener of their own. Any
other path below `/v1/` goes to a worker that serves the model, unread.
"""

_KINDS = {
    Kind.CHAT: "Chat; placed by its prompt.",
    Kind.COMPLETION: "Completion; placed by its prompt, of several by the first.",
    Kind.MESSAGES: "Anthropic's messages; placed by the prompt they make.",
    Kind.RESPONSES: "Responses; placed by the prompt they make.",
    Kind.EMBEDDING: "Embedding; placed by its input.",
    Kind.SCORING: "Scores of texts beside a query; placed by load.",
    Kind.TOKENS: "Token ids, or how many there are.",
}


class Route(NamedTuple):
    method: str
    path: str
    meaning: str
    surface: str


@contextmanager
def whole_gateway() -> Iterator[Gateway]:
    """With every part there is. It connects to nothing."""
    with TemporaryDirectory() as directory:
        keyring = Path(directory) / "keyring.json"
        Keyring.generate().save(keyring)
        gateway = Gateway(
            GatewayConfig(
                redis="redis://127.0.0.1:1",
                keyring=keyring,
                routing=RoutingConfig(shadow=("session",)),
                transfer=TransferConfig(shifted=True),
                hedging=HedgingConfig(enabled=True),
                batches=BatchesConfig(directory=Path(directory) / "batches"),
            )
        )
        # It says nothing before there was a first one.
        gateway.disaggregation.metrics.outcomes[Outcome.TWO_LEGS] += 1
        try:
            yield gateway
        finally:
            asyncio.run(gateway.fleet.stop())


class Shown(NamedTuple):
    families: list[Metric]
    routes: list[Route]


@cache
def shown() -> Shown:
    """What a gateway with every part shows; read once."""
    with whole_gateway() as gateway:
        families = sorted(gateway.collectors.collect(), key=lambda family: family.name)
        found = [Route("POST", path, _KINDS[Kind.of("POST", path) or Kind.OTHER], "inference") for path in POSTED_PATHS]
        for surface in ("public", "admin", "metrics"):
            surfaces = Surfaces(**{name: name == surface for name in ("public", "admin", "metrics")})
            found += _of_app(gateway.app(surfaces).routes, surface)
    return Shown(families, found)


def families() -> list[Metric]:
    return shown().families


def routes() -> list[Route]:
    return shown().routes


def worker_families() -> list[Metric]:
    """Of our own workers. Read off metrics that count nothing yet."""
    info = SimpleNamespace(model="m", block_size_tokens=16, blocks_total=1)
    metrics = EngineMetrics(transfer=TransferMetrics(), host=HostMetrics())
    desk = SimpleNamespace(pools={}, offers={}, means={}, waiting=0)
    collectors = (
        EngineCollector(SimpleNamespace(info=info, metrics=metrics)),  # type: ignore[arg-type]
        PoolCollector(desk),  # type: ignore[arg-type]
        PresenceCollector(Presence()),
        QualityCollector(QualityJournal()),
    )
    return sorted((family for collector in collectors for family in collector.collect()), key=lambda f: f.name)


def metrics_page() -> str:
    titles = ("metric", "type", "labels", "meaning")
    gateway, workers = table(titles, map(_metric, families())), table(titles, map(_metric, worker_families()))
    return f"{METRICS}\n{gateway}\n\n{WORKER_METRICS}\n{workers}\n"


def _metric(family: Metric) -> list[str]:
    return [f"`{sample_name(family)}`", family.type, _labels(family), plain(family.documentation)]


def sample_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labels(family: Metric) -> str:
    names: Sequence[str] = getattr(family, "_labelnames", ())
    return ", ".join(f"`{name}`" for name in names)


def headers_page() -> str:
    rows = [[f"`{name}`", "; ".join(ways), meaning] for name, ways, meaning in sorted(HEADERS)]
    return f"{HEADERS_OPENING}\n{table(('header', 'from and to', 'meaning'), rows)}\n"


def _of_app(listed: Sequence[object], surface: str) -> Iterator[Route]:
    for route in listed:
        if isinstance(route, APIRoute) and route.path not in POSTED_PATHS:
            for method in sorted(route.methods - {"HEAD"}):
                meaning = first_paragraph(route.endpoint.__doc__ or "")
                yield Route(method, route.path.replace(":path}", "}"), meaning, surface)


def routes_page() -> str:
    parts = [ROUTES.strip()]
    titles = {"inference": "Inference", "public": "Besides", "admin": "Operators", "metrics": "Metrics"}
    found = routes()
    for surface, title in titles.items():
        rows = [[f"`{r.method}`", f"`{r.path}`", r.meaning] for r in found if r.surface == surface]
        parts += [f"## {title}", table(("method", "path", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"

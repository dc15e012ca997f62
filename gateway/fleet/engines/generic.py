"""Any OpenAI server: its models, perhaps its health, and nothing of its cache."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.fleet.engines.contract import Discovery, EngineLoad, EngineTraits, Lack, ModelEntry
from gateway.fleet.engines.questions import Leaving, ProbeError, Questions, document_of


class GenericAdapter:
    """What other adapters refine. Implements `EngineAdapter`."""

    name = "openai"
    traits = EngineTraits()

    async def health(self, ask: Questions) -> None:
        answer = await ask.get("/health")
        if answer.status_code == 404:
            answer = await ask.get("/v1/models")
        if answer.status_code == 503 and document_of(answer).get("status") == "draining":
            raise Leaving("draining")
        if answer.status_code >= 300:
            raise ProbeError(f"/health answers {answer.status_code}")

    async def discover(
        self, ask: Questions, models: Sequence[ModelEntry], earlier: Discovery | None = None
    ) -> Discovery:
        discovery = described(models)
        metrics = await ask.try_metrics()
        discovery.epoch = process_start_ms(metrics.total("process_start_time_seconds"))
        return discovery

    async def lacks(self, ask: Questions, discovery: Discovery) -> Sequence[Lack]:
        return ()

    async def load(self, ask: Questions) -> EngineLoad | None:
        return None

    async def tokenize(self, ask: Questions, request: Mapping[str, Any]) -> Sequence[int] | None:
        return await ask.token_ids("/tokenize", request)


def described(models: Sequence[ModelEntry]) -> Discovery:
    """What a list of models says by itself. `created` is left alone: engines write the time of the answer there."""
    discovery = Discovery({str(entry["id"]): entry for entry in models})
    lengths = [length for entry in models if isinstance(length := entry.get("max_model_len"), int) and length > 0]
    discovery.max_model_len = min(lengths, default=0)
    discovery.revisions = {
        name: root for name, entry in discovery.models.items() if isinstance(root := entry.get("root"), str)
    }
    return discovery


def process_start_ms(seconds: float | None) -> int | None:
    """When an engine's process started, by the metric that Prometheus clients export of themselves: every gateway
    takes it for the same life."""
    return round(seconds * 1000) if seconds and 0 < seconds < 2**40 else None


def load_of(
    running: float | None, waiting: float | None, queried: float | None = None, hit: float | None = None
) -> EngineLoad | None:
    """An engine that does not say how many are running says nothing."""
    if running is None and waiting is None:
        return None
    queried_tokens, hit_tokens = (None if value is None else int(value) for value in (queried, hit))
    return EngineLoad(int(running or 0), int(waiting or 0), time.time(), queried_tokens, hit_tokens)

"""llama.cpp's server. It keeps one prompt a slot and says nothing of it: what it holds is guessed from what was sent.

/props               what is loaded, how many slots, whether it sleeps, its build
/slots, /metrics     its queue (`--no-slots` and the lack of `--metrics` hide them)
/apply-template      the text of a chat, which /tokenize then turns into token ids
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.fleet.engines.contract import (
    Discovery,
    EngineLoad,
    EngineTraits,
    Lack,
    ModelEntry,
)
from gateway.fleet.engines.generic import GenericAdapter, described, load_of
from gateway.fleet.engines.questions import ProbeError, Questions, document_of

NO_METRICS = Lack(
    "--metrics",
    "requests that wait for a slot are not counted by it",
    "start it with this flag",
)
NO_EVENTS = Lack(
    "KV events",
    "this engine announces nothing of its cache, which is guessed from what was sent to it",
    "use few slots a worker and sessions (`x-ropeway-session`), or an engine that announces",
)


class LlamaCppAdapter(GenericAdapter):
    name = "llamacpp"
    traits = EngineTraits(token_ids=True, hits_whole_blocks=False, wakes_itself=True)

    async def discover(
        self, ask: Questions, models: Sequence[ModelEntry], earlier: Discovery | None = None
    ) -> Discovery:
        discovery = described(models)
        props = await ask.document("/props")
        settings = props.get("default_generation_settings")
        length = settings.get("n_ctx") if isinstance(settings, dict) else None
        discovery.max_model_len = length if isinstance(length, int) else discovery.max_model_len
        slots = props.get("total_slots")
        discovery.capacity_requests = slots if isinstance(slots, int) and slots > 0 else 0
        discovery.version = str(props.get("build_info") or "")
        discovery.asleep = props.get("is_sleeping") is True
        path = props.get("model_path")
        if isinstance(path, str) and path:
            discovery.revisions = {name: path for name, entry in discovery.models.items() if not entry.parent}
        return discovery

    async def lacks(self, ask: Questions, discovery: Discovery) -> Sequence[Lack]:
        missing = (await ask.get("/metrics")).status_code >= 400
        return (NO_EVENTS, NO_METRICS) if missing else (NO_EVENTS,)

    async def load(self, ask: Questions) -> EngineLoad | None:
        metrics = await ask.metrics()
        if metrics is not None:
            found = load_of(metrics.total("llamacpp:requests_processing"), metrics.total("llamacpp:requests_deferred"))
            if found is not None:
                return found
        answer = await ask.get("/slots")
        try:
            slots = orjson.loads(answer.content) if answer.status_code == 200 else None
        except orjson.JSONDecodeError:
            return None
        if not isinstance(slots, list):
            return None
        busy = sum(isinstance(slot, dict) and slot.get("is_processing") is True for slot in slots)
        return EngineLoad(busy, 0, time.time())

    async def tokenize(self, ask: Questions, request: Mapping[str, Any]) -> Sequence[int] | None:
        """Both kinds of prompts are tokenized with special tokens added and read."""
        text = request.get("prompt")
        if "messages" in request:
            answer = await ask.post("/apply-template", request)
            if answer.status_code in (400, 404, 405, 501):
                return None
            text = document_of(answer).get("prompt")
            if not isinstance(text, str):
                raise ProbeError(f"/apply-template answers {answer.status_code} and no prompt")
        return await ask.token_ids("/tokenize", {"content": text, "add_special": True, "parse_special": True})

"""TensorRT-LLM's server (`trtllm-serve`), by its published interface: events, and little else.

/v1/models           `owned_by` "tensorrt_llm"
/version
/kv_cache_events     asked by POST: what its cache did since it was asked last, each event once, all ranks together

Its `/metrics` is no page of metrics: it hands out what each iteration was, once, to whoever asks, and is left to those
whom it was meant for. Neither its block size, nor its ranks, nor when its process started can be asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.fleet.engines.contract import Discovery, EngineLoad, EngineTraits, EventEndpoints, Lack, ModelEntry
from gateway.fleet.engines.generic import GenericAdapter, described
from gateway.fleet.engines.questions import Questions

EVENTS_PATH = "/kv_cache_events"
TOKENS_PER_BLOCK = 32
"""`KvCacheConfig.tokens_per_block`, unless it is configured otherwise."""

NO_BLOCK_SIZE = Lack(
    "tokens_per_block",
    f"its server does not say it, and blocks of another size than is believed ({TOKENS_PER_BLOCK}) are not counted",
    "give the worker `block_size_tokens` where it was started with another",
)
TOLD_ONCE = Lack(
    EVENTS_PATH,
    "it tells each event to one reader, and only while its kv_cache_config has an event_buffer_max_size",
    "set that to 16384 or so, with enable_block_reuse, and let nobody else ask; several gateways need a shared index",
)
NO_START_TIME = Lack(
    "process start",
    "its server does not say when it started, so a quick restart shows in the numbers of its events alone",
    "nothing to be done",
)


class TrtllmAdapter(GenericAdapter):
    name = "trtllm"
    traits = EngineTraits(token_ids=True)

    async def discover(
        self, ask: Questions, models: Sequence[ModelEntry], earlier: Discovery | None = None
    ) -> Discovery:
        discovery = described(models)
        known = earlier.version if earlier is not None else ""
        discovery.version = known or str((await ask.document("/version")).get("version") or "")
        discovery.block_size_tokens = TOKENS_PER_BLOCK
        discovery.events = EventEndpoints.at(ask.url + EVENTS_PATH)
        return discovery

    async def lacks(self, ask: Questions, discovery: Discovery) -> Sequence[Lack]:
        """Whether it keeps events shows in its answers, and to ask is to take them from the reader they are for."""
        return NO_BLOCK_SIZE, TOLD_ONCE, NO_START_TIME

    async def load(self, ask: Questions) -> EngineLoad | None:
        return None

    async def tokenize(self, ask: Questions, request: Mapping[str, Any]) -> Sequence[int] | None:
        return None

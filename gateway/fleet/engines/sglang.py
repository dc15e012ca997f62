"""SGLang, by its published interface.

/server_info         formerly /get_server_info: its arguments, `page_size`, `version`, and a `kv_events` block
/model_info          formerly /get_model_info: what is loaded, and the version of its weights
/metrics             queue and prefix cache, with `--enable-metrics`
/tokenize            of plain prompts; of chats in later versions
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.fleet.engines.contract import (
    Discovery,
    EngineLoad,
    EngineTraits,
    EventEndpoints,
    Lack,
    ModelEntry,
)
from gateway.fleet.engines.generic import GenericAdapter, described, load_of, process_start_ms
from gateway.fleet.engines.questions import Questions

_RANKS_MAX = 64

NO_EVENTS = Lack(
    "--kv-events-config",
    "it says nothing of its cache, which is then guessed from what was sent to it",
    'start it with --kv-events-config \'{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5558"}\'',
)
NO_CACHE_REPORT = Lack(
    "--enable-cache-report",
    "its answers do not say how much of a prompt was cached, so predictions are judged by its counters alone",
    "start it with this flag",
)
NO_METRICS = Lack(
    "--enable-metrics",
    "its queue, and when its process started, are not known",
    "start it with this flag",
)
NO_PREFIX_CACHE = Lack(
    "--disable-radix-cache",
    "it keeps no prefixes, so there is nothing to route to",
    "start it without this flag",
)


class SglangAdapter(GenericAdapter):
    name = "sglang"
    traits = EngineTraits(salts=True, priorities=True, token_ids=True)

    async def discover(
        self, ask: Questions, models: Sequence[ModelEntry], earlier: Discovery | None = None
    ) -> Discovery:
        discovery = described(models)
        _read_server_info(await server_info(ask), discovery, ask)
        metrics = await ask.try_metrics()
        discovery.epoch = process_start_ms(metrics.total("process_start_time_seconds"))
        info = await ask.document("/model_info") or await ask.document("/get_model_info")
        if info:
            revision = f"{info.get('model_path')}@{info.get('weight_version')}"
            discovery.revisions |= {name: revision for name, entry in discovery.models.items() if not entry.parent}
        return discovery

    async def lacks(self, ask: Questions, discovery: Discovery) -> Sequence[Lack]:
        info = await server_info(ask)
        return [
            lack
            for lack, lacking in (
                (NO_PREFIX_CACHE, info.get("disable_radix_cache") is True),
                (NO_EVENTS, discovery.events is None),
                (NO_CACHE_REPORT, info.get("enable_cache_report") is False),
                (NO_METRICS, info.get("enable_metrics") is False),
            )
            if lacking
        ]

    async def load(self, ask: Questions) -> EngineLoad | None:
        metrics = await ask.metrics()
        if metrics is None:
            return None
        return load_of(
            metrics.total("sglang:num_running_reqs"),
            metrics.total("sglang:num_queue_reqs"),
            metrics.total("sglang:prompt_tokens_total"),
            metrics.total("sglang:cached_tokens_total"),
        )


async def server_info(ask: Questions) -> Mapping[str, Any]:
    return await ask.document("/server_info") or await ask.document("/get_server_info")


def _read_server_info(info: Mapping[str, Any], discovery: Discovery, ask: Questions) -> None:
    discovery.version = str(info.get("version") or "")
    discovery.block_size_tokens = _count(info, "page_size") * (_count(info, "dcp_size") or 1)
    discovery.capacity_requests = _count(info, "max_running_requests")
    discovery.kv_tokens = _count(info, "max_total_num_tokens")
    discovery.caches_prefixes = info.get("disable_radix_cache") is not True
    length = _count(info, "context_length")
    discovery.max_model_len = min(filter(None, (length, discovery.max_model_len)), default=0)
    events, configured = info.get("kv_events"), _configured_events(info)
    described_there = events if isinstance(events, dict) else {}
    discovery.events = _events(described_there, configured, _count(info, "dp_size"), ask)
    # Where contexts are split among ranks, pages of the cache are as many times as long.
    size = _count(described_there, "block_size") * (_count(info, "dcp_size") or 1)
    discovery.block_size_tokens = size or discovery.block_size_tokens


def _configured_events(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """`--kv-events-config`, which stands among the arguments as the JSON that was given."""
    try:
        document = orjson.loads(info.get("kv_events_config") or "{}")
    except (orjson.JSONDecodeError, TypeError):
        return {}
    return document if isinstance(document, dict) else {}


def _events(
    block: Mapping[str, Any], configured: Mapping[str, Any], dp_size: int, ask: Questions
) -> EventEndpoints | None:
    """By the `kv_events` block, and by the configuration what that leaves out: the replay socket, and in earlier
    versions all of it."""
    if (block or configured).get("publisher") != "zmq":
        return None
    port, host = _count(block, "endpoint_port_base"), block.get("endpoint_host")
    endpoint, replay = configured.get("endpoint") or "tcp://*:5557", configured.get("replay_endpoint")
    if port and isinstance(host, str):
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        endpoint = f"tcp://{shown}:{port}"
    return EventEndpoints.at(
        ask.reachable(str(endpoint)),
        ask.reachable(replay) if isinstance(replay, str) else None,
        str(block.get("topic") or configured.get("topic") or ""),
        min(_count(block, "dp_size") or dp_size or 1, _RANKS_MAX),
    )


def _count(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

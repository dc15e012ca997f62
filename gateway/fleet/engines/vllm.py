"""vLLM, as it is.

/version, /v1/models (`root` is the path that was loaded; `created` is the time of the answer)
/metrics             block size (`cache_config_info`), start of the process, sleep, queue, prefix cache
/kv_event_sources    configuration of each rank's event publisher
/tokenize, /v1/chat/completions/render (with `--enable-scale-out`)
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gateway.fleet.engines.contract import (
    Discovery,
    EngineLoad,
    EngineTraits,
    EventEndpoint,
    EventEndpoints,
    Lack,
    ModelEntry,
)
from gateway.fleet.engines.generic import GenericAdapter, described, load_of, process_start_ms
from gateway.fleet.engines.questions import Metrics, ProbeError, Questions

RENDER_PATH = "/v1/chat/completions/render"
_TOKENIZED_KEYS = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
    }
)
"""Of a chat, what `/tokenize` reads. What else changes a prompt is lost on it."""
_VERSION_MARK = " weights "
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

NO_EVENTS = Lack(
    "--kv-events-config",
    "it says nothing of its cache, which is then guessed from what was sent to it",
    'start it with --kv-events-config \'{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:5558"}\', or give the worker `events:` where it cannot say where they are',
)
NO_REPLAY = Lack(
    "replay_endpoint",
    "events that are lost, or were sent before the gateway came, stay lost",
    'add "replay_endpoint":"tcp://*:5558" to --kv-events-config',
)
NO_DETAILS = Lack(
    "--enable-prompt-tokens-details",
    "its answers do not say how much of a prompt was cached, so predictions are judged by its counters alone",
    "start it with this flag",
)
NO_SCALE_OUT = Lack(
    "--enable-scale-out",
    "chats can only be rendered by /tokenize, which knows no reasoning_effort and no documents",
    "start it with this flag",
)
NO_PREFIX_CACHE = Lack(
    "--enable-prefix-caching",
    "it keeps no prefixes, so there is nothing to route to",
    "start it with this flag",
)
NO_START_TIME = Lack(
    "process_start_time_seconds",
    "with several API servers its metrics do not say when it started, so a quick restart shows in its events alone",
    "start it with --api-server-count 1 where that matters",
)


def connects(endpoint: str) -> Lack:
    return Lack(
        "kv events endpoint",
        f"its publisher connects to {endpoint} rather than binding, so one gateway at most can hear it",
        'use "endpoint":"tcp://*:PORT" in --kv-events-config, or a worker\'s `events: {endpoint: ..., bind: true}`',
    )


class VllmAdapter(GenericAdapter):
    name = "vllm"
    traits = EngineTraits(
        salts=True,
        salted_paths=frozenset(
            {
                "/v1/messages",
                "/v1/responses",
                "/v1/embeddings",
                "/v1/score",
                "/score",
                "/v1/rerank",
                "/v2/rerank",
                "/rerank",
            }
        ),
        priorities=True,
        token_ids=True,
        chat_token_ids=True,
        rank_header=b"x-data-parallel-rank",
    )

    async def discover(
        self, ask: Questions, models: Sequence[ModelEntry], earlier: Discovery | None = None
    ) -> Discovery:
        discovery = described(models)
        _read_metrics(await ask.try_metrics(), discovery)
        known = earlier is not None and discovery.epoch is not None and discovery.epoch == earlier.epoch
        if not known:
            discovery.version = str((await ask.document("/version")).get("version") or "")
            discovery.events = read_event_sources(await ask.document("/kv_event_sources"), ask)
        if not known or earlier is None or _says_weights(earlier):
            _read_weights(await ask.document("/weight_info"), discovery)
        return discovery

    async def lacks(self, ask: Questions, discovery: Discovery) -> Sequence[Lack]:
        found = [NO_PREFIX_CACHE] if not discovery.caches_prefixes else []
        sources = _sources(await ask.document("/kv_event_sources"))
        if sources is None and discovery.events is None:
            found.append(NO_EVENTS)
        elif sources is not None:
            found += [connects(source["endpoint"]) for source in sources[:1] if _publisher_connects(source)]
            found += [NO_REPLAY for source in sources[:1] if not source.get("replay_endpoint")]
        if discovery.epoch is None:
            found.append(NO_START_TIME)
        model = next(iter(discovery.models))
        if (await ask.post(RENDER_PATH, {"model": model})).status_code in (403, 404, 405):
            found.append(NO_SCALE_OUT)
        if await _hides_cached_tokens(ask, model):
            found.append(NO_DETAILS)
        return found

    async def load(self, ask: Questions) -> EngineLoad | None:
        return vllm_load(await ask.metrics())

    async def tokenize(self, ask: Questions, request: Mapping[str, Any]) -> Sequence[int] | None:
        if "messages" not in request:
            return await ask.token_ids("/tokenize", request)
        rendered = await ask.token_ids(RENDER_PATH, request, "token_ids")
        if rendered is not None:
            return rendered
        if _lost_on_tokenize(request):
            return None
        return await ask.token_ids("/tokenize", {key: request[key] for key in request.keys() & _TOKENIZED_KEYS})


def _read_weights(info: Mapping[str, Any], discovery: Discovery) -> None:
    """The version of weights that were replaced while it ran; only a server in development mode tells."""
    version = info.get("weight_version")
    if version is not None:
        for name, entry in discovery.models.items():
            if not entry.parent:
                discovery.revisions[name] = f"{entry.get('root')}{_VERSION_MARK}{version}"


def _says_weights(discovery: Discovery) -> bool:
    return any(_VERSION_MARK in revision for revision in discovery.revisions.values())


def vllm_load(metrics: Metrics | None) -> EngineLoad | None:
    """By the names that our own workers use as well."""
    if metrics is None:
        return None
    return load_of(
        metrics.total("vllm:num_requests_running"),
        metrics.total("vllm:num_requests_waiting"),
        metrics.total("vllm:prefix_cache_queries_total"),
        metrics.total("vllm:prefix_cache_hits_total"),
    )


def _read_metrics(metrics: Metrics, discovery: Discovery) -> None:
    discovery.epoch = process_start_ms(metrics.total("process_start_time_seconds"))
    for labels in metrics.labels("vllm:cache_config_info"):
        size = labels.get("block_size", "")
        discovery.block_size_tokens = int(size) if size.isdigit() else 0
        blocks = labels.get("num_gpu_blocks", "")
        discovery.kv_tokens = int(blocks) * discovery.block_size_tokens if blocks.isdigit() else 0
        discovery.caches_prefixes = labels.get("enable_prefix_caching", "True") != "False"
    discovery.asleep = metrics.labelled("vllm:engine_sleep_state", "sleep_state", "awake") == 0


def read_event_sources(document: Mapping[str, Any], ask: Questions) -> EventEndpoints | None:
    """Where to hear each rank; None where nothing is published, or not to us."""
    sources = _sources(document)
    if sources is None or any(_publisher_connects(source) and not _can_bind(source, ask) for source in sources):
        return None
    return EventEndpoints(tuple(_event_endpoint(source, ask) for source in sources))


def _sources(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """By rank: of `{"0": {"endpoint", ...}, ...}`, or `{"sources": [{"data_parallel_rank", ...}, ...]}`."""
    listed = document.get("sources")
    if isinstance(listed, list):
        document = {str(source.get("data_parallel_rank")): source for source in listed if isinstance(source, dict)}
    ranks = {int(rank): source for rank, source in document.items() if rank.isdigit() and _publishes(source)}
    # With one missing, the next would be taken for it.
    return [ranks[rank] for rank in sorted(ranks)] if ranks and max(ranks) == len(ranks) - 1 else None


def _publishes(source: object) -> bool:
    if not isinstance(source, dict) or not isinstance(source.get("endpoint"), str):
        return False
    return source.get("publisher", "zmq") == "zmq" and source.get("enable_kv_cache_events", True) is True


def _event_endpoint(source: Mapping[str, Any], ask: Questions) -> EventEndpoint:
    endpoint, replay = source["endpoint"], source.get("replay_endpoint")
    return EventEndpoint(
        ask.reachable(endpoint),
        ask.reachable(replay) if isinstance(replay, str) else None,
        str(source.get("topic") or ""),
        bind=_publisher_connects(source),
    )


def _publisher_connects(source: Mapping[str, Any]) -> bool:
    """vLLM binds wildcards and local transports, and connects to the rest. The list form names sockets as bound."""
    endpoint = source["endpoint"]
    as_configured = "enable_kv_cache_events" in source
    return as_configured and "*" not in endpoint and "::" not in endpoint and endpoint.startswith("tcp:")


def _can_bind(source: Mapping[str, Any], ask: Questions) -> bool:
    """Another machine's loopback is out of reach."""
    theirs, ours = urlsplit(source["endpoint"]).hostname, urlsplit(ask.url).hostname
    return theirs not in _LOOPBACK or ours in _LOOPBACK


def _lost_on_tokenize(request: Mapping[str, Any]) -> bool:
    return any(request.get(key) is not None for key in ("reasoning_effort", "documents"))


async def _hides_cached_tokens(ask: Questions, model: str) -> bool:
    """Whether an answer says nothing of cached tokens: one token of the shortest prompt is asked for."""
    try:
        answer = await ask.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0})
        usage = answer.json()["usage"] if answer.status_code == 200 else {"prompt_tokens_details": {}}
        return usage.get("prompt_tokens_details") is None
    except (ProbeError, ValueError, KeyError, TypeError, AttributeError):
        return False

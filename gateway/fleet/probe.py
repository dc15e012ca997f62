"""Asking a worker what it is: models, block size, epoch, event sockets, token ids. One question, one function.

Every question may go unanswered: an OpenAI server need not have more than `/v1/models`. What differs between engines
stays in here.
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import msgspec

from cachecore.holders import Worker
from cachecore.index.schema import HOLDER_ID_BYTES_MAX, parse_holder
from cachecore.transfer.plan import ADDRESSES_MAX
from gateway.fleet.worker import Discovery, EngineLoad, EventEndpoints, ModelEntry, OpenPool, TransferAbility

_LOAD_SAMPLE = re.compile(
    r"^(?:vllm:num_requests|sglang:num)_(running|running_reqs|waiting|queue_reqs)(?:\{[^\n]*\})? ([0-9.e+]+)$",
    re.MULTILINE,
)
"""As vLLM and SGLang write it; our own workers use vLLM's names."""
_PROCESS_START = re.compile(r"^process_start_time_seconds(?:\{[^\n]*\})? ([0-9.e+]+)$", re.MULTILINE)


class ProbeError(Exception):
    """The worker does not answer as an OpenAI server does. The message says how; it is shown to operators."""


async def health(client: httpx.AsyncClient, url: str) -> None:
    """Raises ProbeError unless the worker says it is well. A server without `/health` is asked for its models."""
    answer = await _get(client, f"{url}/health")
    if answer.status_code == 404:
        answer = await _get(client, f"{url}/v1/models")
    if answer.status_code >= 300:
        raise ProbeError(f"/health answers {answer.status_code}")


async def discover(client: httpx.AsyncClient, url: str) -> Discovery:
    """Raises ProbeError when the worker lists no models."""
    answer = await _get(client, f"{url}/v1/models")
    try:
        entries = [ModelEntry(entry) for entry in answer.json()["data"]]
        models = {str(entry["id"]): entry for entry in entries}
    except (ValueError, KeyError, TypeError):
        raise ProbeError(f"/v1/models answers {answer.status_code} and no list of models") from None
    if not models:
        raise ProbeError("/v1/models lists no model")
    discovery = Discovery(models)
    discovery.max_model_len = min((entry.get("max_model_len") or 0 for entry in entries), default=0)
    _read_server_info(await _get_json(client, f"{url}/server_info"), discovery, url)
    if discovery.epoch is None:
        discovery.epoch = await _process_start_ms(client, url)
    return discovery


async def _process_start_ms(client: httpx.AsyncClient, url: str) -> int | None:
    """When the engine's process started, by the metric that Prometheus clients export of themselves: every gateway
    takes it for the same life. None when it is not to be had."""
    try:
        answer = await _get(client, f"{url}/metrics")
    except ProbeError:
        return None
    found = _PROCESS_START.search(answer.text) if answer.status_code == 200 else None
    return round(float(found[1]) * 1000) if found else None


def _read_server_info(info: Mapping[str, Any], discovery: Discovery, url: str) -> None:
    """`/server_info` as our own workers and SGLang answer it."""
    epoch, block_size = info.get("epoch"), info.get("block_size") or info.get("page_size")
    if isinstance(epoch, int):
        discovery.epoch = epoch
    if isinstance(block_size, int):
        discovery.block_size_tokens = block_size
    capacity = info.get("max_num_seqs") or info.get("max_running_requests")
    if isinstance(capacity, int) and capacity > 0:
        discovery.capacity_requests = capacity
    discovery.tokenizer_fingerprint = str(info.get("tokenizer_fingerprint") or "")
    if info.get("transfer") is not None:
        _read_transfer(info["transfer"], discovery, url)
    events = info.get("kv_events")
    if isinstance(events, dict) and isinstance(events.get("endpoint"), str):
        replay = events.get("replay_endpoint")
        discovery.events = EventEndpoints(
            _reachable(events["endpoint"], url),
            _reachable(replay, url) if isinstance(replay, str) else None,
            str(events.get("topic") or ""),
            int(events.get("dp_size") or 1),
        )
        discovery.block_size_tokens = int(events.get("block_size") or discovery.block_size_tokens)


_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=HOLDER_ID_BYTES_MAX)]


class _PoolInfo(msgspec.Struct, frozen=True):
    name: _Name
    generation: int
    run_blocks: _Count
    codec: str


class _TransferInfo(msgspec.Struct, frozen=True):
    """The "transfer" of `/server_info`. Further keys may be there."""

    holder: _Name
    compatibility: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    bytes_per_token: _Count
    addresses: Annotated[tuple[str, ...], msgspec.Meta(max_length=ADDRESSES_MAX)] = ()
    codecs: tuple[str, ...] = ()
    shifted: bool = False
    pools: tuple[_PoolInfo, ...] = ()


def _read_transfer(value: object, discovery: Discovery, url: str) -> None:
    """A worker that does not say it right moves nothing."""
    try:
        info = msgspec.convert(value, _TransferInfo)
        holder = parse_holder(info.holder.encode())
        if not isinstance(holder, Worker):
            raise ValueError(f"{info.holder!r} is no worker")
    except (msgspec.ValidationError, ValueError) as error:
        discovery.transfer_problem = str(error)
        return
    discovery.transfer = TransferAbility(
        holder,
        tuple(_reachable(address, url) for address in info.addresses),
        info.compatibility,
        frozenset(info.codecs),
        info.bytes_per_token,
        info.shifted,
        tuple(OpenPool(pool.name, pool.generation, pool.run_blocks, pool.codec) for pool in info.pools),
    )


def _reachable(endpoint: str, url: str) -> str:
    """A bound wildcard (`tcp://*:5557`) is reached at the worker's own host."""
    host = urlsplit(url).hostname or "127.0.0.1"
    for wildcard in ("//*:", "//0.0.0.0:", "//[::]:"):
        endpoint = endpoint.replace(wildcard, f"//{host}:")
    return endpoint


async def load(client: httpx.AsyncClient, url: str) -> EngineLoad | None:
    """The engine's queue by its `/metrics`, all ranks together; None when it does not say. Raises ProbeError."""
    answer = await _get(client, f"{url}/metrics")
    if answer.status_code >= 500:
        raise ProbeError(f"/metrics answers {answer.status_code}")
    samples = _LOAD_SAMPLE.findall(answer.text) if answer.status_code == 200 else []
    if not samples:
        return None
    running = sum(float(value) for name, value in samples if name.startswith("running"))
    waiting = sum(float(value) for name, value in samples if not name.startswith("running"))
    return EngineLoad(int(running), int(waiting), time.time())


async def tokenize(client: httpx.AsyncClient, url: str, request: Mapping[str, Any]) -> Sequence[int] | None:
    """Token ids by the worker's own `/tokenize`; None when it has none. Raises ProbeError when it fails."""
    try:
        answer = await client.post(f"{url}/tokenize", json=request)
    except httpx.HTTPError as error:
        raise ProbeError(f"/tokenize: {type(error).__name__}") from None
    if answer.status_code in (404, 405, 501):
        return None
    try:
        tokens = answer.json()["tokens"]
    except (ValueError, KeyError, TypeError):
        raise ProbeError(f"/tokenize answers {answer.status_code} and no tokens") from None
    return list(map(int, tokens))


async def _get(client: httpx.AsyncClient, url: str) -> httpx.Response:
    try:
        return await client.get(url)
    except httpx.HTTPError as error:
        raise ProbeError(f"{urlsplit(url).path}: {type(error).__name__}") from None


async def _get_json(client: httpx.AsyncClient, url: str) -> Mapping[str, Any]:
    answer = await _get(client, url)
    try:
        document = answer.json() if answer.status_code == 200 else {}
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}

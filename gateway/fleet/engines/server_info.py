"""`/server_info` as our own workers answer it, and the connectors' sidecars."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from cachecore.holders import Worker
from cachecore.index.schema import HOLDER_ID_BYTES_MAX, parse_holder
from cachecore.transfer.plan import ADDRESSES_MAX
from gateway.fleet.engines.contract import Discovery, EventEndpoints, OpenPool, TransferAbility
from gateway.fleet.engines.questions import Questions

_RANKS_MAX = 64
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


def read_server_info(info: Mapping[str, Any], discovery: Discovery, ask: Questions) -> None:
    """Write down what a worker of ours says of itself."""
    epoch, block_size, capacity, blocks = (
        info.get(key) for key in ("epoch", "block_size", "max_num_seqs", "blocks_total")
    )
    if isinstance(epoch, int):
        discovery.epoch = epoch
    if isinstance(block_size, int):
        discovery.block_size_tokens = block_size
    if isinstance(capacity, int) and capacity > 0:
        discovery.capacity_requests = capacity
    if isinstance(block_size, int) and isinstance(blocks, int) and blocks > 0:
        discovery.kv_tokens = blocks * block_size
    discovery.tokenizer_fingerprint = str(info.get("tokenizer_fingerprint") or "")
    discovery.version = str(info.get("engine") or "")
    model, revision = info.get("model"), info.get("revision")
    if isinstance(model, str) and isinstance(revision, str) and revision:
        discovery.revisions[model] = revision
    read_events(info.get("kv_events"), discovery, ask)
    if info.get("transfer") is not None:
        read_transfer(info["transfer"], discovery, ask)


def read_events(events: object, discovery: Discovery, ask: Questions) -> None:
    if not isinstance(events, dict) or not isinstance(events.get("endpoint"), str):
        return
    replay, ranks, size = events.get("replay_endpoint"), events.get("dp_size"), events.get("block_size")
    discovery.events = EventEndpoints.at(
        ask.reachable(events["endpoint"]),
        ask.reachable(replay) if isinstance(replay, str) else None,
        str(events.get("topic") or ""),
        min(ranks, _RANKS_MAX) if isinstance(ranks, int) and ranks > 0 else 1,
    )
    if isinstance(size, int) and size > 0:
        discovery.block_size_tokens = size


def read_transfer(value: object, discovery: Discovery, ask: Questions) -> None:
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
        tuple(map(ask.reachable, info.addresses)),
        info.compatibility,
        frozenset(info.codecs),
        info.bytes_per_token,
        info.shifted,
        tuple(OpenPool(pool.name, pool.generation, pool.run_blocks, pool.codec) for pool in info.pools),
    )

"""The pools that a worker opens: which, where, and within what bounds. No torch here."""

import argparse
import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from cachecore.store import RedisStore, StoreError, parse_address
from cachecore.store.pools import Announcement, Bucket, BucketPool, DirectoryPool, KvPool, PoolBounds, RedisPool
from cachecore.store.pools.contract import BLOCKS_MAX, LONG_RUN_TIMES
from cachecore.store.pools.journal import Journal, RunDocument, encode_item
from cachecore.store.pools.means import is_mean, tells_of_mean

T = TypeVar("T")

RUN_BLOCKS = 4
"""In a short run. A prompt's last blocks that fill none are computed anew."""
BYTES_MAX = 10 << 30
PIECE_BYTES = 64 << 10
"""Of a listing."""

_FORM = "NAME=dir:/path, NAME=redis://host:port or NAME=s3://bucket/prefix"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)(|KiB|MiB|GiB|TiB)")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BUCKET_KEYS = ("ca", "endpoint", "region")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What all pools of one worker have in common; every worker that opens a pool should say the same."""

    bounds: PoolBounds = field(default_factory=lambda: PoolBounds(bytes_max=BYTES_MAX))
    run_blocks: int = RUN_BLOCKS
    codec: str = ""
    """In which KV is stored; the model's wire codec when empty."""
    means: bool = False
    """Whether they keep means of text that prompts share (`cachecore.store.pools.means`)."""

    def __post_init__(self) -> None:
        most = BLOCKS_MAX // LONG_RUN_TIMES
        if not 1 <= self.run_blocks <= most:
            raise ValueError(f"a short run of a pool has 1 to {most} blocks, not {self.run_blocks}")


def add_pool_arguments(parser: argparse.ArgumentParser) -> None:
    """What `pools_of` reads."""
    group = parser.add_argument_group("pools of KV, shared with other workers")
    group.add_argument(
        "--pool", action="append", default=[], metavar="NAME=WHERE", help=f"may be given several times: {_FORM}"
    )
    group.add_argument("--pool-codec", default="", metavar="CODEC", help="default: i8 where the model allows it")
    group.add_argument(
        "--pool-run-blocks", type=int, default=RUN_BLOCKS, metavar="N", help=f"in short runs (default: {RUN_BLOCKS})"
    )
    group.add_argument(
        "--pool-means",
        action="store_true",
        help="keep the mean KV of text that several prompts share, and repair passages from it",
    )
    group.add_argument(
        "--pool-bytes-max", type=_bytes, default=BYTES_MAX, metavar="SIZE", help="of each pool (default: 10GiB)"
    )
    group.add_argument("--pool-tenant-bytes-max", type=_bytes, default=0, metavar="SIZE", help="of each tenant")
    group.add_argument(
        "--pool-idle-hours",
        type=float,
        default=168.0,
        metavar="HOURS",
        help="unread, then it goes (default: 168)",
    )


def pools_of(args: argparse.Namespace) -> "OpenPools | None":
    """None where there is no --pool. Raises ValueError, fit for a user."""
    if not args.pool:
        return None
    bounds = PoolBounds(
        bytes_max=args.pool_bytes_max,
        tenant_bytes_max=args.pool_tenant_bytes_max,
        idle_seconds_max=args.pool_idle_hours * 3600.0,
    )
    return OpenPools(args.pool, PoolSettings(bounds, args.pool_run_blocks, args.pool_codec, args.pool_means))


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MiB or 10GiB")
    return int(float(match[1]) * _UNITS[match[2]])


class OpenPools:
    """One worker's pools. `start` and `close` belong to the loop that uses them."""

    def __init__(self, specifications: Sequence[str], settings: PoolSettings | None = None) -> None:
        """Of `NAME=WHERE` each. Raises ValueError, with what is wrong with it, for one that cannot be a pool."""
        self.settings = settings or PoolSettings()
        self.journal = Journal()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stores: list[RedisStore] = []
        self._pools: dict[str, KvPool] = {}
        for specification in specifications:
            name, _, where = specification.partition("=")
            if not _NAME.fullmatch(name) or not where:
                raise ValueError(f"--pool {specification}: a pool is written {_FORM}")
            if name in self._pools:
                raise ValueError(f"--pool {specification}: there is a pool {name} already")
            try:
                self._pools[name] = self._opened(name, where)
            except (ValueError, OSError, StoreError) as error:
                raise ValueError(f"--pool {specification}: {error}") from None

    def __repr__(self) -> str:
        return f"OpenPools({', '.join(map(repr, self._pools.values()))})"

    @property
    def pools(self) -> Mapping[str, KvPool]:
        return self._pools

    async def start(self) -> None:
        """Reach them, or go on trying: a pool that is away stops nobody."""
        self._loop = asyncio.get_running_loop()
        for store in self._stores:
            await store.start()
        for pool in self._pools.values():
            await pool.start()

    async def close(self) -> None:
        self.journal.close()
        for pool in self._pools.values():
            await pool.close()
        for store in self._stores:
            await store.close()

    async def listing(self, name: str) -> AsyncIterator[bytes]:
        """All that lies in a pool, in pieces, as `cachecore.store.pools.journal` has it. From any loop."""
        pieces = list_runs(self._pools[name])
        try:
            while (piece := await self._elsewhere(anext(pieces, None))) is not None:
                yield piece
        finally:
            await self._elsewhere(pieces.aclose())

    async def _elsewhere(self, step: Awaitable[T]) -> T:
        """Its outcome, on the pools' own loop."""

        async def carry_out() -> T:
            return await step

        if self._loop is None or self._loop is asyncio.get_running_loop():
            return await step
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(carry_out(), self._loop))

    def describe(self, codec: str) -> list[dict[str, Any]]:
        """`transfer.pools` of `/server_info`: those that have been reached. `codec` is the model's wire codec."""
        return [
            {
                "name": pool.holder.name,
                "generation": pool.holder.generation,
                "run_blocks": self.settings.run_blocks,
                "codec": self.settings.codec or codec,
            }
            for pool in self._pools.values()
            if pool.holder is not None
        ]

    def _announce(self, announcement: Announcement) -> None:
        if not tells_of_mean(announcement):
            self.journal(announcement)

    def _opened(self, name: str, where: str) -> KvPool:
        """Raises ValueError, StoreError."""
        bounds = self.settings.bounds
        scheme = where.partition(":")[0]
        if scheme == "dir":
            return DirectoryPool(name, _directory(where), bounds, self._announce)
        if scheme == "s3":
            return BucketPool(name, _bucket(where), bounds, self._announce)
        if scheme in ("unix", *(f"redis{tls}{kind}" for tls in ("", "s") for kind in ("", "+cluster", "+sentinel"))):
            store = RedisStore(parse_address(where))
            self._stores.append(store)
            return RedisPool(name, store, bounds, self._announce)
        raise ValueError(f"a pool is written {_FORM}")


async def list_runs(pool: KvPool) -> AsyncGenerator[bytes, None]:
    """The wire form of all that lies in a pool."""
    holder, held = pool.holder, bytearray()
    if holder is not None:
        async for run in pool.runs():
            if is_mean(run.key):
                continue
            held += encode_item(RunDocument.of(holder, run))
            if len(held) > PIECE_BYTES:
                yield bytes(held)
                held.clear()
    whole = holder is not None and pool.holder == holder and pool.stats().up
    yield bytes(held) + encode_item(whole)


def _directory(where: str) -> Path:
    path = Path(where.removeprefix("dir:")).expanduser()
    if not path.is_dir():
        raise ValueError(f"{path} is no directory: make it, or mount it, first")
    return path


def _bucket(where: str) -> Bucket:
    """`s3://bucket/prefix?endpoint=https://host:port&region=...&ca=/path`; credentials come from the environment."""
    parts = urlsplit(where)
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if unknown := sorted(options.keys() - set(_BUCKET_KEYS)):
        raise ValueError(f"{unknown[0]} is no option of a bucket; known are {', '.join(_BUCKET_KEYS)}")
    if not parts.hostname or parts.username or parts.port:
        raise ValueError("a bucket is written s3://bucket/prefix, its credentials are in the environment")
    if "ca" in options and options.get("endpoint", "").startswith("http://"):
        raise ValueError("ca belongs to TLS: begin the endpoint with https://")
    return Bucket(parts.netloc, parts.path.strip("/"), **options)

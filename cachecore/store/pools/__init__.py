"""Pools: KV that every worker can read and that outlives them, behind one contract."""

from cachecore.store.pools.contract import (
    Accepted,
    Announce,
    Announcement,
    Fetched,
    KvPool,
    Missed,
    MissReason,
    PoolBounds,
    PoolStats,
    RefusalReason,
    Refused,
    RemovalReason,
    Run,
    RunKey,
    SealedFrame,
    Span,
    cut,
)
from cachecore.store.pools.directory import DirectoryPool
from cachecore.store.pools.redis import RedisPool
from cachecore.store.pools.s3 import Bucket, BucketPool

__all__ = [
    "Accepted",
    "Announce",
    "Announcement",
    "Bucket",
    "BucketPool",
    "DirectoryPool",
    "Fetched",
    "KvPool",
    "MissReason",
    "Missed",
    "PoolBounds",
    "PoolStats",
    "RedisPool",
    "RefusalReason",
    "Refused",
    "RemovalReason",
    "Run",
    "RunKey",
    "SealedFrame",
    "Span",
    "cut",
]

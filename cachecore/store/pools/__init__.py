"""Pools: KV that every worker can read and that outlives them, behind one contract."""

from cachecore.store.pools.contract import (
    Accepted,
    Announce,
    Announcement,
    Declined,
    DeclineReason,
    Extent,
    Found,
    KvPool,
    Missed,
    MissReason,
    PoolBounds,
    PoolRun,
    PoolStats,
    RemovalReason,
    RunKey,
    SealedFrame,
    run_ends,
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
    "DeclineReason",
    "Declined",
    "DirectoryPool",
    "Extent",
    "Found",
    "KvPool",
    "MissReason",
    "Missed",
    "PoolBounds",
    "PoolRun",
    "PoolStats",
    "RedisPool",
    "RemovalReason",
    "RunKey",
    "SealedFrame",
    "run_ends",
]

"""Means in a pool and out of it again, in every codec."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cachecore.blocks import HASH_BYTES, PrefixHash
from cachecore.kv.means import MeanKv
from cachecore.kv.rope import rope_table
from cachecore.kv.variants import RopeConfig
from cachecore.scope import Keyring
from cachecore.store.pools import DirectoryPool, PoolBounds
from cachecore.store.pools.means import Contexts
from tests.workers.reference.support import KEYRING
from tests.workers.transfer.world import RIVAL, naming_of
from workers.transfer.means import MeanStore, MeanText
from workers.transfer.shape import KvShape

SHAPE = KvShape(bytes(16), 5, 2, 64, 4, "float32")
ROPE = rope_table(RopeConfig("default", 10_000.0, 64), 512)
NAME = PrefixHash(b"n" * HASH_BYTES)
TOKENS = 23
NAMING = naming_of()
TEXT = MeanText(NAMING, NAME, list(range(70, 70 + TOKENS)), 5)
CONTEXTS = Contexts.of(PrefixHash(b"a" * HASH_BYTES)).joined(Contexts.of(PrefixHash(b"b" * HASH_BYTES)))


def store(pool: DirectoryPool, codec: str = "raw", keyring: Keyring = KEYRING, shape: KvShape = SHAPE) -> MeanStore:
    return MeanStore({"pool": pool}, shape, ROPE, keyring, codec, ThreadPoolExecutor(1))


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[DirectoryPool]:
    made = DirectoryPool("pool", tmp_path, PoolBounds(1 << 24))
    await made.start()
    yield made
    await made.close()


def drawn() -> MeanKv:
    torch.manual_seed(3)
    keys, values = torch.randn(2, SHAPE.layers, TOKENS, SHAPE.kv_heads, SHAPE.head_dim)
    return MeanKv(keys, values, CONTEXTS.number)


@pytest.mark.parametrize(
    ("codec", "error_max"), [("raw", 0.0), ("i8", 0.01), ("fp8", 0.04), ("i4h", 0.15), ("lm3h", 0.25)]
)
async def test_a_mean_comes_back(pool: DirectoryPool, codec: str, error_max: float) -> None:
    here, mean = store(pool, codec), drawn()
    assert (await here.has(NAMING, NAME, pool), await here.find(NAMING, NAME, pool)) == (False, None)
    assert await here.put(TEXT, pool, CONTEXTS, mean)
    known = await here.find(NAMING, NAME, pool)
    assert known is not None
    assert (known.text, known.contexts) == (TEXT, CONTEXTS)
    assert await here.holder(NAMING, NAME) is pool
    back = await here.mean_of(known)
    assert back.contexts == 2
    for given, got in ((mean.keys, back.keys), (mean.values, back.values)):
        assert float((given - got).norm() / given.norm()) <= error_max
    keys, values = await here.turned(known, slice(5, 20), 300)
    assert torch.allclose(keys, back.part(slice(5, 20)).keys_at(300, ROPE))
    assert torch.equal(values, back.values[:, 5:20])


async def test_it_is_there_for_its_tenant_its_class_and_its_codec_alone(pool: DirectoryPool) -> None:
    await store(pool).put(TEXT, pool, CONTEXTS, drawn())
    assert await store(pool).find(naming_of(RIVAL), NAME, pool) is None
    assert await store(pool, shape=replace(SHAPE, compatibility=b"x" * 16)).find(NAMING, NAME, pool) is None
    assert await store(pool, "i8").find(NAMING, NAME, pool) is None
    assert await store(pool, keyring=Keyring({0: b"x" * 32}, 0)).find(NAMING, NAME, pool) is None
    assert await store(pool).find(NAMING, NAME, pool) is not None


async def test_one_that_grows_takes_the_place_of_what_was_there(pool: DirectoryPool) -> None:
    here, more = store(pool), CONTEXTS.joined(Contexts.of(PrefixHash(b"c" * HASH_BYTES)))
    for contexts in (CONTEXTS, more):
        assert await here.put(TEXT, pool, contexts, drawn())
        known = await here.find(NAMING, NAME, pool)
        assert known is not None
        assert known.contexts == contexts
    assert pool.stats().runs == 1
    assert here.counts["stored"] == 2

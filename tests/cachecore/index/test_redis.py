"""The shared index on real servers: the common behaviour, and beside the naive index on random histories."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cachecore.holders import Holder
from cachecore.index.contract import IndexEvent, PrefixIndex
from cachecore.index.redis import RedisIndex
from tests.cachecore.index.behaviour import PrefixIndexBehaviour
from tests.cachecore.index.histories import History, run_beside_naive
from tests.cachecore.index.publishing import with_handles
from tests.cachecore.index.remote import Remote, fresh_schema
from tests.cachecore.store.servers import BINARIES, start_cluster, start_server


@pytest.fixture(scope="module", params=["valkey", "redis", "cluster"])
def remote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "cluster":
        server = start_cluster(directory)
    elif request.param in BINARIES:
        server = start_server(directory, binary=BINARIES[request.param], persist=False)
    else:
        pytest.skip("no redis-server on PATH")
    with server:
        remote = Remote(server.url)
        yield remote
        remote.close()


def redis_index(remote: Remote) -> PrefixIndex:
    schema = fresh_schema()
    publisher = remote.publisher(schema)
    return remote.index(RedisIndex(remote.store, schema, publisher), publisher.flush)


class TestRedisIndex(PrefixIndexBehaviour):
    @pytest.fixture
    def index(self, remote: Remote) -> PrefixIndex:
        return redis_index(remote)


class TestBesideNaive:
    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("layers", [False, True])
    def test_random_histories(self, remote: Remote, seed: int, layers: bool) -> None:
        run_beside_naive(redis_index(remote), History(seed, layers=layers), steps=60)

    @pytest.mark.parametrize("seed", range(10, 13))
    def test_places_that_are_known_to_be_rooted(self, remote: Remote, seed: int) -> None:
        """With handles the chains' roots are known, and with them which places need no looking for later beginnings."""
        run_beside_naive(WithHandles(redis_index(remote)), History(seed, conversations=4), steps=60)


class WithHandles:
    """The index, of which every store says the handles of its blocks."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        return self._index.apply(holder, sequence, list(map(with_handles, events)))

"""The shared index on real servers: the common behaviour, and beside the naive index on random histories."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cachecore.holders import Holder, Place, Tier
from cachecore.index.contract import IndexEvent, PrefixIndex, Stored
from cachecore.index.redis import RedisIndex
from cachecore.index.schema import shard_of
from tests.cachecore.index.behaviour import PrefixIndexBehaviour
from tests.cachecore.index.histories import ROOT, History, chain_of, cut, name_at, run_beside_naive, worker
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


def test_a_call_looks_for_so_many_names_and_no_more(remote: Remote) -> None:
    """L1 begins where nothing else ends, in the middle of what L0 has: it is found by asking for each name before. What
    is past the bound comes out short. Where one goes on just behind the other there is nothing to look for."""
    chain = chain_of(*range(520))
    shard = [holder for number in range(1000) if shard_of(holder := worker(f"w{number}")) == 0][:24]
    overlapping, adjacent = redis_index(remote), redis_index(remote)
    for holder in shard:
        for index, start in ((overlapping, 505), (adjacent, 510)):
            index.apply(holder, 0, [Stored(ROOT, cut(chain, 0, 510))])
            index.apply(holder, 1, [Stored(name_at(chain, start), cut(chain, start), Tier.L1)])
    near, far = [Place(holder, Tier.L0) for holder in shard], [Place(holder, Tier.L1) for holder in shard]
    assert adjacent.match(chain).depths == dict.fromkeys(near, 510) | dict.fromkeys(far, 520)
    depths = dict(overlapping.match(chain).depths)
    assert [depths.pop(place) for place in near] == [510] * 24
    assert list(depths.values()) == [520] * 16
    assert set(depths) < set(far)


class WithHandles:
    """The index, of which every store says the handles of its blocks."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def apply(self, holder: Holder, sequence: int, events: Sequence[IndexEvent]) -> bool:
        return self._index.apply(holder, sequence, list(map(with_handles, events)))

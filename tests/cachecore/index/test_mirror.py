"""The mirror over two gateways: the common behaviour, and beside the naive index on random histories."""

from collections.abc import Iterator

import pytest

from cachecore.index.contract import PrefixIndex
from tests.cachecore.index.behaviour import PrefixIndexBehaviour
from tests.cachecore.index.gateways import Gateway, TwoGateways
from tests.cachecore.index.histories import History, run_beside_naive
from tests.cachecore.index.remote import LoopThread, fresh_schema
from tests.cachecore.store.servers import BINARIES, start_cluster, start_server

OTHERS = [pytest.param(name, marks=pytest.mark.servers) for name in ("redis", "cluster")]


@pytest.fixture(scope="module", params=["valkey", *OTHERS])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "cluster":
        server = start_cluster(directory)
    elif request.param in BINARIES:
        server = start_server(directory, binary=BINARIES[request.param], persist=False)
    else:
        pytest.skip("no redis-server on PATH")
    with server:
        yield server.url


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def index(thread: LoopThread, url: str) -> Iterator[PrefixIndex]:
    schema = fresh_schema()

    async def start() -> tuple[Gateway, Gateway]:
        writer, reader = Gateway(url, schema), Gateway(url, schema)
        for gateway in (writer, reader):
            await gateway.start()
        for gateway in (writer, reader):
            await gateway.ready()
        return writer, reader

    async def stop() -> None:
        for gateway in pair:
            await gateway.stop()

    pair = thread.run(start())
    yield TwoGateways(thread, *pair)
    thread.run(stop())


class TestTwoGateways(PrefixIndexBehaviour):
    @pytest.fixture
    def index(self, index: PrefixIndex) -> PrefixIndex:
        return index


class TestBesideNaive:
    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("layers", [False, True])
    def test_random_histories(self, index: PrefixIndex, seed: int, layers: bool) -> None:
        run_beside_naive(index, History(seed, layers=layers), steps=60)

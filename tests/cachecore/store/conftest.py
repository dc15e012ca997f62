import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from cachecore.store import Address, RedisStore, parse_address
from tests.cachecore.store.servers import BINARIES, Cluster, Server, start_cluster, start_server

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
Open = Callable[..., Awaitable[RedisStore]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, LoopFactory]:
    """The loop that the gateway runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module", params=sorted(BINARIES))
def binary(request: pytest.FixtureRequest) -> str:
    return BINARIES[request.param]


@pytest.fixture(scope="module")
def server(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that a test must leave as it found it (its keys apart)."""
    with start_server(tmp_path_factory.mktemp("shared"), binary=binary) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """One to freeze, kill and restart."""
    with start_server(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_cluster(tmp_path_factory.mktemp("cluster"), binary=binary) as cluster:
        yield cluster


@pytest.fixture
async def open_store() -> AsyncIterator[Open]:
    """Starts a store and closes it after the test. Its budget is a patient one unless the test is about budgets."""
    stores = []

    async def opened(where: str | Address, budget_seconds: float = 2.0) -> RedisStore:
        address = parse_address(where) if isinstance(where, str) else where
        store = RedisStore(address, budget_seconds=budget_seconds)
        stores.append(store)
        await store.start()
        return store

    yield opened
    for store in stores:
        await store.close()

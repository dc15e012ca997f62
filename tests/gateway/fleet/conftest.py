from collections.abc import AsyncIterator, Iterator

import pytest

from cachecore.index.schema import Schema
from cachecore.store import RedisStore, parse_address
from tests.cachecore.store.servers import Server, start_server


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("valkey"), persist=False) as server:
        yield server


@pytest.fixture
async def store(valkey: Server) -> AsyncIterator[RedisStore]:
    valkey.command("FLUSHALL")
    store = RedisStore(parse_address(valkey.url), budget_seconds=1.0)
    await store.start()
    yield store
    await store.close()


@pytest.fixture
def schema() -> Schema:
    return Schema("test")

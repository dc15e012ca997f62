from collections.abc import AsyncIterator, Iterator

import pytest

pytest.register_assert_rewrite(
    *("tests.cachecore.index.behaviour", "tests.cachecore.index.histories", "tests.cachecore.index.publishing")
)

from cachecore.index.publisher import Publisher  # noqa: E402
from cachecore.index.schema import Schema  # noqa: E402
from cachecore.store import RedisStore  # noqa: E402
from tests.cachecore.index.publishing import Clock, opened  # noqa: E402
from tests.cachecore.index.remote import fresh_schema  # noqa: E402
from tests.cachecore.store.servers import BINARIES, Server, start_server  # noqa: E402


@pytest.fixture(scope="module", params=sorted(BINARIES))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("publisher"), binary=BINARIES[request.param], persist=False) as server:
        yield server


@pytest.fixture
async def store(server: Server) -> AsyncIterator[RedisStore]:
    server.command("FLUSHALL")
    async with opened(server.url) as store:
        yield store


@pytest.fixture
def schema() -> Schema:
    return fresh_schema()


@pytest.fixture
def publisher(store: RedisStore, schema: Schema) -> Publisher:
    return Publisher(store, schema, clock_ns=Clock())

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from cachecore.index.schema import Schema
from cachecore.store import RedisStore, parse_address
from gateway.fleet.engines.questions import Questions
from tests.cachecore.store.servers import Server, start_server
from tests.gateway.fleet.scripted_engine import Asker, Reply, ScriptedEngine, running


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


Scripted = Callable[..., Any]


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    """Starts scripted engines: `await scripted({"/v1/models": ...}, server="...")`."""
    contexts = []
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as http:

        async def start(script: Mapping[str, Reply], server: str = "") -> Asker:
            context = running(ScriptedEngine(script, server))
            engine = await context.__aenter__()
            contexts.append(context)
            return Asker(engine, Questions(http, engine.url))

        yield start
        for context in contexts:
            await context.__aexit__(None, None, None)

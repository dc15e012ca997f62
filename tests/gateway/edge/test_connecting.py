"""Connections to workers that nobody waits for any more leave nothing behind, on either event loop."""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import uvloop

from gateway.edge.upstream import UpstreamPool

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class Acceptor(asyncio.Protocol):
    """Says nothing, and goes when the other side does."""

    def __init__(self, accepted: set[asyncio.BaseTransport]) -> None:
        self._accepted = accepted

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._accepted.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._accepted.discard(self._transport)


async def give_up_connecting(seed: int, attempts: int) -> tuple[Counter[str], int]:
    """How attempts ended of which most are given up, by cancelling or by a timeout; and the connections left."""
    random, ends, accepted = Random(seed), Counter[str](), set[asyncio.BaseTransport]()
    server = await asyncio.get_running_loop().create_server(lambda: Acceptor(accepted), "127.0.0.1", 0)
    pool = UpstreamPool("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server:
        for _ in range(attempts):
            by_timeout = random.random() < 0.3
            task = asyncio.ensure_future(pool.connect(random.uniform(1e-5, 5e-4) if by_timeout else 5.0))
            for _ in range(random.randrange(8)):
                await asyncio.sleep(0)
            if not by_timeout and random.random() < 0.7:
                task.cancel()
            try:
                (await task).abort()
                ends["opened"] += 1
            except (asyncio.CancelledError, TimeoutError) as error:
                ends[type(error).__name__] += 1
        for _ in range(200):
            await asyncio.sleep(0.01)
            if not len(pool) and not accepted:
                break
        return ends, len(pool)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_that_is_given_up_as_it_opens_is_forgotten(loop: str) -> None:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        ends, left = runner.run(give_up_connecting(1, 400))
    assert left == 0
    assert min(ends["opened"], ends["CancelledError"]) > 20, ends

"""The shared store: every call within its budget, or an error at once.

A call goes: breaker -> connection from the pool -> one round trip -> the answer, all against one deadline. A node of a
cluster that points elsewhere is followed within the same deadline. Nothing is ever asked twice after silence: whether
the first try was carried out cannot be known.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachecore.store.address import Address
from cachecore.store.breaker import Breaker
from cachecore.store.errors import Moved, Refused, StoreError, Unavailable
from cachecore.store.script import Call
from cachecore.store.server import CONNECT_SECONDS, Server
from cachecore.store.streams import StreamEntry, StreamReader
from cachecore.store.topology import WATCH_SECONDS, Cluster, OneServer, Topology
from cachecore.store.wire import Part, Question

logger = logging.getLogger("ropeway.store")

ROUNDS_MAX = 5
"""A first try, a script's text, and redirections of a cluster that is being changed."""


@dataclass(frozen=True)
class StoreHealth:
    up: bool
    since: float
    """Unix time of the last change; of the start when there was none."""
    failures: int
    """In a row, now; the most of any node."""
    reason: str
    """Of the last failure, while there is one."""
    latency_seconds: float
    """Of the last answer."""
    kind: str
    """single, cluster or sentinel."""
    server: str
    """redis or valkey; empty when it was never reached."""
    version: str


class RedisStore:
    def __init__(self, address: Address, *, budget_seconds: float = 0.020, breaker: Breaker | None = None) -> None:
        """Raises ValueError when the address's certificates cannot be used. The breaker of a cluster is each node's."""
        self.address = address
        self._budget_seconds = budget_seconds
        make = Cluster if address.kind == "cluster" else OneServer
        self._topology: Topology = make(address, breaker or Breaker())
        self._streams = StreamReader(self._topology)
        self._keeper: asyncio.Task[None] | None = None
        self._started = time.time()
        self._closed = False

    def __repr__(self) -> str:
        return f"RedisStore({self.address}, {'up' if self.up else 'away'})"

    async def start(self) -> None:
        """Try to reach the server for a second; when that fails, go on trying in the background."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CONNECT_SECONDS):
                await self._topology.mend(CONNECT_SECONDS)
        for server in self._topology.servers:
            if server.breaker.failures:
                server.distrust(server.breaker.reason)
        self._topology.wake.set()
        self._keeper = asyncio.create_task(self._keep(), name="store keeper")

    async def close(self) -> None:
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._streams.close()
        await self._topology.close()

    @property
    def clustered(self) -> bool:
        return self.address.kind == "cluster"

    @property
    def up(self) -> bool:
        """Whether calls are let through, to some node at least."""
        return not self._closed and any(not server.breaker.opened for server in self._topology.servers)

    def health(self) -> StoreHealth:
        servers = list(self._topology.servers)
        breakers = [server.breaker for server in servers]
        facts = next((server.facts for server in servers if server.facts), {})
        return StoreHealth(
            up=self.up,
            since=max((breaker.since for breaker in breakers), default=0.0) or self._started,
            failures=max((breaker.failures for breaker in breakers), default=0),
            reason=next((breaker.reason for breaker in breakers if breaker.reason), ""),
            latency_seconds=max((server.latency_seconds for server in servers), default=0.0),
            kind=self.address.kind,
            server=facts.get(b"server", b"").decode(),
            version=facts.get(b"version", b"").decode(),
        )

    def group(self, keys: Sequence[bytes]) -> list[list[int]]:
        """Indices of the keys that one call may touch together: all of them, or in a cluster those of one slot."""
        return self._topology.group(keys)

    async def run(self, call: Call, budget_seconds: float | None = None) -> Any:
        """The script's answer. Raises StoreError."""
        return _only(await self.run_many((call,), budget_seconds))

    async def run_many(self, calls: Sequence[Call], budget_seconds: float | None = None) -> list[Any]:
        """The answer of each, or the StoreError in its place: one round trip for each server that is involved.

        Calls of one server are carried out in their order, but not as one step.
        """
        return await self._ask([Question(call) for call in calls], [call.keys for call in calls], budget_seconds)

    async def command(self, *parts: Part, budget_seconds: float | None = None) -> Any:
        """The answer to one command, whose second part is its key. Raises StoreError."""
        key = parts[1:2]
        keys = [part if isinstance(part, bytes) else str(part).encode() for part in key]
        return _only(await self._ask([Question(parts)], [keys], budget_seconds))

    async def read_streams(
        self, positions: Mapping[bytes, bytes], block_seconds: float, count: int
    ) -> list[StreamEntry]:
        """Entries after the positions (stream -> id), as soon as there are any; none after `block_seconds` without.

        At most `count` of each stream, in the stream's order. May be cancelled at any time: what it would have returned
        is read again from the same position. Raises StoreError when some cannot be read and the others bring nothing.
        """
        if self._closed:
            raise Unavailable("the store is closed")
        return await self._streams.read(positions, block_seconds, count)

    async def _ask(
        self, questions: list[Question], keys: Sequence[Sequence[bytes]], budget_seconds: float | None
    ) -> list[Any]:
        if self._closed:
            return [Unavailable("the store is closed")] * len(questions)
        budget = self._budget_seconds if budget_seconds is None else budget_seconds
        deadline = asyncio.get_running_loop().time() + budget
        answers: list[Any] = [None] * len(questions)
        batches = self._route(keys, answers)
        for _ in range(ROUNDS_MAX):
            await self._ask_each(batches, questions, answers, deadline)
            batches = self._again(batches, questions, answers)
            if not batches:
                break
        return answers

    def _route(self, keys: Sequence[Sequence[bytes]], answers: list[Any]) -> dict[Server, list[int]]:
        batches: dict[Server, list[int]] = {}
        for index, some in enumerate(keys):
            try:
                batches.setdefault(self._topology.server_for(some), []).append(index)
            except StoreError as error:
                answers[index] = error
        return batches

    async def _ask_each(
        self, batches: dict[Server, list[int]], questions: list[Question], answers: list[Any], deadline: float
    ) -> None:
        async def ask(server: Server, indices: list[int]) -> None:
            try:
                got = await server.ask([questions[index] for index in indices], deadline)
            except StoreError as error:
                got = [error] * len(indices)
            for index, answer in zip(indices, got, strict=True):
                answers[index] = answer

        if len(batches) == 1:
            await ask(*next(iter(batches.items())))
        else:
            await asyncio.gather(*(ask(server, indices) for server, indices in batches.items()))

    def _again(
        self, batches: dict[Server, list[int]], questions: list[Question], answers: list[Any]
    ) -> dict[Server, list[int]]:
        """What must be asked once more: scripts a server does not know, and what another node serves."""
        again: dict[Server, list[int]] = {}
        for server, indices in batches.items():
            for index in indices:
                answer = answers[index]
                target: Server | None = None
                if isinstance(answer, Moved):
                    target = self._topology.follow(answer)
                    questions[index] = questions[index]._replace(asking=answer.asking)
                    if target is None:
                        answers[index] = Refused(
                            f"{server.name} is a node of a cluster: its URL is redis+cluster://", "MOVED"
                        )
                elif isinstance(answer, Refused) and answer.code == "NOSCRIPT" and not questions[index].by_text:
                    target = server
                    questions[index] = questions[index]._replace(by_text=True)
                if target is not None:
                    again.setdefault(target, []).append(index)
        return again

    async def _keep(self) -> None:
        """Look after what is away until it is back, for ever."""
        while True:
            try:
                await self._look_after()
            except Exception:  # an answer that no server should give must not end the looking
                logger.exception("%s: the look-out failed", self.address)
                await asyncio.sleep(WATCH_SECONDS)

    async def _look_after(self) -> None:
        topology = self._topology
        while True:
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    await topology.wake.wait()
            except TimeoutError:
                await topology.watch()
            topology.wake.clear()
            while topology.troubled:
                delays = [server.breaker.probe_delay_seconds for server in topology.servers if server.breaker.opened]
                await asyncio.sleep(min(delays, default=0.1))
                await topology.mend(self._budget_seconds)


def _only(answers: list[Any]) -> Any:
    answer = answers[0]
    if isinstance(answer, StoreError):
        raise answer
    return answer

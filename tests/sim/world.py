"""One history: a gateway's own pipeline and edge between simulated clients and workers, all drawn from one seed."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from random import Random
from types import CoroutineType
from typing import Any
from unittest import mock

import uvicorn
from uvicorn.server import ServerState

from cachecore.holders import Epoch
from cachecore.index.memory import MemoryIndex
from cachecore.prompts.naming import PromptNamer
from cachecore.prompts.plain import PlainRenderer
from cachecore.scope import Keyring
from gateway.admission import Admission
from gateway.config import AdmissionConfig, BreakersConfig, HedgingConfig, PrioritiesConfig, ProbesConfig, WorkerConfig
from gateway.edge.contract import Deadlines
from gateway.edge.server import Edge, EdgeLimits, Inbound
from gateway.fleet import registry
from gateway.fleet.engines.contract import Discovery, ModelEntry
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.registry import Fleet
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.journey import Journey
from gateway.pipeline import Pipeline, PipelineSettings
from gateway.prompts import Prompts
from gateway.reliability.safeguards import Safeguards
from gateway.tenants import Tenants
from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import Receipts
from tests.sim.clients import BODY_BYTES_MAX, Client, draw_habits, draw_request
from tests.sim.loop import SimulatedLoop, Stuck
from tests.sim.network import Network, Weather
from tests.sim.watching import Watch, Watched
from tests.sim.workers import Worker

HISTORY_SECONDS_MAX = 300.0
SETTLING_SECONDS = 1.5
"""After the last client has gone: by then nothing may be left of any request."""
SILENCE_SECONDS = 6.0
"""And by then of those whose going cannot be noticed before their worker is given up."""
POLICIES = ("kv-aware", "round-robin", "least-loaded", "session", "prefix-aware")


@dataclass(frozen=True, slots=True)
class Climate:
    """What a whole history is like."""

    policy: str
    admission: bool
    requests_usage: bool
    hedges_after_ms: float | None
    total_seconds: float | None
    first_byte_seconds: float | None
    idle_seconds: float | None
    sweep_seconds: float
    workers: int
    clients: int
    faults: float
    pause_seconds_max: float
    restarts: int
    hangs: int
    shuts_down_at: float | None
    weather: Weather


def draw_climate(random: Random) -> Climate:
    window, piece = random.choice((65_536, 65_536, 4_000)), random.choice((65_536, 65_536, 400))
    return Climate(
        policy=random.choice(POLICIES),
        admission=random.random() < 0.5,
        requests_usage=random.random() < 0.4,
        hedges_after_ms=random.choice((None, None, None, 20.0, 200.0)),
        total_seconds=random.choice((None, None, None, None, 1.0)),
        first_byte_seconds=random.choice((4.0, None)),
        idle_seconds=random.choice((3.0, 3.0, None)),
        sweep_seconds=random.choice((0.2, 1.0)),
        workers=random.randint(1, 4),
        clients=random.randint(1, 6),
        faults=random.choice((0.0, 0.15, 0.5)),
        pause_seconds_max=random.choice((0.01, 0.1, 0.4)),
        restarts=random.choice((0, 0, 1, 3)),
        hangs=random.choice((0, 0, 1)),
        shuts_down_at=random.random() * 6 if random.random() < 0.08 else None,
        weather=Weather(random.choice((0.0005, 0.002, 0.05)), window, piece, random.choice((0.0, 0.5, 1.0))),
    )


class _Ordered(dict[Any, None]):
    """A set in the order of its members' coming, as addresses of objects differ from run to run."""

    def add(self, member: Any) -> None:
        self[member] = None

    def discard(self, member: Any) -> None:
        self.pop(member, None)


class WatchedHandler:
    """The pipeline, each of whose journeys is watched."""

    def __init__(self, pipeline: Pipeline, watch: Watch) -> None:
        self._pipeline = pipeline
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def owns(self, method: str, path: str) -> bool:
        return path != "/cold" and self._pipeline.owns(method, path)

    def begin(self, inbound: Inbound) -> Any:
        begun = self._pipeline.begin(inbound)
        return self._begin_later(begun) if isinstance(begun, CoroutineType) else self._watched(begun)

    async def _begin_later(self, begun: Any) -> Watched:
        return self._watched(await begun)

    def _watched(self, journey: Journey) -> Watched:
        return self._watch.watched(journey)


class World:
    def __init__(self, seed: int, loop: SimulatedLoop, narrate: Callable[[str], None] | None = None) -> None:
        self._narrate = narrate
        random = self.random = Random(seed)
        self.seed = seed
        self.loop = loop
        self.climate = climate = draw_climate(random)
        self.watch = Watch(legs_max=1 if climate.hedges_after_ms is None else 2)
        self._digest = blake2b(digest_size=16)
        self.network = loop.network = Network(loop, Random(random.random()), climate.weather, self._trace)
        self.workers = [self._worker(number) for number in range(climate.workers)]
        self.clients = [self._client(number) for number in range(climate.clients)]
        self.knowledge = Knowledge(MemoryIndex())
        self.metrics = GatewayMetrics()
        self.fleet = _fleet(self.knowledge, self._safeguards())
        self.restarted: list[Worker] = []
        self.shut_down = False
        for worker in self.workers:
            worker.listen()
            self._register(worker)
        self.admission = self._admission() if climate.admission else None
        self.pipeline = self._pipeline()
        deadlines = Deadlines(0.5, climate.first_byte_seconds, climate.idle_seconds)
        self.edge = Edge(
            WatchedHandler(self.pipeline, self.watch), EdgeLimits(BODY_BYTES_MAX, 100, 20.0, 20.0), deadlines
        )
        self.edge.connections = _Ordered()  # type: ignore[assignment]

    def _worker(self, number: int) -> Worker:
        climate = self.climate
        stalls = climate.idle_seconds is not None and climate.first_byte_seconds is not None
        return Worker(
            f"w{number}",
            9000 + number,
            Random(self.random.random()),
            climate.faults,
            stalls,
            climate.pause_seconds_max,
            self.network,
        )

    def _client(self, number: int) -> Client:
        random = Random(self.random.random())
        habits = draw_habits(random)
        asked = [
            draw_request(random, f"c{number}-{index}", habits.http10, habits.keep_alive)
            for index in range(random.randint(1, 4))
        ]
        return Client(f"c{number}", random, habits, asked)

    def _register(self, worker: Worker) -> None:
        """As probes would have found it."""
        record = WorkerRecord.of(WorkerConfig(url=f"http://worker:{worker.port}", name=worker.name))
        record.discovery = Discovery({"m": ModelEntry({"id": "m"})})
        record.epoch, record.healthy, record.reason = Epoch(1), True, ""
        record.holders = (record.holder(),)
        self.fleet.workers[record.name] = record
        self.fleet.safeguards.joined(record)
        pool = self.fleet.pools.setdefault("m", ModelPool("m", PlainRenderer()))
        pool.workers.append(record)

    def _safeguards(self) -> Safeguards:
        after_ms = self.climate.hedges_after_ms
        hedging = HedgingConfig(
            enabled=after_ms is not None, after_ms=after_ms, budget_share=1.0, budget_per_second_min=10.0
        )
        return Safeguards(BreakersConfig(), hedging=hedging, clock=self.loop.time, random=Random(self.random.random()))

    def _admission(self) -> Admission:
        config = AdmissionConfig(wait_seconds_max=8.0, requests_max=4)
        return Admission(config, PrioritiesConfig(), self.knowledge, self.metrics.refused, self.loop.time)

    def _pipeline(self) -> Pipeline:
        prompts = Prompts(Keyring({0: bytes(32)}, 0), PromptNamer(1 << 20), long_prompt_characters=3000)
        return Pipeline(
            PipelineSettings(
                self.climate.policy,
                False,
                False,
                requests_usage=self.climate.requests_usage,
                total_seconds=self.climate.total_seconds,
            ),
            self.fleet,
            self.knowledge,
            prompts,
            Tenants(None),
            self.metrics,
            Receipts(),
            admission=self.admission,
            clock=self.loop.time,
            random=Random(self.random.random()),
        )

    # Playing

    async def play(self) -> None:
        watch, climate = self.watch, self.climate
        owned = [
            asyncio.create_task(self.edge.sweep(climate.sweep_seconds)),
            asyncio.create_task(self._probe()),
            asyncio.create_task(self.fleet.safeguards.run(self.fleet.pools, self.knowledge.estimates)),
        ]
        self._schedule()
        try:
            async with asyncio.timeout(HISTORY_SECONDS_MAX):
                while not all(client.finished for client in self.clients):
                    await asyncio.sleep(0.5)
        except TimeoutError:
            hung = [client.name for client in self.clients if not client.finished]
            watch.violations.append(f"clients {hung} were never let go")
        await asyncio.sleep(SETTLING_SECONDS + max(client.undetectable for client in self.clients) * SILENCE_SECONDS)
        self._settled()
        if self.admission is not None:
            self.admission.close()
        for worker in self.workers:
            worker.stop()
        await asyncio.sleep(SETTLING_SECONDS)
        for task in owned:
            task.cancel()
        await asyncio.gather(*owned, return_exceptions=True)
        self._emptied()

    def _schedule(self) -> None:
        random, loop, climate = self.random, self.loop, self.climate
        for number, client in enumerate(self.clients):
            loop.call_later(client.habits.starts_at, self._connect, number)
        for _ in range(climate.restarts):
            loop.call_later(random.random() * 6, self._restart, random.choice(self.workers))
        for _ in range(climate.hangs):
            loop.call_later(random.random() * 6, random.choice(self.workers).hang, random.random() * 2)
        if climate.shuts_down_at is not None:
            loop.call_later(climate.shuts_down_at, self._shut_down)

    def _connect(self, number: int) -> None:
        client = self.clients[number]
        if self.shut_down:
            client.finished = True
            return
        protocol = self.edge.protocol(config=uvicorn_config(), server_state=ServerState(), app_state={})
        self.network.join(client, protocol, client.name)

    def _restart(self, worker: Worker) -> None:
        self.restarted.append(worker)
        worker.restart(self.random.random(), reset=self.random.random() < 0.5)

    def _shut_down(self) -> None:
        self.shut_down = True
        for connection in list(self.edge.connections):
            connection.shutdown()
        self.loop.call_later(self.random.random() * 2, self.edge.stop)

    async def _probe(self) -> None:
        """As `Fleet._watch` would: who is away is found out, and who is back in a new life."""
        while True:
            await asyncio.sleep(0.5)
            restarted, self.restarted = self.restarted, []
            for worker in restarted:
                record = self.fleet.workers[worker.name]  # type: ignore[index]
                for holder in record.holders:
                    self.knowledge.forget(holder)
                record.connections.close_idle()
                self.fleet.safeguards.reborn(record)
                record.epoch = Epoch(record.epoch + 1)
                record.holders = (record.holder(),)
            for worker in self.workers:
                record = self.fleet.workers[worker.name]  # type: ignore[index]
                record.healthy = True

    # When it is over

    def _settled(self) -> None:
        """No client is left: nothing may be left of what they asked."""
        say, knowledge = self.watch.violations.append, self.knowledge
        if len(knowledge.accounting) or any(account.inflight for account in knowledge.accounting.accounts()):
            say(f"in flight after the end: {knowledge.accounting}")
        if knowledge.accounting.unknown or knowledge.accounting.dropped:
            say(f"accounts of nobody: {knowledge.accounting.unknown}")
        if len(knowledge.prefills) or len(knowledge.arrivals):
            say(f"leases after the end: {knowledge.prefills} {knowledge.arrivals}")
        if self.admission is not None and (self.admission.held.requests or self.admission.held.bytes):
            say(f"still waiting: {self.admission.held}")
        for record in self.fleet.workers.values():
            if len(record.connections) != record.connections.idle:
                say(f"connections to {record.name} that nobody uses: {record.connections._open}")
        if self.edge.connections:
            say(f"client connections after the end: {list(self.edge.connections)}")
        answered = sum(journey.status == 200 for journey in self.watch.journeys)
        if len(knowledge.predictions) > answered:
            say(f"{len(knowledge.predictions)} predictions after {answered} answers")
        knowledge.predictions.expire(self.loop.time() + 1e6)
        knowledge.inexact_predictions.expire(self.loop.time() + 1e6)
        if len(knowledge.predictions) or len(knowledge.inexact_predictions):
            say(f"predictions that never expire: {knowledge.predictions}")
        self.metrics.settle()
        if sum(self.metrics.endings.values()) != len(self.watch.journeys):
            say(f"{len(self.watch.journeys)} requests, but {self.metrics.endings} endings")

    def _emptied(self) -> None:
        say = self.watch.violations.append
        if self.network.ends:
            say(f"open ends: {list(self.network.ends)}")
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            say(f"tasks after the end: {left}")

    def _trace(self, who: str, what: str, data: bytes) -> None:
        self._digest.update(f"{self.loop.time():.9f} {who} {what} {len(data)}\n".encode())
        if self._narrate is not None:
            self._narrate(f"{self.loop.time():.6f} {who} {what} {len(data)} {data[:120]!r}")
        self.watch.happened(who, what, data, self.network)

    def digest(self) -> str:
        """Of all that happened, and of all that the clients got."""
        for client in self.clients:
            for asked in client.requests:
                said = f"{asked.marker} {asked.status} {asked.complete} {asked.interim} {asked.ended_at}\n"
                self._digest.update(said.encode() + asked.content)
        return self._digest.hexdigest()


def _fleet(knowledge: Knowledge, safeguards: Safeguards) -> Fleet:
    # Nobody is asked anything over HTTP, and a client for it takes longer to make than a history to play.
    with mock.patch.object(registry.httpx, "AsyncClient"):
        return Fleet(ProbesConfig(), {}, knowledge, mock.Mock(), safeguards=safeguards)


@cache
def uvicorn_config() -> uvicorn.Config:
    config = uvicorn.Config(
        _application, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
    )
    config.load()
    return config


async def _application(scope: Any, receive: Any, send: Any) -> None:
    """Echoes the body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Records(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self._kept.append(f"logged: {record.getMessage()}{cause}")


@contextmanager
def _records(kept: list[str]) -> Iterator[None]:
    handler = _Records(kept)
    loggers = [logging.getLogger(name) for name in ("ropeway", "uvicorn", "asyncio")]
    levels = [(logger, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, propagate, level in levels:
            logger.removeHandler(handler)
            logger.propagate = propagate
            logger.setLevel(level)


def play(seed: int, narrate: Callable[[str], None] | None = None) -> World:
    """Play the history of a seed to its end; `narrate` is told all that happens."""
    loop = SimulatedLoop()
    problems: list[str] = []
    loop.set_exception_handler(lambda _, context: problems.append(f"unhandled: {context}"))
    with _records(problems), closing(loop):
        world = World(seed, loop, narrate)
        try:
            loop.run_until_complete(world.play())
        except Stuck:
            problems.append("somebody waits for what will never come")
    world.watch.violations += problems
    return world

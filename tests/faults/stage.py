"""Real processes that things befall: workers, each behind a faulty network, a Valkey behind another, a gateway.

Every life of a worker appends to the same access log, which tells what it was asked even when it was killed.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from cachecore.scope import Keyring
from gateway.chaos import FREEZE, KILL, Target
from tests.cachecore.store.proxy import FaultProxy
from tests.cachecore.store.servers import Server, start_server
from tests.faults.books import Attempt
from tests.faults.questions import TENANTS
from tests.gateway.end_to_end.processes import REPOSITORY, Fleet, Gateway, eventually, free_ports, new_keyring
from tests.gateway.end_to_end.sharing import sharing_config
from workers.simulated.access_log import read_entry

CUT, END, REFUSE, SILENCE, NARROW, SLOW, EMPTY = "cut", "end", "refuse", "silence", "narrow", "slow", "empty"
PATH = "/v1/chat/completions"
READY_SECONDS_MAX = 90.0
NARROW_BYTES_PER_SECOND = 6_000
SLOW_SECONDS = 0.15


class Lifetime(Fleet):
    """Of one worker. It may end before it is ready."""

    def __init__(self, directory: Path, *flags: str, ports: range, name: str) -> None:
        self.began_ns = time.time_ns()
        super().__init__(directory, *flags, ports=ports, name=name)

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Not when it is made."""


class Member(Target):
    """One worker, in whatever life."""

    def __init__(self, stage: "Stage", number: int, flags: tuple[str, ...]) -> None:
        self.name = f"worker-{number}"
        self.access_log = stage.directory / f"{self.name}.jsonl"
        self.kills = 0
        self.frozen_at: list[tuple[float, float]] = []
        """On the wall clock, from when until when."""
        self.proxy: FaultProxy | None = None
        self._stage = stage
        self._flags = (*flags, "--access-log", str(self.access_log))
        self._ports = free_ports(1)
        self._fleet: Lifetime | None = None

    @property
    def fleet(self) -> "Lifetime":
        assert self._fleet is not None
        return self._fleet

    def start(self) -> None:
        """It is ready later."""
        name = f"{self.name}-{self.kills}"
        self._fleet = Lifetime(self._stage.directory, *self._flags, ports=self._ports, name=name)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.fleet.process.poll() is None, f"{self.name} has ended:\n{self.fleet.tail()}"
            return "ready http" in self.fleet.said()

        eventually(ready, f"{self.name} is ready", READY_SECONDS_MAX)

    async def connect(self) -> FaultProxy:
        self.proxy = FaultProxy(self._ports[0])
        await self.proxy.listen()
        return self.proxy

    def strike(self, kind: str) -> None:
        if kind == KILL:
            self.kills += 1
            self.fleet.kill()
        else:
            self.frozen_at.append((time.time(), float("inf")))
            self.fleet.freeze()

    def mend(self, kind: str) -> None:
        if kind == KILL:
            if self.fleet.process.poll() is not None:
                self.start()
        else:
            self.fleet.thaw()
            self.frozen_at[-1] = (self.frozen_at[-1][0], time.time())

    def was_frozen(self, start: float, end: float) -> bool:
        return any(began < end and over > start for began, over in self.frozen_at)

    def attempts(self) -> Iterator[Attempt]:
        """Every request for clients that any of its lives received."""
        entries = [read_entry(line) for line in self.access_log.read_bytes().splitlines()]
        ended = {(entry.epoch, entry.number): entry for entry in entries if entry.event == "ended"}
        for entry in entries:
            if entry.event == "received" and entry.path == PATH:
                end = ended.get((entry.epoch, entry.number))
                lives = entry.epoch > self.fleet.began_ns  # epochs are times
                stood_still = self.was_frozen(entry.at, end.at if end else float("inf"))
                yield Attempt(self.name, entry, end, lives, stood_still)


class Link(Target):
    """The way to a server."""

    def __init__(self, stage: "Stage", proxy: FaultProxy) -> None:
        self._stage = stage
        self._proxy = proxy

    def strike(self, kind: str) -> None:
        proxy = self._proxy
        if kind == CUT:
            proxy.cut()
        elif kind == END:
            proxy.end_answers()
        elif kind == REFUSE:
            self._stage.do_later(proxy.close())
        elif kind == SILENCE:
            proxy.silent = True
        elif kind == NARROW:
            proxy.bytes_per_second = NARROW_BYTES_PER_SECOND
        else:
            assert kind == SLOW
            proxy.latency_seconds = SLOW_SECONDS

    def mend(self, kind: str) -> None:
        if kind == REFUSE:
            self._stage.do_later(self._proxy.listen())
        self._proxy.silent = False
        self._proxy.bytes_per_second = float("inf")
        self._proxy.latency_seconds = 0.0


class Store(Target):
    """The Valkey."""

    def __init__(self, stage: "Stage", server: Server) -> None:
        self._stage = stage
        self._server = server

    def strike(self, kind: str) -> None:
        if kind == FREEZE:
            self._server.freeze()
        else:
            self._server.kill()

    def mend(self, kind: str) -> None:
        if kind == FREEZE:
            self._server.thaw()
        else:
            self._stage.do_later(asyncio.to_thread(self._server.restart, empty=kind == EMPTY))


class Stage:
    """`async with Stage(...) as stage:`, then strike and mend its `targets`; `heal` makes everything whole again."""

    def __init__(self, directory: Path, workers: int, flags: tuple[str, ...], config: Mapping[str, Any]) -> None:
        self.directory = directory
        keyring = new_keyring(directory)
        self.keyring = Keyring.load(keyring)
        self.members = [Member(self, n, (*flags, "--keyring", str(keyring))) for n in range(1, workers + 1)]
        self.targets: dict[str, Target] = {member.name: member for member in self.members}
        self._config = config
        self._keyring_file = keyring
        self._keys_file = directory / "keys.jsonl"
        self.keys: dict[str, str] = {}
        """Of each tenant."""
        self._proxies: list[FaultProxy] = []
        self._under_way: set[asyncio.Task[Any]] = set()
        self._gateway: Gateway | None = None
        self._server: Server | None = None

    @property
    def gateway(self) -> Gateway:
        assert self._gateway is not None
        return self._gateway

    async def __aenter__(self) -> "Stage":
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self) -> None:
        for member in self.members:
            member.start()
        await self._wait_ready()
        urls = []
        for member in self.members:
            proxy = await member.connect()
            self._add_link(f"link-{member.name}", proxy)
            urls.append(f"http://127.0.0.1:{proxy.port}")
        self._server = await asyncio.to_thread(start_server, self.directory)
        self.targets["valkey"] = Store(self, self._server)
        store = FaultProxy(self._server.port)
        await store.listen()
        self._add_link("link-valkey", store)
        sharing = sharing_config(store.url, self._keyring_file, "a", lease_seconds=0.6)
        self.keys = {tenant: await asyncio.to_thread(self._new_key, tenant) for tenant in TENANTS}
        config = {**self._config, **sharing, "tenants": {"api_keys_file": str(self._keys_file)}}
        self._gateway = await asyncio.to_thread(Gateway, self.directory, urls, config)

    def _new_key(self, tenant: str) -> str:
        command = [sys.executable, "-m", "ropeway", "keys", "new", "--tenant", tenant, "--file", str(self._keys_file)]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()

    async def _wait_ready(self) -> None:
        for member in self.members:
            await asyncio.to_thread(member.wait_ready)

    def _add_link(self, name: str, proxy: FaultProxy) -> None:
        self._proxies.append(proxy)
        self.targets[name] = Link(self, proxy)

    def do_later(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def heal(self) -> None:
        """Everybody lives and is well connected; returns when the gateway knows it. Raises what starting raised."""
        await asyncio.gather(*self._under_way)
        for member in self.members:
            if member.fleet.process.poll() is not None:
                member.start()
        await self._wait_ready()
        assert self._server is not None
        if self._server.process.poll() is not None:
            await asyncio.to_thread(self._server.restart)
        await asyncio.to_thread(
            self.gateway.wait_for, lambda: self.gateway.healthy() == len(self.members), "all workers healthy"
        )

    async def stop(self) -> None:
        await asyncio.gather(*self._under_way, return_exceptions=True)
        if self._gateway is not None:
            await asyncio.to_thread(self._gateway.stop)
        for proxy in self._proxies:
            await proxy.close()
        if self._server is not None:
            self._server.stop()
        for member in self.members:
            if member._fleet is not None:
                member._fleet.thaw()
                await asyncio.to_thread(member._fleet.kill)

    def attempts(self) -> list[Attempt]:
        return [attempt for member in self.members for attempt in member.attempts()]

    def tenant_of(self, salt: str) -> str | None:
        """None for one that is not the gateway's."""
        read = self.keyring.read_salt(salt)
        return read.key_id.tenant if read is not None else None

    def gateway_cpu_seconds(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.gateway.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metrics(self) -> dict[str, float]:
        """The gateway's samples, each under its name and labels."""
        lines = self.gateway.operator.get("/metrics").raise_for_status().text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def running(self, member: Member) -> float:
        """Requests that the worker itself runs or has waiting."""
        text = httpx.get(f"{member.fleet.urls[0]}/metrics", trust_env=False).text
        wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(wanted))

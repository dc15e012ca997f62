"""Which server a key is asked of: always the same one, the master that sentinels name, or the owner of its slot.

A cluster's map is read whole (CLUSTER SLOTS) at the start, when a node points elsewhere (MOVED) and while a node is
away; in between it is corrected slot by slot from the redirections themselves. Sentinels are asked for each new
connection, and every second: a master that they have replaced takes writes for some seconds more if one lets it.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from cachecore.store.address import Address
from cachecore.store.breaker import Breaker
from cachecore.store.errors import Endpoint, Moved, Refused, StoreError, Unavailable
from cachecore.store.server import CONNECT_SECONDS, Server
from cachecore.store.slots import SLOTS, key_slot
from cachecore.store.wire import Credentials, Question, Wire, dial

SENTINEL_SECONDS = 0.5
WATCH_SECONDS = 1.0


class Topology(Protocol):
    """`wake` is set when something is to be mended; `mend` is called until `troubled` is False."""

    wake: asyncio.Event

    @property
    def servers(self) -> Iterable[Server]: ...

    @property
    def troubled(self) -> bool: ...

    def server_for(self, keys: Sequence[bytes]) -> Server:
        """Raises StoreError when no one server serves all the keys."""
        ...

    def follow(self, error: Moved) -> Server | None:
        """Where the answer points to; None when it may not be followed."""
        ...

    def group(self, keys: Sequence[bytes]) -> list[list[int]]: ...

    async def mend(self, budget_seconds: float) -> None: ...

    async def watch(self) -> None:
        """Called every WATCH_SECONDS while nothing is to be mended."""
        ...

    async def close(self) -> None: ...


class Dialler:
    """Makes the connections to whatever the address means."""

    def __init__(self, address: Address, replaced: Callable[[], None] = lambda: None) -> None:
        """`replaced` is called when the master is another one than that of the connections before."""
        self.address = address
        self._replaced = replaced
        self._tls = address.tls_context()
        self._credentials = Credentials(address.username, address.password)
        self._sentinels = list(address.endpoints)
        self.current: Endpoint | None = None
        """The master that was connected to last."""

    async def server(self) -> Wire:
        address = self.address
        return await self.place(address.path or address.endpoints[0])

    async def place(self, place: Endpoint | str) -> Wire:
        return await _dial(place, self._credentials, self._tls, self.address.database)

    async def master(self) -> Wire:
        """Of the service, by the sentinels' word and its own."""
        place = await self.ask_sentinels()
        wire = await self.place(place)
        if wire.facts.get(b"role") != b"master":
            wire.close()
            raise Unavailable(f"{place}: the sentinels' master of {self.address.service!r} is not one (yet)")
        if self.current not in (None, place):
            self._replaced()
        self.current = place
        return wire

    async def ask_sentinels(self) -> Endpoint:
        reasons = []
        for sentinel in list(self._sentinels):
            try:
                place = await self._ask_sentinel(sentinel)
            except StoreError as error:
                reasons.append(str(error))
            else:
                self._sentinels.remove(sentinel)
                self._sentinels.insert(0, sentinel)
                return place
        raise Unavailable("no sentinel knows the master: " + "; ".join(reasons))

    async def _ask_sentinel(self, sentinel: Endpoint) -> Endpoint:
        try:
            wire = await _dial(sentinel, Credentials(), self._tls, seconds=SENTINEL_SECONDS)
        except Refused as error:
            if error.code != "NOAUTH":
                raise
            wire = await _dial(sentinel, self._credentials, self._tls, seconds=SENTINEL_SECONDS)
        try:
            question = Question(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.address.service or ""))
            answer = (await wire.exchange([question], _from_now(SENTINEL_SECONDS)))[0]
        finally:
            wire.close()
        if isinstance(answer, StoreError):
            raise answer
        if answer is None:
            raise Unavailable(f"{sentinel}: no service {self.address.service!r}")
        return Endpoint(answer[0].decode(), int(answer[1]))


def _from_now(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def _dial(
    place: Endpoint | str,
    credentials: Credentials,
    tls: ssl.SSLContext | None,
    database: int = 0,
    seconds: float = CONNECT_SECONDS,
) -> Wire:
    return await dial(place, credentials, seconds=seconds, tls=tls, database=database)


class OneServer:
    """A single server, or the master of a service."""

    def __init__(self, address: Address, breaker: Breaker) -> None:
        self._dialler = dialler = Dialler(address, lambda: self._server.sever())
        self._guarded = address.kind == "sentinel"
        self.wake = asyncio.Event()
        connect = dialler.master if self._guarded else dialler.server
        self._server = Server(str(address), connect, breaker, self.wake.set)
        self.servers = (self._server,)

    @property
    def troubled(self) -> bool:
        return self._server.breaker.opened

    def server_for(self, keys: Sequence[bytes]) -> Server:
        return self._server

    def follow(self, error: Moved) -> Server | None:
        return None

    def group(self, keys: Sequence[bytes]) -> list[list[int]]:
        return [list(range(len(keys)))] if keys else []

    async def mend(self, budget_seconds: float) -> None:
        await self._server.probe(budget_seconds)

    async def watch(self) -> None:
        if self._guarded and self._dialler.current is not None:
            with contextlib.suppress(StoreError):
                if await self._dialler.ask_sentinels() != self._dialler.current:
                    self._server.sever()

    async def close(self) -> None:
        await self._server.close()


class Cluster:
    def __init__(self, address: Address, breaker: Breaker) -> None:
        self.wake = asyncio.Event()
        self._address = address
        self._breaker = breaker
        self._dialler = Dialler(address)
        self._nodes: dict[Endpoint, Server] = {}
        """The masters."""
        self._others: list[Endpoint] = list(address.endpoints)
        """Where to ask for the map when no master answers: replicas, and where the URL says to begin."""
        self._owners: list[Server | None] = [None] * SLOTS
        self._stale = True
        self._reason = "its map was never read"

    @property
    def servers(self) -> Iterable[Server]:
        return self._nodes.values()

    @property
    def troubled(self) -> bool:
        return self._stale or any(node.breaker.opened for node in self._nodes.values())

    def server_for(self, keys: Sequence[bytes]) -> Server:
        slot = key_slot(keys[0]) if keys else 0
        for key in keys[1:]:
            if key_slot(key) != slot:
                raise Refused("CROSSSLOT the keys of one call lie in several slots of the cluster", "CROSSSLOT")
        owner = self._owners[slot]
        if owner is None:
            self._suspect()
            raise Unavailable(f"{self._address}: nobody serves slot {slot} ({self._reason})")
        return owner

    def follow(self, error: Moved) -> Server | None:
        node = self._node(error.endpoint)
        if not error.asking:
            self._owners[error.slot] = node
            self._suspect()
        return node

    def group(self, keys: Sequence[bytes]) -> list[list[int]]:
        slots: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            slots.setdefault(key_slot(key), []).append(index)
        return list(slots.values())

    async def mend(self, budget_seconds: float) -> None:
        away = [node for node in self._nodes.values() if node.breaker.opened]
        await asyncio.gather(self._read_map(), *(node.probe(budget_seconds) for node in away))

    async def watch(self) -> None:
        pass  # redirections tell

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    def _suspect(self) -> None:
        self._stale = True
        self.wake.set()

    def _node(self, endpoint: Endpoint) -> Server:
        node = self._nodes.get(endpoint)
        if node is None:

            async def connect() -> Wire:
                return await self._dialler.place(endpoint)

            node = self._nodes[endpoint] = Server(str(endpoint), connect, self._breaker.fresh(), self.wake.set)
        return node

    async def _read_map(self) -> None:
        """From the first node that gives one, those that answer lately first."""
        sound = [endpoint for endpoint, node in self._nodes.items() if not node.breaker.failures]
        for endpoint in dict.fromkeys([*sound, *self._others, *self._nodes]):
            try:
                await self._apply_map(await self._fetch_map(endpoint), endpoint)
            except StoreError as error:
                self._reason = str(error)
            else:
                self._stale = False
                return

    async def _fetch_map(self, endpoint: Endpoint) -> list[Any]:
        wire = await self._dialler.place(endpoint)
        try:
            answer = (await wire.exchange([Question(("CLUSTER", "SLOTS"))], _from_now(CONNECT_SECONDS)))[0]
        finally:
            wire.close()
        if isinstance(answer, StoreError):
            raise answer
        if not answer:
            raise Unavailable(f"{endpoint}: it knows no slots")
        return list(answer)

    async def _apply_map(self, ranges: list[Any], source: Endpoint) -> None:
        owners: list[Server | None] = [None] * SLOTS
        others = list(self._address.endpoints)
        masters = set()
        for first, last, master, *replicas in ranges:
            endpoint = _endpoint(master, source)
            masters.add(endpoint)
            owners[first : last + 1] = [self._node(endpoint)] * (last + 1 - first)
            others += [_endpoint(replica, source) for replica in replicas]
        self._owners, self._others = owners, others
        gone = [self._nodes.pop(endpoint) for endpoint in set(self._nodes) - masters]
        await asyncio.gather(*(node.close() for node in gone))


def _endpoint(entry: list[Any], source: Endpoint) -> Endpoint:
    """Of a node in CLUSTER SLOTS: an unknown host is the one that was asked."""
    host = entry[0].decode() if entry[0] else ""
    return Endpoint(source.host if host in ("", "?") else host, int(entry[1]))

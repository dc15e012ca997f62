"""The directory of workers that gateways share: what is registered with one is known to all.

Workers of a gateway's configuration file are its own and are not listed. What the admin API registers is, in one hash,
with a lease that any gateway renews that finds the worker well. The workers of the directory are put into the fleet,
and taken out of it, of every gateway.

* Removals are entries too, kept as long as a lease. An entry that is absent was lost with its server, and whoever knows
  the worker lists it again; only a gateway that was away longer than removals are kept, while others were not, believes
  that it has missed one.
* While the server is away, changes hold here and are passed on when it is back.
* Where names or URLs collide the worker that is there already stays. A configured one goes only where it was listed as
  well, and was removed rather than forgotten.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import orjson

from cachecore.store import Call, Script, StoreError
from gateway.config import WorkerConfig
from gateway.errors import NotFound, ServiceError
from gateway.fleet.worker import WorkerRecord

logger = logging.getLogger("ropeway.directory")

LEASE_SECONDS = 600.0
READ_SECONDS = 1.0
_TURNS_PER_LEASE = 10
_BUDGET_SECONDS = 0.5
_SCRIPT = Script.load(Path(__file__).with_name("directory.lua"))


class DirectoryStore(Protocol):
    """What is used of `cachecore.store.RedisStore`."""

    async def run(self, call: Call, budget_seconds: float | None = None) -> Any: ...

    async def command(self, *parts: bytes | str | int, budget_seconds: float | None = None) -> Any: ...


class Membership(Protocol):
    """What is used of `gateway.fleet.registry.Fleet`."""

    @property
    def workers(self) -> Mapping[str, WorkerRecord]: ...

    async def register(self, config: WorkerConfig) -> WorkerRecord: ...

    async def remove(self, name: str) -> None: ...

    async def drain(self, name: str, draining: bool) -> bool: ...


class DirectoryStats(NamedTuple):
    shared: int
    """Workers known by the directory, here or elsewhere."""
    pending: int
    """Changes that are not in the directory yet."""
    malformed: int
    """Entries that make no sense."""
    refused: int
    """Workers that could not be taken in."""
    problem: str
    """Why the directory could not be reached; empty when it could."""


class _Removal(msgspec.Struct, frozen=True):
    removed: bool = False
    expired: bool = False


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(WorkerConfig) if field.name != "name"}


class _Entry(msgspec.Struct, frozen=True):
    """A value of the hash; `removed` says that there is no such worker any longer."""

    settings: Mapping[str, Any] = {}
    """Of a worker's configuration what is not as always, but its name."""
    removed: bool = False
    expired: bool = False
    """Removed since nobody found it well."""

    @classmethod
    def of(cls, config: WorkerConfig) -> "_Entry":
        stated = msgspec.to_builtins(config)
        settings = {key: stated[key] for key, default in _DEFAULTS.items() if stated[key] != default}
        return cls({**settings, "url": config.url.rstrip("/")})

    @classmethod
    def read(cls, document: bytes) -> "_Entry":
        """Raises ValueError (msgspec.ValidationError is one)."""
        values = msgspec.json.decode(document, type=dict[str, Any])
        removal = msgspec.convert(values, _Removal)
        # What a later version has written besides is nothing to this one.
        settings = {key: value for key, value in values.items() if key in _DEFAULTS}
        return cls(settings, removal.removed, removal.expired)

    def config(self, name: str) -> WorkerConfig:
        """Raises ValueError."""
        return msgspec.convert({**self.settings, "name": name}, WorkerConfig)


class _Change(NamedTuple):
    mode: str
    """`put`, or `offer` where it must not replace anything."""
    document: bytes


_REMOVED = _Change("put", orjson.dumps({"removed": True}))


class Directory:
    """See the module's opening. `run` has to run for others' changes to be seen.

    `announce` tells the other gateways that there is something to read (`Peers.announce_directory_change`), and theirs
    call `changed` here. `register` and `remove` take the place of the fleet's own in the admin API.
    """

    def __init__(
        self,
        store: DirectoryStore,
        prefix: str,
        fleet: Membership,
        configured: Iterable[WorkerConfig] = (),
        announce: Callable[[], None] | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._store = store
        self._key = f"{prefix}:{{fleet}}:workers".encode()
        self._fleet = fleet
        self._announce = announce
        self._lease_seconds = lease_seconds
        self.configure(configured)
        self._shared: dict[str, _Entry] = {}
        """What the directory was last seen, or made, to say of the workers in it."""
        self._pending: dict[str, _Change] = {}
        self._raw: list[bytes] | None = None
        """The hash as it was read last."""
        self._swept_at = self._read_at = float("-inf")
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._malformed = self._refused = 0
        self._problem = ""

    def configure(self, configured: Iterable[WorkerConfig]) -> None:
        """Other workers are this gateway's own from now on."""
        self._configured = {WorkerRecord.of(config).name for config in configured}

    def changed(self) -> None:
        """Another gateway has changed the directory."""
        self._changed.set()

    def stats(self) -> DirectoryStats:
        return DirectoryStats(len(self._shared), len(self._pending), self._malformed, self._refused, self._problem)

    async def register(self, config: WorkerConfig) -> WorkerRecord:
        """Add a worker to this gateway and all others. Raises ServiceError as `Fleet.register` does."""
        async with self._turn:
            record = await self._fleet.register(config)
            for name, entry in list(self._shared.items()):
                if entry.settings.get("url") == record.url and name != record.name:
                    self._forget(name)
            entry = _Entry.of(config)
            self._list(record.name, entry, "put")
            await self._pass_on()
            return record

    async def remove(self, name: str) -> None:
        """Take a worker from this gateway and all others. Raises NotFound."""
        async with self._turn:
            if name in self._fleet.workers:
                await self._fleet.remove(name)
            elif name not in self._shared:
                raise NotFound(f"there is no worker {name!r}")
            self._forget(name)
            await self._pass_on()

    async def drain(self, name: str, draining: bool) -> bool:
        """Send a worker no new requests, or do so again. Whether all gateways do, as with workers of the directory: of
        a configuration file's each gateway is told for itself. Raises NotFound."""
        async with self._turn:
            await self._fleet.drain(name, draining)
            shared = name in self._shared
            if shared:
                self._list(name, _Entry.of(self._fleet.workers[name].config), "put")
                await self._pass_on()
            return shared

    async def run(self) -> None:
        """Read what others change, and renew leases, until cancelled."""
        interval = min(READ_SECONDS, self._lease_seconds / _TURNS_PER_LEASE)
        while True:
            try:
                await self._take_turn()
            except Exception:
                logger.exception("reading the directory of workers failed; trying again")
            timer = asyncio.get_running_loop().call_later(interval, self._changed.set)
            await self._changed.wait()
            timer.cancel()
            self._changed.clear()

    async def _take_turn(self) -> None:
        async with self._turn:
            now = asyncio.get_running_loop().time()
            sweep = now - self._swept_at >= self._lease_seconds / _TURNS_PER_LEASE
            if (self._pending or sweep) and not await self._pass_on():
                return
            try:
                raw = await self._store.command(b"HGETALL", self._key, budget_seconds=_BUDGET_SECONDS)
            except StoreError as error:
                self._failed(error)
                return
            away, self._read_at = now - self._read_at, now
            if raw != self._raw:
                self._raw = raw
                await self._apply(_pairs(raw), away < self._lease_seconds)

    # Telling

    def _list(self, name: str, entry: _Entry, mode: str) -> None:
        self._shared[name] = entry
        self._pending[name] = _Change(mode, orjson.dumps(entry.settings))

    def _forget(self, name: str) -> None:
        self._shared.pop(name, None)
        self._pending[name] = _REMOVED

    async def _pass_on(self) -> bool:
        """Write what has changed here, and renew leases. False when the server is away; it is tried again later."""
        pending = dict(self._pending)
        changes = [part for name, (mode, document) in pending.items() for part in (name, mode, document)]
        well = [name for name in self._shared if (worker := self._fleet.workers.get(name)) and worker.healthy]
        arguments: list[bytes | int | str] = [int(self._lease_seconds * 1000), len(pending), *changes, *well]
        try:
            await self._store.run(Call(_SCRIPT, [self._key], arguments), budget_seconds=_BUDGET_SECONDS)
        except StoreError as error:
            self._failed(error)
            return False
        self._problem = ""
        self._swept_at = asyncio.get_running_loop().time()
        self._pending.clear()  # nothing was added meanwhile: turns are taken one at a time
        if pending and self._announce is not None:
            self._announce()
        return True

    def _failed(self, error: StoreError) -> None:
        if not self._problem:
            logger.warning("the directory of workers cannot be reached: %s", error)
        self._problem = str(error)

    # Hearing

    async def _apply(self, listed: Mapping[str, bytes], recent: bool) -> None:
        """Bring the fleet in line. `recent`: no removal can have been missed, so what is absent was lost."""
        for name, document in listed.items():
            try:
                entry = _Entry.read(document)
                config = None if entry.removed else entry.config(name)
            except ValueError:
                self._malformed += 1
                continue
            if config is None:
                await self._take_out(name, entry.expired)
            else:
                await self._take_in(name, entry, config)
        for name, entry in [(name, entry) for name, entry in self._shared.items() if name not in listed]:
            if recent or not listed:
                self._list(name, entry, "offer")
                self._changed.set()
            else:
                await self._take_out(name, expired=True)

    async def _take_in(self, name: str, entry: _Entry, config: WorkerConfig) -> None:
        record = self._fleet.workers.get(name)
        if record is not None and _meaning(record.config) == _meaning(config):
            if record.draining != config.draining:
                await self._fleet.drain(name, config.draining)
            self._shared[name] = entry
            return
        taken = any(
            worker.url == config.url.rstrip("/") for worker in self._fleet.workers.values() if worker.name != name
        )
        if taken or (record is not None and name in self._configured):
            self._refused += 1
            return
        try:
            await self._fleet.register(config)
        except ServiceError as error:
            logger.warning("worker %s of the directory: %s", name, error)
            self._refused += 1
            return
        self._shared[name] = entry

    async def _take_out(self, name: str, expired: bool) -> None:
        known = self._shared.pop(name, None) is not None
        if known and name in self._fleet.workers and not (expired and name in self._configured):
            await self._fleet.remove(name)


def _meaning(config: WorkerConfig) -> Mapping[str, Any]:
    """What makes it another worker."""
    return _Entry.of(msgspec.structs.replace(config, draining=False)).settings


def _pairs(raw: list[bytes]) -> dict[str, bytes]:
    """The hash by name. Names that are not text are nobody's."""
    return {name.decode(): value for name, value in zip(raw[::2], raw[1::2], strict=True) if _is_text(name)}


def _is_text(name: bytes) -> bool:
    try:
        return bool(name.decode())
    except UnicodeDecodeError:
        return False

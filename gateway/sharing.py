"""What a gateway has only where it shares an index: the store, the mirror, leases, peers, the directory of workers.

Made whole by the composition root (`gateway.server`), started before the first worker is registered and stopped after
the last request. Once the mirror is loaded no request waits for any of it.
"""

import asyncio
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cachecore.index.epochs import SharedEpochs
from cachecore.index.leases import Leases
from cachecore.index.mirror import MirrorIndex
from cachecore.index.publisher import Publisher
from cachecore.index.redis import RedisIndex, SharedIndex
from cachecore.index.schema import Schema
from cachecore.scope import Keyring
from cachecore.store import EmbeddedValkey, RedisStore, StoreError, parse_address
from gateway.config import GatewayConfig
from gateway.errors import StartupError
from gateway.fleet.agreement import Disagreement, agree
from gateway.fleet.directory import Directory
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.ownership import LeasedStreams
from gateway.fleet.peers import Peers, PeersStats
from gateway.fleet.registry import Fleet
from gateway.fleet.streams import Intakes, NamingFor
from gateway.fleet.sweeper import Sweeper

logger = logging.getLogger("ropeway.sharing")

SETTLE_SECONDS = 5.0
"""Between two assertions of the workers' lives, and two looks for what nobody holds any more."""


class IndexBackend:
    """The index that a fleet shares, as one gateway has it, and the server behind it.

    Made first: the rest of the gateway is built on `index`.
    """

    def __init__(self, config: GatewayConfig, keyring: Keyring) -> None:
        sharing = config.sharing
        self._keyring = keyring
        self.gateway = sharing.gateway or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.lookups = sharing.lookups
        self.schema = Schema(sharing.prefix)
        self._embedded = EmbeddedValkey(embedded_directory(config)) if config.redis == "embedded" else None
        address = self._embedded.address if self._embedded is not None else parse_address(config.redis)
        self.store = RedisStore(address, budget_seconds=sharing.budget_ms / 1e3)
        self.publisher = Publisher(
            self.store,
            self.schema,
            blocks_max=config.index.blocks_max,
            stream_length_max=sharing.stream_entries_max,
        )
        direct = RedisIndex(self.store, self.schema, self.publisher)
        self.index: SharedIndex = direct
        self.mirror: MirrorIndex | None = None
        if sharing.lookups == "mirror":
            self.index = self.mirror = MirrorIndex(
                self.store, self.schema, self.publisher, direct, config.index.blocks_max
            )
        self.epochs = SharedEpochs(self.store, self.schema)
        self.leases = Leases(self.store, self.schema, self.gateway, sharing.lease_seconds)

    async def start(self) -> None:
        """A server elsewhere may come later. Raises StartupError when the embedded one does not start, and Disagreement
        when the server's index is another fleet's."""
        if self._embedded is not None:
            try:
                await self._embedded.start()
            except StoreError as error:
                raise StartupError(f"redis: embedded: {error}") from None
        await self.store.start()
        try:
            await agree(self.store, self.schema, self._keyring)
            logger.info("sharing the index as %s through %s", self.gateway, self.store.address)
        except StoreError as error:
            logger.warning("serving without %s until it can be reached: %s", self.store.address, error)
        except Disagreement:
            await self.stop()
            raise
        if self.mirror is not None:
            self.mirror.start()

    async def check(self) -> None:
        """See that the index is still this fleet's: the server may have come late, or have lost its data.

        Raises StoreError.
        """
        try:
            await agree(self.store, self.schema, self._keyring)
        except Disagreement as error:
            logger.error("nothing that is shared can be used here: %s", error)

    async def keep(self) -> None:
        """See to it that the embedded server runs; nothing to do for one elsewhere."""
        if self._embedded is not None:
            await self._embedded.keep()

    async def stop(self) -> None:
        if self.mirror is not None:
            await self.mirror.stop()
        await self.store.close()
        if self._embedded is not None:
            await self._embedded.stop()


class Sharing:
    """A gateway among others: who follows which events, who has dispatched what, which workers there are."""

    def __init__(
        self,
        backend: IndexBackend,
        knowledge: Knowledge,
        naming_for: NamingFor,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Before anything uses the accounts in `knowledge`: they are replaced by such as leave notes. `tls`: as the
        fleet's."""
        self.backend = backend
        self.peers = Peers(
            backend.store, backend.schema.prefix, backend.gateway, knowledge, self._holders_of, self._directory_changed
        )
        self.streams = LeasedStreams(
            backend.leases, backend.index, Intakes(backend.index, naming_for, tls=tls), lambda: self.peers.alive()
        )
        backend.publisher.on_fenced = self.streams.fenced
        self._tasks: list[asyncio.Task[None]] = []
        self._fleet: Fleet | None = None
        self.directory: Directory | None = None

    def join(self, fleet: Fleet, config: GatewayConfig) -> Directory:
        """The workers are known from here on. Returns what registers and removes them for everybody."""
        self._fleet = fleet
        backend = self.backend
        self._sweeper = Sweeper(backend.store, backend.schema, backend.leases, fleet, config.sharing.stream_entries_max)
        self.directory = Directory(
            backend.store, backend.schema.prefix, fleet, config.workers, self.peers.announce_directory_change
        )
        return self.directory

    async def start(self) -> None:
        await self.backend.start()
        assert self.directory is not None  # noqa: S101 (joined)
        jobs: dict[str, Coroutine[Any, Any, None]] = {
            "index writer": self.backend.publisher.run(),
            "stream ownership": self.streams.run(),
            "peers": self.peers.run(),
            "directory of workers": self.directory.run(),
            "sweeper": self._sweep(),
            "embedded Valkey": self.backend.keep(),
        }
        self._tasks = [asyncio.create_task(job, name=name) for name, job in jobs.items()]

    async def stop(self) -> None:
        """After the fleet has stopped: it gives its streams back while the writer still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.backend.stop()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SETTLE_SECONDS)
            try:
                await self.backend.check()
                await self.backend.epochs.settle()
                await self._sweeper.sweep()
            except StoreError as error:
                logger.debug("sweeping waits: %s", error)
            except Exception:
                logger.exception("sweeping the shared index failed")

    def _holders_of(self, worker: str) -> Any:
        record = self._fleet.workers.get(worker) if self._fleet is not None else None
        return record.holders if record is not None else ()

    def _directory_changed(self) -> None:
        if self.directory is not None:
            self.directory.changed()

    def document(self) -> dict[str, Any]:
        """For the status page."""
        backend = self.backend
        return {
            "gateway": backend.gateway,
            "lookups": backend.lookups,
            "server": {"address": str(backend.store.address), **asdict(backend.store.health())},
            "mirror": asdict(backend.mirror.progress()) if backend.mirror is not None else None,
            "streams_owned": [f"{holder.name}/{holder.rank}" for holder in self.streams.owned()],
            "peers": _peers(self.peers.stats()),
            "directory": self.directory.stats()._asdict() if self.directory is not None else {},
        }


def _peers(stats: PeersStats) -> dict[str, Any]:
    peers = [peer._asdict() for peer in stats.peers]
    return {**stats._asdict(), "received": stats.received._asdict(), "peers": peers}


def embedded_directory(config: GatewayConfig) -> Path:
    """Where the Valkey of our own keeps its data."""
    if config.sharing.directory is not None:
        return config.sharing.directory
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "ropeway" / "valkey"

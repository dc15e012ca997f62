"""Who comes in and for how much: API keys, rate limits and TLS of one gateway, followed while it serves."""

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from cachecore.store import RedisStore, parse_address
from gateway import tls
from gateway.api_keys import KeyShelf
from gateway.config import GatewayConfig, RateLimitsConfig, TlsConfig, UpstreamTlsConfig
from gateway.errors import ConfigError
from gateway.limits import RateLimits
from gateway.tenants import KeyWatch, Roster, Tenants


class Limited(Protocol):
    """What is told of limits (`gateway.pipeline.Pipeline`)."""

    limits: RateLimits | None


class Access:
    """Made by the composition root before what it lets in; `start` it before the first request."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError."""
        keys = config.tenants
        self.tenants = Tenants(None if keys.open else Roster({}), keys.public_allowed)
        self.limits = RateLimits(config.rate_limits)
        self.upstream_tls: ssl.SSLContext | None = None
        """None where every worker is asked in clear, unless one is registered later: then the system's authorities."""
        if any(url.startswith("https:") for worker in config.workers for url in (worker.url, worker.sidecar)) or (
            config.upstream_tls != UpstreamTlsConfig()
        ):
            self.upstream_tls = tls.upstream_context(config.upstream_tls)
        self._limited: Limited | None = None
        self._listeners: list[tls.ListenerTls] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._store: RedisStore | None = None
        self._watch: KeyWatch | None = None
        if not keys.open:
            shelf = self._shelf(keys.api_keys_redis, config.sharing.prefix) if keys.api_keys_redis else None
            self._watch = KeyWatch(self.tenants, keys.api_keys_file, shelf, self._keys_changed)

    def _shelf(self, url: str, prefix: str) -> KeyShelf:
        try:
            self._store = RedisStore(parse_address(url))
        except ValueError as error:
            raise ConfigError(f"tenants.api_keys_redis: {error}") from None
        return KeyShelf(self._store, prefix)

    @property
    def keys_problem(self) -> str:
        """Why API keys could not be read the last time; empty where they could."""
        return self._watch.problem if self._watch is not None else ""

    def listener(self, config: TlsConfig) -> ssl.SSLContext | None:
        """For a listener whose files are followed from here on; None for plain HTTP. Raises ConfigError."""
        listener = tls.listener_tls(config)
        if listener is None:
            return None
        self._listeners.append(listener)
        return listener.context

    def limit(self, limited: Limited, on_refused: Callable[[int], None]) -> None:
        """Whose requests count. Where nobody is limited it is told of no limits, and pays nothing.

        `on_refused` is told the status of each refusal.
        """
        self.limits.on_refused = on_refused
        self._limited = limited
        self._keys_changed()

    def apply(self, config: RateLimitsConfig) -> None:
        """Other limits from now on."""
        self.limits.apply(config)
        self._keys_changed()

    async def start(self) -> None:
        if self._store is not None:
            await self._store.start()
        if self._watch is not None:
            await self._watch.look()
            self._own(self._watch.run(), "API keys")
        if self._listeners:
            self._own(tls.follow(self._listeners), "TLS files")

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store is not None:
            await self._store.close()

    def _own(self, job: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(job, name=name))

    def _keys_changed(self) -> None:
        self.limits.apply_keys(self.tenants.roster.tenants())
        if self._limited is not None:
            self._limited.limits = self.limits if self.limits.active else None

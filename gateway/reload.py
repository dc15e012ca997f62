"""A configuration that changes while the gateway serves: what is different, what of it is done at once, and what waits
for a restart.

    SIGHUP, or the file has changed ─► read again ─► wrong: refused with its line, and the running one goes on
                                                └─► differences ─► live ones applied, in order
                                                               └─► all others said in the log and in /status

`differences` is a function of two configurations; `Reloader` has the parts of a gateway that they are applied to. While
a file is being written it is left alone, until it has not changed between two looks: half of one may be right, too.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from gateway.admission import Admission
from gateway.config import GatewayConfig, RateLimitsConfig, Section, WorkerConfig
from gateway.edge.server import Edge
from gateway.errors import ConfigError, NotFound, ServiceError
from gateway.fleet.registry import Fleet
from gateway.fleet.worker import WorkerRecord
from gateway.pipeline import Pipeline
from gateway.settings.loading import Request, load_again
from gateway.settings.showing import redacted

logger = logging.getLogger("ropeway.reload")

LOOK_SECONDS = 1.0

LIVE = frozenset(
    {
        "workers",
        "policy",
        "policy_header_allowed",
        "log_level",
        "rate_limits",
        "admission.weights",
        "limits.body_bytes_max",
        "limits.header_bytes_max",
        "limits.requests_bytes_max",
        "limits.connections_max",
    }
)
"""Keys that a running gateway takes over, with all below them. Connections that are open keep their limits."""


class Change(NamedTuple):
    """One key that is said otherwise than before."""

    key: str
    before: Any
    after: Any

    @property
    def live(self) -> bool:
        return any(self.key == key or self.key.startswith(f"{key}.") for key in LIVE)

    def __str__(self) -> str:
        if self.key == "workers":
            return f"workers: {worker_changes(self.before, self.after)}"
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


def _shown(value: Any) -> str:
    plain = redacted(msgspec.to_builtins(value, enc_hook=str))
    return plain if isinstance(plain, str) and plain else repr(plain)


def differences(before: Section, after: Section, at: str = "") -> list[Change]:
    """The keys whose values differ, in the order of the tree. Sections are looked into, lists are not."""
    return list(_differences(before, after, at))


def _differences(before: Section, after: Section, at: str) -> Iterator[Change]:
    for name in before.__struct_fields__:
        old, new, key = getattr(before, name), getattr(after, name), f"{at}{name}"
        if isinstance(old, Section) and isinstance(new, Section):
            yield from _differences(old, new, f"{key}.")
        elif old != new:
            yield Change(key, old, new)


class WorkerChanges(NamedTuple):
    """What has to be done to a fleet, in this order."""

    removed: Sequence[str]
    registered: Sequence[WorkerConfig]
    """New, or the same by name or URL and otherwise different."""
    drained: Sequence[WorkerConfig]
    """Different in that alone: what is known of their caches stays."""

    def __str__(self) -> str:
        registered = [_name(config) for config in self.registered]
        begun = [_name(config) for config in self.drained if config.draining]
        ended = [_name(config) for config in self.drained if not config.draining]
        named = {"registered": registered, "removed": self.removed, "draining": begun, "no longer draining": ended}
        return "; ".join(f"{what} {', '.join(names)}" for what, names in named.items() if names) or "in another order"


def worker_changes(before: Sequence[WorkerConfig], after: Sequence[WorkerConfig]) -> WorkerChanges:
    old = {_name(config): config for config in before}
    new = {_name(config): config for config in after}
    changed = [config for name, config in new.items() if name in old and old[name] != config]
    drained = [c for c in changed if msgspec.structs.replace(c, draining=old[_name(c)].draining) == old[_name(c)]]
    registered = [config for name, config in new.items() if name not in old or config in changed]
    return WorkerChanges(
        [name for name in old if name not in new], [config for config in registered if config not in drained], drained
    )


def _name(config: WorkerConfig) -> str:
    return WorkerRecord.of(config).name


class Limits(Protocol):
    """What limits tenants (`gateway.access.Access`)."""

    def apply(self, config: RateLimitsConfig) -> None: ...


class Parts(NamedTuple):
    """Of a gateway: what can be changed while it serves."""

    fleet: Fleet
    pipeline: Pipeline
    admission: Admission | None
    edge: Edge
    limits: Limits
    configured: Callable[[Sequence[WorkerConfig]], None] = lambda workers: None
    """Told which workers are the configuration's own."""


class Reloader:
    """Follows the configuration of one gateway. `run` has to run for changes to be seen."""

    def __init__(self, request: Request, running: GatewayConfig, parts: Parts, look_seconds: float = LOOK_SECONDS):
        self._request = request
        self._started_with = self._accepted = running
        self._parts = parts
        self._look_seconds = look_seconds
        self._wanted = asyncio.Event()
        self._file = _WatchedFile(request.path) if request.path is not None else None
        self._loaded_at = time.time()
        self._reloads = self._refusals = 0
        self._problem = ""

    def wanted(self) -> None:
        """Read again at once, whether or not the file has changed."""
        self._wanted.set()

    def document(self) -> dict[str, Any]:
        """For `/status`."""
        return {
            "file": str(self._request.path) if self._request.path is not None else None,
            "loaded_at": self._loaded_at,
            "reloads": self._reloads,
            "refusals": self._refusals,
            "problem": self._problem or None,
            "needs_restart": [change.key for change in self.waiting()],
        }

    def waiting(self) -> list[Change]:
        """What was said since the start that only a restart brings about."""
        return [change for change in differences(self._started_with, self._accepted) if not change.live]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), self._look_seconds)
            wanted, changed = self._wanted.is_set(), self._file is not None and self._file.has_changed()
            self._wanted.clear()
            if wanted or changed:
                if self._file is not None:
                    self._file.take()
                await self.reload()

    async def reload(self) -> bool:
        """Read the configuration again and apply what can be; False where it was refused."""
        try:
            config = load_again(self._request)
        except ConfigError as error:
            self._refuse(f"{error}")
            return False
        changes = differences(self._accepted, config)
        before, self._accepted = self._accepted, config
        self._problem, self._loaded_at = "", time.time()
        self._reloads += 1
        for change in changes:
            if change.live:
                logger.info("changed: %s", change)
            else:
                logger.warning("needs a restart: %s", change)
        if not changes:
            logger.info("the configuration was read again, and says the same")
        await self._apply(before, config, {change.key for change in changes if change.live})
        return True

    def _refuse(self, problem: str) -> None:
        self._refusals += 1
        self._problem = problem
        logger.error("the configuration is refused, and the running one kept: %s", problem)

    async def _apply(self, before: GatewayConfig, config: GatewayConfig, keys: set[str]) -> None:
        parts = self._parts
        if "log_level" in keys:
            logging.getLogger().setLevel(config.log_level.upper())
        if "policy" in keys:
            parts.pipeline.use_policy(config.policy)
        if "policy_header_allowed" in keys:
            allowed = config.policy_header_allowed
            parts.pipeline.settings = parts.pipeline.settings._replace(policy_header_allowed=allowed)
        if "admission.weights" in keys and parts.admission is not None:
            parts.admission.use_weights(config.admission.weights)
        if before.rate_limits != config.rate_limits:
            parts.limits.apply(config.rate_limits)
        if before.limits != config.limits:
            sizes = config.limits
            parts.edge.limits = parts.edge.limits._replace(
                body_bytes_max=sizes.body_bytes_max,
                header_bytes_max=sizes.header_bytes_max,
                requests_bytes_max=sizes.requests_bytes_max,
                connections_max=sizes.connections_max,
            )
        if "workers" in keys:
            await self._apply_workers(worker_changes(before.workers, config.workers))
            parts.configured(config.workers)

    async def _apply_workers(self, changes: WorkerChanges) -> None:
        """New ones come before old ones go, as far as names allow, so that there is always somebody to serve."""
        fleet = self._parts.fleet
        for config in changes.registered:
            try:
                await fleet.register(config)
            except ServiceError as error:
                self._problem = f"workers: {config.url}: {error}"
                logger.error("a worker of the configuration cannot be taken in: %s", self._problem)
        for config in changes.drained:
            with suppress(NotFound):
                await fleet.drain(_name(config), config.draining)
        for name in changes.removed:
            with suppress(NotFound):
                await fleet.remove(name)


class _WatchedFile:
    """Whether a file says something else than before, and has settled."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._settled = self._stamp()
        self._digest = self._read()

    def has_changed(self) -> bool:
        """True once for every new content, when two calls in a row have found the file alike."""
        stamp = self._stamp()
        settled, self._seen = stamp == self._seen, stamp
        if not settled or stamp == self._settled:
            return False
        self._settled = stamp
        digest = self._read()
        changed, self._digest = digest != self._digest, digest
        return changed

    def take(self) -> None:
        """It is being read as it is now."""
        self._seen = self._settled = self._stamp()
        self._digest = self._read()

    def _stamp(self) -> tuple[int, int, int] | None:
        """None while it is not there: it may be on its way."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> bytes:
        try:
            return sha256(self._path.read_bytes()).digest()
        except OSError:
            return b""

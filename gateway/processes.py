"""Several gateways behind one port of one machine: `ropeway serve --processes N`.

    this process ─ starts, watches, passes signals on ─► N gateways, all listening on the same port (SO_REUSEPORT)
                 └ a Valkey, unless one is named ◄───────┘ the index that they share

The kernel deals connections out among the gateways, each of which is one as any other: it has its own mirror of the
index, follows its part of the event streams, and hears of what its siblings dispatch. One that dies is started again.
Of ports for operators each has its own, counted up from the one that is named.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cachecore.scope import Keyring
from cachecore.store import EmbeddedValkey, StoreError
from cachecore.store.children import dies_with_parent
from gateway.config import GatewayConfig
from gateway.errors import ConfigError, StartupError
from gateway.ports import require_free_port
from gateway.settings.loading import Request
from gateway.sharing import embedded_directory

logger = logging.getLogger("ropeway.processes")

STEADY_SECONDS = 60.0
"""A gateway that ends sooner than this may have failed to start."""
PAUSE_SECONDS = 0.5
"""Before one that died is started again; twice as long for each that fails to start, up to the next."""
PAUSE_SECONDS_MAX = 30.0
LAST_SECONDS = 5.0
"""What a gateway is given to end, beyond what its requests are."""


def member(request: Request, config: GatewayConfig, number: int) -> Request:
    """What the gateway of a number (from 0) is configured with, where `request` is that of all of them."""
    own: dict[str, Any] = {"processes": 1, "handover.reuse_port": True}
    if shares_own_server(config):
        own["redis"] = EmbeddedValkey(embedded_directory(config)).url
        own["keyring"] = keyring_of(config)
    for name, listener in (("admin", config.admin), ("metrics", config.metrics)):
        if listener.port:
            own[f"{name}.port"] = listener.port + number
    return request._replace(overrides={**request.overrides, **own})


def shares_own_server(config: GatewayConfig) -> bool:
    """Whether the index lies in a Valkey that this process starts."""
    return config.redis in ("none", "embedded")


def keyring_of(config: GatewayConfig) -> Path:
    """Names must be alike in all gateways, and outlive them where the index does."""
    return config.keyring or embedded_directory(config) / "keyring.json"


def run(config: GatewayConfig, arguments: Sequence[str]) -> int:
    """Run `config.processes` gateways, each by the command line `arguments` and its number, until told to stop.
    Returns the exit status. Raises StartupError."""
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    _check_ports(config)
    return asyncio.run(_Processes(config, arguments).run())


def _check_ports(config: GatewayConfig) -> None:
    if config.port == 0:
        raise ConfigError("port: several processes need one that is known; 0 gives each its own")
    require_free_port(config.host, config.port)
    own = {listener.port for listener in (config.admin, config.metrics) if listener.port}
    taken = {port + number for port in own for number in range(config.processes)}
    if config.port in taken or len(taken) < len(own) * config.processes:
        raise ConfigError("metrics.port: every process takes the next port, of admin and of metrics: they overlap")
    if not own:
        logger.warning("/status and /metrics tell of whichever process answers; metrics.port gives each its own")


class _Gateway:
    """One of them, over all its lives."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._began = 0.0
        self._pause = PAUSE_SECONDS
        self._process: asyncio.subprocess.Process | None = None

    async def live(self) -> int:
        """One life. Returns its exit status."""
        self._began = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C is passed on once, not heard twice
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def steady(self) -> bool:
        """Whether it must have served."""
        return time.monotonic() - self._began > STEADY_SECONDS

    def next_pause(self) -> float:
        """How long to wait before it is started again, in seconds."""
        if self.steady:
            self._pause = PAUSE_SECONDS
        pause, self._pause = self._pause, min(self._pause * 2, PAUSE_SECONDS_MAX)
        return pause


class _Processes:
    def __init__(self, config: GatewayConfig, arguments: Sequence[str]) -> None:
        self._config = config
        self._gateways = [_Gateway([*arguments, "--process", str(number)]) for number in range(config.processes)]
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._pass_on, signal.SIGHUP)
        server = await self._server()
        kept = asyncio.create_task(server.keep(), name="embedded server") if server is not None else None
        lives = [asyncio.create_task(self._keep(gateway), name="gateway") for gateway in self._gateways]
        try:
            await self._stopping.wait()
            timeouts = self._config.timeouts
            patience = self._config.handover.announce_seconds + timeouts.shutdown_seconds + LAST_SECONDS
            await asyncio.wait(lives, timeout=patience)
        finally:
            self._pass_on(signal.SIGKILL)
            await asyncio.gather(*lives)
            if server is not None and kept is not None:
                kept.cancel()
                with suppress(asyncio.CancelledError):
                    await kept
                await server.stop()
        return self._status

    async def _server(self) -> EmbeddedValkey | None:
        """Started before anyone asks for it. Raises StartupError."""
        if not shares_own_server(self._config):
            return None
        server = EmbeddedValkey(embedded_directory(self._config))
        try:
            await server.start()
        except StoreError as error:
            raise StartupError(f"redis: embedded: {error}") from None
        keyring = keyring_of(self._config)
        if not keyring.exists():
            Keyring.generate().save(keyring)
        return server

    async def _keep(self, gateway: _Gateway) -> None:
        """Start it, and again whenever it ends unasked."""
        while not self._stopping.is_set():
            status = await gateway.live()
            if self._stopping.is_set():
                return
            if not gateway.steady and status in (StartupError.exit_code, ConfigError.exit_code):
                # It has said why, and would say so again.
                self._status = status
                self._stop()
                return
            pause = gateway.next_pause()
            logger.error("a process has ended with status %d; another is started in %.1f s", status, pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def _stop(self) -> None:
        """The operator wants the end; the second time at once."""
        self._stopping.set()
        self._pass_on(signal.SIGTERM)

    def _pass_on(self, number: signal.Signals) -> None:
        for gateway in self._gateways:
            gateway.signal(number)

"""A wire over an engine. `TcpServer` and `TcpTransport` speak over it as ever; long sends travel by the engine."""

import socket
from dataclasses import dataclass
from functools import cached_property

from cachecore.scope import Keyring
from cachecore.transfer.engines.channel import PullingChannel, ServingChannel, introduce
from cachecore.transfer.engines.contract import Engine
from cachecore.transfer.engines.memory import Landings, Slots
from cachecore.transfer.tcp.channel import Channel, TcpWire, scheme_of
from cachecore.transfer.tcp.tls import Tls


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Both ends of a fleet have the same."""

    slot_bytes: int = 2 << 20
    """What is read at a time."""
    slots: int = 64
    """A source's registered memory is `slots * slot_bytes`."""
    window: int = 2
    """Slots that one connection fills ahead of its puller."""
    inline_bytes_max: int = 32 << 10
    """Up to here a read by the engine, which costs a round trip and a reply, gains nothing."""


class EngineWire:
    """Owns its engine. What serves and what pulls may run on two loops; neither on more than one."""

    def __init__(
        self,
        engine: Engine,
        keyring: Keyring,
        settings: EngineSettings | None = None,
        *,
        tls: Tls | None = None,
    ) -> None:
        """`tls` secures the connection beside the engine, not what the engine moves."""
        self.engine = engine
        self.settings = settings or EngineSettings()
        self._keyring = keyring
        self._tls = tls
        self._beside = TcpWire(tls)

    @property
    def scheme(self) -> str:
        return scheme_of(self.engine.scheme, self._tls)

    async def connect(self, host: str, port: int) -> Channel:
        inner = await self._beside.connect(host, port)
        return PullingChannel(inner, self.engine, self._landings, self.settings.slot_bytes, self._keyring)

    async def accepted(self, connection: socket.socket) -> Channel:
        slots, settings = self._slots, self.settings
        inner = await self._beside.accepted(connection)
        introduction = introduce(slots.description, self._keyring)
        return ServingChannel(inner, slots, settings.window, settings.inline_bytes_max, introduction)

    def close(self) -> None:
        """After those who use it."""
        self.engine.close()

    @cached_property
    def _slots(self) -> Slots:
        return Slots(self.engine, self.settings.slot_bytes, self.settings.slots)

    @cached_property
    def _landings(self) -> Landings:
        return Landings(self.engine, self.settings.slot_bytes)

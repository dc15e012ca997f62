"""Mooncake's transfer engine as an engine: no metadata server, the two ends speak to each other.

It listens on all interfaces, wherever one tells it to, and lets whoever connects read and write what is registered:
between workers there must be nobody else. It checks that an address lies in registered memory.
"""

import os
from typing import Any

from cachecore.transfer.engines.contract import EngineUnavailable, Peer, Region, load
from cachecore.transfer.errors import Reason, WireError

_UNDER_WAY = 0
_DONE = 1
_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    # Mooncake's own patience; a pull's is shorter, but a landing is not used again before its read has ended.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}


class MooncakeEngine:
    scheme = "mooncake"

    def __init__(self, host: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> None:
        """`host` is where pullers find this worker; `protocol` "tcp" or "rdma", over `device`.

        Raises EngineUnavailable.
        """
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # The package's libraries say "libibverbs.so.1: cannot open shared object file" where Debian's are missing.
        module = load(("mooncake.engine",), "mooncake", "the system library libibverbs (Debian: libibverbs1)")
        self._engine: Any = module.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise EngineUnavailable(f"Mooncake does not start on {host} over {protocol} {device}")
        self._name = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: list[Region] = []

    def register(self, region: Region) -> None:
        if self._engine.register_memory(region.address, len(region.memory)):
            raise EngineUnavailable(f"Mooncake cannot register {len(region.memory)} bytes")
        self._registered.append(region)

    def describe(self, region: Region) -> bytes:
        return self._name.encode()

    def meet(self, description: bytes) -> Peer:
        peer = Peer(description.decode(errors="replace"))
        if self._engine.send_probe(peer):
            raise WireError(f"Mooncake does not reach {peer}", Reason.UNREACHABLE)
        return peer

    def read(self, peer: Peer, address: int, region: Region, size: int) -> "MooncakeReading":
        batch = self._engine.batch_transfer_async_read(peer, [region.address], [address], [size])
        if not batch:
            raise WireError(f"Mooncake does not read from {peer}", Reason.CLOSED)
        return MooncakeReading(self._engine, batch)

    def progress(self) -> None:
        """It has threads of its own, which sleep while there is nothing to do."""

    def close(self) -> None:
        for region in self._registered:
            self._engine.unregister_memory(region.address)
        self._registered.clear()


class MooncakeReading:
    def __init__(self, engine: Any, batch: int) -> None:
        self._engine = engine
        self._batch = batch
        self._status = _UNDER_WAY

    def is_over(self) -> bool:
        if not self.abandon():
            return False
        if self._status != _DONE:
            raise WireError("a read failed", Reason.CLOSED)
        return True

    def abandon(self) -> bool:
        """It cannot be stopped. It ends when the bytes are there, or when Mooncake's own patience does."""
        if self._status == _UNDER_WAY:
            # To ask once more after the answer would be to ask about freed memory.
            self._status = self._engine.transfer_check_status(self._batch)
        return bool(self._status != _UNDER_WAY)

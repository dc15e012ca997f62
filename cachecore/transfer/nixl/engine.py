"""NIXL as an engine: one agent, host memory, reads over its UCX backend.

UCX takes the best that two workers have in common. It is configured by its own environment variables (`UCX_TLS`,
`UCX_NET_DEVICES`), which it reads when the first agent of a process starts. NIXL's progress thread would keep a core
busy as long as the worker lives, so there is none: connections come about, and reads over TCP go on, in `progress`.
"""

import contextlib
import logging
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cachecore.transfer.engines.contract import EngineUnavailable, Peer, Region, is_loopback, load
from cachecore.transfer.errors import Reason, WireError

_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
_BACKEND = "UCX"
_PEERS_MAX = 256


class NixlEngine:
    scheme = "nixl"

    def __init__(self, host: str = "127.0.0.1") -> None:
        """`host` is where the worker listens: UCX keeps to the loopback where that does. Raises EngineUnavailable."""
        if is_loopback(host):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        nixl = _load_quietly()
        sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND], sync_mode=sync)
        try:
            self._agent = nixl.nixl_agent(f"ropeway-{secrets.token_hex(8)}", config)
        except Exception as error:
            raise EngineUnavailable(f"NIXL does not start: {error!r}") from error
        if _BACKEND not in self._agent.backends:
            raise EngineUnavailable(f"NIXL has no backend {_BACKEND} here, only {self._agent.get_plugin_list()}")
        self._registered: dict[int, Any] = {}
        self._peers: OrderedDict[bytes, Peer] = OrderedDict()
        self._meeting = threading.Lock()

    def register(self, region: Region) -> None:
        try:
            listed = [(region.address, len(region.memory), 0, "")]
            self._registered[region.address] = self._agent.register_memory(listed, "DRAM", [_BACKEND])
        except Exception as error:
            raise EngineUnavailable(f"NIXL cannot register {len(region.memory)} bytes: {error!r}") from error

    def describe(self, region: Region) -> bytes:
        # Not of all that is registered: nobody else has business where this one's own reads land.
        listed = self._registered[region.address]
        return bytes(self._agent.get_partial_agent_metadata(listed, True, [_BACKEND]))

    def meet(self, description: bytes) -> Peer:
        with self._meeting:
            peer = self._peers.get(description)
            if peer is None:
                with _translated(Reason.UNREACHABLE):
                    peer = self._peers[description] = Peer(self._agent.add_remote_agent(description).decode())
            self._peers.move_to_end(description)
            if len(self._peers) > _PEERS_MAX:
                self._forget(self._peers.popitem(last=False)[1])
            return peer

    def read(self, peer: Peer, address: int, region: Region, size: int) -> "NixlReading":
        try:
            with _translated(Reason.CLOSED):
                here = self._agent.get_xfer_descs([(region.address, size, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(address, size, 0)], "DRAM")
                return NixlReading(self._agent, self._agent.initialize_xfer("READ", here, there, peer))
        except WireError:
            self._lose(peer)
            raise

    def progress(self) -> None:
        with contextlib.suppress(Exception):  # whoever reads here notices what fails
            self._agent.get_new_notifs()  # there are none; to ask is what makes it go on

    def close(self) -> None:
        for listed in self._registered.values():
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(listed)
        self._registered.clear()

    def _lose(self, peer: Peer) -> None:
        """Whoever comes back is met anew."""
        with self._meeting:
            for description in [known for known, name in self._peers.items() if name == peer]:
                self._forget(self._peers.pop(description))

    def _forget(self, peer: Peer) -> None:
        with contextlib.suppress(Exception):  # it may have gone by itself
            self._agent.remove_remote_agent(peer)


class NixlReading:
    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._state = agent.transfer(handle)

    def is_over(self) -> bool:
        with _translated(Reason.CLOSED):
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
        if self._state == "PROC":
            return False
        self.abandon()
        if self._state != "DONE":
            raise WireError("a read failed", Reason.CLOSED)
        return True

    def abandon(self) -> bool:
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception:  # it cannot be stopped any more
            return False
        return True


@contextlib.contextmanager
def _translated(reason: Reason) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # NIXL's have no other class in common
        raise WireError(f"NIXL: {error}", reason) from error


def _load_quietly() -> ModuleType:
    """NIXL sets up logging for everybody when it is imported, to standard output; not here."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    raises = logging.raiseExceptions
    try:
        return load(_MODULES, "nixl")
    finally:
        logging.raiseExceptions = raises

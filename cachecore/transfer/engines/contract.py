"""What an engine has to do to carry KV: register memory, tell others where it is, read what others have registered.

Nothing else is asked of it. Who may pull, what is wanted, and where it lies is said over a connection beside it, and
what was read is believed only once its MAC has been verified.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, NewType, Protocol

import numpy

from cachecore.transfer.errors import Reason, TransferError

Peer = NewType("Peer", str)
"""An engine elsewhere, by the name that this one knows it by."""


class EngineUnavailable(TransferError):
    """An engine that is not installed, does not start, or takes no more memory; the message says what would help."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Reason.UNREACHABLE)


class Region(NamedTuple):
    """Memory that does not move."""

    memory: memoryview
    address: int

    @classmethod
    def allocate(cls, size: int) -> "Region":
        array = numpy.zeros(size, numpy.uint8)
        return cls(array.data, array.ctypes.data)


class Reading(Protocol):
    """A read under way."""

    def is_over(self) -> bool:
        """Whether the bytes are there. Raises WireError when they will not come; nothing is written any more then."""
        ...

    def abandon(self) -> bool:
        """Stop it. False while it may still write: ask again."""
        ...


class Engine(Protocol):
    """Safe to use from several threads. Nothing but `meet` and `register` takes long."""

    @property
    def scheme(self) -> str: ...

    def register(self, region: Region) -> None:
        """Raises EngineUnavailable."""
        ...

    def describe(self, region: Region) -> bytes:
        """What others need to read from a region that is registered here."""
        ...

    def meet(self, description: bytes) -> Peer:
        """Get ready to read there. Raises WireError(UNREACHABLE)."""
        ...

    def read(self, peer: Peer, address: int, region: Region, size: int) -> Reading:
        """`size` bytes at the peer's `address`, into the beginning of a registered region. Raises WireError."""
        ...

    def progress(self) -> None:
        """Called often while others may be reading here, for an engine that does nothing by itself."""
        ...

    def close(self) -> None: ...


def load(modules: Sequence[str], extra: str, needs: str = "") -> ModuleType:
    """The first of an engine's modules that is there. Raises EngineUnavailable."""
    problems = []
    for name in modules:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            problems.append(str(error))
    advice = f"pip install 'ropeway[{extra}]'" + (f"; it also needs {needs}" if needs else "")
    raise EngineUnavailable(f"the transport {extra} needs its engine ({'; '.join(problems)}): {advice}")


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")

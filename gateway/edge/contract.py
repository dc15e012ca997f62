"""What an exchange is handed, and by whom: the contracts of `gateway.edge.exchange`."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Protocol

from gateway.edge.http1 import ResponseHead
from gateway.edge.upstream import UpstreamPool
from gateway.errors import ServiceError
from gateway.reliability.failures import Failure


class Ending(StrEnum):
    """How an exchange ended."""

    COMPLETE = "complete"
    CLIENT_GONE = "client_gone"
    UPSTREAM_BROKE = "upstream_broke"
    """After the first byte: the client got an error event or an aborted body."""
    REFUSED = "refused"
    """Before the first byte: the client got an error object."""
    STOPPED = "stopped"
    """After the first byte, as UPSTREAM_BROKE, where it was the gateway that did not wait for the end."""
    OVERTAKEN = "overtaken"
    """The client's answer came from another worker, which was asked as well (`gateway.edge.hedge`)."""

    # Enum's own hash is a Python function, and endings are counted by key.
    __hash__ = str.__hash__


class Patience(NamedTuple):
    """How long a request may take, from now on."""

    total_seconds: float | None = None
    """Until its answer has to be complete; None does not bound it."""
    hedge_seconds: float | None = None
    """Until another worker is asked as well; None asks nobody else."""


class Attempt(Protocol):
    """A decision to act upon: where to send which bytes, and what to add to the answer."""

    connections: UpstreamPool
    request_parts: list[bytes]
    answer_headers: bytes
    """Complete header lines."""
    reads_head: bool
    """Whether `Listener.answered` is to be called."""
    strips_usage: bool
    """Whether the client did not ask for the usage that its event stream will bring."""


class Listener(Protocol):
    """Who accounts for an exchange (`gateway.journey.Journey`)."""

    patience: Callable[[], Patience] | None
    """Asked once, before the first attempt. None where nothing bounds the request, and nobody else is asked."""

    @property
    def attempt(self) -> Attempt: ...

    def answered(self, head: ResponseHead) -> None:
        """The head of the answer that the client gets has come."""
        ...

    def first_byte(self) -> None:
        """The answer has begun: with its first byte, or in an event stream with the first event that says something."""
        ...

    def failed(self, failure: Failure) -> bool:
        """An attempt has failed before its first byte. Prepare another in `attempt`; False when there is none to make,
        and the client gets what the failure's row says."""
        ...

    def broke(self, failure: Failure) -> None:
        """The attempt has failed, and there will be no other."""
        ...

    def hedge(self) -> "Listener | None":
        """Decide on another worker to ask as well, and account for that; None where nobody else is to be asked."""
        ...

    def ended(self, ending: Ending, status: int, body_bytes: int, tail: bytes) -> None:
        """Called exactly once. `tail` is the end of the body as it stood on the wire, or what was taken out of it."""
        ...


class Client(Protocol):
    """The client's side of the connection (`gateway.edge.server.EdgeProtocol`)."""

    http10: bool

    def connection_header(self) -> bytes:
        """The header line that says whether the connection stays open; empty where that goes without saying."""
        ...

    def write(self, data: bytes) -> None: ...
    def answer_complete(self, keep_alive: bool) -> None: ...
    def answer_error(self, error: ServiceError) -> None: ...

    def error_event(self, error: ServiceError) -> bytes:
        """What ends a stream of events that breaks, in the form that its client knows."""
        ...

    def abort(self, reset: bool) -> None:
        """Close without ending the body. `reset`: where the end of the connection would be taken for the body's."""
        ...


class Deadlines:
    """How long an exchange may wait for what. `now` is the loop's time, refreshed by the edge's sweep."""

    __slots__ = ("connect_seconds", "first_byte_seconds", "idle_seconds", "now")

    def __init__(self, connect_seconds: float, first_byte_seconds: float | None, idle_seconds: float | None) -> None:
        self.connect_seconds = connect_seconds
        self.first_byte_seconds = first_byte_seconds
        self.idle_seconds = idle_seconds
        self.now = 0.0

"""What may go wrong with a store.

StoreError                 its message is fit for an operator
├── Unavailable            no answer, or one that says "not now": the caller does without for a while
│   └── Moved              (inside the store alone) a cluster's node points to another one
└── Refused                the server's answer is no, and it will be no again
"""

from typing import NamedTuple


class StoreError(Exception):
    """Raised, and among the results of `RedisStore.run_many`, whatever the cause."""


class Unavailable(StoreError):
    """Too slow, unreachable, still loading, a demoted master, a cluster without this slot, or the breaker is open."""


class Refused(StoreError):
    """The server answered with an error; `code` is its first word: OOM, NOPERM, WRONGTYPE, CROSSSLOT, ..."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Endpoint(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Moved(Unavailable):
    """A slot is served elsewhere: from now on, or with `asking` for this one question while it migrates."""

    def __init__(self, message: str, slot: int, endpoint: Endpoint, asking: bool) -> None:
        super().__init__(message)
        self.slot = slot
        self.endpoint = endpoint
        self.asking = asking


# Answers that pass by themselves: a server that loads or is busy, a failover or a resharding under way.
TRANSIENT = frozenset(
    {"LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "TRYAGAIN", "UNBLOCKED", "NOREPLICAS", "NOMASTERLINK"}
)


def error_of(message: str) -> StoreError:
    """The error for a server's error line (without its dash)."""
    code = message.partition(" ")[0]
    if code in ("MOVED", "ASK"):
        return _moved(message, code)
    if code in TRANSIENT:
        return Unavailable(message)
    return Refused(message, code)


def _moved(message: str, code: str) -> StoreError:
    try:
        _, slot, where = message.split(" ")[:3]
        host, _, port = where.rpartition(":")
        return Moved(message, int(slot), Endpoint(host, int(port)), code == "ASK")
    except ValueError:
        return Unavailable(f"a redirection that makes no sense: {message}")

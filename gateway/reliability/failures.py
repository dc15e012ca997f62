"""Everything that may go wrong with a request, and what follows from each: the one table of it.

Whoever meets a failure names its row; nobody else decides what the client is told, whether another attempt may be made,
what the worker is held to account for or how it is counted. docs/reliability.md shows the same rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from gateway.errors import (
    DeadlineExceeded,
    InternalError,
    NoWorker,
    Overloaded,
    ServiceError,
    ShuttingDown,
    TooManyRequests,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnavailable,
)


class Answer(Enum):
    """What the client gets when no other attempt is made. The value is how the page says it."""

    ERROR = "an error object"
    THEIRS = "the worker's own answer"
    BROKEN = "what had come, an error event, an aborted body"
    NOBODY = "nobody is there to get one"
    COMPLETE = "a complete answer all the same"


class Retry(Enum):
    """Where another attempt is made, if one is."""

    NO = "no"
    SAME = "same worker, new connection"
    ELSEWHERE = "elsewhere"


class Blame(Enum):
    """What the worker is held to account for."""

    NONE = "does not count"
    COUNTED = "counts"
    SUSPECT = "counts; no requests until a probe succeeds"


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """One row. Identity is the object."""

    name: str
    """Label of `ropeway_failures_total`, and of `ropeway_retries_total` where another attempt was made."""
    when: str
    answer: Answer
    kind: type[ServiceError] | None = None
    """What it is translated to: its status and code. None where the client is told nothing of ours."""
    message: str = ""
    """For the client; empty where whoever raises `kind` knows better."""
    retry: Retry = Retry.NO
    blame: Blame = Blame.NONE
    attempts_max: int = 0
    """A request is given up once so many of its attempts have ended like this, whatever the configuration allows; 0
    leaves it to that."""
    codes: tuple[str, ...] = ()
    """Where they are others than that of `kind`."""

    def __repr__(self) -> str:
        return f"<Failure {self.name}>"

    @property
    def status(self) -> int | None:
        """None where it is the worker's, or was sent before."""
        return self.kind.status if self.kind is not None and self.answer is Answer.ERROR else None

    @property
    def code(self) -> str:
        return (self.kind.code or "") if self.kind is not None else ""

    def error(self) -> ServiceError:
        assert self.kind is not None  # noqa: S101  rows whose answer is of ours have one
        return self.kind(self.message)


CONNECT_REFUSED = Failure(
    "connect_refused",
    "the worker refuses the connection, or there is no way to it",
    Answer.ERROR,
    UpstreamUnavailable,
    "No worker could be reached for this request.",
    Retry.ELSEWHERE,
    Blame.SUSPECT,
)
CONNECT_TIMED_OUT = Failure(
    "connect_timed_out",
    "no connection within `timeouts.connect_seconds`",
    Answer.ERROR,
    UpstreamUnavailable,
    "No worker could be reached for this request.",
    Retry.ELSEWHERE,
    Blame.SUSPECT,
)
CONNECTION_STALE = Failure(
    "connection_stale",
    "a connection that was kept open is lost before any byte of the answer",
    Answer.ERROR,
    UpstreamUnavailable,
    "No worker could be reached for this request.",
    Retry.SAME,
)
CONNECTION_LOST = Failure(
    "connection_lost",
    "a new connection is lost before any byte of the answer",
    Answer.ERROR,
    UpstreamUnavailable,
    "No worker could be reached for this request.",
    Retry.ELSEWHERE,
    Blame.SUSPECT,
    attempts_max=2,
)
HEAD_MALFORMED = Failure(
    "head_malformed",
    "the answer is no HTTP, or ends within its head",
    Answer.ERROR,
    UpstreamFailed,
    "The worker's answer was not valid HTTP.",
    blame=Blame.COUNTED,
)
WORKER_BUSY = Failure("worker_busy", "the worker answers 429", Answer.THEIRS, retry=Retry.ELSEWHERE)
WORKER_UNAVAILABLE = Failure(
    "worker_unavailable",
    "the worker, or a proxy before it, answers 502, 503 or 504",
    Answer.THEIRS,
    retry=Retry.ELSEWHERE,
    blame=Blame.COUNTED,
)
WORKER_ERROR = Failure(
    "worker_error", "the worker answers 500, or another status above 504", Answer.THEIRS, blame=Blame.COUNTED
)
WORKER_REFUSAL = Failure("worker_refusal", "the worker answers another 4xx, or 501", Answer.THEIRS)
FIRST_BYTE_TIMEOUT = Failure(
    "first_byte_timeout",
    "no answer within `timeouts.first_byte_seconds`",
    Answer.ERROR,
    UpstreamTimeout,
    "The worker did not answer in time.",
    blame=Blame.COUNTED,
)
TIME_OVER = Failure(
    "deadline_exceeded",
    "the request's own time (`timeouts.total_seconds`, `x-ropeway-timeout-ms`) is over before any byte of an answer",
    Answer.ERROR,
    DeadlineExceeded,
    "The request was not answered in the time it has.",
)
BODY_CUT = Failure(
    "body_cut",
    "the connection is lost before the answer's end",
    Answer.BROKEN,
    UpstreamFailed,
    "The worker broke off before the end of its answer.",
    blame=Blame.COUNTED,
)
BODY_MALFORMED = Failure(
    "body_malformed",
    "what should be a chunk is none",
    Answer.BROKEN,
    UpstreamFailed,
    "The worker broke off before the end of its answer.",
    blame=Blame.COUNTED,
)
IDLE_TIMEOUT = Failure(
    "idle_timeout",
    "nothing more comes for `timeouts.idle_seconds`, and the client is reading",
    Answer.BROKEN,
    UpstreamFailed,
    "The worker broke off before the end of its answer.",
    blame=Blame.COUNTED,
)
TIME_OVER_MIDWAY = Failure(
    "deadline_exceeded_midway",
    "the request's own time is over within the answer",
    Answer.BROKEN,
    DeadlineExceeded,
    "The answer was not complete in the time the request has.",
)
CLIENT_GONE = Failure("client_gone", "the client closes its connection, or resets it", Answer.NOBODY)
NO_WORKER = Failure("no_worker", "no healthy worker serves the model", Answer.ERROR, NoWorker)
OVERLOADED = Failure(
    "overloaded", "no worker can start it in the time it has (docs/admission.md)", Answer.ERROR, Overloaded
)
SHED = Failure(
    "shed",
    "the queue is full, or the tenant's part of it (docs/admission.md)",
    Answer.ERROR,
    TooManyRequests,
    codes=("queue_full", "over_share"),
)
RATE_LIMITED = Failure("rate_limited", "the tenant's limit is reached", Answer.ERROR, TooManyRequests)
SHUTTING_DOWN = Failure(
    "shutting_down",
    "its answer has not begun when the gateway stops",
    Answer.ERROR,
    ShuttingDown,
    "The gateway is stopping: try again.",
)
STOPPED_MIDWAY = Failure(
    "stopped_midway",
    "its answer is not complete when `timeouts.shutdown_seconds` are over",
    Answer.BROKEN,
    UpstreamFailed,
    "The gateway stopped before the end of the answer.",
)
PLAN_FAILED = Failure(
    "plan_failed",
    "KV could not be pulled, a passage not repaired, a prefill worker did not deliver: the worker computes",
    Answer.COMPLETE,
)
GATEWAY_FAULT = Failure("gateway_fault", "a fault of the gateway's own, before any byte", Answer.ERROR, InternalError)

FAILURES = (
    CONNECT_REFUSED,
    CONNECT_TIMED_OUT,
    CONNECTION_STALE,
    CONNECTION_LOST,
    HEAD_MALFORMED,
    WORKER_BUSY,
    WORKER_UNAVAILABLE,
    WORKER_ERROR,
    WORKER_REFUSAL,
    FIRST_BYTE_TIMEOUT,
    TIME_OVER,
    BODY_CUT,
    BODY_MALFORMED,
    IDLE_TIMEOUT,
    TIME_OVER_MIDWAY,
    CLIENT_GONE,
    NO_WORKER,
    OVERLOADED,
    SHED,
    RATE_LIMITED,
    SHUTTING_DOWN,
    STOPPED_MIDWAY,
    PLAN_FAILED,
    GATEWAY_FAULT,
)

FAILED_STATUS_MIN = 429
"""No lower status is a failure that anything follows from."""
_OF_STATUS: Mapping[int, Failure] = {
    429: WORKER_BUSY,
    501: WORKER_REFUSAL,
    502: WORKER_UNAVAILABLE,
    503: WORKER_UNAVAILABLE,
    504: WORKER_UNAVAILABLE,
}
_OF_ERROR: Mapping[type[ServiceError], Failure] = {
    failure.kind: failure for failure in (NO_WORKER, OVERLOADED, SHUTTING_DOWN, TIME_OVER) if failure.kind is not None
}


def of_status(status: int) -> Failure | None:
    """The row of a worker's answer; None where it is no failure."""
    if status < 400:
        return None
    return _OF_STATUS.get(status, WORKER_ERROR if status >= 500 else WORKER_REFUSAL)


def of_error(error: Exception) -> Failure | None:
    """The row of a refusal of our own; None where the client has made a mistake."""
    if not isinstance(error, ServiceError):
        return GATEWAY_FAULT
    if isinstance(error, TooManyRequests):
        return RATE_LIMITED if error.code == TooManyRequests.code else SHED
    return _OF_ERROR.get(type(error))


def page() -> str:
    """The table of docs/reliability.md."""
    head = "| `failure` | when | the client gets | status, code | another attempt | circuit breaker |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(_row, FAILURES), ""])


def _row(failure: Failure) -> str:
    codes = failure.codes or (failure.code,) if failure.code else ()
    told = [str(failure.status)] if failure.status is not None else []
    told.append(" or ".join(f"`{code}`" for code in codes))
    attempt = failure.retry.value
    if failure.attempts_max:
        attempt += f"; not after {failure.attempts_max} like it"
    columns = (f"`{failure.name}`", failure.when, failure.answer.value, ", ".join(filter(None, told)), attempt)
    return f"| {' | '.join(columns)} | {failure.blame.value} |"

"""When a worker that fails its requests is left alone, and how it comes back: one circuit breaker for each worker.

    closed ── failures in a row, or their share of a window ──► open ── time ──► half-open ── one trial ──► closed
                                                                 ▲                               │
                                                                 └───── failed: twice as long ───┘

What counts as a failure is the caller's to say: an answer that blames the client never does, nor does a client that
leaves. While a circuit is open only the trial's own outcome moves it; requests that were sent before say nothing new.

The first pause is short and each further one twice as long, up to a limit; a worker that fails again soon after it came
back goes on where it was. Jitter is handed in, so that many breakers (or gateways) do not try a worker all at once.
"""

from collections import deque
from enum import StrEnum
from typing import NamedTuple

SLICES = 6
"""Of a window: so finely what was long ago is forgotten."""
TRIAL_SECONDS_MAX = 60.0
"""A trial that has not ended by then does not keep others from being one."""
_LEVEL_MAX = 16


class Circuit(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


# Members of enumerations are looked up by a slow path.
CLOSED, OPEN, HALF_OPEN = Circuit


class BreakerSettings(NamedTuple):
    failures_in_a_row: int = 5
    failure_share: float = 0.5
    """Of at least `requests_min` requests of a window."""
    requests_min: int = 20
    window_seconds: float = 30.0
    open_seconds_min: float = 1.0
    open_seconds_max: float = 60.0
    jitter_share: float = 0.2
    """A pause is shorter by up to this share of it."""


class Outcomes(NamedTuple):
    """How requests of a window ended."""

    requests: int
    failures: int

    @property
    def failure_share(self) -> float:
        return self.failures / self.requests if self.requests else 0.0


_NO_OUTCOMES = Outcomes(0, 0)


class Breaker:
    """One worker's. Times are seconds of any clock that does not go back."""

    __slots__ = (
        "_closed_at",
        "_failures",
        "_in_a_row",
        "_level",
        "_pause_seconds",
        "_slice_ends_at",
        "_slices",
        "_successes",
        "_trial",
        "_trial_at",
        "circuit",
        "failures_total",
        "opened_total",
        "reopens_at",
        "settings",
    )

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self.settings = settings or BreakerSettings()
        self.circuit = CLOSED
        self.failures_total = self.opened_total = 0
        self.reopens_at = 0.0
        """When an open circuit lets a trial through."""
        self._successes = self._failures = self._in_a_row = self._level = 0
        self._slices: deque[Outcomes] = deque(maxlen=SLICES - 1)
        self._slice_ends_at = 0.0
        self._trial = ""
        self._trial_at = self._closed_at = self._pause_seconds = 0.0

    def __repr__(self) -> str:
        return f"Breaker({self.circuit}, in_a_row={self._in_a_row}, level={self._level}, trial={self._trial!r})"

    # What requests tell

    def succeeded(self, request_id: str, now: float) -> None:
        if self.circuit is CLOSED:
            self._successes += 1
            self._in_a_row = 0
        elif request_id == self._trial:
            self._close(now)

    def failed(self, request_id: str, now: float, jitter: float) -> bool:
        """Whether this has opened the circuit. `jitter`: drawn from [0, 1)."""
        self.failures_total += 1
        if self.circuit is CLOSED:
            self.advance(now)
            self._failures += 1
            self._in_a_row += 1
            opens = self._too_many(now)
        else:
            opens = request_id == self._trial
        if opens:
            self._open(now, jitter)
        return opens

    def dropped(self, request_id: str) -> None:
        """The request ended without a word for or against the worker: another may be the trial."""
        if request_id == self._trial:
            self._trial = ""

    # What decisions ask

    def admits(self, now: float) -> bool:
        """Whether a request may be sent: any while closed, one at a time while half-open."""
        if self.circuit is OPEN and now >= self.reopens_at:
            self.circuit = HALF_OPEN
        if self.circuit is HALF_OPEN:
            return not self._trial or now - self._trial_at >= TRIAL_SECONDS_MAX
        return self.circuit is CLOSED

    def sent(self, request_id: str, now: float) -> None:
        """A request is on its way there: while half-open it is the trial, unless there is one."""
        if self.circuit is HALF_OPEN and self.admits(now):
            self._trial, self._trial_at = request_id, now

    def reborn(self) -> None:
        """The worker is another process than the one that failed: its trial may come at once."""
        if self.circuit is OPEN:
            self.circuit, self._trial = HALF_OPEN, ""

    # The window

    def advance(self, now: float) -> None:
        """Forget what has left the window. To be called about once a second: successes are not dated one by one."""
        behind = (now - self._slice_ends_at) * SLICES / self.settings.window_seconds
        if behind < 0.0:
            return
        self._slices.append(Outcomes(self._successes + self._failures, self._failures))
        self._slices.extend([_NO_OUTCOMES] * min(int(behind), SLICES))
        self._successes = self._failures = 0
        self._slice_ends_at = now + self.settings.window_seconds / SLICES

    def outcomes(self, now: float) -> Outcomes:
        """Of the window that ends now. While the circuit is not closed none are added."""
        self.advance(now)
        requests = sum(part.requests for part in self._slices) + self._successes + self._failures
        return Outcomes(requests, sum(part.failures for part in self._slices) + self._failures)

    def forget(self) -> None:
        """What was held against the worker is settled: begin anew."""
        self._slices.clear()
        self._successes = self._failures = self._in_a_row = 0

    # Steps

    def _too_many(self, now: float) -> bool:
        settings = self.settings
        if self._in_a_row >= settings.failures_in_a_row:
            return True
        outcomes = self.outcomes(now)
        return outcomes.requests >= settings.requests_min and outcomes.failure_share >= settings.failure_share

    def _open(self, now: float, jitter: float) -> None:
        settings = self.settings
        relapsed = self.circuit is HALF_OPEN or (
            self.opened_total > 0 and now - self._closed_at < 2.0 * self._pause_seconds
        )
        self._level = min(self._level + 1, _LEVEL_MAX) if relapsed else 0
        longest = min(settings.open_seconds_min * 2.0**self._level, settings.open_seconds_max)
        self._pause_seconds = longest * (1.0 - settings.jitter_share * jitter)
        self.circuit, self.reopens_at, self._trial = OPEN, now + self._pause_seconds, ""
        self.opened_total += 1

    def _close(self, now: float) -> None:
        self.circuit, self._trial, self._closed_at = CLOSED, "", now
        self.forget()

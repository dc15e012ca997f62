"""What the gateway knows of the holders that it lets others pull from: what is under way, and who disappointed of late.

A pull counts against its source until it is reported, or until it should have ended: an answer in one piece reports it
only when it is complete.

A source that did not deliver is left alone for a while, by the worker that it failed; each failure in a row doubles
that. How long depends on what the failure says: a busy source is free in a moment, one that cannot be reached was
perhaps restarted, and one whose frames do not authenticate will hardly do better the next time. Two minutes after the
end of a pause it is forgotten.
"""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

PAUSE_SECONDS_MAX = 120.0
PAUSES_SECONDS = {
    "busy": 0.1,
    "deadline": 0.5,
    "stalled": 1.0,
    "closed": 1.0,
    "unreachable": 2.0,
    "incomplete": 2.0,
    "internal": 2.0,
    "unexpected": 10.0,
    "unusable": 10.0,
    "malformed": 10.0,
    "forged": 30.0,
    "incompatible": 30.0,
}
"""By `cachecore.transfer.errors.Reason`. What is not listed is no fault of the source's, or will be known by its events
or the next probe: a block that was evicted, a new epoch."""

_NOTHING: Mapping[Hashable, int] = {}


class _Pause(NamedTuple):
    until: float
    failures: int


class _Pull(NamedTuple):
    source: Hashable
    size_bytes: int
    ends_at: float


class SourceAccounts:
    """Sources and targets are whatever the caller calls them."""

    def __init__(self) -> None:
        self._pulls: dict[str, _Pull] = {}
        self._pauses: dict[tuple[Hashable, Hashable], _Pause] = {}

    def __len__(self) -> int:
        return len(self._pulls)

    def begin(self, request_id: str, source: Hashable, size_bytes: int, ends_at: float) -> None:
        self._pulls[request_id] = _Pull(source, size_bytes, ends_at)

    def end(self, request_id: str) -> None:
        self._pulls.pop(request_id, None)

    def ahead_bytes(self, now: float) -> Mapping[Hashable, int]:
        """By source, of pulls that should still be under way."""
        if not self._pulls:
            return _NOTHING
        for request_id in [request_id for request_id, pull in self._pulls.items() if pull.ends_at <= now]:
            del self._pulls[request_id]
        ahead: dict[Hashable, int] = {}
        for pull in self._pulls.values():
            ahead[pull.source] = ahead.get(pull.source, 0) + pull.size_bytes
        return ahead

    def failed(self, source: Hashable, target: Hashable, reason: str, now: float) -> None:
        pause = PAUSES_SECONDS.get(reason)
        if pause is None:
            return
        for key in [key for key, old in self._pauses.items() if old.until + PAUSE_SECONDS_MAX <= now]:
            del self._pauses[key]
        failures = self._pauses[source, target].failures if (source, target) in self._pauses else 0
        seconds = min(pause * 2.0 ** min(failures, 10), PAUSE_SECONDS_MAX)
        self._pauses[source, target] = _Pause(now + seconds, failures + 1)

    def delivered(self, source: Hashable, target: Hashable) -> None:
        self._pauses.pop((source, target), None)

    def paused(self, source: Hashable, target: Hashable, now: float) -> bool:
        pause = self._pauses.get((source, target))
        return pause is not None and now < pause.until

    def document(self, now: float) -> dict[str, float]:
        """Seconds that are left of each pause, for `/status`."""
        return {
            f"{source}>{target}": round(pause.until - now, 3)
            for (source, target), pause in self._pauses.items()
            if pause.until > now
        }

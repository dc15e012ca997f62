"""WEKA's agent sessions: seconds, block ids that hold within one session, usually of 64 tokens, a last part left out.

    {"id": "s1", "block_size": 64, "hash_id_scope": "local", "requests": [
        {"t": 0.0, "type": "n", "in": 130, "out": 20, "hash_ids": [1, 2]},
        {"t": 9.5, "type": "subagent", "requests": [{"t": 10.0, "in": 70, "out": 5, "hash_ids": [7]}]}]}
    {"id": "s1", "t": 0.0, "in": 130, "out": 20, "hash_ids": [1, 2]}

The second form has a row for each request. A session's own requests are a closed loop, and so are those of each of its
subagents, who share its ids and start after the request before them. Where a request says how long the model took
(`api_time`) the pause is known; where it says `think_time`, that is the pause. Each session's clock may start at 0:
then sessions are given times to begin at.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from loadtest.traces.arrivals import poisson
from loadtest.traces.blocksizes import settle_block_size
from loadtest.traces.building import Draft, names_of
from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample
from loadtest.traces.rows import RowError, Tally, json_rows, number, numbers, tokens, understood, whole

BLOCK_SIZE_TOKENS = 64
_GLOBAL = "global"
_Loop = tuple[str | int, ...]
"""A session's name, and for a subagent's requests where in the session they stand."""


class _Sessions:
    """Drafts of all sessions; a session's ids are a scope of their own."""

    def __init__(self) -> None:
        self.drafts: list[Draft] = []
        self.lengths: list[tuple[int, int]] = []
        self.block_sizes: set[int] = set()
        self._scopes: dict[str, int] = {}
        self._last: dict[_Loop, tuple[Draft, float]] = {}
        """Of each loop, its last request and when that had been answered in the recording."""

    def add_session(self, session: Mapping[str, Any]) -> None:
        if "block_size" in session:
            self.block_sizes.add(whole(session, "block_size", 1))
        name, scope = str(session["id"]), session.get("hash_id_scope", "local")
        before = len(self.drafts), len(self.lengths)
        try:
            for loop, request in _flattened(session["requests"], (name,)):
                self.add(request, name, loop, scope == _GLOBAL)
        except Exception:
            del self.drafts[before[0] :], self.lengths[before[1] :]
            raise

    def add(self, request: Mapping[str, Any], session: str, loop: "_Loop", shared_ids: bool) -> None:
        ids, length, start = numbers(request, "hash_ids"), tokens(request, "in", 1), number(request, "t")
        scope = 0 if shared_ids else self._scopes.setdefault(session, len(self._scopes) + 1)
        follows, ended = self._last.get(loop) or self._last.get(loop[:-1]) or (None, 0.0)
        pause = number(request, "think_time", 0.0) if "think_time" in request else max(start - ended, 0.0)
        draft = Draft(start, length, tokens(request, "out"), names_of(ids, scope), session=session, follows=follows)
        if follows is not None:
            draft.delay_seconds = pause
            draft.arrival_seconds = follows.arrival_seconds + pause
        took = number(request, "api_time", 0.0) if "api_time" in request else 0.0
        self._last[loop] = draft, start + took
        self.drafts.append(draft)
        self.lengths.append((length, len(ids)))

    def start_apart(self, starts: Iterator[float]) -> int:
        """Where several sessions begin at one time, begin them one after another. Returns how many there are."""
        began: dict[str, float] = {}
        for draft in self.drafts:
            began.setdefault(draft.session, draft.arrival_seconds)
        if len(began) < 2 or len(set(began.values())) > 1:
            return 0
        offsets = {session: next(starts) for session in began}
        for draft in self.drafts:
            draft.arrival_seconds += offsets[draft.session]
        return len(began)


def _flattened(requests: Any, loop: _Loop) -> Iterator[tuple[_Loop, Mapping[str, Any]]]:
    if not isinstance(requests, list):
        raise RowError("`requests` is no list")
    for place, request in enumerate(requests):
        if isinstance(request.get("requests"), list):
            yield from _flattened(request["requests"], (*loop, place))
        else:
            yield loop, request


def _read(path: Path, options: ReadOptions) -> Parsed:
    tally, sessions = Tally(path, "weka"), _Sessions()

    def add(row: Mapping[str, Any]) -> None:
        if "requests" in row:
            sessions.add_session(row)
        else:
            name = str(row["id"])
            sessions.add(row, name, (name,), shared_ids=False)

    understood(json_rows(path, options.progress), add, tally)
    stated = options.block_size_tokens or (next(iter(sessions.block_sizes)) if len(sessions.block_sizes) == 1 else None)
    block_size, notes = settle_block_size(sessions.lengths, BLOCK_SIZE_TOKENS, stated)
    count = sessions.start_apart(poisson(Random(options.seed), options.rate))
    if count:
        rate = f"{options.rate:g} a second (Poisson, seed {options.seed})"
        notes.append(f"{count} sessions start at one time: begun at {rate}")
    return Parsed(sessions.drafts, block_size, [*notes, *tally.notes()], names_are_ids=True)


def _matches(sample: Sample) -> bool:
    requests = sample.keys.get("requests")
    if sample.has("id") and isinstance(requests, list):
        return "hash_id_scope" in sample.keys or (
            bool(requests) and isinstance(requests[0], dict) and "t" in requests[0]
        )
    return sample.has("t", "in", "out", "hash_ids")


WEKA = Format("weka", "WEKA: t in s, in, out, hash_ids of 64 tokens within a session", _matches, _read)

"""The pure state of `policies/`, made to leave a note of every change a request of this gateway makes.

What other gateways did is applied through the methods of the base classes (`gateway.fleet.peerbook`), and leaves none:
so nothing that was heard is told again. Without peers a gateway uses the base classes themselves.
"""

from collections import deque
from collections.abc import Callable, Sequence

from cachecore.holders import Worker
from gateway.fleet.notes import (
    CHAIN_BYTES_MAX,
    LISTED_MAX,
    SECONDS_MAX,
    TOKENS_MAX,
    Dispatched,
    Finished,
    FirstToken,
    Listed,
    Note,
    Predicted,
    Recorded,
    Withdrawn,
)
from policies.state.chains import ChainStore
from policies.state.history import RoutingHistory
from policies.state.inflight import AnswerSample, InflightAccounting, PrefillSample, WorkerKey
from policies.state.pins import PinnedChains
from policies.state.predictions import PredictedInsertions

NOTES_MAX = 16_384
"""Kept while they cannot be sent. Beyond that the oldest go, and the list of requests has to set it right."""

HoldersOf = Callable[[str], Sequence[Worker]]
"""The ranks of a worker's present life, by its name; none when there is no such worker."""


class Outbox:
    """Notes that wait to be sent, and this gateway's own requests under way."""

    __slots__ = ("_holders_of", "idle", "notes", "requests", "rouse")

    def __init__(self, holders_of: HoldersOf, notes_max: int = NOTES_MAX) -> None:
        self._holders_of = holders_of
        self.notes: deque[Note] = deque(maxlen=notes_max)
        self.requests: dict[str, Dispatched] = {}
        self.idle = False
        """Whether the sender sleeps and is to be roused by the next note."""
        self.rouse: Callable[[], None] = _nothing

    def __repr__(self) -> str:
        return f"Outbox({len(self.notes)} notes, {len(self.requests)} requests under way)"

    @property
    def full(self) -> bool:
        """Whether some may have gone."""
        return len(self.notes) == self.notes.maxlen

    def add(self, note: Note) -> None:
        self.notes.append(note)
        if self.idle:
            self.wake()

    def wake(self) -> None:
        self.idle = False
        self.rouse()

    def epoch(self, worker: str, rank: int) -> int:
        """The life a worker is in; 0, which nobody knows, when it is not there."""
        holders = self._holders_of(worker)
        return holders[rank].epoch if rank < len(holders) else 0

    def take(self, count_max: int) -> list[Note]:
        """The oldest notes, which are no longer kept."""
        notes = self.notes
        return [notes.popleft() for _ in range(min(count_max, len(notes)))]


# On the path of every request: `Outbox.add` is written out, and `super()` takes longer than the class's name.


class NotedAccounting(InflightAccounting):
    def __init__(self, outbox: Outbox, pins: PinnedChains | None = None) -> None:
        super().__init__(pins=pins)
        self._outbox = outbox
        self._note = outbox.notes.append

    @property
    def own_requests(self) -> int:
        return len(self._outbox.requests)

    def dispatch(
        self,
        request_id: str,
        worker: str,
        rank: int,
        now: float,
        prompt_tokens: int,
        prefill_seconds: float,
        output_tokens_max: int = 0,
        prior_seconds: float | None = None,
        in_one_piece: bool = False,
    ) -> None:
        InflightAccounting.dispatch(
            self,
            request_id,
            worker,
            rank,
            now,
            prompt_tokens,
            prefill_seconds,
            output_tokens_max,
            prior_seconds,
            in_one_piece,
        )
        outbox = self._outbox
        told = output_tokens_max if 0 <= output_tokens_max <= TOKENS_MAX else 0  # the client's own word
        epoch = outbox.epoch(worker, rank)
        outbox.requests[request_id] = note = Dispatched(
            request_id, worker, epoch, rank, prompt_tokens, prefill_seconds, told, prior_seconds, in_one_piece
        )
        self._note(note)
        if outbox.idle:
            outbox.wake()

    def first_token(self, request_id: str, now: float) -> PrefillSample | None:
        self._note(FirstToken(request_id))
        if self._outbox.idle:
            self._outbox.wake()
        return InflightAccounting.first_token(self, request_id, now)

    def finish(
        self, request_id: str, now: float, output_tokens: int = 0, answered: bool = False
    ) -> AnswerSample | None:
        outbox = self._outbox
        if outbox.requests.pop(request_id, None) is not None:
            told = output_tokens if 0 <= output_tokens <= TOKENS_MAX else 0  # the worker's own word
            self._note(Finished(request_id, told, answered))
            if outbox.idle:
                outbox.wake()
        return InflightAccounting.finish(self, request_id, now, output_tokens, answered)

    def listed(self, now: float) -> Listed:
        """This gateway's requests under way, for those that missed their notes."""
        listed: list[Dispatched] = []
        for request_id, note in list(self._outbox.requests.items()):
            request = self._requests.get(request_id)
            if request is None:  # dropped as the oldest of too many
                del self._outbox.requests[request_id]
            elif len(listed) < LISTED_MAX:
                # Without its prior: nobody who did not see all of it should learn from it.
                listed.append(
                    Dispatched(
                        request_id,
                        note.worker,
                        note.epoch,
                        note.rank,
                        note.prompt_tokens,
                        note.prefill_seconds,
                        note.output_tokens_max,
                        None,
                        note.in_one_piece,
                        min(max(now - request.dispatched_at, 0.0), SECONDS_MAX),
                        not request.waiting,
                    )
                )
        return Listed(len(listed) == len(self._outbox.requests), listed)


class NotedPredictions(PredictedInsertions):
    def __init__(self, store: ChainStore, outbox: Outbox) -> None:
        super().__init__(store)
        self._outbox = outbox

    def predict(self, request_id: str, key: WorkerKey, chain: bytes, now: float) -> None:
        PredictedInsertions.predict(self, request_id, key, chain, now)
        if chain:
            outbox, (worker, rank) = self._outbox, key
            dispatched = outbox.requests.get(request_id)
            epoch = dispatched.epoch if dispatched is not None else outbox.epoch(worker, rank)
            outbox.add(Predicted(request_id, worker, epoch, rank, chain[:CHAIN_BYTES_MAX]))

    def confirm(self, request_id: str) -> None:
        self._tell_withdrawn(request_id)
        super().confirm(request_id)

    def cancel(self, request_id: str) -> None:
        self._tell_withdrawn(request_id)
        super().cancel(request_id)

    def _tell_withdrawn(self, request_id: str) -> None:
        if request_id in self._pending:
            self._outbox.add(Withdrawn(request_id))


class NotedHistory(RoutingHistory):
    def __init__(self, store: ChainStore, outbox: Outbox) -> None:
        super().__init__(store)
        self._outbox = outbox

    def record(self, key: WorkerKey, chain: bytes) -> None:
        RoutingHistory.record(self, key, chain)
        if chain:
            outbox, (worker, rank) = self._outbox, key
            outbox.add(Recorded(worker, outbox.epoch(worker, rank), rank, chain[:CHAIN_BYTES_MAX]))


def _nothing() -> None:
    """Nobody sends yet."""

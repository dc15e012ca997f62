"""What other gateways are known to have under way, kept in the same accounts as this gateway's own requests.

Messages go in, calls of the accounting and its siblings come out; nothing here does I/O. A request of another gateway
is counted under `<gateway>/<request id>`, from the moment its note is read, by this gateway's clock.

* The accounts are the fleet's, and so are the means they keep themselves (how long outputs are, how long a request
  holds its slot): every gateway hears of every finish once, as if all requests were its own.
* The estimates are not: a stretch of prefill or a whole answer teaches the gateway that saw its last first token or
  its end, and what it would teach here is dropped. A stretch counts everyone's prefills all the same, so what the one
  gateway learns from it is right.
* A note about a life of a worker that is not its present one here is counted and set aside. When that life begins here
  as well, requests still under way are counted after all.
* Lost messages show in sequence numbers, lost notes in the count of requests that every message carries. Then the
  gateway is asked for the list of its requests, which replaces all that was known of them.
* A gateway that has not been heard for `silence_seconds`, or that has started again, has nothing under way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.fleet.noted import HoldersOf
from gateway.fleet.notes import (
    DirectoryChanged,
    Dispatched,
    Finished,
    FirstToken,
    Leaving,
    Listed,
    Message,
    NoteError,
    Predicted,
    Recorded,
    Wanted,
    Withdrawn,
    decode,
)
from policies.state.history import RoutingHistory
from policies.state.inflight import InflightAccounting
from policies.state.predictions import PredictedInsertions

SILENCE_SECONDS = 3.0
PEERS_MAX = 256
PEER_REQUESTS_MAX = 65_536
_ASK_SECONDS = 1.0
"""Between two requests for the list of one gateway."""


class BookCounts(NamedTuple):
    """What has come of the messages of others so far."""

    messages: int = 0
    notes: int = 0
    malformed: int = 0
    """Messages nothing could be read from, or of another version."""
    refused: int = 0
    """Notes and messages beyond the bounds on gateways and requests."""
    repeated: int = 0
    """Messages read twice."""
    gaps: int = 0
    """Messages before which others were lost."""
    differences: int = 0
    """Messages after which our count of requests was not the sender's."""
    strange_lives: int = 0
    """Notes about a life of a worker that is not its present one here."""
    unknown_requests: int = 0
    """Notes about requests never heard of."""
    silenced: int = 0
    """Gateways given up."""


class PeerView(NamedTuple):
    """One other gateway, as far as it is known."""

    gateway: str
    run: str
    requests: int
    set_aside: int
    """Of those, on lives of workers that are not known here."""
    complete: bool
    """Whether this is all it has under way."""
    silent_seconds: float


class _Peer:
    """A run of another gateway."""

    __slots__ = ("asked_at", "complete", "gateway", "heard_at", "requests", "run", "sequence", "set_aside")

    def __init__(self, gateway: str, run: str, sequence: int, now: float) -> None:
        self.gateway = gateway
        self.run = run
        self.sequence = sequence
        self.heard_at = now
        self.asked_at = now - _ASK_SECONDS
        # A run heard from its first message on has nothing that we missed.
        self.complete = sequence == 0
        self.requests: dict[str, Dispatched] = {}
        self.set_aside: dict[str, tuple[Dispatched, float]] = {}
        """Requests on lives that are not known here, and when they were told of."""

    def __len__(self) -> int:
        return len(self.requests) + len(self.set_aside)

    def __repr__(self) -> str:
        return f"_Peer({self.gateway}, run {self.run}, {len(self.requests)} + {len(self.set_aside)} requests)"


class PeerBook:
    """See the module's opening. `gateway` is this gateway's own id."""

    def __init__(
        self,
        gateway: str,
        accounting: InflightAccounting,
        predictions: PredictedInsertions,
        history: RoutingHistory,
        holders_of: HoldersOf,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._gateway = gateway
        self._accounting = accounting
        self._predictions = predictions
        self._history = history
        self._holders_of = holders_of
        self._silence_seconds = silence_seconds
        self._peers: dict[str, _Peer] = {}
        self._counts = dict.fromkeys(BookCounts._fields, 0)
        self._appliers: dict[type, Callable[[_Peer, Any, float], None]] = {
            Dispatched: self._dispatched,
            FirstToken: self._first_token,
            Finished: self._finished,
            Predicted: self._predicted,
            Withdrawn: self._withdrawn,
            Recorded: self._recorded,
            Listed: self._listed,
            Wanted: self._wanted,
            DirectoryChanged: self._directory_changed,
            Leaving: self._leaving,
        }
        self.namesakes = 0
        """Messages of another gateway with this one's id."""
        self.list_wanted = False
        """Somebody asks for our list. Set back by whoever sends it."""
        self.directory_changed = False
        """Somebody changed the directory of workers. Set back by whoever reads it."""

    def __repr__(self) -> str:
        return f"PeerBook({list(self._peers.values())})"

    # What comes in

    def receive(self, data: bytes, now: float) -> None:
        """A message of another gateway. Nothing in it can raise."""
        try:
            message = decode(data)
        except NoteError:
            self._counts["malformed"] += 1
            return
        peer = self._peer(message, now)
        if peer is None:
            return
        self._counts["messages"] += 1
        self._counts["notes"] += len(message.notes)
        for note in message.notes:
            self._appliers[type(note)](peer, note, now)
        if message.inflight is not None and message.inflight != len(peer) and peer.complete:
            self._counts["differences"] += 1
            peer.complete = False

    def expire(self, now: float) -> None:
        """Give up whoever is silent. To be called several times a second."""
        for peer in list(self._peers.values()):
            if now - peer.heard_at >= self._silence_seconds:
                self._counts["silenced"] += 1
                self._retire(peer, now)
            elif peer.set_aside:
                self._place_set_aside(peer, now)

    # What goes out

    def asks(self, now: float) -> list[Wanted]:
        """Whose lists are needed, each named once in a while."""
        asked = [p for p in self._peers.values() if not p.complete and now - p.asked_at >= _ASK_SECONDS]
        for peer in asked:
            peer.asked_at = now
        return [Wanted(peer.gateway) for peer in asked]

    @property
    def incomplete(self) -> bool:
        return not all(peer.complete for peer in self._peers.values())

    def alive(self) -> list[str]:
        """The gateways heard of lately, this one left out."""
        return list(self._peers)

    def counts(self) -> BookCounts:
        return BookCounts(**self._counts)

    def view(self, now: float) -> list[PeerView]:
        return [
            PeerView(p.gateway, p.run, len(p), len(p.set_aside), p.complete, max(now - p.heard_at, 0.0))
            for p in self._peers.values()
        ]

    # Who it is from

    def _peer(self, message: Message, now: float) -> _Peer | None:
        """Who sent this; None when it is not to be read."""
        peer = self._peers.get(message.gateway)
        if peer is not None and peer.run != message.run:
            self._retire(peer, now)
            peer = None
        if peer is None:
            if message.gateway == self._gateway:
                self.namesakes += 1
                return None
            if len(self._peers) >= PEERS_MAX:
                self._counts["refused"] += 1
                return None
            peer = self._peers[message.gateway] = _Peer(message.gateway, message.run, message.sequence, now)
        elif message.sequence <= peer.sequence:
            self._counts["repeated"] += 1
            return None
        elif message.sequence > peer.sequence + 1:
            self._counts["gaps"] += 1
            peer.complete = False
        peer.sequence = message.sequence
        peer.heard_at = now
        return peer

    def _retire(self, peer: _Peer, now: float) -> None:
        del self._peers[peer.gateway]
        for request_id in list(peer.requests):
            self._end(peer, request_id, now)
        self._predictions.cancel_all(f"{peer.gateway}/")

    # Notes. The base classes' own methods are called: those of `gateway.fleet.noted` would tell it all again.

    def _dispatched(self, peer: _Peer, note: Dispatched, now: float) -> None:
        request_id = note.request_id
        if len(peer) >= PEER_REQUESTS_MAX and request_id not in peer.requests:
            self._counts["refused"] += 1
        elif self._knows(note):
            peer.set_aside.pop(request_id, None)
            self._place(peer, note, now)
        else:
            self._end(peer, request_id, now)
            peer.set_aside[request_id] = (note, now)

    def _first_token(self, peer: _Peer, note: FirstToken, now: float) -> None:
        request_id = note.request_id
        if request_id in peer.requests:
            InflightAccounting.first_token(self._accounting, f"{peer.gateway}/{request_id}", now)
        elif request_id in peer.set_aside:
            peer.set_aside[request_id][0].started = True
        else:
            self._counts["unknown_requests"] += 1

    def _finished(self, peer: _Peer, note: Finished, now: float) -> None:
        if not self._end(peer, note.request_id, now, note.output_tokens, note.answered):
            self._counts["unknown_requests"] += 1

    def _predicted(self, peer: _Peer, note: Predicted, now: float) -> None:
        if self._knows(note):
            request_id, key = f"{peer.gateway}/{note.request_id}", (note.worker, note.rank)
            PredictedInsertions.predict(self._predictions, request_id, key, note.chain, now)
            self._accounting.pin(request_id, note.chain)

    def _withdrawn(self, peer: _Peer, note: Withdrawn, now: float) -> None:
        PredictedInsertions.cancel(self._predictions, f"{peer.gateway}/{note.request_id}")

    def _recorded(self, peer: _Peer, note: Recorded, now: float) -> None:
        if self._knows(note):
            RoutingHistory.record(self._history, (note.worker, note.rank), note.chain)

    def _listed(self, peer: _Peer, note: Listed, now: float) -> None:
        peer.complete = True
        if note.complete:
            listed = {request.request_id for request in note.requests}
            for request_id in [known for known in (*peer.requests, *peer.set_aside) if known not in listed]:
                self._end(peer, request_id, now)
        for request in note.requests:
            known = peer.requests.get(request.request_id)
            if known is None or _placement(known) != _placement(request):
                self._dispatched(peer, request, now)
            elif request.started:
                self._first_token(peer, FirstToken(request.request_id), now)

    def _wanted(self, peer: _Peer, note: Wanted, now: float) -> None:
        if note.gateway in ("", self._gateway):
            self.list_wanted = True

    def _directory_changed(self, peer: _Peer, note: DirectoryChanged, now: float) -> None:
        self.directory_changed = True

    def _leaving(self, peer: _Peer, note: Leaving, now: float) -> None:
        if self._peers.get(peer.gateway) is peer:
            self._retire(peer, now)

    # Requests

    def _knows(self, note: Dispatched | Predicted | Recorded) -> bool:
        known = self._present(note)
        self._counts["strange_lives"] += not known
        return known

    def _present(self, note: Dispatched | Predicted | Recorded) -> bool:
        holders = self._holders_of(note.worker)
        return note.rank < len(holders) and holders[note.rank].epoch == note.epoch

    def _place(self, peer: _Peer, note: Dispatched, now: float) -> None:
        request_id = f"{peer.gateway}/{note.request_id}"
        peer.requests[note.request_id] = note
        InflightAccounting.dispatch(
            self._accounting,
            request_id,
            note.worker,
            note.rank,
            now - note.age_seconds,
            note.prompt_tokens,
            note.prefill_seconds,
            note.output_tokens_max,
            note.prior_seconds,
            note.in_one_piece,
        )
        if note.started:
            InflightAccounting.first_token(self._accounting, request_id, now)

    def _place_set_aside(self, peer: _Peer, now: float) -> None:
        for request_id, (note, told_at) in list(peer.set_aside.items()):
            if self._present(note):
                del peer.set_aside[request_id]
                # Its prefill began unseen: nothing is learned from it.
                note.age_seconds, note.prior_seconds = note.age_seconds + now - told_at, None
                self._place(peer, note, now)

    def _end(self, peer: _Peer, request_id: str, now: float, output_tokens: int = 0, answered: bool = False) -> bool:
        """False when there was no such request."""
        if peer.requests.pop(request_id, None) is None:
            return peer.set_aside.pop(request_id, None) is not None
        InflightAccounting.finish(self._accounting, f"{peer.gateway}/{request_id}", now, output_tokens, answered)
        return True


def _placement(note: Dispatched) -> tuple[str, int, int]:
    return note.worker, note.epoch, note.rank

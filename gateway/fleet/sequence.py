"""What to do with the numbered messages of an event stream: apply, ask again, or give up what is known.

A publisher numbers its batches from 0 and keeps the last few thousand for replay. Messages get lost (a slow reader, a
reconnect), publishers restart, and replies to a replay race the live stream. The rules, free of sockets and clocks:

* Batches are applied in the order of their numbers, each once. While a replay is on its way, live batches wait.
* A gap asks for a replay from the first missing batch. If the replay cannot fill it, a removal may have been missed:
  everything known of the holder is void, and the stream goes on from what is there.
* A replay may have gaps itself: an engine's ROUTER socket drops what its queue has no room for. What it has left out
  is asked for again, as long as each replay begins with what was asked for.
* Nothing is void at the beginning. Whoever joins late knows too little, which shortens matches and never makes them
  wrong; so a history that starts in the middle is taken as it comes.
* A live number that is not above the last LIVE one means a new publisher (unless the very same batch came twice).
  Numbers below what a replay has brought are no such sign: the live copy merely came second.
* Whoever goes on for another knows the stream up to that one's last batch, and owes it every batch from there on: now
  a history that starts later is a gap. A new subscription brings new messages only, so its first number, too, must lie
  above that batch. And the replay begins WITH that batch: a publisher that has neither it nor anything later to show
  is a new one. (One that is new and has already come further cannot be told from the old one by its numbers; that is
  for whoever watches the worker's process.)
"""

from collections import deque
from enum import StrEnum
from typing import NamedTuple


class VoidReason(StrEnum):
    """Why nothing that is known of a holder may be believed any longer."""

    GAP = "gap"
    """Batches are lost for good."""
    RESTART = "restart"
    """The publisher has started over."""
    DOUBT = "doubt"
    """What it led us to believe has turned out wrong."""


class Apply(NamedTuple):
    sequence: int
    payload: bytes


class Replay(NamedTuple):
    """Ask the publisher for its batches from `start` on, in place of any replay under way; report the end of it."""

    start: int


class Void(NamedTuple):
    reason: VoidReason


Action = Apply | Replay | Void


class SequenceTracker:
    """Feed it what arrives, do what it returns, in order. See the module's opening for the rules.

    `waiting_max` bounds the live batches that wait for a replay; those beyond it are dropped and asked for later.
    """

    def __init__(self, waiting_max: int = 10_000) -> None:
        self.expected: int | None = None
        """Number of the next batch to apply; None until the stream's beginning is known."""
        self.replaying = False
        self._waiting: deque[Apply] = deque()
        self._waiting_max = waiting_max
        self._covered: int | None = None
        """A replay under way must bring every batch from `expected` to below this one; None when it owes nothing."""
        self._brought = False
        """The replay under way has brought something new."""
        self._last_live: Apply | None = None
        """What live numbers must stay above; after a resumption, a stand-in for the last batch that was applied."""
        self._unproven = False
        """The stream was resumed, and nothing has come from its publisher yet."""

    def __repr__(self) -> str:
        return f"SequenceTracker(expected={self.expected}, replaying={self.replaying}, waiting={len(self._waiting)})"

    def start(self) -> list[Action]:
        """Before the first message: what the worker announced before we came."""
        return [self._request(0, None)]

    def resume(self, cursor: int) -> list[Action]:
        """Before the first message, in place of `start`: every batch up to `cursor` has been applied by another."""
        self.expected = cursor + 1
        self._last_live = Apply(cursor, b"")
        self._unproven = True
        return [self._request(cursor, self.expected)]

    def live(self, sequence: int, payload: bytes) -> list[Action]:
        """A message of the live stream has arrived."""
        message, last = Apply(sequence, payload), self._last_live
        if last is not None and sequence <= last.sequence:
            return [] if message == last else self._restart(message)
        self._last_live = message
        self._unproven = False
        if self.replaying:
            self._wait(message)
            return []
        return self._next(message)

    def replayed(self, sequence: int, payload: bytes) -> list[Action]:
        """A message of the replay under way has arrived."""
        if not self.replaying:
            return []
        self._unproven = False
        expected, actions = self.expected, list[Action]()
        if expected is not None and sequence < expected:
            return []
        if expected is not None and sequence > expected:
            if self._brought:
                return [self._request(expected, max(sequence, self._covered or 0))]
            actions.append(Void(VoidReason.GAP))
        self.expected = sequence + 1
        self._brought = True
        return [*actions, Apply(sequence, payload)]

    def replay_ended(self, complete: bool) -> list[Action]:
        """The replay is over: `complete` when the publisher said so, else it failed or nobody answers replays."""
        if not self.replaying:
            return []
        self.replaying = False
        if complete and self._unproven:
            return self._start_over()
        first = self._waiting[0].sequence if self._waiting else None
        actions: list[Action] = []
        if self.expected is None:
            self.expected = first if first is not None or not complete else 0
        elif self._covered is not None and self.expected < self._covered:
            actions.append(Void(VoidReason.GAP))
            self.expected = self._covered
        while self._waiting and not self.replaying:
            actions += self._next(self._waiting.popleft())
        return actions

    def doubt(self, reread: bool) -> list[Action]:
        """Void what was applied; `reread` begins again with what the publisher can still show."""
        void = Void(VoidReason.DOUBT)
        if not reread:
            return [void]
        self._unproven = False
        self.expected = None
        return [void, self._request(0, None)]

    def _next(self, message: Apply) -> list[Action]:
        """The next message, with no replay under way."""
        if self.expected is None:
            if message.sequence:
                self._waiting.appendleft(message)
                return [self._request(0, None)]
            self.expected = 0
        if message.sequence < self.expected:
            return []
        if message.sequence > self.expected:
            self._waiting.appendleft(message)
            return [self._request(self.expected, message.sequence)]
        self.expected += 1
        return [message]

    def _restart(self, message: Apply) -> list[Action]:
        self._last_live = message
        self._waiting.clear()
        self.replaying = self._unproven = False
        self.expected = None
        return [Void(VoidReason.RESTART), *self._next(message)]

    def _start_over(self) -> list[Action]:
        """The publisher is a new one and has not sent anything since we came."""
        self._last_live = None
        self._unproven = False
        self.expected = None
        return [Void(VoidReason.RESTART), *self.start()]

    def _request(self, start: int, covered: int | None) -> Replay:
        self.replaying = True
        self._brought = False
        self._covered = covered
        return Replay(start)

    def _wait(self, message: Apply) -> None:
        if len(self._waiting) < self._waiting_max:
            self._waiting.append(message)

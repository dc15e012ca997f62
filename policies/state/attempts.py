"""How many further attempts a gateway may make: a share of its requests, and a few a second besides.

    allowed in a window = share * requests of the window + per second * seconds of the window

Without such a budget retries multiply the load of a fleet exactly when it can bear least (Finagle's `RetryBudget`,
Envoy's `retry_budget`). Every gateway spends a share of its own requests, so all together spend that share of the
fleet's.
"""

from collections import deque

WINDOW_SECONDS = 10
"""Divided into seconds."""


class AttemptBudget:
    """Counts the requests of a window, and what was spent of it. `requests` is counted by whoever begins one."""

    __slots__ = ("_counted", "_second", "_seconds", "_spent", "denied", "per_second_min", "requests", "share", "spent")

    def __init__(self, share: float, per_second_min: float) -> None:
        self.share = share
        self.per_second_min = per_second_min
        self.requests = self.spent = self.denied = 0
        """Since the start."""
        self._counted = self._spent = 0
        """Of these, what lies before the present second."""
        self._second = 0
        self._seconds: deque[tuple[int, int]] = deque(maxlen=WINDOW_SECONDS - 1)

    def __repr__(self) -> str:
        return f"AttemptBudget(share={self.share}, spent={self.spent}, denied={self.denied})"

    def spend(self, now: float) -> bool:
        """Whether another attempt may be made, which it then must be."""
        if self.left(now) < 1.0:
            self.denied += 1
            return False
        self.spent += 1
        return True

    def refund(self) -> None:
        """An attempt was not made after all."""
        self.spent -= 1

    def left(self, now: float) -> float:
        """Attempts that could be made at this moment."""
        self.advance(now)
        requests = sum(count for count, _ in self._seconds) + self.requests - self._counted
        spent = sum(count for _, count in self._seconds) + self.spent - self._spent
        return self.share * requests + self.per_second_min * WINDOW_SECONDS - spent

    def advance(self, now: float) -> None:
        """Begin a new second. To be called in every one: requests are not dated one by one."""
        second = int(now)
        if second <= self._second:
            return
        self._seconds.append((self.requests - self._counted, self.spent - self._spent))
        self._seconds.extend([(0, 0)] * min(second - self._second - 1, WINDOW_SECONDS))
        self._counted, self._spent, self._second = self.requests, self.spent, second

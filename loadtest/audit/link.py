"""The network between engines in virtual time: each has one interface, which sends and receives one run at a time."""

from dataclasses import dataclass
from typing import NamedTuple

from policies.estimates import LinkPrior


@dataclass(frozen=True, slots=True)
class LinkShape:
    gigabits_per_second: float
    latency_seconds: float = 0.005
    compression: float = 1.0
    """How much smaller the codec makes KV."""

    def __post_init__(self) -> None:
        if not self.gigabits_per_second > 0 or self.latency_seconds < 0 or not self.compression > 0:
            raise ValueError("a link needs a positive rate and compression, and a latency that is not negative")

    @property
    def bytes_per_second(self) -> float:
        return LinkPrior.of_network(self.gigabits_per_second).bytes_per_second


class Transfer(NamedTuple):
    size_bytes: int
    arrives_at: float
    """Of the last byte, or when it is given up."""
    complete: bool


class Network:
    """Interfaces of a fleet. A run waits for both ends to be free, first come first served."""

    def __init__(self, shape: LinkShape, engines: int) -> None:
        self.shape = shape
        self.moved_bytes = 0
        self._sends_until = [0.0] * engines
        self._receives_until = [0.0] * engines

    def transfer(self, source: int, target: int, size_bytes: int, now: float, patience_seconds: float) -> Transfer:
        """Move so much. What has not come after `patience_seconds` is given up, and leaves the rest of its turn. Raises
        ValueError for nothing to move: what is there already is not to be pulled."""
        if size_bytes < 1:
            raise ValueError(f"cannot move {size_bytes} bytes")
        begins = max(now, self._sends_until[source], self._receives_until[target])
        ends = begins + size_bytes / self.shape.bytes_per_second
        deadline, arrives = now + patience_seconds, ends + self.shape.latency_seconds
        if begins < deadline:
            self._sends_until[source] = self._receives_until[target] = min(ends, deadline)
        if arrives > deadline:
            return Transfer(size_bytes, deadline, False)
        self.moved_bytes += size_bytes
        return Transfer(size_bytes, arrives, True)

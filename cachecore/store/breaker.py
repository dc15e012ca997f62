"""When to stop asking a server that does not answer, and when to look again. Time is handed in."""

from dataclasses import dataclass


@dataclass
class Breaker:
    """Opens after `threshold` failures in a row; then only probes get through, and the first success closes it."""

    threshold: int = 3
    probe_seconds_min: float = 0.1
    probe_seconds_max: float = 1.0
    failures: int = 0
    """In a row."""
    reason: str = ""
    """Of the last failure; empty while there is none."""
    opened: bool = False
    since: float = 0.0
    """When it last opened or closed, on the clock of the `now` handed in; 0 when it never did."""
    probes: int = 0
    """That failed since it opened."""

    def fresh(self) -> "Breaker":
        """Another one with the same settings, closed: each node of a cluster has its own."""
        return Breaker(self.threshold, self.probe_seconds_min, self.probe_seconds_max)

    def failed(self, reason: str, now: float) -> bool:
        """Count a failure; True when this one opened the breaker."""
        self.failures += 1
        self.reason = reason
        if self.opened:
            self.probes += 1
            return False
        if self.failures < self.threshold:
            return False
        self.opened, self.since, self.probes = True, now, 0
        return True

    def succeeded(self, now: float) -> None:
        self.failures = 0
        if self.opened:
            self.opened, self.since, self.probes = False, now, 0
        self.reason = ""

    @property
    def probe_delay_seconds(self) -> float:
        """How long to wait before the next look: doubled with every failed one, to the bound."""
        return min(self.probe_seconds_min * 2.0 ** min(self.probes, 16), self.probe_seconds_max)

"""What is noted while a history is played: each journey's ends, and which upstream requests live at one time."""

import re
from dataclasses import dataclass, field
from typing import Any

from gateway.edge.contract import Ending
from gateway.edge.upstream import UpstreamConnection
from gateway.journey import Journey
from tests.sim.network import End, Network

_MARKER = re.compile(rb'"marker": ?"(c[0-9]+-[0-9]+)"').search


class Watched:
    """A journey that counts how often it has ended. Everything else is the journey's own."""

    def __init__(self, journey: Journey, watch: "Watch") -> None:
        self._journey = journey
        self._watch = watch
        self.marker = journey.request.id
        self.endings: list[Ending] = []
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journey, name)

    def hedge(self) -> "Watched | None":
        second = self._journey.hedge()
        return None if second is None else self._watch.watched(second)

    def ended(self, ending: Ending, status: int, body_bytes: int, tail: bytes) -> None:
        self.endings.append(ending)
        self.status = status
        self._journey.ended(ending, status, body_bytes, tail)


def _lives(end: End) -> bool:
    """Whether the gateway still waits for an answer there."""
    connection = end.get_protocol()
    assert isinstance(connection, UpstreamConnection)
    return not end.is_closing() and connection._receiver is not None


@dataclass(slots=True)
class Watch:
    legs_max: int = 1
    """How many upstream requests may live at once for one client request."""
    journeys: list[Watched] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    sent: dict[str, list[End]] = field(default_factory=dict)
    """The gateway's ends of connections to workers that a request was written to, in their order."""

    def watched(self, journey: Journey) -> Watched:
        self.journeys.append(Watched(journey, self))
        return self.journeys[-1]

    def happened(self, who: str, what: str, data: bytes, network: Network) -> None:
        if what != "writes" or not who.startswith("to ") or not who.endswith("caller"):
            return
        marker = _MARKER(data)
        if marker is None:
            self.violations.append(f"written to a worker, and no request: {data[:200]!r}")
            return
        end = next(end for end in network.ends if end.name == who)
        earlier = self.sent.setdefault(marker[1].decode(), [])
        if sum(map(_lives, earlier)) >= self.legs_max:
            self.violations.append(f"{marker[1].decode()} is sent again while it still lives elsewhere")
        earlier.append(end)

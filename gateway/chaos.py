"""Seeded misfortune for a stack: what befalls which part, when and for how long; and the hand that brings it about.

`schedule` is pure: one seed is one history, on every machine. Every victim has a stream of its own, so that what
befalls one does not depend on who else there is; only where the last one of a group would be struck it is spared.

`Chaos` carries a schedule out on `Target`s. It is asked now and then what is due (`tick`), waits for nothing, and says
each fault in one line. `end` makes good what may not last: nothing is left stopped.
"""

import heapq
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol, Self

from cachecore.store.embedded import server_pid
from gateway.errors import StartupError
from gateway.supervisor import Process

KILL = "kill"
FREEZE = "freeze"
SPAN_SECONDS_MAX = 3600.0


class Span(NamedTuple):
    """A time drawn evenly between two bounds."""

    seconds_min: float
    seconds_max: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """`2-8`, or `5` for always the same. Raises ValueError that says what is wrong."""
        least, dash, most = text.partition("-")
        try:
            span = cls(float(least), float(most if dash else least))
        except ValueError:
            raise ValueError(f"seconds as MIN-MAX are expected, as in 2-8, not {text!r}") from None
        if not all(map(math.isfinite, span)) or not 0 < span.seconds_min <= span.seconds_max <= SPAN_SECONDS_MAX:
            raise ValueError(f"0 < MIN <= MAX <= {SPAN_SECONDS_MAX:.0f} seconds are expected, not {text!r}")
        return span

    def __str__(self) -> str:
        return f"{self.seconds_min:g}-{self.seconds_max:g}"

    def draw(self, random: Random) -> float:
        return random.uniform(self.seconds_min, self.seconds_max)


class Bounds(NamedTuple):
    """Between which the times of a schedule are drawn."""

    interval: Span = Span(5.0, 20.0)
    """From the end of a victim's fault to its next one."""
    outage: Span = Span(0.5, 3.0)
    """How long a fault lasts."""


DEFAULT_BOUNDS = Bounds()


def bounds_of(seed: int | None, interval: str | None, outage: str | None) -> Bounds:
    """Those that a command line gives; the default for what it leaves out. Raises StartupError."""
    if seed is None and (interval or outage):
        raise StartupError("--chaos-interval and --chaos-outage are for --chaos SEED")
    try:
        return Bounds(
            DEFAULT_BOUNDS.interval if interval is None else Span.parse(interval),
            DEFAULT_BOUNDS.outage if outage is None else Span.parse(outage),
        )
    except ValueError as error:
        raise StartupError(f"--chaos: {error}") from None


class Victim(NamedTuple):
    """A part that faults may befall."""

    name: str
    kinds: tuple[str, ...]
    group: str = ""
    """Of which one member at least is well at any time; empty for none."""
    recovery_seconds: float = 0.0
    """What it takes, once a fault is over, to be well."""


class Fault(NamedTuple):
    """`kind` befalls `victim`."""

    at_seconds: float
    """After the beginning."""
    victim: str
    kind: str
    seconds: float
    """How long it lasts."""

    @property
    def over_at_seconds(self) -> float:
        return self.at_seconds + self.seconds


def schedule(seed: int, victims: Sequence[Victim], bounds: Bounds) -> Iterator[Fault]:
    """Faults in the order of their times, without end. No victim has two at once."""
    members: defaultdict[str, list[str]] = defaultdict(list)
    for victim in victims:
        members[victim.group].append(victim.name)
    known = {victim.name: victim for victim in victims}
    well_at = dict.fromkeys(known, 0.0)
    for fault in heapq.merge(*(_faults_of(victim, seed, bounds) for victim in victims)):
        victim = known[fault.victim]
        others = [well_at[name] for name in members[victim.group] if name != victim.name]
        if victim.group and all(at > fault.at_seconds for at in others):
            continue
        well_at[victim.name] = fault.over_at_seconds + victim.recovery_seconds
        yield fault


def _faults_of(victim: Victim, seed: int, bounds: Bounds) -> Iterator[Fault]:
    random = Random(f"{seed}:{victim.name}")
    now = 0.0
    while True:
        now += bounds.interval.draw(random)
        fault = Fault(now, victim.name, random.choice(victim.kinds), bounds.outage.draw(random))
        yield fault
        now = fault.over_at_seconds


class Target(Protocol):
    """What a victim is in reality. Neither method waits."""

    def strike(self, kind: str) -> None: ...

    def mend(self, kind: str) -> None:
        """The fault is over."""
        ...


class Chaos:
    """A schedule under way."""

    def __init__(
        self,
        seed: int,
        faults: Iterator[Fault],
        targets: Mapping[str, Target],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`targets` by the names of the victims."""
        self.count = 0
        """Faults so far."""
        self._seed = seed
        self._faults = faults
        self._targets = targets
        self._say = say
        self._clock = clock
        self._began = clock()
        self._next = next(faults, None)
        self._lasting: list[tuple[float, Fault]] = []

    def tick(self) -> None:
        """End what is over, and bring about what is due."""
        elapsed = self._clock() - self._began
        while self._lasting and self._lasting[0][0] <= elapsed:
            _, fault = heapq.heappop(self._lasting)
            self._targets[fault.victim].mend(fault.kind)
        while self._next is not None and self._next.at_seconds <= elapsed:
            fault, self._next = self._next, next(self._faults, None)
            self._bring_about(fault, elapsed)

    def end(self) -> None:
        """Whatever is stopped goes on; what was killed stays so."""
        lasting, self._lasting, self._next = self._lasting, [], None
        for _, fault in lasting:
            if fault.kind != KILL:
                self._targets[fault.victim].mend(fault.kind)
        self._say(f"chaos, seed {self._seed}: {self.count} faults in {self._clock() - self._began:.0f} s")

    def _bring_about(self, fault: Fault, elapsed: float) -> None:
        self.count += 1
        self._say(
            f"{datetime.now():%H:%M:%S} chaos, seed {self._seed}, +{fault.at_seconds:.1f} s: "
            f"{fault.kind} {fault.victim} for {fault.seconds:.1f} s"
        )
        self._targets[fault.victim].strike(fault.kind)
        # From now on, not from when it was due: a late tick must not make an outage of nothing.
        heapq.heappush(self._lasting, (elapsed + fault.seconds, fault))


class PartTarget:
    """A process of the supervisor's."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def strike(self, kind: str) -> None:
        if kind == KILL:
            self._process.fell()
        else:
            self._process.signal(signal.SIGSTOP)

    def mend(self, kind: str) -> None:
        if kind == KILL:
            self._process.rise()
        else:
            self._process.signal(signal.SIGCONT)


class ValkeyTarget:
    """The server that a gateway keeps in a directory, and starts again by itself when it is killed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._frozen: int | None = None

    def strike(self, kind: str) -> None:
        pid = server_pid(self._directory)
        if pid is None:
            return
        if kind == KILL:
            _signal(pid, signal.SIGKILL)
        else:
            self._frozen = pid
            _signal(pid, signal.SIGSTOP)

    def mend(self, kind: str) -> None:
        frozen, self._frozen = self._frozen, None
        if frozen is not None:
            _signal(frozen, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)

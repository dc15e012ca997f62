"""KV on its way into a sequence's blocks: what the engine's thread waits for and transfers bring.

A load is begun when its sequence has been given blocks, and is over when every run has settled, well or not. The engine
may call it off at any moment (preemption, a client that left): once `cancel` has returned nothing is written any more,
and the blocks can be given to others.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cachecore.kv.calibration import RAW
from cachecore.scope import Fidelity, Naming
from cachecore.transfer.plan import Pull
from cachecore.transfer.transport import Fetched, Outcome
from workers.transfer.passages import PassageLoad


class LoadCancelled(Exception):
    """Nobody waits for the load any more."""


class Arrived(NamedTuple):
    """Blocks `first_block` to `end_block` of a sequence that hold valid KV in every layer."""

    first_block: int
    end_block: int
    fidelity: Fidelity


def best_of(codec: str) -> Fidelity:
    """How good KV is at best that travels in a codec."""
    return Fidelity.EXACT if codec == RAW else Fidelity.QUANTIZED


class RunLoad:
    """One run, into blocks `first_block` to `end_block` of a sequence: all of the run or a part of it."""

    def __init__(self, pull: Pull, first_block: int, end_block: int) -> None:
        self.pull = pull
        self.first_block = first_block
        self.end_block = end_block
        self.blocks: Sequence[int] = ()
        """Of the pool, to be written to."""
        self.layers = 0
        """Leading layers that are in place."""
        self.fidelity = Fidelity.EXACT
        """Of what has come so far."""
        self.outcome: Outcome | None = None
        """None until it has settled."""

    @property
    def expected_fidelity(self) -> Fidelity:
        """Of what is to come, if the source's own is exact."""
        return best_of(self.pull.plan.codec)

    def __repr__(self) -> str:
        return f"RunLoad({self.first_block}..{self.end_block}, {self.layers} layers, {self.outcome})"

    @property
    def is_good(self) -> bool:
        return isinstance(self.outcome, Fetched)


class Load:
    """The runs that one sequence waits for, in order."""

    def __init__(
        self,
        runs: Sequence[RunLoad],
        naming: Naming,
        fidelity: Fidelity,
        began: float,
        passages: Sequence[PassageLoad] = (),
    ) -> None:
        self.runs = runs
        self.passages = passages
        """What was computed at other positions, in order, behind the runs."""
        self.naming = naming
        self.fidelity = fidelity
        """The worst that may come."""
        self.began = began
        """By the monotonic clock: when the sequence's first pull began. Deadlines count from here."""
        self.improving = False
        """Something better is being looked for that passages can do without (`Loader.improve`)."""
        self.on_cancel: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._cancelled = False

    @property
    def layers(self) -> int:
        """Leading layers that can be computed with: in place in every run. None where there are passages: they are
        repaired layer by layer, when all of them have come."""
        return 0 if self.passages else min(run.layers for run in self.runs)

    @property
    def settled(self) -> bool:
        runs = all(run.outcome is not None for run in self.runs)
        return runs and not self.improving and all(passage.outcome is not None for passage in self.passages)

    @property
    def failed(self) -> bool:
        """Whether some run has settled and is not there."""
        return any(run.outcome is not None and not run.is_good for run in self.runs)

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def arrived(self) -> list[Arrived]:
        return [Arrived(run.first_block, run.end_block, run.fidelity) for run in self.runs if run.is_good]

    def gaps(self, first_block: int, tokens: int, size: int) -> Iterator[tuple[int, int]]:
        """The tokens from block `first_block` on that no run brings, as (start, end), `tokens` being where they end."""
        start = first_block * size
        for run in self.runs:
            if start < run.first_block * size:
                yield start, run.first_block * size
            start = run.end_block * size
        if start < tokens:
            yield start, tokens

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Within this, the blocks are the load's to write to. Raises LoadCancelled when they are so no longer."""
        with self._lock:
            if self._cancelled:
                raise LoadCancelled
            yield

    def cancel(self) -> None:
        """Call it off; returns when nothing is being written."""
        with self._lock:
            self._cancelled = True
        if self.on_cancel is not None:
            self.on_cancel()

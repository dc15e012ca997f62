"""Which of the engine's blocks holds which KV: what the worker's side serves from.

The engine keeps blocks for nobody's sake but its own, so a run that is lent may be given away while it is read. It is
read all the same, without a lock: the index hears of a block that was given away before anybody writes to it, so what
was read while the index still had the very same entries is what they say (`vouch`). An entry that left and came back is
another entry.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from cachecore.blocks import HASH_BYTES, PrefixHash
from cachecore.scope import Fidelity
from cachecore.transfer.errors import Reason, Unserved
from workers.transfer.runs import Held, HeldRun
from workers.vllm.names import Lineage
from workers.vllm.orders import Export, Orders


class BlockIndex:
    """`workers.transfer.source.Lender`. Changed by the engine's thread, read by transfers.

    No larger than the engine's pool: a block has one entry at most.
    """

    def __init__(self, lineage_of: Callable[[str | None], Lineage | None]) -> None:
        self._lineage_of = lineage_of
        self._lock = threading.Lock()
        self._held: dict[int, Held] = {}
        self._blocks: dict[tuple[PrefixHash, Fidelity], dict[int, None]] = {}
        """Equal ones: requests that began at once compute the same block twice."""

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, orders: Orders) -> None:
        """Returns before anything may be written to the blocks that were dropped."""
        with self._lock:
            if orders.cleared:
                self._held.clear()
                self._blocks.clear()
            for export in orders.exported:
                self._add(export)
            for block in orders.dropped:
                self._drop(block)

    @contextlib.contextmanager
    def lend(self, tail: PrefixHash, blocks: int, worst: Fidelity) -> Iterator[HeldRun | None]:
        with self._lock:
            run = self._find(tail, blocks, worst)
        yield run

    def vouch(self, run: HeldRun) -> None:
        with self._lock:
            kept = all(self._held.get(block) is held for block, held in zip(run.blocks, run.held, strict=True))
        if not kept:
            raise Unserved("blocks of the run were given to others while it was read", Reason.STALE)

    def _find(self, tail: PrefixHash, blocks: int, worst: Fidelity) -> HeldRun | None:
        """From its tail backwards, each block as good as there is."""
        found: list[int] = []
        name: PrefixHash | None = tail
        while len(found) < blocks:
            block = None if name is None else self._best(name, worst)
            if block is None:
                return None
            found.append(block)
            name = self._held[block].parent
        found.reverse()
        return HeldRun(found, [self._held[block] for block in found])

    def _best(self, name: PrefixHash, worst: Fidelity) -> int | None:
        places = (self._blocks.get((name, fidelity)) for fidelity in Fidelity if fidelity <= worst)
        return next((next(iter(place)) for place in places if place), None)

    def _add(self, export: Export) -> None:
        lineage = self._lineage_of(export.cache_salt)
        if lineage is None:
            return
        parent = export.parent
        width = len(export.tokens) // len(export.blocks)
        for number, block in enumerate(export.blocks):
            name = PrefixHash(export.names[number * HASH_BYTES : (number + 1) * HASH_BYTES])
            tokens = memoryview(export.tokens[number * width : (number + 1) * width]).cast("I")
            known = self._held.get(block)
            if known is None or (known.name, known.fidelity) != (name, export.fidelity):
                self._drop(block)
                first_block = export.first_block + number
                self._held[block] = Held(name, export.fidelity, parent, first_block, tokens, lineage.naming)
                self._blocks.setdefault((name, export.fidelity), {})[block] = None
            parent = name

    def _drop(self, block: int) -> None:
        held = self._held.pop(block, None)
        if held is None:
            return
        key = held.name, held.fidelity
        same = self._blocks[key]
        del same[block]
        if not same:
            del self._blocks[key]

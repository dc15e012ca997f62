"""L1: what the engine's memory gives up is kept in the worker's host memory, and comes back at the price of a copy.

Rules:

* A block is kept under its name and fidelity, as in L0, and found where L0's part of a prefix ends.
* What comes back to L0 stays here too: when L0 gives it up again, nothing is copied.
* The least recently used goes first, unless it was used again: then it gets another round, and its count of uses is
  halved. L0 gives blocks up deepest first and uses touch them so, and a parent has been used as often as its child: so
  parents outlive their children here as well.
* What enters and leaves is announced, before L0 announces what it has given up: whoever follows the events never sees
  a child without its parent.

All of it happens on the engine's thread. On CUDA host memory is pinned and copies are only enqueued, in the stream that
computes: what overwrites a block comes after the copy, and nobody waits. On a CPU a copy costs about a hundredth of
what computing the block did (tests/bench/bench_host_tier.py).
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cachecore.blocks import Chain, PrefixHash, split_chain
from cachecore.events import BlockRemoved, BlockStored, KvEvent
from cachecore.scope import Fidelity
from workers.engine import HostMetrics
from workers.reference.kv_pool import Kept, Leaving, following_each_other, handle_of
from workers.transfer.runs import Held

MEDIUM = "CPU"
"""In KV events: L1."""
USES_MAX = 64
"""How many count at most."""


class HostMemory(Protocol):
    """Room for so many blocks, and the way there and back."""

    @property
    def slots(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """From the engine's blocks."""
        ...

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None: ...


class PinnedMemory:
    """`keys` and `values` are the engine's, [layers, blocks, block_size, kv_heads, head_dim]; a block lies here as one
    piece, so that each is one copy over the bus."""

    def __init__(self, keys: Tensor, values: Tensor, bytes_max: int) -> None:
        """Raises ValueError when not even one block fits."""
        self._keys, self._values = keys, values
        shape = (keys.shape[0], *keys.shape[2:])
        self.block_bytes = 2 * keys[:, 0].numel() * keys.element_size()
        self.slots = bytes_max // self.block_bytes
        if not self.slots:
            raise ValueError(f"host memory of {bytes_max} bytes does not hold one block of {self.block_bytes}")
        self._pages = torch.empty((self.slots, 2, *shape), dtype=keys.dtype, pin_memory=keys.is_cuda)
        self._on_bus = keys.is_cuda

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            for part, pool in enumerate((self._keys, self._values)):
                source = pool[:, block].contiguous() if self._on_bus else pool[:, block]
                self._pages[slot, part].copy_(source, non_blocking=True)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            for part, pool in enumerate((self._keys, self._values)):
                source = self._pages[slot, part]
                pool[:, block].copy_(source.to(pool.device, non_blocking=True) if self._on_bus else source)


class _Entry:
    __slots__ = ("held", "slot", "uses")

    def __init__(self, held: Held, slot: int) -> None:
        self.held = held
        self.slot = slot
        self.uses = 0

    @property
    def key(self) -> "_Key":
        return self.held.name, self.held.fidelity


_Key = tuple[PrefixHash, Fidelity]


class HostTier:
    """See the module's opening."""

    def __init__(self, memory: HostMemory, block_size_tokens: int) -> None:
        self._memory = memory
        self._block_size_tokens = block_size_tokens
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        """Who goes first stands first."""
        self._free = list(range(memory.slots - 1, -1, -1))
        self.metrics = HostMetrics(bytes_max=memory.slots * memory.block_bytes)

    def __repr__(self) -> str:
        return f"HostTier({len(self._entries)} of {self._memory.slots} blocks)"

    def __len__(self) -> int:
        return len(self._entries)

    # What L0 gives up

    def keep(self, leaving: Sequence[Leaving]) -> list[KvEvent]:
        """Take what L0 gives up, in that order; what is to be announced of it, before L0 announces its removals."""
        stored, removed, copies = dict[_Key, Held](), dict[_Key, Held](), dict[int, int]()
        for block, held in leaving[-self._memory.slots :]:
            key = (held.name, held.fidelity)
            if key in self._entries:
                self._entries.move_to_end(key)
                continue
            if not self._free:
                given_up = self._give_up()
                if stored.pop(given_up.key, None) is None:
                    removed[given_up.key] = given_up.held
            slot = self._free.pop()
            self._entries[key] = _Entry(held, slot)
            copies[slot] = block
            if removed.pop(key, None) is None:
                stored[key] = held
        self._copy(list(copies.values()), list(copies))
        self.metrics.stored_blocks += len(stored)
        self.metrics.removed_blocks += len(removed)
        self._measure()
        return [*_removed(list(removed.values())), *_stored(list(stored.values()), self._block_size_tokens)]

    def _give_up(self) -> "_Entry":
        """Make room for one."""
        while True:
            key, entry = next(iter(self._entries.items()))
            if not entry.uses:
                break
            entry.uses //= 2
            self._entries.move_to_end(key)
        del self._entries[key]
        self._free.append(entry.slot)
        return entry

    # What L0 has not

    def match(self, chain: Chain, best: Fidelity, worst: Fidelity) -> list[Kept]:
        """The leading blocks of `chain`, which follows what L0 has; along it fidelity gets worse from `best` on, never
        better and never worse than `worst`."""
        found: list[Kept] = []
        levels = [fidelity for fidelity in Fidelity if best <= fidelity <= worst]
        for name in split_chain(chain):
            while levels and (name, levels[0]) not in self._entries:
                levels = levels[1:]
            if not levels:
                break
            entry = self._entries[name, levels[0]]
            found.append(Kept(entry.held, entry.slot))
        return found

    def look(self, name: PrefixHash, worst: Fidelity) -> Kept | None:
        """The best there is of one block."""
        entries = (self._entries.get((name, fidelity)) for fidelity in Fidelity if fidelity <= worst)
        entry = next((entry for entry in entries if entry is not None), None)
        return None if entry is None else Kept(entry.held, entry.slot)

    def use(self, found: Sequence[Kept]) -> None:
        """They are wanted again: deepest first, so that parents stay longer."""
        for held, _ in reversed(found):
            key = (held.name, held.fidelity)
            entry = self._entries[key]
            entry.uses = min(entry.uses + 1, USES_MAX)
            self._entries.move_to_end(key)

    def still(self, found: Sequence[Kept]) -> Sequence[Kept]:
        """The leading ones that are here yet: what L0 has given up meanwhile may have taken their places."""
        for at, (held, slot) in enumerate(found):
            entry = self._entries.get((held.name, held.fidelity))
            if entry is None or entry.slot != slot:
                return found[:at]
        return found

    def fetch(self, found: Sequence[Kept], blocks: Sequence[int]) -> None:
        """Copy them into as many blocks of the engine's. They stay here."""
        began = time.perf_counter()
        self._memory.load([kept.slot for kept in found], blocks)
        self.metrics.copy_seconds += time.perf_counter() - began
        self.metrics.fetched_bytes += len(found) * self._memory.block_bytes
        self.metrics.hit_tokens += len(found) * self._block_size_tokens

    def clear(self) -> None:
        """Forget everything. Whoever clears L0 announces it for all tiers."""
        self._free += [entry.slot for entry in self._entries.values()]
        self._entries.clear()
        self._measure()

    def handles(self) -> list[int]:
        """Every block that is kept, as events call it."""
        return [handle_of(*key) for key in self._entries]

    def _copy(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        began = time.perf_counter()
        self._memory.save(blocks, slots)
        self.metrics.copy_seconds += time.perf_counter() - began
        self.metrics.saved_bytes += len(blocks) * self._memory.block_bytes

    def _measure(self) -> None:
        self.metrics.blocks = len(self._entries)
        self.metrics.bytes = len(self._entries) * self._memory.block_bytes


def _stored(deepest_first: Sequence[Held], block_size_tokens: int) -> Iterator[BlockStored]:
    for stretch in following_each_other(deepest_first[::-1]):
        first = stretch[0]
        yield BlockStored(
            block_hashes=tuple(handle_of(held.name, held.fidelity) for held in stretch),
            parent_block_hash=None if first.parent is None else handle_of(first.parent, first.parent_fidelity),
            token_ids=[token for held in stretch for token in held.token_ids],
            block_size=block_size_tokens,
            medium=MEDIUM,
            cache_salt=first.cache_salt or None,
        )


def _removed(blocks: Sequence[Held]) -> list[KvEvent]:
    handles = tuple(handle_of(held.name, held.fidelity) for held in blocks)
    return [BlockRemoved(handles, medium=MEDIUM)] if handles else []

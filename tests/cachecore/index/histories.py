"""Seeded histories of a fleet, and the harness that runs an index beside the naive one over them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from cachecore.blocks import BlockHasher, Chain, PrefixHash, pack_tokens
from cachecore.holders import Epoch, Holder, Place, Pool, Tier, Worker, WorkerName
from cachecore.index.contract import Cleared, IndexEvent, PrefixIndex, Removed, Stored
from cachecore.index.naive import NaiveIndex
from cachecore.scope import Fidelity

HASHER = BlockHasher(bytes(32), 4)
ROOT = HASHER.root(b"histories")


def worker(name: str, epoch: int = 0, rank: int = 0) -> Worker:
    return Worker(WorkerName(name), Epoch(epoch), rank)


def chain_of(*blocks: int, parent: PrefixHash = ROOT) -> Chain:
    """The names of blocks whose tokens are all the given number."""
    return HASHER.chain(parent, pack_tokens([block for block in blocks for _ in range(4)]))


def cut(chain: Chain, start: int, stop: int | None = None) -> Chain:
    return Chain(chain[start * 16 : None if stop is None else stop * 16])


def name_at(chain: Chain, position: int) -> PrefixHash:
    """The name before block `position`: its parent."""
    return PrefixHash(chain[(position - 1) * 16 : position * 16]) if position else ROOT


@dataclass
class History:
    """A random stream of batches and queries over one growing set of conversations."""

    seed: int
    conversations: int = 6
    blocks_max: int = 90
    layers: bool = True
    rng: random.Random = field(init=False)
    chains: list[Chain] = field(init=False)
    holders: list[Holder] = field(init=False)
    sequences: dict[Holder, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.chains = []
        tokens: list[list[int]] = [[]]
        for _ in range(self.conversations):
            base = self.rng.choice(tokens)
            text = base[: self.rng.randint(0, len(base))]
            text = text + [self.rng.randint(0, 5) for _ in range(self.rng.randint(1, self.blocks_max))]
            tokens.append(text)
            self.chains.append(chain_of(*text))
        self.holders = [worker("a"), worker("a", rank=1), worker("a", epoch=1), worker("b"), Pool("p", 0)]

    def chain(self) -> Chain:
        return self.rng.choice(self.chains)

    def piece(self) -> tuple[Chain, int, int]:
        chain = self.chain()
        total = len(chain) // 16
        start = self.rng.choice([0, 0, self.rng.randrange(total)])
        stop = self.rng.choice([total, self.rng.randint(start + 1, total), start + 1])
        return chain, start, stop

    def place(self) -> tuple[Tier, Fidelity]:
        if not self.layers or self.rng.random() < 0.5:
            return Tier.L0, Fidelity.EXACT
        return self.rng.choice(list(Tier)), self.rng.choice(list(Fidelity))

    def event(self) -> IndexEvent:
        chain, start, stop = self.piece()
        tier, fidelity = self.place()
        kind = self.rng.random()
        if kind < 0.5:
            return Stored(name_at(chain, start), cut(chain, start, stop), tier, fidelity)
        if kind < 0.98:
            names = [chain[at * 16 : at * 16 + 16] for at in range(start, stop)]
            order = self.rng.choice(["up", "down", "scattered"])
            if order == "down":
                names.reverse()
            elif order == "scattered":
                names = self.rng.sample(names, self.rng.randint(1, len(names)))
            return Removed(Chain(b"".join(names)), tier, fidelity)
        return Cleared(self.rng.choice([None, tier]))

    def batch(self) -> tuple[Holder, int, list[IndexEvent]]:
        holder = self.rng.choice(self.holders)
        sequence = self.sequences.get(holder, 0)
        if self.rng.random() < 0.9:
            sequence += 1
        self.sequences[holder] = sequence
        return holder, sequence, [self.event() for _ in range(self.rng.randint(1, 4))]

    def queries(self) -> Iterator[Chain]:
        """Every conversation, one cut short, and one that leaves a conversation for text nobody has seen."""
        yield from self.chains
        chain, start, stop = self.piece()
        yield cut(chain, 0, stop)
        yield Chain(cut(chain, 0, start) + chain_of(99, 98, parent=name_at(chain, start)))


def run_beside_naive(index: PrefixIndex, history: History, steps: int) -> None:
    """Apply one history to the index and to the naive one; raise AssertionError at the first difference."""
    naive = NaiveIndex()
    for step in range(steps):
        holder, sequence, events = history.batch()
        assert index.apply(holder, sequence, events) == naive.apply(holder, sequence, events), step
        if history.rng.random() < 0.03:
            gone = history.rng.choice(history.holders)
            index.forget(gone)
            naive.forget(gone)
            history.sequences.pop(gone, None)
        compare(index, naive, history, step)
    for holder in history.holders:
        index.forget(holder)
        naive.forget(holder)
        compare(index, naive, history, steps)


def compare(index: PrefixIndex, naive: NaiveIndex, history: History, step: int) -> None:
    for query in history.queries():
        assert index.match(query) == naive.match(query), f"step {step}: {len(query) // 16} blocks"
    for holder in history.holders:
        assert index.sequence(holder) == naive.sequence(holder), step
    holder, tier = history.rng.choice(history.holders), history.rng.choice(list(Tier))
    found = sorted(index.holdings(holder, tier))
    assert found == sorted(naive.holdings(holder, tier)), step
    ours, theirs = index.stats(), naive.stats()
    assert (ours.holdings, ours.stale_batches) == (theirs.holdings, theirs.stale_batches), step
    assert ours.unknown_removals == theirs.unknown_removals, (step, ours, theirs)


def places(match_depths: dict[Place, int]) -> dict[tuple[str, Tier, Fidelity], int]:
    """Depths by holder name, for tests that read better so."""
    return {(place.holder.name, place.tier, place.fidelity): depth for place, depth in match_depths.items()}

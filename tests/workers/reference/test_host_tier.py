"""L1 by itself: which blocks it keeps, what it announces, and the bytes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from cachecore.blocks import Chain, PrefixHash, pack_tokens, split_chain
from cachecore.events import BlockRemoved, BlockStored, KvEvent
from cachecore.holders import Epoch, Place, Tier, Worker, WorkerName
from cachecore.index.memory import MemoryIndex
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, Keyring, Naming
from tests.workers.reference.support import greedy, run_tokens, tiny_engine
from workers.reference.config import ModelError
from workers.reference.kv_pool import KvPool, Leaving, NamedRun, handle_of
from workers.reference.tiers.host import HostTier, PinnedMemory
from workers.transfer.runs import Held

SIZE = 2
KEYRING = Keyring.generate()
SCOPE = IdentityScope("model", KEYRING.key_id(DEFAULT_TENANT), SIZE)
NAMING = Naming.of(SCOPE, KEYRING)
EXACT, QUANTIZED = Fidelity.EXACT, Fidelity.QUANTIZED


@dataclass
class NamedMemory:
    """Instead of bytes it moves words: `device[block]` is what lies in a block."""

    slots: int
    block_bytes: int = 10
    device: dict[int, str] = field(default_factory=dict)
    host: dict[int, str] = field(default_factory=dict)

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            self.host[slot] = self.device[block]

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for slot, block in zip(slots, blocks, strict=True):
            self.device[block] = self.host[slot]


def tier_of(slots: int) -> tuple[HostTier, NamedMemory]:
    memory = NamedMemory(slots)
    return HostTier(memory, SIZE), memory


def chain_of(tokens: Sequence[int], naming: Naming = NAMING) -> Chain:
    return naming.hasher.chain(naming.root, pack_tokens(tokens))


def held_of(tokens: Sequence[int], fidelity: Fidelity = EXACT, salt: str = "") -> list[Held]:
    """The blocks of a prompt, as L0 describes them."""
    names: list[PrefixHash] = list(split_chain(chain_of(tokens)))
    return [
        Held(
            name,
            fidelity,
            names[at - 1] if at else None,
            at,
            list(tokens[at * SIZE : (at + 1) * SIZE]),
            NAMING,
            fidelity if at else EXACT,
            salt if not at else "",
        )
        for at, name in enumerate(names)
    ]


def leave(tier: HostTier, memory: NamedMemory, blocks: Sequence[Held], first_block: int = 0) -> list[KvEvent]:
    """L0 gives up a prompt's blocks, deepest first; block n holds the word for its name."""
    leaving = []
    for at, held in enumerate(blocks):
        memory.device[first_block + at] = word(held)
        leaving.append(Leaving(first_block + at, held))
    return tier.keep(leaving[::-1])


def word(held: Held) -> str:
    return f"{held.name.hex()} {held.fidelity}"


def found(tier: HostTier, tokens: Sequence[int], best: Fidelity = EXACT, worst: Fidelity = EXACT) -> list[Held]:
    return [kept.held for kept in tier.match(chain_of(tokens), best, worst)]


PROMPT = [1, 2, 3, 4, 5, 6]


def test_what_left_comes_back_with_its_bytes() -> None:
    tier, memory = tier_of(4)
    blocks = held_of(PROMPT)
    leave(tier, memory, blocks, first_block=10)
    memory.device.clear()
    kept = tier.match(chain_of([*PROMPT, 7, 8]), EXACT, EXACT)
    assert [each.held for each in kept] == blocks
    tier.fetch(kept, [3, 1, 2])
    assert [memory.device[block] for block in (3, 1, 2)] == [word(held) for held in blocks]
    assert found(tier, [1, 2, 9, 9]) == blocks[:1]
    assert found(tier, [9, 9, 3, 4]) == []
    stats = tier.metrics
    assert (stats.stored_blocks, stats.hit_tokens, stats.saved_bytes, stats.fetched_bytes) == (3, 6, 30, 30)
    assert (stats.blocks, stats.bytes, stats.bytes_max) == (3, 30, 40)


def test_what_is_still_here_is_not_copied_again() -> None:
    tier, memory = tier_of(4)
    blocks = held_of(PROMPT)
    assert leave(tier, memory, blocks)
    memory.host = dict.fromkeys(memory.host, "untouched")
    assert leave(tier, memory, blocks) == []
    assert set(memory.host.values()) == {"untouched"}
    assert tier.metrics.saved_bytes == 30


def test_the_least_recently_used_goes_first_and_children_before_their_parents() -> None:
    tier, memory = tier_of(4)
    first, second = held_of([1, 2, 3, 4]), held_of([5, 6, 7, 8])
    leave(tier, memory, first)
    leave(tier, memory, second)
    leave(tier, memory, first)  # as if L0 had computed it once more
    events = leave(tier, memory, held_of([9, 9]))
    assert events[:1] == [BlockRemoved((handle_of(second[1].name),), medium="CPU")]
    assert found(tier, [5, 6, 7, 8]) == second[:1]
    leave(tier, memory, held_of([8, 8]))
    assert found(tier, [5, 6, 7, 8]) == []
    assert found(tier, [1, 2, 3, 4]) == first


def test_what_was_used_again_gets_another_round_for_a_while() -> None:
    tier, memory = tier_of(3)
    used = held_of([1, 2, 3, 4])
    leave(tier, memory, used)
    tier.use(tier.match(chain_of([1, 2, 3, 4]), EXACT, EXACT))
    others = 0
    while len(found(tier, [1, 2, 3, 4])) == 2:
        leave(tier, memory, held_of([100 + others, 0]))
        others += 1
        assert others < 20
    assert others > 2
    assert found(tier, [1, 2, 3, 4]) in (used[:1], [])


def test_of_more_than_fits_the_beginning_stays() -> None:
    tier, memory = tier_of(2)
    blocks = held_of([1, 2, 3, 4, 5, 6, 7, 8])
    leave(tier, memory, blocks)
    assert found(tier, [1, 2, 3, 4, 5, 6, 7, 8]) == blocks[:2]
    assert len(tier) == 2


def test_fidelity_is_kept_apart_and_only_gets_worse_along_a_chain() -> None:
    tier, memory = tier_of(8)
    exact, worse = held_of(PROMPT), held_of(PROMPT, QUANTIZED)
    leave(tier, memory, exact[:1])
    leave(tier, memory, worse[1:], first_block=4)
    leave(tier, memory, exact[2:], first_block=7)
    assert found(tier, PROMPT) == exact[:1]
    assert found(tier, PROMPT, worst=QUANTIZED) == [exact[0], *worse[1:]]
    assert found(tier, PROMPT, best=QUANTIZED, worst=QUANTIZED) == []
    kept = tier.match(chain_of(PROMPT), EXACT, QUANTIZED)
    tier.fetch(kept, [20, 21, 22])
    assert memory.device[22] == word(worse[2])


def test_clearing_forgets_everything() -> None:
    tier, memory = tier_of(4)
    leave(tier, memory, held_of(PROMPT))
    tier.clear()
    assert found(tier, PROMPT) == []
    assert tier.handles() == []
    assert tier.metrics.bytes == 0
    leave(tier, memory, held_of([1, 2, 3, 4, 5, 6, 7, 8]))
    assert len(tier) == 4


def test_events_name_what_the_engine_named_and_carry_tokens_salt_and_medium() -> None:
    tier, memory = tier_of(8)
    blocks = held_of(PROMPT, salt="pepper")
    handles = tuple(handle_of(held.name) for held in blocks)
    assert leave(tier, memory, blocks) == [
        BlockStored(handles, None, PROMPT, SIZE, medium="CPU", cache_salt="pepper"),
    ]
    worse = held_of([1, 2, 3, 4, 9, 9], QUANTIZED)
    other = held_of([7, 7])
    tier = HostTier(memory, SIZE)
    events = tier.keep([Leaving(2, worse[2]), Leaving(0, other[0])])
    assert events == [
        BlockStored((handle_of(other[0].name),), None, [7, 7], SIZE, medium="CPU"),
        BlockStored(
            (handle_of(worse[2].name, QUANTIZED),), handle_of(worse[1].name, QUANTIZED), [9, 9], SIZE, medium="CPU"
        ),
    ]


def test_an_index_that_follows_the_events_knows_both_tiers() -> None:
    worker, index = Worker(WorkerName("w"), Epoch(1)), MemoryIndex()
    rekeyer = Rekeyer(SIZE, lambda salt, adapter: NAMING)
    tier, memory = tier_of(4)
    blocks = held_of(PROMPT)
    handles = tuple(handle_of(held.name) for held in blocks)
    batches: list[list[KvEvent]] = [[BlockStored(handles, None, PROMPT, SIZE)]]
    batches.append([*leave(tier, memory, blocks[1:]), BlockRemoved(handles[:0:-1])])
    depths = []
    for sequence, batch in enumerate(batches):
        index.apply(worker, sequence, rekeyer.rekey(batch))
        depths.append(dict(index.match(chain_of(PROMPT)).depths))
    l0, l1 = Place(worker, Tier.L0), Place(worker, Tier.L1)
    assert depths == [{l0: 3}, {l0: 1, l1: 3}]
    other = held_of([9, 9, 8, 8, 7, 7])
    index.apply(worker, 2, rekeyer.rekey(leave(tier, memory, other, first_block=10)))
    assert dict(index.match(chain_of(PROMPT)).depths) == {l0: 1, l1: 2}


def test_beside_a_naive_model() -> None:
    """Whatever happens, a block that is found has the bytes that left under its name, and the bound is kept."""
    rng = random.Random(3)
    tier, memory = tier_of(7)
    announced: set[int] = set()
    for step in range(600):
        tokens = [rng.randrange(3) for _ in range(SIZE * rng.randrange(1, 5))]
        fidelity = rng.choice([EXACT, QUANTIZED])
        if rng.random() < 0.6:
            blocks = held_of(tokens, fidelity)
            for event in leave(tier, memory, blocks, first_block=100 * step):
                for handle in event.block_hashes:  # type: ignore[union-attr]
                    if isinstance(event, BlockStored):
                        assert handle not in announced
                        announced.add(handle)
                    else:
                        announced.remove(handle)
        else:
            kept = tier.match(chain_of(tokens), EXACT, fidelity)
            tier.use(kept)
            tier.fetch(kept, range(len(kept)))
            assert [memory.device[at] for at in range(len(kept))] == [word(each.held) for each in kept]
            assert [each.held.name for each in kept] == list(split_chain(chain_of(tokens)))[: len(kept)]
            assert all(each.held.fidelity <= fidelity for each in kept)
        assert set(tier.handles()) == announced
        assert len(tier) <= 7


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_blocks_go_to_host_memory_and_back_unchanged() -> None:
    shape = (3, 6, SIZE, 2, 4)
    keys, values = torch.randn(shape), torch.randn(shape)
    before = keys.clone(), values.clone()
    memory = PinnedMemory(keys, values, bytes_max=5 * 2 * keys[:, 0].numel() * 4)
    assert (memory.slots, memory.block_bytes) == (5, 2 * 3 * SIZE * 2 * 4 * 4)
    memory.save([4, 0, 2], [1, 3, 0])
    keys.zero_()
    values.zero_()
    memory.load([0, 1, 3], [5, 4, 0])
    for pool, was in zip((keys, values), before, strict=True):
        assert torch.equal(pool[:, [5, 4, 0]], was[:, [2, 4, 0]])
        assert not pool[:, [1, 2, 3]].any()


def test_memory_for_less_than_a_block_is_refused() -> None:
    keys = torch.zeros(3, 6, SIZE, 2, 4)
    with pytest.raises(ValueError, match="does not hold one block of 384"):
        PinnedMemory(keys, keys, bytes_max=383)


# ---- below the engine's pool -----------------------------------------------------------------------------------------


@dataclass
class Desk:
    """A pool of named blocks over a tier, and what lies in each block."""

    blocks: int
    slots: int

    def __post_init__(self) -> None:
        self.tier, self.memory = tier_of(self.slots)
        self.pool = KvPool(self.blocks, SIZE)
        self.pool.below = self.tier

    def compute(self, tokens: Sequence[int], fidelity: Fidelity = EXACT) -> list[int]:
        """As the scheduler does: take what is there, compute the rest, name it. The sequence's blocks."""
        chain = chain_of(tokens)
        hits = self.pool.recall(chain, fidelity)
        self.check(chain, hits)
        self.pool.acquire(hits)
        whole = held_of(tokens, fidelity)
        fresh = self.pool.allocate(len(whole) - len(hits))
        for block, held in zip(fresh, whole[len(hits) :], strict=True):
            self.memory.device[block] = word(held)
        if not fresh:
            return hits
        run = NamedRun(
            fresh,
            Chain(chain[len(hits) * 16 :]),
            whole[len(hits) - 1].name if hits else None,
            tokens[len(hits) * SIZE :],
            "",
            fidelity,
            self.pool.fidelity_of(hits[-1]) if hits else EXACT,
            len(hits),
            NAMING,
        )
        return hits + self.pool.commit(run)

    def check(self, chain: Chain, blocks: Sequence[int]) -> None:
        for block, name in zip(blocks, split_chain(chain), strict=False):
            assert self.memory.device[block] == f"{name.hex()} {self.pool.fidelity_of(block)}"


def test_what_the_pool_evicts_comes_back_when_it_is_wanted() -> None:
    desk = Desk(blocks=3, slots=8)
    desk.pool.release(desk.compute(PROMPT))
    desk.pool.release(desk.compute([9, 9, 8, 8, 7, 7]))
    assert desk.pool.match(chain_of(PROMPT)) == []
    blocks = desk.pool.recall(chain_of(PROMPT))
    assert len(blocks) == 3
    desk.check(chain_of(PROMPT), blocks)
    assert desk.tier.metrics.hit_tokens == 6
    desk.pool.take_events()
    assert desk.pool.recall(chain_of(PROMPT)) == blocks
    assert desk.pool.take_events() == []


def test_what_comes_back_goes_on_behind_what_is_there_and_does_not_evict_it() -> None:
    desk = Desk(blocks=4, slots=8)
    desk.pool.release(desk.compute(PROMPT))
    desk.pool.release(desk.pool.allocate(2))  # evicts its end
    assert len(desk.pool.match(chain_of(PROMPT))) == 2
    desk.pool.release(desk.compute([9, 9, 8, 8]))
    assert len(desk.pool.match(chain_of(PROMPT))) == 2
    assert len(desk.pool.recall(chain_of(PROMPT))) == 3
    desk.check(chain_of(PROMPT), desk.pool.match(chain_of(PROMPT)))


def test_as_much_comes_back_as_there_is_room_for() -> None:
    desk = Desk(blocks=4, slots=8)
    desk.pool.release(desk.compute(PROMPT))
    desk.pool.release(desk.compute([9, 9, 8, 8, 7, 7, 6, 6]))
    busy = desk.pool.allocate(2)
    assert len(desk.pool.recall(chain_of(PROMPT))) == 2
    desk.pool.release(busy)
    assert len(desk.pool.recall(chain_of(PROMPT))) == 3


def test_exact_kv_below_is_preferred_to_worse_kv_here() -> None:
    desk = Desk(blocks=3, slots=8)
    desk.pool.release(desk.compute(PROMPT))
    desk.pool.clear()
    leave(desk.tier, desk.memory, held_of(PROMPT), first_block=50)
    whole = held_of(PROMPT, QUANTIZED)
    fresh = desk.pool.allocate(2)
    for block, held in zip(fresh, whole, strict=False):
        desk.memory.device[block] = word(held)
    chain = chain_of(PROMPT[:4])
    desk.pool.release(desk.pool.commit(NamedRun(fresh, chain, None, PROMPT[:4], "", QUANTIZED, naming=NAMING)))
    blocks = desk.pool.recall(chain_of(PROMPT), QUANTIZED)
    assert [desk.pool.fidelity_of(block) for block in blocks] == [EXACT] * 3
    desk.check(chain_of(PROMPT), blocks)


def test_a_run_that_a_peer_wants_is_brought_back_for_it() -> None:
    desk = Desk(blocks=4, slots=8)
    desk.pool.release(desk.compute(PROMPT))
    desk.pool.release(desk.pool.allocate(3))
    names = list(split_chain(chain_of(PROMPT)))
    assert len(desk.pool.match(chain_of(PROMPT))) == 1
    run = desk.pool.find(names[2], 3)
    assert run is not None
    assert [held.name for held in run.held] == names
    desk.check(chain_of(PROMPT), run.blocks)
    assert desk.pool.find(names[2], 4) is None
    assert desk.pool.find(chain_of([9, 9])[:16], 1) is None  # type: ignore[arg-type]
    desk.pool.allocate(4)
    assert desk.pool.find(names[2], 3) is None


def test_clearing_the_pool_clears_what_is_below() -> None:
    desk = Desk(blocks=3, slots=8)
    desk.pool.release(desk.compute(PROMPT))
    desk.pool.release(desk.compute([9, 9, 8, 8, 7, 7]))
    desk.pool.clear()
    assert len(desk.tier) == 0
    assert desk.pool.recall(chain_of(PROMPT)) == []


def test_events_of_both_tiers_keep_an_index_true() -> None:
    """On a random stream: what the index believes to be in each tier is what is there, and no block lies under a wrong
    name."""
    rng = random.Random(8)
    desk = Desk(blocks=9, slots=14)
    worker, index = Worker(WorkerName("w"), Epoch(1)), MemoryIndex()
    rekeyer = Rekeyer(SIZE, lambda salt, adapter: NAMING)
    live: list[list[int]] = []
    for step in range(500):
        tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 6))]
        if live and (rng.random() < 0.4 or desk.pool.blocks_available < 6):
            desk.pool.release(live.pop(rng.randrange(len(live))))
        else:
            live.append(desk.compute(tokens))
        if rng.random() < 0.1:
            names = list(split_chain(chain_of(tokens)))
            run = desk.pool.find(names[-1], len(names))
            if run is not None:
                desk.check(chain_of(tokens), run.blocks)
        index.apply(worker, step, rekeyer.rekey(desk.pool.take_events()))
        here = {handle_of(name) for name in index.holdings(worker, Tier.L0)}
        below = {handle_of(name) for name in index.holdings(worker, Tier.L1)}
        assert here == set(desk.pool.handles())
        assert below == set(desk.tier.handles())
    assert rekeyer.stats().unknown_parent == rekeyer.stats().unknown_handle == 0
    assert desk.tier.metrics.hit_tokens > 100


# ---- in an engine ----------------------------------------------------------------------------------------------------


async def test_an_engine_goes_on_from_what_its_memory_gave_up() -> None:
    prompts = [[(7 * number + at * at) % 97 for at in range(60)] for number in range(4)]
    announced: list[KvEvent] = []
    engine = tiny_engine(announced.extend, blocks=20, host_kv_mib=1)
    plain = tiny_engine(blocks=128)
    await engine.start()
    await plain.start()
    try:
        expected = [await run_tokens(plain, prompt, greedy(8)) for prompt in prompts]
        first = [await run_tokens(engine, prompt, greedy(8)) for prompt in prompts]
        again = [await run_tokens(engine, prompt, greedy(8)) for prompt in prompts]
        assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again] == [tokens for tokens, _ in expected]
        assert [cached for _, cached in first] == [0] * 4
        assert [cached for _, cached in again] == [56] * 4
        metrics = engine.metrics.host
        assert metrics is not None
        assert metrics.hit_tokens >= 4 * 14
        assert 0 < metrics.bytes <= metrics.bytes_max <= 2**20
        assert {event.medium for event in announced if isinstance(event, BlockStored)} == {"GPU", "CPU"}
        await engine.reset_prefix_cache()
        assert (await run_tokens(engine, prompts[0], greedy(8)))[1] == 0
    finally:
        await engine.stop()
        await plain.stop()


def test_an_engine_whose_host_memory_holds_no_block_is_refused() -> None:
    with pytest.raises(ModelError, match="does not hold one block"):
        tiny_engine(block_size_tokens=65_536, blocks=1, host_kv_mib=1)

"""The pool beside a naive model on random streams of operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachecore.blocks import BlockHasher, Chain, pack_tokens, split_chain
from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored
from cachecore.scope import Fidelity
from workers.reference.kv_pool import KvPool, NamedRun, OutOfBlocksError, handle_of

SIZE = 2
HASHER = BlockHasher(bytes(32), SIZE)
ROOT = HASHER.root(b"scope")


def names_of(tokens: list[int]) -> Chain:
    return HASHER.chain(ROOT, pack_tokens(tokens))


def commit(
    pool: KvPool,
    blocks: list[int],
    tokens: list[int],
    first: int = 0,
    salt: str = "",
    fidelity: Fidelity = Fidelity.EXACT,
) -> list[int]:
    names = list(split_chain(names_of(tokens)))
    run = NamedRun(
        blocks[first : len(names)],
        Chain(b"".join(names[first:])),
        names[first - 1] if first else None,
        tokens[first * SIZE : len(names) * SIZE],
        salt,
        fidelity,
        pool.fidelity_of(blocks[first - 1]) if first else Fidelity.EXACT,
        first,
    )
    return blocks[:first] + pool.commit(run) + blocks[len(names) :]


def test_a_committed_prefix_is_found_and_shared() -> None:
    pool = KvPool(8, SIZE)
    blocks = commit(pool, pool.allocate(2), [1, 2, 3, 4])
    assert pool.match(names_of([1, 2, 3, 4, 5, 6])) == blocks
    assert pool.match(names_of([1, 2, 9, 9])) == blocks[:1]
    assert pool.match(names_of([9, 9, 3, 4])) == []
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.blocks_available == 6
    pool.release(blocks)
    assert pool.blocks_available == 8
    assert pool.match(names_of([1, 2, 3, 4])) == blocks


def test_events_name_blocks_by_the_low_64_bits_and_carry_the_salt_once() -> None:
    pool = KvPool(8, SIZE)
    blocks = pool.allocate(3)
    commit(pool, blocks, [1, 2, 3, 4], salt="pepper")
    commit(pool, blocks, [1, 2, 3, 4, 5, 6], first=2, salt="pepper")
    names = list(split_chain(names_of([1, 2, 3, 4, 5, 6])))
    handles = [int.from_bytes(name[8:], "big") for name in names]
    first, second = pool.take_events()
    assert first == BlockStored((handles[0], handles[1]), None, [1, 2, 3, 4], SIZE, cache_salt="pepper")
    assert second == BlockStored((handles[2],), handles[1], [5, 6], SIZE)
    assert pool.take_events() == []


def test_the_oldest_leaves_are_evicted_first() -> None:
    pool = KvPool(4, SIZE)
    older = commit(pool, pool.allocate(2), [1, 2, 3, 4])
    newer = commit(pool, pool.allocate(2), [5, 6, 7, 8])
    pool.release(older)
    pool.release(newer)
    pool.acquire(older[:1])  # the parent is used again, its child is not
    pool.release(older[:1])
    pool.take_events()
    order = [names_of([1, 2, 3, 4])[16:], names_of([5, 6, 7, 8])[16:], names_of([5, 6])]
    assert [pool.allocate(1), pool.allocate(1), pool.allocate(1)] == [[older[1]], [newer[1]], [newer[0]]]
    assert pool.take_events() == [BlockRemoved((handle_of(name),)) for name in order]
    assert pool.match(names_of([1, 2, 3, 4])) == older[:1]


def test_two_that_compute_one_block_end_up_sharing_it() -> None:
    pool = KvPool(4, SIZE)
    mine = commit(pool, pool.allocate(2), [1, 2, 3, 4])
    other = pool.allocate(2)
    pool.take_events()
    assert commit(pool, other, [1, 2, 3, 5]) == [mine[0], other[1]]
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash == handle_of(names_of([1, 2]))
    assert event.token_ids == [3, 5]
    assert pool.blocks_available == 1


def test_too_many_blocks_take_nothing() -> None:
    pool = KvPool(2, SIZE)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.blocks_available == 1


def test_clearing_forgets_names_and_keeps_blocks_in_use() -> None:
    pool = KvPool(4, SIZE)
    kept = commit(pool, pool.allocate(1), [1, 2])
    gone = commit(pool, pool.allocate(1), [3, 4])
    pool.release(gone)
    pool.clear()
    assert pool.take_events()[-1] == AllBlocksCleared()
    assert pool.match(names_of([1, 2])) == pool.match(names_of([3, 4])) == []
    assert pool.blocks_available == 3
    pool.release(kept)
    assert pool.blocks_available == 4


QUANTIZED = Fidelity.QUANTIZED


def test_a_name_may_be_held_at_two_fidelities_and_the_better_one_is_found() -> None:
    pool = KvPool(8, SIZE)
    worse = commit(pool, pool.allocate(2), [1, 2, 3, 4], fidelity=QUANTIZED)
    chain = names_of([1, 2, 3, 4])
    assert pool.match(chain) == []
    assert pool.match(chain, QUANTIZED) == worse
    better = commit(pool, pool.allocate(1), [1, 2])
    assert pool.match(chain) == better
    assert pool.match(chain, QUANTIZED) == [better[0], worse[1]]
    assert [pool.fidelity_of(block) for block in (better[0], worse[1])] == [Fidelity.EXACT, QUANTIZED]
    assert sorted(pool.handles()) == sorted(
        [handle_of(name, QUANTIZED) for name in split_chain(chain)] + [handle_of(names_of([1, 2]))]  # type: ignore[arg-type]
    )


def test_what_gets_worse_is_announced_with_a_salt_of_its_own() -> None:
    pool = KvPool(8, SIZE)
    blocks = commit(pool, pool.allocate(1), [1, 2], salt="exact")
    blocks = commit(pool, [*blocks, *pool.allocate(2)], [1, 2, 3, 4, 5, 6], 1, "worse", QUANTIZED)
    commit(pool, [*blocks, *pool.allocate(1)], [1, 2, 3, 4, 5, 6, 7, 8], 3, "worse", QUANTIZED)
    first, second, third = split_chain(names_of([1, 2, 3, 4, 5, 6]))
    fourth = tuple(split_chain(names_of([1, 2, 3, 4, 5, 6, 7, 8])))[3]
    second_handle, third_handle, fourth_handle = (handle_of(name, QUANTIZED) for name in (second, third, fourth))
    assert len({handle_of(second), second_handle, handle_of(second, Fidelity.FUSED)}) == 3
    assert pool.take_events() == [
        BlockStored((handle_of(first),), None, [1, 2], SIZE, cache_salt="exact"),
        BlockStored((second_handle, third_handle), handle_of(first), [3, 4, 5, 6], SIZE, cache_salt="worse"),
        BlockStored((fourth_handle,), third_handle, [7, 8], SIZE),
    ]


def test_a_run_is_found_by_its_tail() -> None:
    pool = KvPool(8, SIZE)
    blocks = commit(pool, pool.allocate(1), [1, 2])
    blocks = commit(pool, [*blocks, *pool.allocate(2)], [1, 2, 3, 4, 5, 6], 1, fidelity=QUANTIZED)
    names = list(split_chain(names_of([1, 2, 3, 4, 5, 6])))
    run = pool.find(names[2], 2, QUANTIZED)
    assert run is not None
    assert (run.blocks, run.fidelity) == (blocks[1:], QUANTIZED)
    assert [(held.number, held.parent, held.token_ids) for held in run.held] == [
        (1, names[0], [3, 4]),
        (2, names[1], [5, 6]),
    ]
    whole = pool.find(names[2], 3, QUANTIZED)
    assert whole is not None
    assert (whole.blocks, whole.held[0].parent, whole.held[0].fidelity) == (blocks, None, Fidelity.EXACT)
    assert pool.find(names[2], 4, QUANTIZED) is None
    assert pool.find(names[2], 2) is None
    assert pool.find(names_of([9, 9]), 1, QUANTIZED) is None  # type: ignore[arg-type]


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, grow and go. The model knows what is announced, and when each name was last used."""

    blocks_total = 10

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(self.blocks_total, SIZE)
        self.sequences: list[tuple[list[int], list[int], Fidelity]] = []  # tokens, blocks, worst that is accepted
        self.announced: dict[int, int | None] = {}  # handle -> parent
        self.exact: set[int] = set()

    def drain(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for handle in event.block_hashes:
                    assert handle not in self.announced
                    assert parent is None or parent in self.announced
                    self.announced[handle] = parent
                    parent = handle
            elif isinstance(event, BlockRemoved):
                for handle in event.block_hashes:
                    del self.announced[handle]
                    orphans = {child for child, parent in self.announced.items() if parent == handle}
                    assert not orphans & self.exact, "a parent went before its child"
            else:
                self.announced.clear()

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=SIZE, max_size=5 * SIZE),
        worst=st.sampled_from([Fidelity.EXACT, QUANTIZED, Fidelity.FUSED]),
        bad=st.booleans(),
    )
    def start(self, tokens: list[int], worst: Fidelity, bad: bool) -> None:
        """`bad`: what is not found comes as bad as is accepted."""
        count = len(tokens) // SIZE
        hits = self.pool.match(names_of(tokens), worst)
        assert len(hits) == self.expected_match(tokens, worst)
        fidelity = worst if bad else self.pool.fidelity_of(hits[-1]) if hits else Fidelity.EXACT
        self.pool.acquire(hits)
        if count - len(hits) > self.pool.blocks_available:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count - len(hits))
            self.pool.release(hits)
            return
        blocks = hits + self.pool.allocate(count - len(hits))
        blocks = commit(self.pool, blocks, tokens[: count * SIZE], len(hits), fidelity=fidelity)
        self.note(tokens[: count * SIZE], blocks, worst)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        """Part of a live sequence's chain is found by its tail, and is as good as the table's."""
        tokens, blocks, worst = data.draw(st.sampled_from(self.sequences))
        end = data.draw(st.integers(1, len(blocks)))
        count = data.draw(st.integers(1, end))
        tail = list(split_chain(names_of(tokens)))[end - 1]
        run = self.pool.find(tail, count, worst)
        assert run is not None
        assert [held.number for held in run.held] == list(range(end - count, end))
        assert run.fidelity <= max(self.pool.fidelity_of(block) for block in blocks[end - count : end])

    @rule(tokens=st.lists(st.integers(0, 2), min_size=SIZE, max_size=4 * SIZE))
    def start_without_reading(self, tokens: list[int]) -> None:
        count = len(tokens) // SIZE
        if count <= self.pool.blocks_available:
            blocks = commit(self.pool, self.pool.allocate(count), tokens[: count * SIZE])
            self.note(tokens[: count * SIZE], blocks, Fidelity.EXACT)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.pool.release(self.sequences.pop(index)[1])

    def note(self, tokens: list[int], blocks: list[int], worst: Fidelity) -> None:
        self.sequences.append((tokens, blocks, worst))
        self.exact |= {handle_of(name) for name in split_chain(names_of(tokens))}

    def expected_match(self, tokens: list[int], worst: Fidelity) -> int:
        self.drain()
        depth, level = 0, Fidelity.EXACT
        for name in split_chain(names_of(tokens)):
            levels = [one for one in Fidelity if level <= one <= worst and handle_of(name, one) in self.announced]
            if not levels:
                break
            depth, level = depth + 1, levels[0]
        return depth

    @invariant()
    def books_balance(self) -> None:
        self.drain()
        references = [0] * self.blocks_total
        for tokens, blocks, worst in self.sequences:
            self.check_prefix(tokens, blocks, worst)
            for block in blocks:
                references[block] += 1
        assert self.pool._references == references
        free, idle = set(self.pool._free), set(self.pool._idle)
        used = {block for block, count in enumerate(references) if count}
        assert len(free) + len(idle) + len(used) == self.blocks_total == len(free | idle | used)
        named = {block for block, name in enumerate(self.pool._held) if name is not None}
        assert named == idle | used
        assert sorted(self.announced) == sorted(self.pool.handles())

    def check_prefix(self, tokens: list[int], blocks: list[int], worst: Fidelity) -> None:
        found = self.pool.match(names_of(tokens), worst)
        levels = [self.pool.fidelity_of(block) for block in found]
        assert levels == sorted(levels), "fidelity gets better along a chain"
        if worst is Fidelity.EXACT:
            assert found == blocks, "a live sequence's prefix is named, and its own"
        else:
            own = [self.pool.fidelity_of(block) for block in blocks]
            assert all(level <= mine for level, mine in zip(levels, own, strict=True))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

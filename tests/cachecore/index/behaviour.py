"""What every prefix index does, whatever it is made of. A backend's test file is a subclass with an `index` fixture.

Matches are awaited where a backend answers later.
"""

import inspect

import pytest

from cachecore.blocks import EMPTY_CHAIN, Chain, PrefixHash
from cachecore.holders import Holder, Place, Pool, Tier
from cachecore.index.contract import Cleared, Match, PrefixIndex, Removed, Stored
from cachecore.scope import Fidelity
from tests.cachecore.index.histories import ROOT, chain_of, cut, name_at, worker

A, B, C = worker("a"), worker("b"), worker("c")
A0, B0, C0 = Place(A, Tier.L0), Place(B, Tier.L0), Place(C, Tier.L0)
TEN = chain_of(*range(10))


class Driver:
    """An index, with the sequence numbers kept for it."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self._sequences: dict[Holder, int] = {}

    def apply(self, holder: Holder, *events: Stored | Removed | Cleared) -> bool:
        self._sequences[holder] = self._sequences.get(holder, -1) + 1
        return self.index.apply(holder, self._sequences[holder], events)

    def store(self, holder: Holder, chain: Chain, start: int = 0, stop: int | None = None, **where: object) -> None:
        piece = cut(chain, start, stop)
        assert self.apply(holder, Stored(name_at(chain, start), piece, **where))  # type: ignore[arg-type]

    def remove(self, holder: Holder, chain: Chain, start: int = 0, stop: int | None = None, **where: object) -> None:
        assert self.apply(holder, Removed(cut(chain, start, stop), **where))  # type: ignore[arg-type]

    async def match(self, chain: Chain) -> Match:
        answer = self.index.match(chain)
        return await answer if inspect.isawaitable(answer) else answer

    async def depths(self, chain: Chain) -> dict[Place, int]:
        return dict((await self.match(chain)).depths)


class PrefixIndexBehaviour:
    @pytest.fixture
    def index(self) -> PrefixIndex:
        raise NotImplementedError

    @pytest.fixture
    def driver(self, index: PrefixIndex) -> Driver:
        return Driver(index)

    # Matches

    async def test_an_empty_index_matches_nothing(self, driver: Driver) -> None:
        assert await driver.match(TEN) == Match(10, {})
        assert await driver.match(EMPTY_CHAIN) == Match(0, {})

    async def test_the_deepest_holder_is_seen_beside_shallower_ones(self, driver: Driver) -> None:
        driver.store(A, TEN, 0, 1)
        driver.store(B, TEN, 0, 9)
        driver.store(C, TEN)
        assert await driver.match(TEN) == Match(10, {A0: 1, B0: 9, C0: 10})
        assert await driver.depths(cut(TEN, 0, 5)) == {A0: 1, B0: 5, C0: 5}

    async def test_a_query_may_outlast_and_leave_what_is_held(self, driver: Driver) -> None:
        driver.store(A, TEN)
        longer = Chain(TEN + chain_of(77, 78, parent=name_at(TEN, 10)))
        fork = Chain(cut(TEN, 0, 4) + chain_of(77, 78, 79, 80, 81, 82, parent=name_at(TEN, 4)))
        assert await driver.depths(longer) == {A0: 10}
        assert await driver.depths(fork) == {A0: 4}

    async def test_only_blocks_from_the_start_count(self, driver: Driver) -> None:
        """The tail block of a query on one worker is worth nothing beside its first block on another."""
        query = chain_of(2, 1)
        driver.store(A, chain_of(1))
        driver.store(B, chain_of(2))
        assert await driver.depths(query) == {B0: 1}

    async def test_blocks_of_one_store_follow_each_other(self, driver: Driver) -> None:
        """Each has its predecessor as parent, not the event's: the third block's text alone is another block."""
        driver.store(A, TEN, 0, 3)
        assert await driver.depths(cut(TEN, 0, 3)) == {A0: 3}
        assert await driver.depths(chain_of(2)) == {}

    async def test_a_store_whose_parent_is_unknown_waits_for_it(self, driver: Driver) -> None:
        driver.store(A, TEN, 7)
        assert await driver.depths(TEN) == {}
        driver.store(A, TEN, 3, 7)
        assert await driver.depths(TEN) == {}
        driver.store(A, TEN, 0, 3)
        assert await driver.depths(TEN) == {A0: 10}

    async def test_one_holders_blocks_do_not_bridge_anothers_gap(self, driver: Driver) -> None:
        driver.store(A, TEN, 0, 3)
        driver.store(A, TEN, 6)
        driver.store(B, TEN, 3, 6)
        assert await driver.depths(TEN) == {A0: 3}

    async def test_branches_of_one_prompt(self, driver: Driver) -> None:
        left = Chain(cut(TEN, 0, 6) + chain_of(20, 21, 22, parent=name_at(TEN, 6)))
        right = Chain(left[: 7 * 16] + chain_of(30, 31, parent=name_at(left, 7)))
        driver.store(A, TEN)
        driver.store(B, left)
        driver.store(A, right, 6)
        assert await driver.depths(TEN) == {A0: 10, B0: 6}
        assert await driver.depths(left) == {A0: 7, B0: 9}
        assert await driver.depths(right) == {A0: 9, B0: 7}

    async def test_growing_block_by_block(self, driver: Driver) -> None:
        for position in range(10):
            driver.store(A, TEN, position, position + 1)
            assert await driver.depths(TEN) == {A0: position + 1}

    async def test_matching_changes_nothing(self, driver: Driver) -> None:
        driver.store(A, TEN, 0, 6)
        before = await driver.match(TEN)
        for _ in range(100):
            await driver.match(TEN)
        assert await driver.match(TEN) == before
        assert driver.index.stats().holdings == 6

    async def test_long_chains_with_many_depths(self, driver: Driver) -> None:
        long = chain_of(*range(700))
        holders = [worker(f"w{number}") for number in range(20)]
        for number, holder in enumerate(holders):
            driver.store(holder, long, 0, 35 * (number + 1))
        expected = {Place(holder, Tier.L0): 35 * (number + 1) for number, holder in enumerate(holders)}
        assert await driver.depths(long) == expected
        assert await driver.depths(cut(long, 0, 350)) == {place: min(depth, 350) for place, depth in expected.items()}

    # Removals

    async def test_a_hole_ends_the_match(self, driver: Driver) -> None:
        driver.store(A, TEN)
        driver.store(B, TEN)
        driver.remove(A, TEN, 4, 5)
        assert await driver.depths(TEN) == {A0: 4, B0: 10}
        driver.store(A, TEN, 4, 5)
        assert await driver.depths(TEN) == {A0: 10, B0: 10}

    async def test_removing_the_first_block_leaves_no_match(self, driver: Driver) -> None:
        driver.store(A, TEN)
        driver.remove(A, TEN, 0, 1)
        assert await driver.depths(TEN) == {}
        assert driver.index.stats().holdings == 9

    @pytest.mark.parametrize("blocks", [10, 200])
    async def test_removals_in_any_order(self, driver: Driver, blocks: int) -> None:
        chain = chain_of(*range(blocks))
        names = [chain[at : at + 16] for at in range(0, len(chain), 16)]
        for order in (names, names[::-1], names[::2] + names[1::2]):
            driver.store(A, chain)
            driver.store(B, chain)
            driver.apply(A, Removed(Chain(b"".join(order))))
            assert await driver.depths(chain) == {B0: blocks}
            driver.remove(B, chain)
            assert driver.index.stats().holdings == 0

    async def test_each_copy_is_removed_once(self, driver: Driver) -> None:
        one = chain_of(1)
        driver.store(A, one)
        driver.store(A, one)
        driver.remove(A, one)
        assert await driver.depths(one) == {A0: 1}
        driver.remove(A, one)
        assert await driver.depths(one) == {}

    async def test_removals_never_count_below_zero(self, driver: Driver) -> None:
        one = chain_of(1)
        driver.store(A, one)
        for _ in range(3):
            driver.remove(A, one)
        assert driver.index.stats().unknown_removals == 2
        driver.store(A, one)
        assert await driver.depths(one) == {A0: 1}
        driver.remove(A, one)
        assert await driver.depths(one) == {}

    async def test_copies_are_counted_per_block(self, driver: Driver) -> None:
        driver.store(A, TEN)
        for _ in range(4):
            driver.store(A, TEN, 2, 6)
        for _ in range(4):
            driver.remove(A, TEN)
        assert await driver.depths(TEN) == {}
        assert sorted(driver.index.holdings(A, Tier.L0)) == sorted(TEN[at * 16 : at * 16 + 16] for at in range(2, 6))
        driver.remove(A, TEN, 2, 6)
        assert driver.index.stats().holdings == 0

    async def test_a_removal_concerns_one_holder_one_tier_and_one_fidelity(self, driver: Driver) -> None:
        driver.store(A, TEN)
        driver.store(B, TEN)
        driver.remove(B, TEN, tier=Tier.L1)
        driver.remove(B, TEN, fidelity=Fidelity.ROTATED)
        driver.remove(C, TEN)
        assert await driver.depths(TEN) == {A0: 10, B0: 10}
        assert driver.index.stats().unknown_removals == 30

    async def test_the_removed_may_be_stored_again_in_pieces(self, driver: Driver) -> None:
        three = chain_of(1, 2, 3)
        driver.store(A, three)
        for position in range(3):
            driver.remove(A, three, position, position + 1)
        driver.store(A, three, 0, 1)
        driver.store(A, three, 1, 2)
        assert await driver.depths(three) == {A0: 2}

    # Tiers and fidelities

    async def test_a_farther_tier_counts_what_nearer_ones_hold(self, driver: Driver) -> None:
        driver.store(A, TEN, 0, 4)
        driver.store(A, TEN, tier=Tier.L1)
        assert await driver.depths(TEN) == {A0: 4, Place(A, Tier.L1): 10}

    async def test_tiers_complete_each_other(self, driver: Driver) -> None:
        driver.store(A, TEN, 0, 4)
        driver.store(A, TEN, 4, 7, tier=Tier.L1)
        driver.store(A, TEN, 7, tier=Tier.L2)
        assert await driver.depths(TEN) == {A0: 4, Place(A, Tier.L1): 7, Place(A, Tier.L2): 10}
        driver.remove(A, TEN, 5, 6, tier=Tier.L1)
        assert await driver.depths(TEN) == {A0: 4, Place(A, Tier.L1): 5}
        driver.store(A, TEN, 5, 6)
        assert await driver.depths(TEN) == {A0: 4, Place(A, Tier.L1): 7, Place(A, Tier.L2): 10}

    async def test_tiers_of_different_holders_do_not(self, driver: Driver) -> None:
        driver.store(A, TEN, 0, 4)
        driver.store(B, TEN, 4, tier=Tier.L1)
        assert await driver.depths(TEN) == {A0: 4}

    async def test_a_block_is_as_good_as_the_worst_of_its_chain(self, driver: Driver) -> None:
        driver.store(A, TEN, 0, 3)
        driver.store(A, TEN, 3, fidelity=Fidelity.QUANTIZED)
        assert await driver.depths(TEN) == {A0: 3, Place(A, Tier.L0, Fidelity.QUANTIZED): 10}

    async def test_a_nearer_but_worse_holding_does_not_help_a_better_one(self, driver: Driver) -> None:
        near_fused, far_exact = Place(A, Tier.L0, Fidelity.FUSED), Place(A, Tier.L1)
        driver.store(A, TEN, 0, 5, fidelity=Fidelity.FUSED)
        driver.store(A, TEN, 3, tier=Tier.L1)
        assert await driver.depths(TEN) == {near_fused: 5}
        driver.store(A, TEN, 0, 3, tier=Tier.L1)
        assert await driver.depths(TEN) == {near_fused: 5, far_exact: 10}

    async def test_a_place_is_listed_for_what_it_holds_itself(self, driver: Driver) -> None:
        """Host memory that holds only what lies beyond the match adds nothing to it."""
        driver.store(A, TEN, 0, 5)
        driver.store(A, TEN, 8, tier=Tier.L1)
        assert await driver.depths(TEN) == {A0: 5}
        driver.store(A, TEN, 2, 3, tier=Tier.L1)
        assert await driver.depths(TEN) == {A0: 5, Place(A, Tier.L1): 5}

    # Holders

    async def test_ranks_and_epochs_of_one_worker_are_apart(self, driver: Driver) -> None:
        first, second, reborn = worker("x", rank=0), worker("x", rank=1), worker("x", epoch=1)
        driver.store(first, TEN, 0, 4)
        driver.store(second, TEN, 0, 6)
        assert await driver.depths(TEN) == {Place(first, Tier.L0): 4, Place(second, Tier.L0): 6}
        driver.index.forget(first)
        driver.store(reborn, TEN, 0, 1)
        assert await driver.depths(TEN) == {Place(second, Tier.L0): 6, Place(reborn, Tier.L0): 1}

    async def test_clearing_takes_everything_of_one_rank(self, driver: Driver) -> None:
        other_rank = worker("a", rank=1)
        for holder in (A, other_rank, B):
            driver.store(holder, TEN)
            driver.store(holder, TEN, 0, 4, tier=Tier.L1)
        driver.apply(A, Cleared())
        assert {place.holder for place in await driver.depths(TEN)} == {other_rank, B}
        assert list(driver.index.holdings(A, Tier.L0)) == []
        driver.store(A, TEN, 0, 2)
        assert (await driver.depths(TEN))[A0] == 2

    async def test_clearing_one_tier(self, driver: Driver) -> None:
        driver.store(A, TEN, 0, 4)
        driver.store(A, TEN, tier=Tier.L1)
        driver.apply(A, Cleared(Tier.L0))
        assert await driver.depths(TEN) == {Place(A, Tier.L1): 10}
        driver.store(A, TEN, 0, 2)
        assert await driver.depths(TEN) == {A0: 2, Place(A, Tier.L1): 10}

    async def test_cleared_copies_do_not_return(self, driver: Driver) -> None:
        driver.store(A, TEN)
        driver.store(A, TEN)
        driver.apply(A, Cleared())
        driver.store(A, TEN)
        driver.remove(A, TEN)
        assert await driver.depths(TEN) == {}

    async def test_the_forgotten_are_not_believed(self, driver: Driver) -> None:
        pool = Pool("shared", 3)
        driver.store(A, TEN)
        driver.store(B, TEN, 0, 3)
        driver.store(pool, TEN, tier=Tier.L2)
        driver.index.forget(A)
        driver.index.forget(pool)
        assert await driver.depths(TEN) == {B0: 3}
        assert driver.index.sequence(A) is None
        assert list(driver.index.holdings(A, Tier.L0)) == []
        assert driver.index.stats().holdings == 3

    async def test_a_forgotten_holder_may_come_back(self, driver: Driver) -> None:
        driver.store(A, TEN)
        driver.index.forget(A)
        assert driver.index.apply(A, 0, [Stored(ROOT, cut(TEN, 0, 2))])
        assert await driver.depths(TEN) == {A0: 2}
        assert sorted(driver.index.holdings(A, Tier.L0)) == sorted([TEN[:16], TEN[16:32]])

    async def test_forgetting_a_stranger_is_nothing(self, driver: Driver) -> None:
        driver.store(A, TEN)
        driver.index.forget(B)
        assert await driver.depths(TEN) == {A0: 10}

    # Streams

    async def test_a_batch_is_applied_once(self, driver: Driver) -> None:
        index = driver.index
        assert index.sequence(A) is None
        assert index.apply(A, 5, [Stored(ROOT, TEN)])
        assert not index.apply(A, 5, [Stored(ROOT, TEN)])
        assert not index.apply(A, 4, [Cleared()])
        assert index.sequence(A) == 5
        assert index.stats().stale_batches == 2
        assert index.apply(A, 9, [Removed(cut(TEN, 9))])
        assert await driver.depths(TEN) == {A0: 9}

    async def test_a_late_store_does_not_revive_a_removed_block(self, driver: Driver) -> None:
        one = chain_of(1)
        assert driver.index.apply(A, 10, [Removed(one)])
        assert not driver.index.apply(A, 5, [Stored(ROOT, one)])
        assert await driver.depths(one) == {}

    async def test_streams_of_holders_are_numbered_apart(self, driver: Driver) -> None:
        assert driver.index.apply(A, 100, [])
        assert driver.index.apply(B, 1, [Stored(ROOT, TEN)])
        assert driver.index.sequence(A) == 100
        assert driver.index.sequence(B) == 1
        assert await driver.depths(TEN) == {B0: 10}

    async def test_events_of_a_batch_apply_in_order(self, driver: Driver) -> None:
        driver.apply(A, Stored(ROOT, TEN), Removed(cut(TEN, 5)), Cleared(), Stored(ROOT, cut(TEN, 0, 2)))
        assert await driver.depths(TEN) == {A0: 2}

    async def test_a_chain_that_bites_its_tail_is_dropped_alone(self, driver: Driver) -> None:
        h1, h2 = PrefixHash(TEN[:16]), PrefixHash(TEN[16:32])
        driver.store(A, TEN)
        for parent, names in ((h1, h2 + h1), (ROOT, h1 + h2 + h1), (h1, h1)):
            driver.apply(A, Stored(parent, Chain(names)), Stored(ROOT, chain_of(50)))
        assert await driver.depths(TEN) == {A0: 10}
        assert await driver.depths(chain_of(50)) == {A0: 1}
        assert driver.index.stats().extra["malformed_events"] == 3
        driver.remove(A, TEN)
        assert await driver.depths(TEN) == {}

    async def test_an_event_that_is_no_whole_number_of_names_is_dropped(self, driver: Driver) -> None:
        driver.apply(A, Stored(ROOT, Chain(TEN[:-1])), Removed(Chain(TEN[:17])), Stored(ROOT, cut(TEN, 0, 2)))
        assert await driver.depths(TEN) == {A0: 2}
        assert driver.index.stats().extra["malformed_events"] == 2

    async def test_empty_events_are_nothing(self, driver: Driver) -> None:
        driver.apply(A, Stored(ROOT, EMPTY_CHAIN), Removed(EMPTY_CHAIN))
        assert await driver.depths(TEN) == {}
        assert driver.index.stats().holdings == 0

    # Accounts

    async def test_holdings_list_every_block_once(self, driver: Driver) -> None:
        driver.store(A, TEN, 0, 6)
        driver.store(A, TEN, 0, 6)
        driver.store(A, TEN, 4, fidelity=Fidelity.QUANTIZED)
        driver.store(A, TEN, 1, 2, tier=Tier.L1)
        assert sorted(driver.index.holdings(A, Tier.L0)) == sorted(TEN[at : at + 16] for at in range(0, len(TEN), 16))
        assert list(driver.index.holdings(A, Tier.L1)) == [TEN[16:32]]
        assert list(driver.index.holdings(B, Tier.L0)) == []

    async def test_stats_count_blocks_and_holdings(self, driver: Driver) -> None:
        driver.store(A, TEN)
        driver.store(B, TEN, 0, 4)
        driver.store(A, TEN, 0, 2, tier=Tier.L1)
        driver.remove(A, TEN, 3, 4)
        stats = driver.index.stats()
        assert (stats.blocks, stats.holdings, stats.holders) == (10, 15, 2)
        driver.remove(B, TEN, 3, 4)
        assert driver.index.stats().blocks == 9

"""From an engine's events to texts that are found: positions, copies, tiers, fidelities, and what is left out."""

from collections.abc import Sequence
from typing import Any

import pytest

from cachecore.blocks import PrefixHash, pack_tokens, split_chain
from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from cachecore.holders import Place, Tier
from cachecore.index.content import MemoryContentIndex
from cachecore.index.content_feed import ContentFeed
from cachecore.index.contract import ContentHolding, Stored
from cachecore.rekey import Rekeyer
from cachecore.scope import Fidelity, TenantId
from tests.cachecore.handover import DEFAULT, OURS, chain_of, minted, naming, naming_for, tokens_of
from tests.cachecore.index.histories import worker

A, B = worker("a"), worker("b")
HERE = Place(A, Tier.L0)


class Follower:
    """A rekeyer and the feed behind it."""

    def __init__(self, holdings_max: int = 0) -> None:
        self.index = MemoryContentIndex(holdings_max)
        self.feed = ContentFeed(self.index)
        self.rekeyer = Rekeyer(OURS, naming_for, with_texts=True)

    def take(self, *events: KvEvent) -> None:
        self.feed.apply(A, self.rekeyer.rekey(events))

    def places(self, number: int, of: Any = DEFAULT) -> list[tuple[Place, int]]:
        """Where block `number`'s text lies, and at which position, oldest first."""
        [content] = of.hasher.contents(pack_tokens(tokens_of(number)))
        [fingerprint] = self.feed.fingerprinter(of).blocks(pack_tokens(tokens_of(number)))
        found = self.index.find(content)
        assert self.index.resolve(fingerprint) == (content if found else None)
        return [(holding.place, holding.position_blocks) for holding in reversed(found)]


def stored(numbers: Sequence[int], parent: int | None = None, **more: Any) -> BlockStored:
    ids = [token for number in numbers for token in tokens_of(number)]
    handles = more.pop("handles", tuple(numbers))
    return BlockStored(tuple(handles), parent, ids, OURS, **more)


@pytest.fixture
def follower() -> Follower:
    return Follower()


def test_blocks_are_found_with_their_source_and_what_came_before(follower: Follower) -> None:
    follower.take(stored([1, 2]), stored([3], 2))
    names = list(split_chain(chain_of([1, 2, 3])))
    for at, number in enumerate((1, 2, 3)):
        [content] = DEFAULT.hasher.contents(pack_tokens(tokens_of(number)))
        before = names[at - 1] if at else DEFAULT.root
        assert follower.index.find(content) == [ContentHolding(HERE, names[at], at, before)]


def test_one_text_in_two_prompts(follower: Follower) -> None:
    follower.take(stored([1, 2]), stored([7, 2], handles=[7, 72]))
    assert follower.places(2) == [(HERE, 1), (HERE, 1)]
    follower.take(BlockRemoved((2,)))
    [content] = DEFAULT.hasher.contents(pack_tokens(tokens_of(2)))
    assert [one.source for one in follower.index.find(content)] == [PrefixHash(chain_of([7, 2])[16:])]


def test_a_copy_is_held_until_the_last_one_has_gone(follower: Follower) -> None:
    follower.take(stored([1]), stored([1]), stored([1]))
    for left in (1, 1, 0):
        follower.take(BlockRemoved((1,)))
        assert len(follower.places(1)) == left
    follower.take(stored([1]), BlockRemoved((1,)))
    assert follower.places(1) == []


def test_a_chain_goes_on_in_another_tier_and_less_faithfully(follower: Follower) -> None:
    quantized = Place(A, Tier.L1, Fidelity.QUANTIZED)
    salt = minted("default", Fidelity.QUANTIZED)
    follower.take(stored([1, 2]), stored([3], 2, medium="CPU"), stored([4], 3, medium="CPU", cache_salt=salt))
    assert follower.places(3) == [(Place(A, Tier.L1), 2)]
    assert follower.places(4) == [(quantized, 3)]


def test_what_was_turned_or_repaired_is_not_offered(follower: Follower) -> None:
    follower.take(stored([1]), stored([2], 1, cache_salt=minted("default", Fidelity.FUSED)), stored([3], 2))
    assert (follower.places(1), follower.places(2), follower.places(3)) == ([(HERE, 0)], [], [])


def test_images_and_what_follows_them_are_left_out(follower: Follower) -> None:
    follower.take(stored([1, 2], extra_keys=(None, (("image", 0),))), stored([3], 2), stored([4]))
    assert [len(follower.places(number)) for number in (1, 2, 3, 4)] == [0, 0, 0, 1]


def test_tenants_have_no_text_in_common(follower: Follower) -> None:
    follower.take(stored([1], cache_salt=minted("acme")))
    assert follower.places(1) == []
    assert follower.places(1, naming(TenantId("acme"))) == [(HERE, 0)]


def test_a_chain_is_found_from_where_it_has_been_followed(follower: Follower) -> None:
    follower.take(stored([3], 2), stored([1, 2]))
    assert follower.places(3) == [(HERE, 2)]
    late = ContentFeed(MemoryContentIndex())
    late.apply(A, follower.rekeyer.rekey([stored([4], 3), stored([5])]))
    assert [len(late.index), late.index.position_after(HERE, PrefixHash(chain_of([5])))] == [1, 1]


@pytest.mark.parametrize("gone", [AllBlocksCleared(), None])
def test_a_holder_is_forgotten_with_its_copies(follower: Follower, gone: AllBlocksCleared | None) -> None:
    follower.take(stored([1, 2]), stored([1, 2]))
    follower.feed.apply(B, Rekeyer(OURS, naming_for, with_texts=True).rekey([stored([1])]))
    if gone:
        follower.take(gone)
    else:
        follower.feed.forget(A)
        follower.rekeyer.clear()
    assert follower.places(1) == [(Place(B, Tier.L0), 0)]
    follower.take(stored([1]), BlockRemoved((1,)))
    assert follower.places(1) == [(Place(B, Tier.L0), 0)]


def test_the_beginning_that_others_go_on_from_stays() -> None:
    follower = Follower(holdings_max=4)
    follower.take(stored([1]))
    for number in range(2, 12):
        follower.take(stored([number], 1))
        assert follower.places(number) == [(HERE, 1)]
    assert follower.places(1) == [(HERE, 0)]


def test_without_being_asked_stores_carry_no_text() -> None:
    [event] = Rekeyer(OURS, naming_for).rekey([stored([1, 2])])
    assert isinstance(event, Stored)
    assert event.text is None
    feed = ContentFeed(MemoryContentIndex())
    feed.apply(A, [event])
    assert len(feed.index) == 0


def test_parts_of_blocks_carry_no_text() -> None:
    subject = Rekeyer(OURS, naming_for, with_texts=True)
    [event] = subject.rekey([BlockStored((1, 2), None, tokens_of(1), OURS // 2)])
    assert isinstance(event, Stored)
    assert event.text is None

"""The content index in memory, alone and beside a list that is searched from its end."""

import random

import pytest

from cachecore.blocks import ContentHash, PrefixHash
from cachecore.holders import Place, Tier
from cachecore.index.content import MemoryContentIndex
from cachecore.index.contract import ContentHolding
from tests.cachecore.index.histories import worker

A, B = worker("a"), worker("b")
A0, A1, B0 = Place(A, Tier.L0), Place(A, Tier.L1), Place(B, Tier.L0)
TEXT, OTHER = ContentHash(b"t" * 16), ContentHash(b"o" * 16)


def source(number: int) -> PrefixHash:
    return PrefixHash(number.to_bytes(16, "little"))


def held(place: Place, name: PrefixHash, position_blocks: int) -> ContentHolding:
    return ContentHolding(place, name, position_blocks, source(10**6))


@pytest.fixture
def index() -> MemoryContentIndex:
    return MemoryContentIndex()


def test_one_text_many_kvs_latest_first(index: MemoryContentIndex) -> None:
    holdings = [held(place, source(number), number) for number, place in enumerate((A0, B0, A1))]
    for holding in holdings:
        index.add(TEXT, holding)
    index.add(OTHER, held(A0, source(9), 0))
    assert index.find(TEXT) == holdings[::-1]
    assert index.find(TEXT, limit=2) == [holdings[2], holdings[1]]
    assert index.find(TEXT, limit=0) == []
    assert index.find(ContentHash(bytes(16))) == []
    assert len(index) == 4


def test_adding_again_moves_to_the_front(index: MemoryContentIndex) -> None:
    first, second = held(A0, source(1), 4), held(B0, source(1), 4)
    for holding in (first, second, first):
        index.add(TEXT, holding)
    assert index.find(TEXT) == [first, second]


def test_removal_concerns_one_place_and_one_source(index: MemoryContentIndex) -> None:
    kept = [held(A1, source(1), 0), held(A0, source(2), 3)]
    for holding in (*kept, held(A0, source(1), 0)):
        index.add(TEXT, holding)
    index.remove(A0, source(1))
    index.remove(B0, source(1))
    assert index.find(TEXT) == kept[::-1]


def test_the_forgotten_are_gone_at_once_and_may_come_back(index: MemoryContentIndex) -> None:
    theirs = held(B0, source(500), 0)
    index.add(TEXT, theirs)
    for number in range(300):
        index.add(TEXT, held(A0, source(number), number))
    index.forget(A)
    assert index.find(TEXT) == [theirs]
    again = held(A0, source(7), 7)
    index.add(TEXT, again)
    for _ in range(10):
        index.remove(B0, source(501))
        assert index.find(TEXT) == [again, theirs]
    assert len(index._contents) == 2


def test_a_bound_forgets_the_oldest() -> None:
    index = MemoryContentIndex(holdings_max=3)
    holdings = [held(A0, source(number), number) for number in range(5)]
    for holding in holdings:
        index.add(TEXT, holding)
    assert index.find(TEXT) == holdings[:1:-1]


def test_a_fingerprint_leads_to_a_text_as_long_as_it_is_held(index: MemoryContentIndex) -> None:
    index.add(TEXT, held(A0, source(1), 0), 7)
    index.add(TEXT, held(B0, source(1), 0), 7)
    index.add(OTHER, held(A0, source(2), 1))
    assert (index.resolve(7), index.resolve(8)) == (TEXT, None)
    index.remove(A0, source(1))
    assert index.resolve(7) == TEXT
    index.remove(B0, source(1))
    assert index.resolve(7) is None
    index.add(OTHER, held(B0, source(2), 1), 8)
    assert index.resolve(8) == OTHER


def test_two_texts_with_one_fingerprint_are_not_confused(index: MemoryContentIndex) -> None:
    index.add(TEXT, held(A0, source(1), 0), 7)
    index.add(OTHER, held(A0, source(2), 0), 7)
    assert index.resolve(7) == OTHER
    index.remove(A0, source(1))
    assert index.resolve(7) == OTHER
    index.remove(A0, source(2))
    assert index.resolve(7) is None


def test_positions_are_known_of_what_is_held(index: MemoryContentIndex) -> None:
    index.add(TEXT, held(A0, source(1), 4))
    assert index.position_after(A0, source(1)) == 5
    assert index.position_after(A1, source(1)) is None
    index.forget(A)
    assert index.position_after(A0, source(1)) is None


def test_what_is_gone_on_from_is_not_the_oldest() -> None:
    index = MemoryContentIndex(holdings_max=2)
    for number in (1, 2):
        index.add(TEXT, held(A0, source(number), number))
    assert index.position_after(A0, source(1)) == 2
    index.add(TEXT, held(A0, source(3), 3))
    assert [holding.source for holding in index.find(TEXT)] == [source(3), source(1)]


@pytest.mark.parametrize("seed", range(5))
def test_beside_a_plain_list(seed: int) -> None:
    rng, index = random.Random(seed), MemoryContentIndex()
    plain: list[tuple[ContentHash, ContentHolding]] = []
    texts = [ContentHash(bytes([number]) * 16) for number in range(4)]
    for _ in range(600):
        place, name = rng.choice((A0, A1, B0)), source(rng.randrange(30))
        kind = rng.random()
        if kind < 0.6:
            text, holding = texts[name[0] % 4], held(place, name, name[0])
            plain = [(t, h) for t, h in plain if (h.place, h.source) != (place, name)] + [(text, holding)]
            index.add(text, holding)
        elif kind < 0.98:
            plain = [(t, h) for t, h in plain if (h.place, h.source) != (place, name)]
            index.remove(place, name)
        else:
            plain = [(t, h) for t, h in plain if h.place.holder != place.holder]
            index.forget(place.holder)
        for text in texts:
            assert index.find(text) == [h for t, h in reversed(plain) if t == text][:8]
        assert len(index) == len(plain)

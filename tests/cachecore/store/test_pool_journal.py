"""What a process tells of its pools: its journal, and both forms on the wire."""

import asyncio
import threading

import pytest

from cachecore.blocks import Chain
from cachecore.holders import Pool, Tier
from cachecore.index.contract import Cleared, Removed
from cachecore.scope import Fidelity
from cachecore.store.pools import Announcement, Extent
from cachecore.store.pools.journal import (
    TOLD_TOGETHER,
    Changes,
    Journal,
    ListingReader,
    PoolCleared,
    RunDocument,
    RunRemoved,
    RunStored,
    encode_changes,
    encode_item,
    read_changes,
)
from tests.cachecore.store.pools.runs import BOB, make_run

HOLDER = Pool("shared", 3)
RUN = make_run(1, layers=Extent(2, 7), heads=Extent(4, 8), codec="i8", fidelity=Fidelity.QUANTIZED, tenant=BOB)
DOCUMENT = RunDocument.of(HOLDER, RUN)


def stored(number: int) -> Announcement:
    run = make_run(number)
    return Announcement(HOLDER, run.stored(), run)


def seeds(changes: Changes) -> list[int]:
    """Of runs made by `make_run`."""
    return [change.run.first_block - 12 for change in changes.changes if isinstance(change, RunStored)]


def test_a_run_survives_its_journey() -> None:
    assert DOCUMENT.holder == HOLDER
    assert DOCUMENT.run() == RUN
    reader = ListingReader()
    assert reader.feed(encode_item(DOCUMENT) + encode_item(True)) == [DOCUMENT]
    assert reader.whole


def test_every_kind_of_change_survives_its_journey() -> None:
    journal = Journal(first=100)
    lost = Removed(Chain(b"t" * 16), Tier.L2, Fidelity.QUANTIZED)
    for announcement in (
        Announcement(HOLDER, RUN.stored(), RUN),
        Announcement(HOLDER, RUN.removed(), RUN),
        Announcement(HOLDER, lost, None),
        Announcement(HOLDER, Cleared(), None),
    ):
        journal(announcement)
    told = journal.since(100)
    assert told == Changes(
        104,
        False,
        [
            RunStored(DOCUMENT),
            RunRemoved("shared", 3, RUN.key.tail, 1, DOCUMENT),
            RunRemoved("shared", 3, b"t" * 16, 1),
            PoolCleared("shared", 3),
        ],
    )
    assert read_changes(encode_changes(told)) == told


def test_a_listing_may_come_byte_by_byte_and_is_whole_only_when_it_says_so() -> None:
    documents = [RunDocument.of(HOLDER, make_run(seed)) for seed in range(3)]
    data = b"".join(map(encode_item, documents))
    reader = ListingReader()
    found = [document for at in range(len(data)) for document in reader.feed(data[at : at + 1])]
    assert found == documents
    assert not reader.whole
    reader.feed(encode_item(False))
    assert not reader.whole


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\1\0\0\0\xc1", encode_item(DOCUMENT)[:4] + b"\x80" * 300],
    ids=["huge", "empty", "no msgpack", "no run"],
)
def test_what_is_no_listing_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        ListingReader().feed(data)


@pytest.mark.parametrize(
    "change",
    [{"chain": b"x" * 17}, {"chain": b""}, {"fidelity": 9}, {"codec": "I8"}, {"layers": Extent(3, 3)}, {"tenant": "/"}],
)
def test_a_document_that_no_run_can_have_is_refused(change: dict[str, object]) -> None:
    import msgspec

    with pytest.raises(ValueError, match=r"\w"):
        msgspec.structs.replace(DOCUMENT, **change).run()


@pytest.mark.parametrize("body", [b"", b"[]", b'{"next": 1, "reset": false, "changes": [{"type": "wiped"}]}'])
def test_what_are_no_changes_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_changes(body)


def test_a_journal_tells_what_it_still_has() -> None:
    journal = Journal(changes_max=4, first=10)
    for number in range(6):
        journal(stored(number))
    assert seeds(journal.since(12)) == [2, 3, 4, 5]
    assert seeds(journal.since(15)) == [5]
    assert journal.since(16) == Changes(16, False, [])
    assert journal.since(11) == journal.since(17) == journal.since(-1) == Changes(16, True, [])


def test_an_answer_is_bounded_and_the_next_one_goes_on() -> None:
    journal = Journal(first=0)
    for number in range(TOLD_TOGETHER + 3):
        journal(stored(number))
    first = journal.since(0)
    assert (first.next, len(first.changes)) == (TOLD_TOGETHER, TOLD_TOGETHER)
    assert seeds(journal.since(first.next)) == [TOLD_TOGETHER, TOLD_TOGETHER + 1, TOLD_TOGETHER + 2]


def test_a_later_life_has_later_numbers() -> None:
    before = Journal()
    before(stored(1))
    assert Journal().since(before.next).reset


async def test_a_follower_waits_for_the_next_change_from_any_thread() -> None:
    journal = Journal(first=0)
    waiting = asyncio.create_task(journal.wait(0, 30.0))
    await asyncio.sleep(0)
    teller = threading.Thread(target=journal, args=(stored(7),))
    teller.start()
    assert seeds(await waiting) == [7]
    teller.join()
    assert await journal.wait(1, 0.01) == Changes(1, False, [])


async def test_closing_lets_everybody_go() -> None:
    journal = Journal(first=0)
    waiting = asyncio.create_task(journal.wait(0, 30.0))
    await asyncio.sleep(0)
    journal.close()
    assert await waiting == Changes(0, False, [])
    assert await journal.wait(0, 30.0) == Changes(0, False, [])

"""What a follower decides, by scripts of entries; then beside a model of a server that loses things."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cachecore.holders import Holder
from cachecore.index import following
from cachecore.index.following import Follower, Resync, StreamId, Verdict
from cachecore.index.schema import Entry, Kind, Record, Version
from tests.cachecore.index.histories import worker

A, B = worker("a"), worker("b")
SKIP, APPLY, REPLACE, FORGET, HOLD, RESYNC = Verdict


def entry(kind: Kind, fence: int, revision: int, holder: Holder = A, events: bytes = b"") -> Entry:
    return Entry(holder, Version(fence, revision), 100 + revision, kind, events)


def new(fence: int, revision: int, holder: Holder = A) -> Entry:
    return entry(Kind.NEW, fence, revision, holder)


def more(fence: int, revision: int, holder: Holder = A) -> Entry:
    return entry(Kind.APPLY, fence, revision, holder)


def gone(fence: int, revision: int, holder: Holder = A) -> Entry:
    return entry(Kind.FORGET, fence, revision, holder)


def restated(fence: int, revision: int, holder: Holder = A) -> Entry:
    return entry(Kind.RESTATED, fence, revision, holder)


def record(fence: int, revision: int) -> Record:
    return Record(Version(fence, revision), 100 + revision, b"a", True)


@pytest.fixture
def ours() -> set[Holder]:
    return set()


@pytest.fixture
def follower(ours: set[Holder]) -> Follower:
    """Has been started on an empty shard."""
    follower = Follower(ours.__contains__)
    assert follower.survey(StreamId(), {}) == []
    return follower


def take(follower: Follower, *entries: Entry) -> list[Verdict]:
    return [follower.take(one) for one in entries]


def asked(follower: Follower, holder: Holder = A) -> Resync:
    resync = follower.ask(holder)
    assert resync is not None
    return resync


def settled(
    follower: Follower, resync: Resync, fence: int, revision: int, holder: Holder = A, whole: bool = True
) -> list[Verdict]:
    """Apply a snapshot and what was held back; the verdicts on that."""
    follower.settle(holder, Version(fence, revision), 100 + revision, whole)
    return [verdict for _, verdict in follower.replay(holder, resync)]


def known(follower: Follower, fence: int, revision: int, holder: Holder = A) -> None:
    """Bring the follower to know a holder at a version."""
    follower.take(more(fence, revision, holder))
    assert settled(follower, asked(follower, holder), fence, revision, holder) == []


class TestEntries:
    def test_what_begins_from_nothing_is_applied_and_what_follows_it(self, follower: Follower) -> None:
        assert take(follower, new(7, 1), more(7, 2), more(7, 3)) == [APPLY, APPLY, APPLY]
        assert follower.version(A) == (7, 3)
        assert follower.sequence(A) == 103

    def test_an_unknown_holder_is_asked_for(self, follower: Follower) -> None:
        assert take(follower, more(7, 4)) == [RESYNC]
        assert follower.version(A) is None
        assert list(follower.wanted) == [A]

    def test_forgetting_a_stranger_is_nothing(self, follower: Follower) -> None:
        assert take(follower, gone(7, 4)) == [SKIP]
        assert not follower.follows(A)

    def test_what_was_seen_is_skipped(self, follower: Follower) -> None:
        entries = [new(7, 1), more(7, 2), more(7, 3)]
        take(follower, *entries)
        assert take(follower, *entries, restated(7, 3), gone(7, 2)) == [SKIP] * 5
        assert follower.version(A) == (7, 3)

    def test_a_deposed_writers_entries_are_skipped(self, follower: Follower) -> None:
        known(follower, 8, 5)
        assert take(follower, more(7, 6), new(7, 9), gone(7, 9), restated(7, 6)) == [SKIP] * 4

    def test_a_new_writer_that_goes_on_is_followed(self, follower: Follower) -> None:
        known(follower, 7, 5)
        assert take(follower, more(8, 6), more(8, 7), more(7, 8)) == [APPLY, APPLY, SKIP]
        assert follower.version(A) == (8, 7)

    @pytest.mark.parametrize("revision", [3, 5, 7])
    def test_a_new_writer_that_goes_on_from_elsewhere_is_not(self, follower: Follower, revision: int) -> None:
        known(follower, 7, 5)
        assert take(follower, more(8, revision), more(7, 6)) == [RESYNC, SKIP]
        assert settled(follower, asked(follower), 8, revision) == []
        assert take(follower, more(8, revision + 1), more(7, 6)) == [APPLY, SKIP]

    def test_a_gap_is_asked_for_once(self, follower: Follower) -> None:
        known(follower, 7, 5)
        assert take(follower, more(7, 7), more(7, 8), more(7, 9)) == [RESYNC, SKIP, SKIP]
        assert list(follower.wanted) == [A]

    def test_a_restated_holder_is_asked_for(self, follower: Follower) -> None:
        known(follower, 7, 5)
        assert take(follower, restated(7, 6)) == [RESYNC]
        assert take(follower, restated(7, 4, B)) == [RESYNC]
        assert list(follower.wanted) == [A, B]

    def test_what_begins_from_nothing_closes_any_gap(self, follower: Follower) -> None:
        known(follower, 7, 5)
        assert take(follower, more(7, 7), new(7, 9), more(7, 10)) == [RESYNC, REPLACE, APPLY]
        assert not follower.wanted

    def test_a_forgotten_holder_may_come_back(self, follower: Follower) -> None:
        assert take(follower, new(7, 1), gone(7, 2), new(9, 1), more(9, 2)) == [APPLY, FORGET, APPLY, APPLY]
        assert take(follower, gone(7, 2)) == [SKIP]
        assert follower.version(A) == (9, 2)

    def test_holders_are_followed_apart(self, follower: Follower) -> None:
        assert take(follower, new(7, 1), new(3, 1, B), more(3, 2, B), more(7, 3)) == [APPLY, APPLY, APPLY, RESYNC]
        assert follower.version(B) == (3, 2)


class TestSnapshots:
    def test_entries_held_back_are_judged_by_the_snapshot(self, follower: Follower) -> None:
        take(follower, more(7, 4))
        resync = asked(follower)
        assert take(follower, more(7, 5), more(7, 6), more(7, 7)) == [HOLD] * 3
        assert settled(follower, resync, 7, 5) == [SKIP, APPLY, APPLY]
        assert (follower.version(A), follower.sequence(A), follower.resyncs) == ((7, 7), 107, 1)

    def test_entries_that_come_while_others_are_replayed_wait_their_turn(self, follower: Follower) -> None:
        take(follower, more(7, 4))
        resync = asked(follower)
        take(follower, more(7, 5), more(7, 6))
        follower.settle(A, Version(7, 4), None, True)
        verdicts = []
        for one, verdict in follower.replay(A, resync):
            verdicts.append((one.version.revision, verdict))
            if one.version.revision == 5:
                assert take(follower, more(7, 7)) == [HOLD]
        assert verdicts == [(5, APPLY), (6, APPLY), (7, APPLY)]
        assert take(follower, more(7, 8)) == [APPLY]

    def test_a_new_life_ends_a_replay(self, follower: Follower) -> None:
        take(follower, more(7, 4))
        resync = asked(follower)
        take(follower, more(7, 5), more(7, 6))
        follower.settle(A, Version(7, 4), None, True)
        replay = follower.replay(A, resync)
        assert next(replay)[1] == APPLY
        assert take(follower, gone(7, 7), new(7, 8)) == [FORGET, APPLY]
        assert list(replay) == []
        assert follower.version(A) == (7, 8)

    def test_less_than_there_is_stays_less_until_it_is_copied_anew(self, follower: Follower) -> None:
        """A server without memory has less of a holder than its writer."""
        take(follower, more(7, 4))
        assert not follower.is_whole(A), "nothing is known yet"
        settled(follower, asked(follower), 7, 4, whole=False)
        assert take(follower, more(7, 5)) == [APPLY]
        assert (follower.version(A), follower.is_whole(A)) == ((7, 5), False)
        assert take(follower, restated(7, 6)) == [RESYNC]
        settled(follower, asked(follower), 7, 6)
        assert follower.is_whole(A)
        assert take(follower, restated(7, 7)) == [RESYNC]
        settled(follower, asked(follower), 7, 7, whole=False)
        assert take(follower, new(7, 8)) == [REPLACE]
        assert follower.is_whole(A), "a new life begins from nothing"

    def test_a_snapshot_in_the_making_is_waited_for(self, follower: Follower) -> None:
        """Its writer announces that it has restated the holder."""
        take(follower, more(7, 4))
        follower.shelve(A, asked(follower))
        assert not follower.wanted
        assert take(follower, restated(7, 4)) == [RESYNC]

    def test_what_cannot_be_applied_is_asked_for(self, follower: Follower) -> None:
        known(follower, 7, 3)
        take(follower, more(7, 4))
        follower.doubt(A)
        assert (follower.version(A), list(follower.wanted)) == (None, [A])
        follower.shelve(A, asked(follower))
        assert take(follower, more(7, 5)) == [RESYNC], "no snapshot, no certainty"

    def test_entries_before_the_snapshot_is_asked_for_are_in_it(self, follower: Follower) -> None:
        assert take(follower, more(7, 4), more(7, 5)) == [RESYNC, SKIP]
        assert settled(follower, asked(follower), 7, 5) == []
        assert take(follower, more(7, 6)) == [APPLY]

    def test_a_snapshot_older_than_a_gap_is_not_enough(self, follower: Follower) -> None:
        take(follower, more(7, 4))
        resync = asked(follower)
        take(follower, more(7, 9))
        assert settled(follower, resync, 7, 6) == [RESYNC]
        assert list(follower.wanted) == [A]

    def test_forgetting_outruns_a_snapshot(self, follower: Follower) -> None:
        known(follower, 7, 3)
        take(follower, more(7, 5))
        resync = asked(follower)
        assert take(follower, gone(7, 6)) == [FORGET]
        assert not follower.expects(A, resync)
        assert not follower.follows(A)

    def test_a_new_life_outruns_a_snapshot(self, follower: Follower) -> None:
        take(follower, more(7, 5))
        resync = asked(follower)
        assert take(follower, new(7, 6), more(7, 7)) == [REPLACE, APPLY]
        assert not follower.expects(A, resync)
        assert follower.version(A) == (7, 7)

    def test_only_one_snapshot_is_on_its_way(self, follower: Follower) -> None:
        take(follower, more(7, 4))
        resync = asked(follower)
        assert follower.ask(A) is None
        assert follower.expects(A, resync)

    def test_a_failed_snapshot_is_asked_for_again(self, follower: Follower) -> None:
        take(follower, more(7, 4))
        first = asked(follower)
        take(follower, more(7, 5))
        follower.fail(A, first)
        assert not follower.expects(A, first)
        assert list(follower.wanted) == [A]
        assert settled(follower, asked(follower), 7, 5) == []

    def test_a_holder_that_is_not_there_is_left_to_the_surveys(self, follower: Follower) -> None:
        known(follower, 7, 3)
        take(follower, more(7, 5))
        follower.shelve(A, asked(follower))
        assert follower.follows(A)
        assert [follower.survey(StreamId(), {}) for _ in range(2)] == [[], [A]]

    def test_too_many_held_back_are_dropped_for_another_snapshot(
        self, follower: Follower, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(following, "HELD_BYTES_MAX", 2000)
        take(follower, more(7, 4))
        resync = asked(follower)
        take(follower, *(more(7, revision) for revision in range(5, 10)))
        assert not resync.held
        assert settled(follower, resync, 7, 4) == []
        assert list(follower.wanted) == [A]


class TestOwnership:
    def test_our_own_holders_are_not_followed(self, follower: Follower, ours: set[Holder]) -> None:
        known(follower, 7, 3)
        ours.add(A)
        follower.own(A)
        assert take(follower, more(7, 4), new(9, 1), gone(9, 2)) == [SKIP] * 3
        assert follower.survey(StreamId(5), {A: record(8, 9)}) == []
        assert not follower.wanted

    def test_a_snapshot_does_not_overwrite_our_own(self, follower: Follower, ours: set[Holder]) -> None:
        take(follower, more(7, 3))
        resync = asked(follower)
        ours.add(A)
        follower.own(A)
        assert not follower.expects(A, resync)

    def test_what_is_ours_no_more_is_asked_for(self, follower: Follower, ours: set[Holder]) -> None:
        ours.update({A, B})
        follower.own(A)
        follower.own(B)
        ours.clear()
        assert take(follower, more(8, 4)) == [SKIP]
        assert list(follower.wanted) == [A]
        follower.survey(StreamId(5), {A: record(8, 4), B: record(8, 9)})
        assert list(follower.wanted) == [A, B]


class TestBurials:
    def test_the_buried_are_not_believed(self, follower: Follower) -> None:
        known(follower, 7, 3)
        follower.bury(A)
        assert take(follower, more(7, 4), new(7, 5), restated(7, 5)) == [SKIP] * 3
        for last in range(3):
            follower.survey(StreamId(last), {A: record(7, 5)})
        assert not follower.follows(A)

    def test_forgotten_by_its_writer_it_may_come_back(self, follower: Follower) -> None:
        known(follower, 7, 3)
        follower.bury(A)
        assert take(follower, gone(7, 4), new(7, 5)) == [SKIP, APPLY]

    def test_a_later_writer_revives_it(self, follower: Follower) -> None:
        known(follower, 7, 3)
        known(follower, 7, 3, B)
        follower.bury(A)
        follower.bury(B)
        assert take(follower, new(8, 1)) == [APPLY]
        for _ in range(2):
            follower.survey(follower.position, {A: record(8, 1), B: record(8, 6)})
        assert list(follower.wanted) == [B]

    def test_our_own_is_buried_until_its_record_is_gone(self, follower: Follower, ours: set[Holder]) -> None:
        ours.add(A)
        follower.own(A)
        ours.clear()
        follower.bury(A, 7)
        assert take(follower, new(7, 1), more(7, 2)) == [SKIP, SKIP]
        follower.survey(StreamId(), {})
        assert take(follower, more(7, 3)) == [SKIP]
        follower.survey(StreamId(), {})
        assert take(follower, new(7, 4)) == [APPLY]

    def test_burying_stops_a_snapshot(self, follower: Follower) -> None:
        take(follower, more(7, 3))
        resync = asked(follower)
        follower.bury(A)
        assert not follower.expects(A, resync)


class TestSurveys:
    def test_the_first_wants_everything(self) -> None:
        follower = Follower(lambda holder: False)
        assert follower.survey(StreamId(9, 2), {A: record(7, 3), B: record(8, 1)}) == []
        assert (follower.position, list(follower.wanted)) == (StreamId(9, 2), [A, B])

    def test_what_the_stream_may_bring_is_waited_for(self, follower: Follower) -> None:
        known(follower, 7, 3)
        for _ in range(5):
            follower.survey(StreamId(9), {A: record(7, 5), B: record(7, 1)})
        assert not follower.wanted
        assert take(follower, more(7, 4), more(7, 5), new(7, 1, B)) == [APPLY] * 3

    @pytest.mark.parametrize("way", ["position", "reads"])
    def test_what_it_has_not_brought_is_asked_for(self, follower: Follower, way: str) -> None:
        """The stream was trimmed: what is left of it goes on behind the entries, or is nothing at all."""
        known(follower, 7, 3)
        follower.survey(StreamId(9), {A: record(7, 5), B: record(7, 1)})
        if way == "position":
            follower.position = StreamId(9)
        else:
            follower.read_to_the_end()
            follower.survey(StreamId(9), {A: record(7, 5), B: record(7, 1)})
            assert not follower.wanted, "the read may have begun before the survey"
            follower.read_to_the_end()
            follower.read_to_the_end()
        follower.survey(StreamId(9), {A: record(7, 5), B: record(7, 1)})
        assert list(follower.wanted) == [A, B]

    def test_a_new_writer_that_has_written_nothing_changes_nothing(self, follower: Follower) -> None:
        follower.position = StreamId(9)
        known(follower, 7, 3)
        for _ in range(3):
            follower.survey(StreamId(9), {A: record(8, 3)})
        assert not follower.wanted
        assert take(follower, more(8, 4)) == [APPLY]

    def test_a_vanished_stream_is_read_from_its_start(self, follower: Follower) -> None:
        """The server came back without it, but with the records: what differs is asked for."""
        follower.position = StreamId(50)
        known(follower, 7, 3)
        known(follower, 7, 3, B)
        follower.survey(StreamId(50), {A: record(7, 3), B: record(7, 3)})
        assert follower.survey(StreamId(), {A: record(7, 3), B: record(7, 5)}) == []
        assert (follower.position, list(follower.wanted)) == (StreamId(), [B])

    def test_a_promoted_replica_is_believed(self, follower: Follower) -> None:
        """It has fewer entries and older records: the copy goes back with it, at once if the stream shows it."""
        follower.position = StreamId(50)
        known(follower, 7, 9)
        follower.survey(StreamId(50), {A: record(7, 9)})
        follower.survey(StreamId(40), {A: record(7, 6)})
        assert (follower.position, list(follower.wanted)) == (StreamId(40), [A])

    def test_a_record_that_goes_back_is_believed(self, follower: Follower) -> None:
        """The promoted replica's stream has grown beyond ours by now."""
        known(follower, 7, 9)
        follower.survey(StreamId(50), {A: record(7, 9)})
        follower.survey(StreamId(60), {A: record(7, 6)})
        assert list(follower.wanted) == [A]

    def test_a_record_behind_a_faster_stream_is_not(self, follower: Follower) -> None:
        """Read before the entries were written, received after them."""
        known(follower, 7, 5)
        follower.survey(StreamId(50), {A: record(7, 5)})
        take(follower, more(7, 6), more(7, 7))
        follower.survey(StreamId(51), {A: record(7, 6)})
        assert not follower.wanted

    def test_absent_twice_is_forgotten(self, follower: Follower) -> None:
        known(follower, 7, 5)
        follower.survey(StreamId(5), {A: record(7, 5)})
        assert follower.survey(StreamId(5), {}) == []
        assert follower.survey(StreamId(5), {}) == [A]
        assert not follower.follows(A)

    def test_absent_before_its_entries_came_is_not(self, follower: Follower) -> None:
        follower.survey(StreamId(5), {})
        take(follower, new(7, 1))
        assert follower.survey(StreamId(5), {}) == []
        take(follower, more(7, 2))
        assert follower.survey(StreamId(5), {}) == []
        assert follower.follows(A)

    def test_a_holder_being_restated_is_left_alone(self, follower: Follower) -> None:
        known(follower, 7, 5)
        follower.position = StreamId(9)
        for _ in range(3):
            assert follower.survey(StreamId(9), {A: record(7, -1)}) == []
        assert not follower.wanted

    def test_a_snapshot_on_its_way_is_not_asked_for_again(self, follower: Follower) -> None:
        follower.position = StreamId(9)
        take(follower, more(7, 5))
        resync = asked(follower)
        for _ in range(3):
            follower.survey(StreamId(9), {A: record(7, 5)})
        assert follower.expects(A, resync)
        assert not follower.wanted


def test_stream_ids_are_ordered_as_numbers() -> None:
    ids = [b"0-0", b"9-10", b"10-2", b"10-10"]
    parsed = [StreamId.parse(text) for text in ids]
    assert parsed == sorted(parsed)
    assert [one.encode() for one in parsed] == ids
    assert StreamId.parse(b"5") == (5, 0)


# Beside a model: a server that loses things, writers that restate them, and a mirror to which everything comes late.


Content = tuple[int, ...]
HOLDERS = [worker(name) for name in "abc"]


@dataclass
class Writer:
    version: Version
    content: Content


@dataclass
class Kept:
    """What a server has, and may lose."""

    contents: dict[Holder, tuple[Version, Content]] = field(default_factory=dict)
    stream: list[tuple[StreamId, Entry]] = field(default_factory=list)
    last: StreamId = field(default_factory=StreamId)


@dataclass
class Server:
    rng: random.Random
    kept: Kept = field(default_factory=Kept)
    saved: Kept = field(default_factory=Kept)
    writers: dict[Holder, Writer] = field(default_factory=dict)
    truth: dict[tuple[Holder, Version], Content] = field(default_factory=dict)
    clock: int = 0

    def write(self, holder: Holder) -> None:
        self.clock += 1
        writer = self.writers.get(holder)
        there = self.kept.contents.get(holder)
        if writer is None:  # a new writer goes on from what is there
            version, content = there or (Version(0, 1000 * self.clock), ())
            writer = self.writers[holder] = Writer(Version(self.clock, version.revision), content)
            self.truth[holder, writer.version] = content
            base = version
        else:
            base = writer.version
        fence, revision = writer.version
        began_empty = not writer.content
        writer.version, writer.content = Version(fence, revision + 1), (*writer.content, self.clock)
        lost = there[0] != base if there else not began_empty
        if lost:
            self.restate(holder)
        else:
            kind = Kind.NEW if began_empty else Kind.APPLY
            self._announce(holder, kind, b"%d" % self.clock)

    def restate(self, holder: Holder) -> None:
        self._announce(holder, Kind.RESTATED, b"")

    def restate_what_is_lost(self) -> None:
        for holder, writer in self.writers.items():
            if self.kept.contents.get(holder, (None,))[0] != writer.version:
                self.restate(holder)

    def forget(self, holder: Holder) -> None:
        writer = self.writers.pop(holder, None)
        if writer is not None and self.kept.contents.pop(holder, None):
            fence, revision = writer.version
            self._append(Entry(holder, Version(fence, revision + 1), None, Kind.FORGET, b""))

    def hand_over(self, holder: Holder) -> None:
        self.writers.pop(holder, None)

    def trim(self) -> None:
        del self.kept.stream[: self.rng.randint(0, len(self.kept.stream))]

    def empty(self) -> None:
        self.kept = Kept()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.kept)

    def go_back(self) -> None:
        self.kept = copy.deepcopy(self.saved)

    def _announce(self, holder: Holder, kind: Kind, events: bytes) -> None:
        writer = self.writers[holder]
        self.truth[holder, writer.version] = writer.content
        self.kept.contents[holder] = writer.version, writer.content
        self._append(Entry(holder, writer.version, None, kind, events))

    def _append(self, announced: Entry) -> None:
        self.clock += 1
        self.kept.last = StreamId(self.clock)
        self.kept.stream.append((self.kept.last, announced))


class Copy:
    """A mirror of the model, whose reads, surveys and snapshots are served at one moment and arrive at a later one."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.follower = Follower(lambda holder: False)
        self.contents: dict[Holder, Content] = {}
        self.reading = False
        self.calm = False
        """Nothing fails and nothing is cut short any more."""
        self.arriving: list[Callable[[], None]] = []

    def arrive(self) -> None:
        while self.arriving:
            self.arriving.pop(0)()

    def read(self) -> None:
        if self.reading:
            return
        self.reading = True
        found = [one for one in self.server.kept.stream if one[0] > self.follower.position]
        limit = 1000 if self.calm else self.server.rng.choice([1, 3, 1000])

        def arrived() -> None:
            self.reading = False
            for at, announced in found[:limit]:
                self.follower.position = at
                self._do(announced, self.follower.take(announced))
            if len(found) < limit:
                self.follower.read_to_the_end()

        self.arriving.append(arrived)

    def survey(self) -> None:
        last = self.server.kept.last
        records = {
            holder: Record(version, None, b"", True) for holder, (version, _) in self.server.kept.contents.items()
        }

        def arrived() -> None:
            for holder in self.follower.survey(last, records):
                self.contents.pop(holder, None)

        self.arriving.append(arrived)

    def ask(self) -> None:
        holder = next(iter(self.follower.wanted), None)
        resync = self.follower.ask(holder) if holder else None
        if holder is None or resync is None:
            return
        there = self.server.kept.contents.get(holder)

        def arrived() -> None:
            if there is None:
                self.follower.shelve(holder, resync)
            elif not self.calm and self.server.rng.random() < 0.2:
                self.follower.fail(holder, resync)
            elif self.follower.expects(holder, resync):
                self.contents[holder] = there[1]
                self.follower.settle(holder, there[0], None, True)
                for announced, verdict in self.follower.replay(holder, resync):
                    self._do(announced, verdict)

        self.arriving.append(arrived)

    def _do(self, announced: Entry, verdict: Verdict) -> None:
        if verdict is FORGET:
            self.contents.pop(announced.holder, None)
        elif verdict is REPLACE:
            self.contents[announced.holder] = (int(announced.events),)
        elif verdict is APPLY:
            self.contents[announced.holder] = (*self.contents.get(announced.holder, ()), int(announced.events))

    def check(self) -> None:
        """What is known at a version is what was written at it."""
        for holder in HOLDERS:
            version = self.follower.version(holder)
            if version is not None:
                assert self.contents[holder] == self.server.truth[holder, version]


LOSSES: list[list[Callable[[Server], None]]] = [
    [],
    [Server.trim],
    [Server.empty],
    [Server.trim, Server.empty],
    [Server.save, Server.go_back],
    [Server.save, Server.go_back, Server.empty],
]


@pytest.mark.parametrize("losses", LOSSES, ids=lambda losses: "+".join(loss.__name__ for loss in losses) or "none")
@pytest.mark.parametrize("seed", range(12))
def test_a_copy_is_exact_whatever_is_lost_and_late(seed: int, losses: list[Callable[[Server], None]]) -> None:
    rng = random.Random(seed)
    server = Server(rng)
    mirror = Copy(server)
    for _ in range(400):
        holder = rng.choice(HOLDERS)
        writing = rng.choices([server.write, server.forget, server.hand_over], [20, 1, 1])[0]
        writing(holder)
        if losses and rng.random() < 0.05:
            rng.choice(losses)(server)
        for step in rng.sample([mirror.read, mirror.survey, mirror.ask, mirror.arrive], rng.randint(0, 3)):
            step()
        mirror.check()
    mirror.arrive()
    mirror.calm = True
    for _ in range(8):
        server.restate_what_is_lost()
        mirror.survey()
        for step in (mirror.read, *[mirror.ask] * 3, mirror.arrive) * 2:
            step()
    assert mirror.contents == {holder: content for holder, (_, content) in server.kept.contents.items()}

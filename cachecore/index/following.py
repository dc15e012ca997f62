"""Following one stream: which of its entries a copy applies, and when it must ask for a holder anew.

No I/O and no clock: `MirrorIndex` reads the streams and does what is decided here.

* Every holder has one writer, who numbers what it writes: a version is (fence, revision) and grows by one revision a
  step. A later writer has a higher fence and goes on counting, and no two lives of a holder share a revision. So an
  entry whose revision is the next one continues what is known, an entry that is not newer was seen, and anything else
  means that something was missed: then the holder is copied anew from a snapshot of it.
* An entry that begins from nothing needs no knowledge of what came before.
* While a snapshot is on its way, entries of its holder are held back, and judged again when it has been applied: it may
  have been taken before or after them. Entries that come while a snapshot is only wanted are in it, and are dropped.
* Entries get lost without a trace when a stream is trimmed or a server comes back with less than it had. So the records
  that the server keeps of all holders are compared with the versions known here (`survey`) now and then. Records and
  stream travel on different connections: what the stream may yet bring is not missed, and a difference counts only if
  it is found twice with nothing changed in between, or if the stream itself has gone back.
* Whoever forgets a holder does not wait for its owner to agree. The holder stays buried here until its record is gone,
  or a writer of a higher fence gives it a new life.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from cachecore.holders import Holder
from cachecore.index.schema import Entry, Kind, Record, Version

HELD_BYTES_MAX = 8 << 20
"""Of the entries held back for one holder; where more come, another snapshot is cheaper."""
_ENTRY_BYTES = 512
"""Of an entry without its events, about."""


class StreamId(NamedTuple):
    """Where an entry stands in a stream; ordered."""

    milliseconds: int = 0
    number: int = 0

    @classmethod
    def parse(cls, text: bytes) -> "StreamId":
        milliseconds, _, number = text.partition(b"-")
        return cls(int(milliseconds), int(number or 0))

    def encode(self) -> bytes:
        return b"%d-%d" % self


class Verdict(Enum):
    """What to do with an entry."""

    SKIP = auto()
    APPLY = auto()
    REPLACE = auto()
    """Apply, after forgetting what is known of the holder."""
    FORGET = auto()
    HOLD = auto()
    """Nothing now: it waits for a snapshot."""
    RESYNC = auto()
    """Nothing: something was missed, and a snapshot is wanted."""


@dataclass(eq=False, slots=True)
class Resync:
    """A snapshot that is wanted or on its way."""

    asked: bool = False
    held: deque[Entry] = field(default_factory=deque)
    held_bytes: int = 0

    @property
    def overflowed(self) -> bool:
        return self.held_bytes > HELD_BYTES_MAX


@dataclass(slots=True)
class _Followed:
    version: Version | None = None
    """Of what is known here; None before anything is."""
    sequence: int | None = None
    fence: int = 0
    """The highest seen of the holder, known here or not."""
    whole: bool = True
    """What is known here is all that its writer knew: no snapshot of a server without memory."""
    resync: Resync | None = None


class _Note(NamedTuple):
    """What a survey found of one holder."""

    here: Version | None
    there: Version | None


class Mark(NamedTuple):
    """A moment of the stream: reading has passed it once an entry from there on was read, or when there was none."""

    last: StreamId
    reads: int


class Follower:
    """Follows one stream. `owns` tells which holders this process itself writes: of those nothing is followed."""

    def __init__(self, owns: Callable[[Holder], bool]) -> None:
        self._owns = owns
        self._holders: dict[Holder, _Followed] = {}
        self._owned: set[Holder] = set()
        self._buried: dict[Holder, int] = {}
        self._unrecorded: set[Holder] = set()
        self._notes: dict[Holder, _Note] = {}
        self._mark: Mark | None = None
        self._reads = 0
        self.position = StreamId()
        """The last entry read, or what the first survey started from."""
        self.wanted: dict[Holder, None] = {}
        """Holders whose snapshot is to be asked for, oldest first."""
        self.resyncs = 0
        """Snapshots applied."""

    # What is known

    def sequence(self, holder: Holder) -> int | None:
        followed = self._holders.get(holder)
        return followed.sequence if followed else None

    def version(self, holder: Holder) -> Version | None:
        """Of the copy here; None while it is not, or not certainly, a copy of anything."""
        followed = self._holders.get(holder)
        return followed.version if followed and followed.resync is None else None

    def standing(self, holder: Holder) -> tuple[Version | None, Resync | None] | None:
        """Equal as long as nothing has been decided about the holder."""
        followed = self._holders.get(holder)
        return (followed.version, followed.resync) if followed else None

    def is_copy(self, holder: Holder, version: Version) -> bool:
        """Whether the copy here is certainly what others have at that version."""
        return _is_copy(self.version(holder), version)

    def is_whole(self, holder: Holder) -> bool:
        """Whether there is a copy here, and of all that the holder's writer knew at its version."""
        return self.version(holder) is not None and self._holders[holder].whole

    def follows(self, holder: Holder) -> bool:
        return holder in self._holders

    @property
    def followed(self) -> int:
        return len(self._holders)

    @property
    def unsettled(self) -> int:
        """Holders whose snapshot is wanted or on its way."""
        return sum(followed.resync is not None for followed in self._holders.values())

    # The stream

    def mark(self, last: StreamId) -> Mark:
        return Mark(last, self._reads)

    def passed(self, mark: Mark) -> bool:
        """Whether every entry up to the mark has been read, or is there no more: the second read that came to the
        stream's end since then began after it."""
        return self.position >= mark.last or self._reads >= mark.reads + 2

    def read_to_the_end(self) -> None:
        """A read has brought all there was."""
        self._reads += 1

    def take(self, entry: Entry) -> Verdict:
        """Judge one entry; the caller does what the answer says before it hands in the next."""
        holder = entry.holder
        if self._is_ours(holder) or self._is_buried(entry):
            return Verdict.SKIP
        followed = self._holders.get(holder)
        if followed is None:
            return self._meet(entry)
        followed.fence = max(followed.fence, entry.version.fence)
        if followed.version is not None and entry.version <= followed.version:
            return Verdict.SKIP
        if entry.kind == Kind.FORGET:
            self._drop(holder)
            return Verdict.FORGET
        if entry.kind == Kind.NEW:
            return self._advance(followed, entry, Verdict.REPLACE)
        if followed.resync is not None:
            return self._hold(followed.resync, entry)
        known = followed.version
        if entry.kind == Kind.APPLY and known is not None and entry.version.revision == known.revision + 1:
            return self._advance(followed, entry, Verdict.APPLY)
        self._want(holder, followed)
        return Verdict.RESYNC

    def _meet(self, entry: Entry) -> Verdict:
        if entry.kind == Kind.FORGET:
            return Verdict.SKIP
        followed = self._holders[entry.holder] = _Followed(fence=entry.version.fence)
        if entry.kind == Kind.NEW:
            return self._advance(followed, entry, Verdict.APPLY)
        self._want(entry.holder, followed)
        return Verdict.RESYNC

    def _advance(self, followed: _Followed, entry: Entry, verdict: Verdict) -> Verdict:
        followed.version, followed.sequence = entry.version, entry.sequence
        followed.whole = followed.whole or entry.kind == Kind.NEW
        followed.resync = None
        self.wanted.pop(entry.holder, None)
        return verdict

    def _hold(self, resync: Resync, entry: Entry) -> Verdict:
        if not resync.asked:
            return Verdict.SKIP
        resync.held_bytes += len(entry.events) + _ENTRY_BYTES
        if resync.overflowed:
            resync.held.clear()
        else:
            resync.held.append(entry)
        return Verdict.HOLD

    # Snapshots

    def ask(self, holder: Holder) -> Resync | None:
        """The caller is about to ask for the holder's snapshot. None when it is not wanted any more."""
        self.wanted.pop(holder, None)
        followed = self._holders.get(holder)
        if followed is None or followed.resync is None or followed.resync.asked:
            return None
        followed.resync = Resync(asked=True)
        return followed.resync

    def expects(self, holder: Holder, resync: Resync) -> bool:
        """Whether the snapshot that was asked for is still of use. It is not when the holder was forgotten, began anew
        or became ours meanwhile."""
        followed = self._holders.get(holder)
        return followed is not None and followed.resync is resync

    def settle(self, holder: Holder, version: Version, sequence: int | None, whole: bool) -> None:
        """The holder's snapshot has been applied. `replay` is next."""
        followed = self._holders[holder]
        followed.version, followed.sequence, followed.whole = version, sequence, whole
        followed.fence = max(followed.fence, version.fence)
        self.resyncs += 1

    def replay(self, holder: Holder, resync: Resync) -> Iterator[tuple[Entry, Verdict]]:
        """After `settle`: the entries that were held back, judged one by one. The caller does what each verdict says
        before it goes on, and may let others run in between: what comes meanwhile is held back too."""
        while self.expects(holder, resync):
            followed = self._holders[holder]
            if resync.overflowed:
                self._want(holder, followed)
                return
            followed.resync = None
            if not resync.held:
                return
            entry = resync.held.popleft()
            verdict = self.take(entry)
            if self._holders.get(holder) is followed and followed.resync is None:
                followed.resync = resync
            yield entry, verdict

    def fail(self, holder: Holder, resync: Resync) -> None:
        """No snapshot could be had. It is wanted as before."""
        if self.expects(holder, resync):
            self._want(holder, self._holders[holder])

    def shelve(self, holder: Holder, resync: Resync) -> None:
        """There is none, or none yet: no use in asking again before an entry or a survey says so."""
        if self.expects(holder, resync):
            followed = self._holders[holder]
            followed.version = followed.resync = None

    def doubt(self, holder: Holder) -> None:
        """An entry could not be applied."""
        if (followed := self._holders.get(holder)) is not None:
            self._want(holder, followed)

    # Ownership

    def own(self, holder: Holder) -> None:
        """This process writes the holder from now on."""
        self._drop(holder)
        self._buried.pop(holder, None)
        self._owned.add(holder)

    def release(self, holder: Holder) -> None:
        """This process writes the holder no more; its copy may be ahead of what was written, or behind."""
        if holder in self._owned:
            self._owned.discard(holder)
            self._want(holder, self._holders.setdefault(holder, _Followed()))

    def bury(self, holder: Holder, fence: int | None = None) -> None:
        """Forget the holder, whatever its writer says. `fence` is that of a holder of our own."""
        self._owned.discard(holder)
        if (followed := self._holders.get(holder)) is not None:
            fence = followed.fence
        if fence is not None:
            self._buried[holder] = fence
        self._drop(holder)

    # Surveys

    def survey(self, last: StreamId, records: Mapping[Holder, Record]) -> list[Holder]:
        """Compare with the records of the stream's shard, read when `last` was the stream's last entry; what has been
        missed is wanted from now on. Returns the holders to be forgotten."""
        started_anew = self._mark is None or last < self.position
        passed = self._mark is not None and self.passed(self._mark)
        if started_anew:
            self.position = last
        for holder in [holder for holder in self._owned if not self._owns(holder)]:
            self.release(holder)
        gone: list[Holder] = []
        notes: dict[Holder, _Note] = {}
        for holder in self._surveyed(records):
            record = records.get(holder)
            note = notes[holder] = _Note(self._version(holder), record.version if record else None)
            if record is None:
                if note == self._notes.get(holder):
                    gone.append(holder)
            elif started_anew or self._has_missed(note, self._notes.get(holder), passed):
                self._catch_up(holder, record, note)
        for holder in gone:
            self._drop(holder)
            del notes[holder]
        self._notes, self._mark = notes, self.mark(last)
        return gone

    def _surveyed(self, records: Mapping[Holder, Record]) -> Iterator[Holder]:
        unrecorded = self._buried.keys() - records.keys()
        for holder in unrecorded & self._unrecorded:  # twice: what was written before the burial may be on its way
            del self._buried[holder]
        self._unrecorded = unrecorded
        for holder, record in records.items():
            if not self._owns(holder) and record.version.fence > self._buried.get(holder, -1):
                self._buried.pop(holder, None)
                yield holder
        yield from [holder for holder in self._holders if holder not in records]

    @staticmethod
    def _has_missed(note: _Note, before: _Note | None, passed: bool) -> bool:
        """Whether a record differs from what is known here for another reason than that the stream is on its way."""
        if before is None or before.there is None or note.there is None or note.there.revision < 0:
            return False
        if before.here is not None and note.there < before.here:
            return True  # the server has gone back
        return passed and (note.here is None or note.here < before.there)

    def _catch_up(self, holder: Holder, record: Record, note: _Note) -> None:
        followed = self._holders.setdefault(holder, _Followed())
        followed.fence = max(followed.fence, record.version.fence)
        if not _is_copy(note.here, record.version) and followed.resync is None:
            self._want(holder, followed)

    def _version(self, holder: Holder) -> Version | None:
        followed = self._holders.get(holder)
        return followed.version if followed else None

    # Parts

    def _want(self, holder: Holder, followed: _Followed) -> None:
        if followed.resync is not None and not followed.resync.asked:
            return
        followed.resync = Resync()
        self.wanted[holder] = None

    def _drop(self, holder: Holder) -> None:
        self._holders.pop(holder, None)
        self.wanted.pop(holder, None)

    def _is_ours(self, holder: Holder) -> bool:
        if self._owns(holder):
            return True
        self.release(holder)
        return False

    def _is_buried(self, entry: Entry) -> bool:
        fence = self._buried.get(entry.holder)
        if fence is None:
            return False
        if entry.version.fence > fence or entry.kind == Kind.FORGET:
            del self._buried[entry.holder]
        return entry.version.fence <= fence


def _is_copy(here: Version | None, there: Version) -> bool:
    """Whether what is known here is what is there: a writer that has just come has changed the fence alone."""
    return here is not None and here.revision == there.revision and here.fence <= there.fence

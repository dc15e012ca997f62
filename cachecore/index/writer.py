"""One holder's writer: which call comes next, and what its answer means. No I/O, and the time is handed in.

* A step is built from everything that has happened since the last one. It stays the same until it is answered, and the
  server takes it once however often it is sent.
* A holder that is new here must have nothing on the server. If it has (`lost`), or if the server has not what a step
  builds on, the holder is restated: everything is written anew in several steps under a revision that says so, and the
  last one tells the mirrors to read it anew.
* A writer that had to drop events (the server was away for too long) makes one step without events of what they have
  changed, and tells the mirrors the same.
* When the server's memory has run out it still takes what it must give up, and the events: what it has of the holder is
  then less than there is, never something else. When it takes more again, the mirrors are told as well.
* A later fence ends it.
"""

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES
from cachecore.holders import Holder
from cachecore.index import lua
from cachecore.index.contract import Cleared, IndexEvent
from cachecore.index.schema import (
    RESTATING,
    Kind,
    Record,
    Schema,
    Version,
    encode_events,
    holder_id,
    shard_of,
)
from cachecore.index.shadow import Drained, Shadow
from cachecore.store import Call, Refused, StoreError, Unavailable

RESTATED_BLOCKS_MAX = 8192
"""Written by one step of a restatement: some 200 KiB."""
RETRY_SECONDS = 0.5
"""After the server has refused something."""

NAMINGS_KEY = 3
"""Its number among the keys of `apply.lua`."""

Argument = bytes | int | str

_APPLY, _FORGET, _CHECK = lua.load("apply"), lua.load("forget"), lua.load("check")


class Mode(Enum):
    NEW = auto()
    """The server has nothing of the holder, or so it seems."""
    LIVE = auto()
    RESTART = auto()
    """The server has something else; the next step starts over."""
    RESTATING = auto()
    FORGOTTEN = auto()
    """The next step forgets the holder; what came after that is new."""
    FENCED = auto()


class _Step(NamedTuple):
    """A call that has not been answered, and what to do then."""

    call: Call
    mode: Mode
    """After it was taken."""
    events: list[IndexEvent]
    blocks: int
    drained: Drained | None = None
    complete: bool = True
    """The server then has everything that the shadow had."""
    silent: bool = False


class HolderWriter:
    def __init__(
        self, schema: Schema, holder: Holder, fence: int, shadow: Shadow, revision: int | None, stream_length_max: int
    ) -> None:
        """`revision` is what the server has and the shadow was loaded from; None when the holder is new here."""
        self.holder = holder
        self.fence = fence
        self.shadow = shadow
        self.mode = Mode.NEW if revision is None else Mode.LIVE
        self.queued_blocks = 0
        """In the events that are to be written."""
        self.touched = False
        """Something was applied since the holder was last forgotten."""
        self._schema = schema
        self._keys = _HolderKeys(schema, holder)
        self._stream_length_max = stream_length_max
        self._written = revision
        """The revision that the server has, as far as is known."""
        self._highest = revision or 0
        """The highest that has been seen or used."""
        self._events: list[IndexEvent] = []
        self._changed = False
        self._silent = False
        """The next step tells no events, and the mirrors to read the holder anew."""
        self._partial = False
        """The server has less than there is: it had no memory."""
        self._retry_at = 0.0
        self._pending: _Step | None = None
        self._unanswered = False
        """The pending step was sent once and not answered: somebody may have taken it."""

    def __repr__(self) -> str:
        return f"HolderWriter({self.holder}, {self.mode.name}, {self.version}, {self.queued_blocks} blocks queued)"

    @property
    def version(self) -> Version:
        """Of what was written last, or is about to be."""
        return Version(self.fence, self._highest)

    @property
    def idle(self) -> bool:
        """Nothing waits to be written."""
        return self._pending is None and self.mode in (Mode.LIVE, Mode.FENCED, Mode.NEW) and not self._has_news

    @property
    def settled(self) -> bool:
        """The server has everything."""
        return self.idle and not self._partial

    @property
    def _has_news(self) -> bool:
        return self._changed or self._silent

    def queue(self, told: Sequence[IndexEvent]) -> None:
        """The shadow has taken a batch, of which `told` is to be told to the mirrors."""
        self._changed = self.touched = True
        restating = self.mode in (Mode.RESTART, Mode.RESTATING)
        if restating and not (self._pending is not None and self._pending.mode is Mode.LIVE):
            return  # whatever it is, it will be in one of the steps
        if not self._silent:
            self._events += told
            self.queued_blocks += sum(_blocks(event) for event in told)

    def drop_events(self) -> None:
        """There are too many: the mirrors will read the holder anew."""
        self._events, self.queued_blocks, self._silent = [], 0, True

    def restate(self) -> None:
        """The server may have lost something."""
        if self.mode in (Mode.LIVE, Mode.RESTATING):
            self.mode = Mode.RESTART

    def renew(self, fence: int) -> None:
        """The lease was lost and got again."""
        if fence > self.fence:
            self.fence = fence
            if self._pending is not None and self._pending.drained is not None:
                self.mode = Mode.RESTART
            self._pending = None

    def forget(self, shadow: Shadow) -> None:
        """The holder is gone; `shadow` is that of its next life, if there is one."""
        self.shadow = shadow
        self.mode, self.touched = Mode.FORGOTTEN, False
        self._pending, self._events, self.queued_blocks = None, [], 0
        self._changed = self._silent = self._partial = False

    # Calls

    def next_call(self, now: float, microseconds: int) -> Call | None:
        """The call to make, the same until it is answered; None when there is nothing to write now. `microseconds` is
        the clock's time, from which the revisions of a new holder start: so none is used twice."""
        if self._pending is None and self.mode is not Mode.FENCED:
            self._pending, self._unanswered = self._next_step(now, microseconds), False
        return self._pending.call if self._pending is not None else None

    def check(self) -> Call | None:
        """A question whether the server still has everything; None while that is not to be expected."""
        if self.mode is not Mode.LIVE or not self.idle:
            return None
        keys, sizes = [self._keys.fixed[0]], list[int]()
        for code, runs, copies in () if self._partial else self.shadow.sizes():
            keys += self._keys.place(code)
            sizes += (runs, copies)
        return Call(_CHECK, keys, [self._keys.holder_id, self.fence, self._written or 0, *sizes])

    def _next_step(self, now: float, microseconds: int) -> _Step | None:
        rests = now < self._retry_at
        if self.mode is Mode.FORGOTTEN:
            return None if rests else self._forgetting()
        if self.mode in (Mode.RESTART, Mode.RESTATING):
            return None if rests else self._restating()
        grows = not (self._partial and rests)
        if not (self._has_news or (self._partial and grows)):
            return None
        if self.mode is Mode.NEW:
            self._highest = max(self._highest, microseconds)
            base = b"new"
        else:
            base = b"%d" % (self._written or 0)
        self._highest += 1
        return self._step(base, self._highest, self.shadow.drain() if grows else self.shadow.drain_losses(), grows)

    def _step(self, base: bytes, revision: int, drained: Drained, grows: bool) -> _Step:
        """An ordinary step: all that is new, with the events that tell it."""
        if self._silent or (self._partial and grows):
            kind, events = Kind.RESTATED, []
        else:
            kind, events = (Kind.NEW if self.mode is Mode.NEW else Kind.APPLY), self._events
        call = self._call(base, revision, drained, kind, encode_events(events), urgent=not grows)
        step = _Step(call, Mode.LIVE, self._events, self.queued_blocks, drained, grows, self._silent)
        self._events, self.queued_blocks, self._changed, self._silent = [], 0, False, False
        return step

    def _restating(self) -> _Step:
        """Some more of everything. The first step begins by emptying all keys, so it is never refused."""
        base = b"%d" % RESTATING
        if self.mode is Mode.RESTART:
            base = b"any"
            self.shadow.restate()
            self._events, self.queued_blocks = [], 0
        self._changed = self._silent = False
        if self._partial:
            drained, last = self.shadow.drain_losses(), True
        else:
            drained = self.shadow.drain(RESTATED_BLOCKS_MAX)
            last = not self.shadow.dirty
        if not last:
            return _Step(self._call(base, RESTATING, drained, None, b"", False), Mode.RESTATING, [], 0, drained)
        self._highest += 1
        call = self._call(base, self._highest, drained, Kind.RESTATED, b"", urgent=self._partial)
        return _Step(call, Mode.LIVE, [], 0, drained, complete=not self._partial)

    def _forgetting(self) -> _Step:
        self._highest += 1
        version = Version(self.fence, self._highest)
        return _Step(forget_call(self._schema, self.holder, version, self._stream_length_max), Mode.NEW, [], 0)

    def _call(
        self, base: bytes, revision: int, drained: Drained, kind: Kind | None, events: bytes, urgent: bool
    ) -> Call:
        """`apply.lua` says what each argument is."""
        shadow, keys = self.shadow, _KeyList(self._keys)
        # An urgent step leaves the server with less than there is: nobody could go on from that.
        fields = None if urgent else shadow.fields
        version, persistable = Version(self.fence, revision), shadow.persistable and not urgent
        rooted = b"" if urgent or revision == RESTATING else shadow.rooted
        record = Record(version, shadow.sequence, shadow.codes, persistable, fields, rooted)
        emptied: list[Argument] = []
        for code in drained.emptied:
            emptied += (keys.runs(code), keys.copies(code))
        if base == b"any":
            emptied.append(NAMINGS_KEY)
        pieces: list[Argument] = []
        for code, edits in drained.edits.items():
            for edit in edits:
                pieces += (keys.runs(code), *edit)
        copies: list[Argument] = []
        for code, counts in drained.copies.items():
            for name, count in counts:
                copies += (keys.copies(code), name, count)
        namings: list[Argument] = []
        for naming, description in drained.namings.items():
            namings += (naming, description)
        arguments: list[Argument] = [
            *(self._keys.holder_id, self.fence, base, revision, record.encode(), int(urgent)),
            *(kind.value if kind else b"", -1 if shadow.sequence is None else shadow.sequence),
            *(events, self._stream_length_max),
            *(len(emptied), *emptied, len(pieces) // 7, *pieces),
            *(len(copies) // 3, *copies, len(namings) // 2, *namings),
        ]
        return Call(_APPLY, keys.listed, arguments)

    # Answers

    def settle(self, answer: object, now: float) -> None:
        """What the server, or the store in its place, said to the last `next_call`."""
        step = self._pending
        if step is None or isinstance(answer, Unavailable):
            self._unanswered = True
            return
        self._pending = None
        if isinstance(answer, Refused) and answer.code == "OOM" and step.drained is not None:
            self._retract(step, now)
        elif isinstance(answer, StoreError):
            self._retry_at = now + RETRY_SECONDS
            self.mode = Mode.FORGOTTEN if step.drained is None else Mode.RESTART
        else:
            self._answered(answer, step)

    def settle_check(self, answer: object) -> None:
        if isinstance(answer, Unavailable) or not self.idle:
            return
        if isinstance(answer, StoreError):
            self.mode = Mode.RESTART  # a key is not what it should be
        else:
            self._answered(answer, None)

    def _answered(self, answer: object, step: _Step | None) -> None:
        said, *rest = answer if isinstance(answer, list) else [b""]
        if said == b"fenced":
            self.mode = Mode.FENCED
        elif said == b"ok" and step is not None:
            self._taken(step)
        elif said == b"lost":
            self.mode = Mode.RESTART
            with suppress(ValueError):
                self._highest = max(self._highest, Record.decode(rest[0]).version.revision)

    def _taken(self, step: _Step) -> None:
        self.mode = step.mode
        if step.drained is None:
            self._written = None
        elif step.mode is Mode.LIVE:
            self._written = self._highest
            self._partial = not step.complete

    def _retract(self, step: _Step, now: float) -> None:
        """There was no memory for a step: keep what it was made of, and go on with what needs none."""
        self._partial = self._changed = True
        self._retry_at = now + RETRY_SECONDS
        if step.mode is Mode.LIVE and not self._unanswered:
            self._highest -= 1  # nobody has seen it, and to mirrors a revision left out is a step that they have missed
        if step.drained is not None:
            self.shadow.undo_drain(step.drained)
        self._silent = self._silent or step.silent
        if not self._silent:
            self._events = step.events + self._events
            self.queued_blocks += step.blocks


def forget_call(schema: Schema, holder: Holder, version: Version, stream_length_max: int) -> Call:
    """Gives up all that the server has of a holder, unless somebody has written it under a higher fence."""
    keys = [schema.holders(shard_of(holder)), schema.stream(shard_of(holder)), *schema.contents(holder)]
    return Call(_FORGET, keys, [holder_id(holder), version.fence, version.revision, stream_length_max])


class _HolderKeys:
    """The keys of one holder, each made once."""

    def __init__(self, schema: Schema, holder: Holder) -> None:
        shard = shard_of(holder)
        self.holder_id = holder_id(holder)
        self.fixed = (schema.holders(shard), schema.stream(shard), schema.namings(holder))
        self._schema = schema
        self._holder = holder
        self._places: dict[bytes, tuple[bytes, bytes]] = {}

    def place(self, code: bytes) -> tuple[bytes, bytes]:
        """Of its runs, and of its copies."""
        keys = self._places.get(code)
        if keys is None:
            keys = self._schema.runs(self._holder, code), self._schema.copies(self._holder, code)
            self._places[code] = keys
        return keys


class _KeyList:
    """The keys of a call, each once; the numbers (from 1) that arguments name them by."""

    def __init__(self, keys: _HolderKeys) -> None:
        self.listed = list(keys.fixed)
        self._keys = keys
        self._runs: dict[bytes, int] = {}
        self._copies: dict[bytes, int] = {}

    def runs(self, code: bytes) -> int:
        return self._runs.get(code) or self._add(self._runs, code, self._keys.place(code)[0])

    def copies(self, code: bytes) -> int:
        return self._copies.get(code) or self._add(self._copies, code, self._keys.place(code)[1])

    def _add(self, numbers: dict[bytes, int], code: bytes, key: bytes) -> int:
        self.listed.append(key)
        numbers[code] = len(self.listed)
        return len(self.listed)


def _blocks(event: IndexEvent) -> int:
    return 1 if isinstance(event, Cleared) else len(event.chain) // HASH_BYTES

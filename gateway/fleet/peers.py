"""The gateways of a fleet tell each other what they dispatch, so that none sends where another just did.

Every change that a request makes to a gateway's accounts, predictions or history is a note. Notes are collected and
appended to one capped stream, at most every few milliseconds and otherwise at once; every gateway reads that stream
and keeps the others' requests in its own accounts (`gateway.fleet.peerbook`).

* A gateway that nobody is there to hear sends nothing but a sign of life each second.
* One that arrives asks everyone for the list of their requests under way.
* While the server is away notes are dropped, everyone else is forgotten after a few seconds, and a gateway decides by
  what it sends itself. Back again, each sends its list.
* Redis' own ids order the stream, so reading goes on where it was after the stream has been emptied. Should the
  server's clock have gone back (a replica promoted), our own messages show it.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from cachecore.index.chains import ChainMultiset
from cachecore.store import StoreError, StreamEntry
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.noted import HoldersOf, NotedAccounting, NotedHistory, NotedPredictions, Outbox
from gateway.fleet.notes import DirectoryChanged, Leaving, Note, Wanted, encode, signature
from gateway.fleet.peerbook import BookCounts, PeerBook, PeerView
from policies.state.pins import PinnedChains

logger = logging.getLogger("ropeway.peers")

INTERVAL_SECONDS = 0.005
READ_INTERVAL_SECONDS = 0.010
"""Several gateways send at their own pace: together their messages cost one reading."""
HEARTBEAT_SECONDS = 1.0
TICK_SECONDS = 0.25
NOTES_PER_MESSAGE_MAX = 200
STREAM_ENTRIES_MAX = 4096
STREAM_ENTRIES_MIN = 256
STREAM_BYTES_MAX = 32 * 1024 * 1024
"""Of all messages in the stream, roughly: where they are large, fewer are kept."""
_BUDGET_SECONDS = 0.5
"""Nobody waits for a message, so a slow server is given more time than a lookup is."""
_RETRY_SECONDS = 0.1
_LIST_SECONDS = 0.1
"""Between two lists of our own, however many ask."""
_READ_COUNT = 128
_READ_AT_ONCE = 16
_CLOCK_BACK_MS = 1000
_BEGINNING = b"0-0"


class NoteStore(Protocol):
    """What is used of `cachecore.store.RedisStore`."""

    async def command(self, *parts: bytes | str | int, budget_seconds: float | None = None) -> Any: ...

    async def read_streams(
        self, positions: Mapping[bytes, bytes], block_seconds: float, count: int
    ) -> list[StreamEntry]: ...


class PeersStats(NamedTuple):
    gateway: str
    run: str
    own_requests: int
    """Requests under way of this gateway itself."""
    sent_messages: int
    sent_notes: int
    sent_bytes: int
    dropped_notes: int
    """Notes never sent, since the server was away; lists have made up for them."""
    failures: int
    """Messages that could not be sent."""
    problem: str
    """Why the last one could not be; empty when it could."""
    received: BookCounts
    peers: list[PeerView]


class Peers:
    """This gateway among the others. `run` has to run for anything to be told or heard.

    Puts accounts that leave notes into `knowledge`, so it has to be made before those are used. `gateway` is this
    gateway's id, unlike all others; `holders_of` names the ranks of a worker's present life. `on_directory_changed`
    is called when another gateway has changed the directory of workers.
    """

    def __init__(
        self,
        store: NoteStore,
        prefix: str,
        gateway: str,
        knowledge: Knowledge,
        holders_of: HoldersOf,
        on_directory_changed: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gateway = gateway
        self.run_id = secrets.token_hex(8)
        self._store = store
        self._stream = f"{prefix}:{{fleet}}:notes".encode()
        self._on_directory_changed = on_directory_changed
        self._clock = clock
        self._signature = signature(gateway, self.run_id)
        self._outbox = outbox = Outbox(holders_of)
        knowledge.accounting = self._accounting = NotedAccounting(outbox, PinnedChains(ChainMultiset()))
        knowledge.predictions = NotedPredictions(ChainMultiset(), outbox)
        knowledge.history = NotedHistory(ChainMultiset(), outbox)
        self._book = PeerBook(gateway, self._accounting, knowledge.predictions, knowledge.history, holders_of)
        self._roused = asyncio.Event()
        outbox.rouse = self._roused.set
        self._joined = asyncio.Event()
        """Set once our first message is in the stream: what follows it is read."""
        self._position = _BEGINNING
        self._sequence = 0
        self._sent_at = self._listed_at = float("-inf")
        self._list_due = False
        self._message_bytes_mean = 0.0
        self._sent_messages = self._sent_notes = self._sent_bytes = 0
        self._dropped_notes = self._failures = 0
        self._problem = ""
        self._namesakes = 0

    async def run(self) -> None:
        """Send and read until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_repeat(self._send), name="notes to peers")
                tasks.create_task(_repeat(self._read), name="notes of peers")
        finally:
            await self._post([Leaving()], 0)

    def announce_directory_change(self) -> None:
        """The directory of workers has been changed by this gateway: the others are to read it."""
        self._outbox.add(DirectoryChanged())

    def alive(self) -> list[str]:
        """The other gateways heard of lately."""
        return self._book.alive()

    def stats(self) -> PeersStats:
        return PeersStats(
            self.gateway,
            self.run_id,
            len(self._outbox.requests),
            self._sent_messages,
            self._sent_notes,
            self._sent_bytes,
            self._dropped_notes,
            self._failures,
            self._problem,
            self._book.counts(),
            self._book.view(self._clock()),
        )

    # Sending

    async def _send(self) -> None:
        if self._joined.is_set():
            await self._wait_for_notes()
        now = self._clock()
        self._book.expire(now)
        notes = self._take_notes(now)
        sign_of_life = TICK_SECONDS if self._problem else HEARTBEAT_SECONDS
        if notes or now - self._sent_at >= sign_of_life:
            sent = await self._post(notes, None if self._outbox.notes else len(self._outbox.requests))
            if not sent:
                self._list_due = True
            await asyncio.sleep(INTERVAL_SECONDS if sent else _RETRY_SECONDS)

    async def _wait_for_notes(self) -> None:
        """Until there is something to send, but not for long."""
        outbox, heard = self._outbox, bool(self._book.alive())
        if outbox.notes and heard:
            return
        outbox.idle = heard
        seconds = _LIST_SECONDS if heard and (self._list_due or self._book.list_wanted) else TICK_SECONDS
        timer = asyncio.get_running_loop().call_later(seconds, self._roused.set)
        await self._roused.wait()
        timer.cancel()
        self._roused.clear()
        outbox.idle = False

    def _take_notes(self, now: float) -> list[Note]:
        outbox, book = self._outbox, self._book
        if not self._joined.is_set():
            return [Wanted()]
        if not book.alive():
            outbox.notes.clear()  # nobody hears them, and whoever comes asks for the list
            return []
        self._list_due = self._list_due or outbox.full
        if self._problem:  # it begins anew with a list
            self._dropped_notes += len(outbox.notes)
            outbox.notes.clear()
        notes = outbox.take(NOTES_PER_MESSAGE_MAX)
        if not outbox.notes:  # a list, and a count of requests, hold as of the last note
            notes += book.asks(now)
            if (self._list_due or book.list_wanted) and now - self._listed_at >= _LIST_SECONDS:
                notes.append(self._accounting.listed(now))
                self._list_due = book.list_wanted = False
                self._listed_at = now
        return notes

    async def _post(self, notes: list[Note], inflight: int | None) -> bool:
        """Append a message to the stream. False when that could not be done, or nobody knows whether it was."""
        data = encode(self.gateway, self.run_id, self._sequence, inflight, notes)
        self._sequence += 1
        self._message_bytes_mean += 0.05 * (len(data) - self._message_bytes_mean)
        kept = min(max(int(STREAM_BYTES_MAX / self._message_bytes_mean), STREAM_ENTRIES_MIN), STREAM_ENTRIES_MAX)
        self._sent_at = self._clock()
        try:
            parts = (b"XADD", self._stream, b"MAXLEN", b"~", kept, b"*", b"b", data)
            entry = await self._store.command(*parts, budget_seconds=_BUDGET_SECONDS)
        except StoreError as error:
            self._failed(len(notes), str(error))
            return False
        if self._problem:
            logger.info("gateway %s tells its peers again what it sends", self.gateway)
            self._problem = ""
        self._joined.set()
        self._sent_messages += 1
        self._sent_notes += len(notes)
        self._sent_bytes += len(data)
        if self._position == _BEGINNING or _milliseconds(entry) < _milliseconds(self._position) - _CLOCK_BACK_MS:
            self._position = entry
        return True

    def _failed(self, notes: int, problem: str) -> None:
        if not self._problem:
            logger.warning("gateway %s cannot tell its peers what it sends: %s", self.gateway, problem)
        self._problem = problem
        self._failures += 1
        self._dropped_notes += notes

    # Reading

    async def _read(self) -> None:
        await self._joined.wait()
        try:
            positions = {self._stream: self._position}
            entries = await self._store.read_streams(positions, block_seconds=HEARTBEAT_SECONDS, count=_READ_COUNT)
        except StoreError:  # the sender says so
            await asyncio.sleep(_RETRY_SECONDS)
            return
        for entry in entries:
            self._position = entry.id
            self._receive(entry.fields.get(b"b", b""))
            if len(entries) > _READ_AT_ONCE:
                await asyncio.sleep(0)  # much has piled up: requests go first
        await asyncio.sleep(READ_INTERVAL_SECONDS)

    def _receive(self, data: bytes) -> None:
        if data.startswith(self._signature):
            return
        book = self._book
        book.receive(data, self._clock())
        if book.directory_changed:
            book.directory_changed = False
            if self._on_directory_changed is not None:
                self._on_directory_changed()
        if book.namesakes > self._namesakes:
            if not self._namesakes:
                logger.error("another gateway is called %s as well; what it sends is not counted here", self.gateway)
            self._namesakes = book.namesakes
        if book.list_wanted or book.incomplete:
            self._roused.set()


async def _repeat(step: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await step()
        except Exception:
            logger.exception("sharing load with other gateways failed; trying again")
            await asyncio.sleep(HEARTBEAT_SECONDS)


def _milliseconds(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])

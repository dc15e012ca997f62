"""Reads the events of an engine that has no socket for them: its server is asked, and tells each event once.

    POST ─► answer (JSON, bounded) ─► queue ─► decode, watch the numbers ─► re-key ─► index.apply

There is no replay. What was said before the gateway came is not known, which shortens matches. What is lost later (the
engine's buffer ran over, an answer broke off, somebody else asked) shows in the numbers of what comes next: nothing
that is known is believed any longer, and the holder is learned anew. Numbers that begin again are a new process.

One question at a time, and none before the last answer is in the index. The next follows at once while there is
something to hear, a little later when there was nothing, ever later while the server does not answer as it should.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx

from cachecore.holders import Worker
from cachecore.index.content_feed import ContentFeed
from cachecore.index.contract import PrefixIndex
from cachecore.rekey import Rekeyer
from cachecore.trtllm_events import Pulled, TrtllmEvents
from gateway.fleet.intake import EventSource, Intake
from gateway.fleet.sequence import Apply, Void, VoidReason

logger = logging.getLogger("ropeway.events")

ANSWER_BYTES_MAX: Final = 16 << 20
"""Of some 8,000 blocks. A longer answer is not read to its end, and is lost."""
_NOTHING: Final = b"[]"


class Unanswered(Exception):
    """The server did not answer as it should. The message says how."""


@dataclass(frozen=True, slots=True)
class Pace:
    idle_seconds: float = 0.1
    """Between an answer that says nothing and the next question. (Some servers wait up to 2 s themselves.)"""
    answer_seconds: float = 10.0
    """To wait for an answer."""
    retry_seconds: float = 0.5
    """After a failure; doubled after each further one."""
    retry_seconds_max: float = 30.0

    def after(self, failures: int) -> float:
        return min(self.retry_seconds * 2.0 ** min(failures - 1, 16), self.retry_seconds_max)


class PolledIntake(Intake):
    """An intake whose source's `live_endpoint` is the URL to ask.

    `resume_from` is the last number that the index knows the holder by. What another has heard cannot be gone on with
    (removals name blocks by what only he was told), so it begins by forgetting that.
    """

    def __init__(
        self,
        holder: Worker,
        source: EventSource,
        index: PrefixIndex,
        rekeyer: Rekeyer,
        decoder: TrtllmEvents,
        on_void: Callable[[VoidReason], None] = lambda reason: None,
        *,
        resume_from: int | None = None,
        contents: ContentFeed | None = None,
        pace: Pace | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(holder, source, index, rekeyer, on_void, contents=contents)
        self._decoder = decoder
        self._pace = pace or Pace()
        self._tls = tls
        self._resume_from = resume_from
        self._http: httpx.AsyncClient | None = None
        self._next_sequence = 0 if resume_from is None else resume_from + 1
        """Of the answers that said something."""
        self._last_id: int | None = None
        """Of the last event that was applied; None where whatever comes is a beginning."""

    async def start(self) -> None:
        self._http = http = httpx.AsyncClient(
            timeout=self._pace.answer_seconds, trust_env=False, verify=self._tls or True
        )
        if self._resume_from is not None:
            self._enqueue(Void(VoidReason.GAP))
        self._tasks = [asyncio.create_task(self._poll(http)), asyncio.create_task(self._apply_queued())]

    async def _close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    def forget(self, reread: bool) -> None:
        """There is nothing to be read again."""
        self._enqueue(Void(VoidReason.DOUBT))

    # ---- asking ------------------------------------------------------------------------------------------------------

    async def _poll(self, http: httpx.AsyncClient) -> None:
        failures = 0
        while True:
            try:
                answer = await self._ask(http)
            except Unanswered as error:
                failures += 1
                self._failed(error, failures)
                await asyncio.sleep(self._pace.after(failures))
                continue
            if failures:
                logger.info("worker %s tells its KV events again", self.holder.name)
            failures = 0
            await self._take_in(answer)

    def _failed(self, error: Unanswered, failures: int) -> None:
        self._stats.unanswered += 1
        if failures == 1:
            logger.warning("worker %s: no KV events from %s: %s", self.holder.name, self.source.live_endpoint, error)

    async def _take_in(self, answer: bytes) -> None:
        if answer.strip() == _NOTHING:
            await asyncio.sleep(self._pace.idle_seconds)
            return
        self._stats.last_seen = time.monotonic()
        self._enqueue(Apply(self._next_sequence, answer))
        self._next_sequence += 1
        while self._queue:
            self._drained.clear()
            await self._drained.wait()

    async def _ask(self, http: httpx.AsyncClient) -> bytes:
        """Raises Unanswered."""
        answer = bytearray()
        try:
            async with (
                asyncio.timeout(self._pace.answer_seconds),
                http.stream("POST", self.source.live_endpoint) as said,
            ):
                if said.status_code != 200:
                    raise Unanswered(f"status {said.status_code}")
                async for piece in said.aiter_bytes():
                    answer += piece
                    if len(answer) > ANSWER_BYTES_MAX:
                        raise Unanswered(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise Unanswered(str(error) or type(error).__name__) from None
        return bytes(answer)

    # ---- applying ----------------------------------------------------------------------------------------------------

    def _apply(self, action: Apply) -> None:
        pulled = self._read(action.payload)
        if pulled.last_id is not None:
            self._last_id = pulled.last_id
        self._stats.other_rank += pulled.other_rank
        self._apply_batch(action.sequence, pulled.batch)

    def _read(self, payload: bytes) -> Pulled:
        """An answer that does not follow the last one is read as a beginning, by a decoder that knows nothing."""
        now, last = time.time(), self._last_id
        pulled = self._decoder.decode(payload, now)
        if last is None or pulled.first_id is None or pulled.first_id == last + 1:
            return pulled
        self._void(VoidReason.GAP if pulled.first_id > last else VoidReason.RESTART)
        return self._decoder.decode(payload, now)

    def _void(self, reason: VoidReason) -> None:
        self._decoder.forget()
        self._last_id = None
        super()._void(reason)

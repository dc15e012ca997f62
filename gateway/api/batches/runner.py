"""Runs batches, a few requests at a time, each through the pipeline as a client's of the lowest priority.

What becomes of a batch is on disk before it is told to anyone, so a gateway that starts again goes on where another, or
itself, has stopped: requests whose line was not written are made again. A request that finds no worker, or too much
before it, is tried again until the batch's time is over; any other answer is an answer.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

from gateway.api.batches.requests import Line, answered, body_of, faults, remaining, unanswered
from gateway.api.batches.shelf import ENDED, Document, Key, Shelf, numbered_lines
from gateway.api.calls import Answer, Call
from gateway.api.translated import Translated
from gateway.edge.contract import Deadlines, Listener
from gateway.edge.http1 import RequestHead
from gateway.edge.server import Inbound
from gateway.errors import NotFound, ServiceError

logger = logging.getLogger("ropeway.batches")

Begin = Callable[[str, Inbound], Listener | Translated | Coroutine[Any, Any, Listener | Translated]]
"""Begins a request of a tenant's."""

POLL_SECONDS = 1.0
LOCK_SECONDS = 5.0
FORGET_SECONDS = 3600.0
RUNNING_MAX = 64
"""Batches at once; further ones wait."""
_AGAIN = frozenset({429, 502, 503, 504})
_WAIT_SECONDS_MAX = 30.0


class BatchRunner:
    """Belongs to one event loop; `run` owns its tasks."""

    def __init__(self, shelf: Shelf, begin: Begin, deadlines: Deadlines, priority: int) -> None:
        self._shelf = shelf
        self._begin = begin
        self._deadlines = deadlines
        self._priority = priority
        self._slots = asyncio.Semaphore(shelf.config.concurrency)
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._calls: set[Call] = set()
        self._forgotten_at = 0.0

    async def run(self) -> None:
        """Until cancelled. Waits for the lock while another gateway has it."""
        while True:
            if await asyncio.to_thread(self._shelf.lock):
                break
            await asyncio.sleep(LOCK_SECONDS)
        try:
            while True:
                try:
                    await self._look()
                except (OSError, ServiceError, ValueError):
                    logger.exception("batches cannot be looked at")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._shelf.unlock()

    async def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        for call in tuple(self._calls):
            call.check(now)
        for key in await asyncio.to_thread(self._shelf.open_batches):
            task = self._running.get(key)
            if task is not None and await asyncio.to_thread(self._shelf.cancelled, key):
                task.cancel()
            elif task is None and len(self._running) < RUNNING_MAX:
                self._running[key] = asyncio.create_task(self._finish(key), name=f"batch {key.id}")
        if time.time() - self._forgotten_at > FORGET_SECONDS:
            self._forgotten_at = time.time()
            await asyncio.to_thread(self._shelf.forget_old, time.time())

    async def _finish(self, key: Key) -> None:
        """Run a batch to its end, or until it is cancelled."""
        try:
            await _Batch(self, key).run()
        except asyncio.CancelledError:
            if await asyncio.shield(asyncio.to_thread(self._shelf.cancelled, key)):
                await asyncio.shield(_Batch(self, key).end("cancelled"))
            else:
                raise
        except (OSError, ServiceError):
            logger.exception("batch %s cannot go on", key.id)
            await asyncio.sleep(LOCK_SECONDS)
        finally:
            del self._running[key]

    async def ask(self, tenant: str, endpoint: str, line: Line, until: float) -> Answer | None:
        """The answer to a request; None when its time is over."""
        wait_seconds = 1.0
        while time.time() < until:
            async with self._slots:
                answer = await self._ask(tenant, endpoint, body_of(line, self._priority))
            if answer.status not in _AGAIN:
                return answer
            await asyncio.sleep(min(wait_seconds, max(until - time.time(), 0.0)))
            wait_seconds = min(wait_seconds * 2, _WAIT_SECONDS_MAX)
        return None

    async def _ask(self, tenant: str, endpoint: str, body: bytes) -> Answer:
        headers = [(b"content-type", b"application/json")]
        head = RequestHead(b"POST", endpoint.encode(), headers, len(body), True, False, False, {})
        call = Call(self._deadlines)
        self._calls.add(call)
        try:
            return await call.run(self._begin(tenant, Inbound(head, endpoint, body, "")))
        except ServiceError as error:
            return Answer(error.status, "", error.body())
        finally:
            self._calls.discard(call)

    @property
    def shelf(self) -> Shelf:
        return self._shelf


class _Batch:
    """One batch, by one who runs it."""

    def __init__(self, runner: BatchRunner, key: Key) -> None:
        self._runner = runner
        self._shelf = runner.shelf
        self._key = key
        self._document: Document = {}
        self._done: dict[str, set[str]] = {}
        self._expired = False
        self._reading = asyncio.Lock()

    async def run(self) -> None:
        self._document = await asyncio.to_thread(self._shelf.batch, self._key)
        if await asyncio.to_thread(self._shelf.cancelled, self._key):
            await self.end("cancelled")
            return
        if self._document["status"] == "validating" and not await self._validate():
            return
        self._done = await asyncio.to_thread(self._shelf.recovered, self._key)
        with suppress(NotFound):  # its input was deleted: what is answered stands
            source = self._shelf.content(self._key.tenant, self._document["input_file_id"])
            done = self._done["output"] | self._done["errors"]
            await self._answer_all(remaining(numbered_lines(source), self._document["endpoint"], done))
        await self.end("expired" if self._expired else "completed")

    async def _answer_all(self, lines: Iterator[Line]) -> None:
        reporter = asyncio.create_task(self._report(), name=f"progress of {self._key.id}")
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._shelf.config.concurrency):
                    tasks.create_task(self._answer(lines))
        finally:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)

    async def _validate(self) -> bool:
        document, config = self._document, self._shelf.config

        def look() -> tuple[int, list[Document]]:
            source = self._shelf.content(self._key.tenant, document["input_file_id"])
            return faults(numbered_lines(source), document["endpoint"], config.requests_max)

        try:
            total, found = await asyncio.to_thread(look)
        except NotFound as error:
            total, found = 0, [{"code": "file_not_found", "line": None, "message": error.message, "param": None}]
        document["request_counts"] = {"total": total, "completed": 0, "failed": 0}
        if found:
            document |= {"status": "failed", "failed_at": int(time.time()), "errors": {"object": "list", "data": found}}
        else:
            document |= {"status": "in_progress", "in_progress_at": int(time.time())}
        await self._save()
        return not found

    async def _answer(self, lines: Iterator[Line]) -> None:
        """Take one line after the other until there is none left."""
        document = self._document
        while (line := await self._next(lines)) is not None:
            answer = await self._runner.ask(self._key.tenant, document["endpoint"], line, document["expires_at"])
            if answer is None:
                self._expired = True
                message = "This request could not be executed before the completion window expired."
                await self._write("errors", line, unanswered(line, "batch_expired", message))
            else:
                kind = "output" if answer.status < 300 else "errors"
                await self._write(kind, line, answered(line, answer))

    async def _next(self, lines: Iterator[Line]) -> Line | None:
        async with self._reading:
            return await asyncio.to_thread(next, lines, None)

    async def _write(self, kind: str, line: Line, written: bytes) -> None:
        await asyncio.to_thread(self._shelf.append, self._key, kind, written)
        self._done[kind].add(line.custom_id)

    async def _report(self) -> None:
        """Say how far it is, as often as anybody would look."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._count():
                await self._save()

    def _count(self) -> bool:
        """Whether there are more than when it was counted last."""
        counts, before = self._document["request_counts"], dict(self._document["request_counts"])
        counts["completed"], counts["failed"] = len(self._done["output"]), len(self._done["errors"])
        return bool(counts != before)

    async def _save(self) -> None:
        await asyncio.to_thread(self._shelf.save, self._key, self._document)

    async def end(self, status: str) -> None:
        """Give its lines to its tenant."""
        if not self._document:
            self._document = await asyncio.to_thread(self._shelf.batch, self._key)
        document, key, now = self._document, self._key, time.time()
        if document["status"] in ENDED:
            return
        self._done = self._done or await asyncio.to_thread(self._shelf.recovered, key)
        self._count()
        for kind, field in (("output", "output_file_id"), ("errors", "error_file_id")):
            taken = await asyncio.to_thread(
                self._shelf.take_file, key.tenant, self._shelf.lines(key, kind), f"{key.id}_{kind}.jsonl", now
            )
            document[field] = taken or document[field]
        document |= {"status": status, "finalizing_at": int(now), f"{status}_at": int(now)}
        await self._save()

"""The live `Status` document: one producer for as long as anybody watches, server-sent events to each watcher.

The document is kept in parts, each serialized once and numbered when it changes: the sections of `Status` and every
worker. A watcher remembers up to which number it was told, and is told all parts beyond when it is ready for more, with
the samples of traffic that it has not seen. So its first event is the whole document, one that keeps up gets what has
changed, one that is slow skips states in between, and nothing is ever buffered for it: it costs two numbers. Whole
documents would be 200 KB a second for each watcher of 200 workers, and deltas between fixed states would need a queue
for each. One that does not take an event within `STUCK_SECONDS` is left (`gateway.views.dashboard.routes`).

What only time changes is left out, or every worker would change with each look: ages, and the engines' own clocks.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any, Literal

import orjson

from gateway.errors import Unavailable
from gateway.fleet.worker import WorkerRecord
from gateway.views.status import Status, StatusView, WorkerStatus
from gateway.views.traffic import Sample, rounded

logger = logging.getLogger("ropeway.feed")

INTERVAL_SECONDS = 1.0
WATCHERS_MAX = 32
STUCK_SECONDS = 10.0

_WORKERS_AT_ONCE = 8
"""Looked at between two turns of requests: a few hundred microseconds."""
_LEFT_OUT = {"workers", "estimates", "traffic", "uptime_seconds"}
_SECTIONS = [field.name for field in fields(Status) if field.name not in _LEFT_OUT]

Kind = Literal["status", "workers"]
PartName = tuple[Kind, str]


class Feed:
    """Built once for a gateway; its task lives while somebody watches. `close` ends every watcher's stream."""

    def __init__(self, view: StatusView, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._view = view
        self._interval_seconds = interval_seconds
        self._parts: dict[PartName, tuple[int, bytes]] = {}
        """The number it last changed at, and itself."""
        self._number = 0
        self._changed = asyncio.Event()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Feed({self._watchers} watchers, {len(self._parts)} parts, number {self._number})"

    @property
    def watchers(self) -> int:
        return self._watchers

    def require_room(self) -> None:
        """Raises Unavailable where there are as many watchers as may be."""
        if self._watchers >= WATCHERS_MAX:
            raise Unavailable(f"{WATCHERS_MAX} watch already", retry_after_seconds=5)

    async def watch(self) -> AsyncGenerator[bytes]:
        """Events for one watcher, the whole document first."""
        self._watchers += 1
        try:
            if self._task is None and not self._closed:
                self._task = asyncio.create_task(self._produce(), name="status feed")
            told = samples = 0
            while not self._closed:
                if self._number > told or (told and self._view.traffic.taken > samples):
                    event, told, samples = self._event(told, samples)
                    yield event
                await self._changed.wait()
        finally:
            self._watchers -= 1
            if not self._watchers:
                await self._stop()

    async def close(self) -> None:
        """The gateway stops: watchers would keep it from ending."""
        self._closed = True
        self._changed.set()
        await self._stop()

    # Producing

    async def _produce(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                # Whoever looks at the gateway must not be what breaks, nor be left without a word.
                logger.exception("the status could not be told")
            self._wake()
            await asyncio.sleep(self._interval_seconds)

    async def _look(self) -> None:
        """Bring the parts up to date."""
        number = self._number + 1
        summary = self._view.summary()
        changed = [self._put(number, ("status", name), getattr(summary, name)) for name in _SECTIONS]
        records = self._view.workers
        for start in range(0, len(records), _WORKERS_AT_ONCE):
            for record in records[start : start + _WORKERS_AT_ONCE]:
                changed.append(self._put(number, ("workers", record.name), self._worker(record)))
            await asyncio.sleep(0)
        changed.append(self._put(number, ("status", "worker_names"), [record.name for record in records]))
        self._forget({record.name for record in records})
        # Not before all are seen: a watcher that came while this was under way would miss the rest.
        self._number = number if any(changed) else self._number

    def _worker(self, record: WorkerRecord) -> WorkerStatus:
        status = self._view.worker(record)
        status.events = []
        status.outstanding_prefill_ms = round(status.outstanding_prefill_ms, 1)
        status.kv_fill = round(status.kv_fill, 3)
        status.trust.pop("silent_seconds", None)
        for doubt in status.trust["doubts"]:
            doubt.pop("seconds", None)
        if status.load is not None:
            status.load.pop("at", None)
        return status

    def _put(self, number: int, name: PartName, value: Any) -> bool:
        data = orjson.dumps(value)
        known = self._parts.get(name)
        if known is not None and known[1] == data:
            return False
        self._parts[name] = (number, data)
        return True

    def _forget(self, workers: set[str]) -> None:
        """Watchers drop those that `worker_names` no longer names."""
        for name in [name for name in self._parts if name[0] == "workers" and name[1] not in workers]:
            del self._parts[name]

    async def _stop(self) -> None:
        task, self._task = self._task, None
        self._parts.clear()
        self._number = 0
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # Watching

    def _event(self, told: int, samples: int) -> tuple[bytes, int, int]:
        """What is new beyond number `told` and the first `samples` ones, as an event, and the numbers to go on from."""
        traffic, number = self._view.traffic, self._number
        document = {kind: self._object(kind, told, number) for kind in ("status", "workers")}
        rows = [rounded(sample) for sample in traffic.since(samples)]
        parts = [b'"whole":%b' % (b"false" if told else b"true")]
        parts += [b'"%b":%b' % (kind.encode(), data) for kind, data in document.items()]
        if not told:
            parts.append(b'"sample_fields":%b' % orjson.dumps(Sample._fields))
        parts.append(b'"samples":%b' % orjson.dumps(rows))
        return b"id: %d\nevent: status\ndata: {%b}\n\n" % (number, b",".join(parts)), number, traffic.taken

    def _object(self, kind: str, told: int, number: int) -> bytes:
        entries = [
            b"%b:%b" % (orjson.dumps(name), data)
            for (of, name), (changed, data) in self._parts.items()
            if of == kind and told < changed <= number
        ]
        return b"{%b}" % b",".join(entries)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

"""An event stream that can be told to lose, swap, repeat or censor its batches, or to end."""

import time
from typing import Any, Final

import msgspec
import zmq

from cachecore.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from workers.publisher import EventPublisher, PublisherConfig, Sequenced
from workers.simulated.faults import EventFault

_LEFT_OUT: Final[dict[EventFault | None, tuple[type, ...]]] = {
    "mute": (BlockStored, BlockRemoved, AllBlocksCleared),
    "hoard": (BlockRemoved, AllBlocksCleared),
}
_REOPEN_SECONDS_MAX: Final = 2.0


class FaultyPublisher(EventPublisher):
    """Every batch gets its sequence number; the fault decides what subscribers see of it."""

    def __init__(self, config: PublisherConfig | None = None, context: "zmq.Context[Any] | None" = None) -> None:
        self._fault: EventFault | None = None
        self._fault_batches: int | None = None
        self._delayed: Sequenced | None = None
        super().__init__(config, context)

    def misbehave(self, fault: EventFault | None, batches: int | None = None) -> None:
        """From the next batch on; for so many batches, or until told otherwise."""
        with self._lock:
            self._send_delayed()
            if self._fault == "close" and fault != "close":
                self._reopen()
            self._fault, self._fault_batches = fault, batches
            if fault == "close":
                self._live.close(linger=0)

    def publish(self, batch: EventBatch) -> int:
        left_out = () if self._fault_batches == 0 else _LEFT_OUT.get(self._fault, ())
        if left_out:
            events = tuple(event for event in batch.events if not isinstance(event, left_out))
            batch = msgspec.structs.replace(batch, events=events)
        return super().publish(batch)

    def _emit(self, item: Sequenced) -> None:
        fault = self._fault_of_next()
        if fault != "silence":
            self._buffer.append(item)
        match fault:
            case "drop" | "silence" | "close":
                return
            case "duplicate":
                self._send(item)
            case "reorder" if self._delayed is None:
                self._delayed = item
                return
        self._send(item)
        self._send_delayed()

    def _send(self, item: Sequenced) -> None:
        if not self._live.closed:
            super()._send(item)

    def _fault_of_next(self) -> EventFault | None:
        if self._fault_batches is None:
            return self._fault
        if self._fault_batches == 0:
            return None
        self._fault_batches -= 1
        return self._fault

    def _send_delayed(self) -> None:
        if self._delayed is not None:
            self._send(self._delayed)
            self._delayed = None

    def _reopen(self) -> None:
        """At the same endpoint, which a socket that was just closed may hold for a moment."""
        live = self._context.socket(zmq.PUB)
        live.setsockopt(zmq.SNDHWM, self.config.hwm)
        limit = time.monotonic() + _REOPEN_SECONDS_MAX
        while True:
            try:
                live.bind(self.endpoint)
                break
            except zmq.ZMQError:
                if time.monotonic() > limit:
                    live.close(linger=0)
                    raise
                time.sleep(0.01)
        self._live = live

"""An event stream that can be told to lose, swap or repeat its batches."""

from typing import Any

import zmq

from workers.publisher import EventPublisher, PublisherConfig, Sequenced
from workers.simulated.faults import EventFault


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
            self._fault, self._fault_batches = fault, batches

    def _emit(self, item: Sequenced) -> None:
        fault = self._fault_of_next()
        if fault != "silence":
            self._buffer.append(item)
        match fault:
            case "drop" | "silence":
                return
            case "duplicate":
                self._send(item)
            case "reorder" if self._delayed is None:
                self._delayed = item
                return
        self._send(item)
        self._send_delayed()

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

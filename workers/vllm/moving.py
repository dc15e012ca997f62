"""The worker's side: serves the engine's blocks to peers, and fills those that it is told to.

Called from the engine's thread at every step; transfers have a thread and an event loop of their own. What a load has
come to is told once, when nothing of it is being written any more.
"""

import logging
import threading
import time
from collections.abc import Callable

from cachecore.transfer.plan import DEADLINE_SECONDS_MAX
from workers.engine import TransferMetrics
from workers.reference.transfer.loads import Load, RunLoad
from workers.reference.transfer.report import PullLog
from workers.reference.transfer.service import TransferService
from workers.vllm.index import BlockIndex
from workers.vllm.names import Lineage
from workers.vllm.orders import LoadOrder, Orders, RunOrder, Settled

logger = logging.getLogger("ropeway.transfer")


_LONGEST_SECONDS = DEADLINE_SECONDS_MAX + 5.0
"""Loads are over by their plans' deadlines. If a defect keeps one from it, its request shall not wait for ever."""


class Mover:
    """See the module's opening."""

    def __init__(self, index: BlockIndex, lineage_of: Callable[[str | None], Lineage | None]) -> None:
        self.metrics = TransferMetrics()
        self.index = index
        self.service: TransferService | None = None
        """Set before anything is to be moved."""
        self._lineage_of = lineage_of
        self._loads: dict[str, Load] = {}
        self._over = Settled(set(), set())
        """What has not been told yet."""
        self._something_settled = threading.Event()

    def wake(self) -> None:
        """Something has come, as transfers say from their threads. Layers are nothing to wake the engine for."""
        if any(load.settled for load in tuple(self._loads.values())):
            self._something_settled.set()

    def obey(self, orders: Orders) -> None:
        """Before the step's computing."""
        try:
            self.index.apply(orders)
        except Exception:
            logger.exception("orders that cannot be carried out; nothing is served that was known before")
            self.index.apply(Orders(cleared=True))
        for request_id in orders.cancelled:
            load = self._loads.pop(request_id, None)
            if load is not None:
                load.cancel()
                self._over.request_ids.add(request_id)
        for order in orders.loads:
            self._begin(order)

    def settled(self, patience_seconds: float = 0.0) -> Settled:
        """What has come since this was asked last. Waits so long where nothing has."""
        self._sweep()
        if self._loads and not self._over.request_ids and self._something_settled.wait(patience_seconds):
            self._sweep()
        over, self._over = self._over, Settled(set(), set())
        self.metrics.loading = len(self._loads)
        return over

    def stop(self) -> None:
        for load in self._loads.values():
            load.cancel()
        if self.service is not None:
            self.service.stop()

    def _begin(self, order: LoadOrder) -> None:
        lineage = self._lineage_of(order.cache_salt)
        if lineage is None or not order.runs or self.service is None:
            self._settle(order.request_id, False)
            return
        load = Load([_run_load(run) for run in order.runs], lineage.naming, order.fidelity, time.monotonic())
        self._loads[order.request_id] = load
        try:
            self.service.begin(load)
        except Exception:  # of its loop, which may have ended
            logger.exception("a pull cannot begin")
            del self._loads[order.request_id]
            self._settle(order.request_id, False)

    def _sweep(self) -> None:
        now = time.monotonic()
        self._something_settled.clear()
        for request_id, load in list(self._loads.items()):
            if load.settled or now > load.began + _LONGEST_SECONDS:
                del self._loads[request_id]
                load.cancel()
                PullLog(self.metrics).settle(load, load.naming.scope.block_size_tokens, now)
                self._settle(request_id, load.settled and not load.failed)

    def _settle(self, request_id: str, is_good: bool) -> None:
        self._over.request_ids.add(request_id)
        if not is_good:
            self._over.failed_ids.add(request_id)


def _run_load(order: RunOrder) -> RunLoad:
    run = RunLoad(order.pull, order.first_block, order.first_block + len(order.blocks))
    run.blocks = order.blocks
    return run

"""The worker's side: serves the engine's blocks to peers, and fills those that it is told to.

Called from the engine's thread at every step; transfers have a thread and an event loop of their own. What a load has
come to is told once, when nothing of it is being written any more.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cachecore.holders import Holder
from cachecore.scope import Naming
from cachecore.transfer.errors import Reason, TransferError
from cachecore.transfer.plan import DEADLINE_SECONDS_MAX
from cachecore.transfer.transport import Fetched
from workers.engine import TransferMetrics, TransferOutcome, TransferReport
from workers.transfer.loads import Load, LoadCancelled, RunLoad
from workers.transfer.passages import PassageLoad
from workers.transfer.report import PullLog
from workers.transfer.service import TransferService
from workers.vllm.fuser import Fuser
from workers.vllm.index import BlockIndex
from workers.vllm.names import Lineage
from workers.vllm.orders import Fusing, LoadOrder, Orders, RunOrder, Settled, Unmoved
from workers.vllm.reports import Reports

logger = logging.getLogger("ropeway.transfer")


_LONGEST_SECONDS = DEADLINE_SECONDS_MAX + 5.0
"""Loads are over by their plans' deadlines. If a defect keeps one from it, its request shall not wait for ever."""


@dataclass(slots=True, eq=False)
class _Loading:
    order: LoadOrder
    load: Load
    fused: "Future[None] | None" = None
    """Once all has come that is to be repaired; done when that is in place."""

    @property
    def settled(self) -> bool:
        """Whether nothing more will be written."""
        if not self.load.settled:
            return False
        return self.order.fusing is None or self.failed or (self.fused is not None and self.fused.done())

    @property
    def failed(self) -> bool:
        passages = any(passage.outcome is not None and not passage.is_good for passage in self.load.passages)
        return self.load.failed or passages or self.unfused is not None

    @property
    def unfused(self) -> BaseException | None:
        """Why what came could not be repaired."""
        return None if self.fused is None or not self.fused.done() else self.fused.exception()


class Mover:
    """See the module's opening."""

    def __init__(
        self,
        index: BlockIndex,
        lineage_of: Callable[[str | None], Lineage | None],
        reports: Reports,
        fuser: Fuser | None = None,
    ) -> None:
        self.metrics = TransferMetrics()
        self.reports = reports
        self.index = index
        self.service: TransferService | None = None
        """Set before anything is to be moved."""
        self._lineage_of = lineage_of
        self._fuser = fuser
        self._fusing = ThreadPoolExecutor(1, "ropeway-fuser")
        self._loads: dict[str, _Loading] = {}
        self._over = Settled(set(), set())
        """What has not been told yet."""
        self._something_settled = threading.Event()

    def wake(self) -> None:
        """Something has come, as transfers say from their threads. Layers are nothing to wake the engine for."""
        if any(loading.load.settled and loading.fused is None for loading in tuple(self._loads.values())):
            self._something_settled.set()

    def obey(self, orders: Orders) -> None:
        """Before the step's computing."""
        try:
            self.index.apply(orders)
        except Exception:
            logger.exception("orders that cannot be carried out; nothing is served that was known before")
            self.index.apply(Orders(cleared=True))
        for request_id in orders.cancelled:
            loading = self._loads.pop(request_id, None)
            if loading is not None:
                loading.load.cancel()
                self._over.request_ids.add(request_id)
        for order in orders.loads:
            self._begin(order)
        for unmoved in orders.unmoved:
            self._report_unmoved(unmoved)

    def settled(self, patience_seconds: float = 0.0) -> Settled:
        """What has come since this was asked last. Waits so long where nothing has."""
        self._sweep()
        if self._loads and not self._over.request_ids and self._something_settled.wait(patience_seconds):
            self._sweep()
        over, self._over = self._over, Settled(set(), set())
        self.metrics.loading = len(self._loads)
        return over

    def stop(self) -> None:
        for loading in self._loads.values():
            loading.load.cancel()
        if self.service is not None:
            self.service.stop()
        self._fusing.shutdown(wait=False, cancel_futures=True)

    def _begin(self, order: LoadOrder) -> None:
        lineage = self._lineage_of(order.cache_salt)
        fusing, service = order.fusing, self.service
        if lineage is None or service is None or not (order.runs or (fusing and self._fuser)):
            self._fail(order)
            return
        passages = [] if fusing is None else _passage_loads(fusing, lineage.naming, service.holder)
        runs = [_run_load(run) for run in order.runs]
        load = Load(runs, lineage.naming, order.fidelity, time.monotonic(), passages)
        self._loads[order.request_id] = _Loading(order, load)
        try:
            service.begin(load)
        except Exception:  # of its loop, which may have ended
            logger.exception("a pull cannot begin")
            del self._loads[order.request_id]
            self._fail(order)

    def _sweep(self) -> None:
        now = time.monotonic()
        self._something_settled.clear()
        for request_id, loading in list(self._loads.items()):
            order, load = loading.order, loading.load
            if load.settled and not loading.settled and loading.fused is None:
                self._fuse(loading)
            if loading.settled:
                del self._loads[request_id]
                self.reports.add(order.key, order.fidelity, self._report(loading, now))
                self._settle(request_id, not loading.failed)
            elif now > load.began + _LONGEST_SECONDS:
                del self._loads[request_id]
                load.cancel()
                self._fail(order)

    def _fuse(self, loading: _Loading) -> None:
        """Not before the step is over in which it was ordered: what it goes on from may be computed in that."""
        fuser, fusing, load = self._fuser, loading.order.fusing, loading.load
        assert fuser is not None  # noqa: S101
        assert fusing is not None  # noqa: S101

        def fuse() -> None:
            if load.cancelled:
                raise LoadCancelled
            kv = fuser.fuse(fusing, load.passages, load.naming.scope.key_id)
            with load.writing():
                fuser.put(fusing, kv)

        loading.fused = self._fusing.submit(fuse)
        loading.fused.add_done_callback(self._look_at)

    def _look_at(self, fused: "Future[None]") -> None:
        error = None if fused.cancelled() else fused.exception()
        if error is not None and not isinstance(error, LoadCancelled | TransferError):
            logger.error("passages could not be repaired", exc_info=error)
        self._something_settled.set()

    def _report(self, loading: _Loading, now: float) -> TransferReport:
        load, log = loading.load, self._log(loading.order.refused)
        log.settle(load, load.naming.scope.block_size_tokens, now)
        if loading.unfused is None:
            return log.report()
        reason = loading.unfused.reason if isinstance(loading.unfused, TransferError) else Reason.INTERNAL
        return TransferReport(TransferOutcome.FAILED, reason.value)

    def _log(self, refused: Sequence[Reason]) -> PullLog:
        log = PullLog(self.metrics)
        for reason in refused:
            log.refuse(reason)
        return log

    def _report_unmoved(self, unmoved: Unmoved) -> None:
        report = self._log(unmoved.refused).report()
        if unmoved.failed:
            report = TransferReport(TransferOutcome.FAILED)
        self.reports.add(unmoved.key, unmoved.fidelity, report)

    def _fail(self, order: LoadOrder) -> None:
        """By a defect on this side."""
        self.reports.add(order.key, order.fidelity, TransferReport(TransferOutcome.FAILED, Reason.INTERNAL.value))
        self._settle(order.request_id, False)

    def _settle(self, request_id: str, is_good: bool) -> None:
        self._over.request_ids.add(request_id)
        if not is_good:
            self._over.failed_ids.add(request_id)


def _passage_loads(fusing: Fusing, naming: Naming, ourselves: Holder) -> list[PassageLoad]:
    """Those of this instance's own have come from the start; they are read when they are repaired."""
    size, token_ids = naming.scope.block_size_tokens, memoryview(fusing.token_ids).cast("I")
    loads = [PassageLoad(pull, token_ids.tolist(), size) for pull in fusing.passages]
    for load in loads:
        if load.pull.plan.source == ourselves:
            load.outcome = Fetched(0, 0, 0.0)
    return loads


def _run_load(order: RunOrder) -> RunLoad:
    run = RunLoad(order.pull, order.first_block, order.first_block + len(order.blocks))
    run.blocks = order.blocks
    return run

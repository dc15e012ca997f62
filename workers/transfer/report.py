"""What became of the plans of one generation: for its answer, and for metrics."""

from cachecore.holders import Holder
from cachecore.kv.calibration import RAW
from cachecore.transfer.errors import Reason
from cachecore.transfer.plan import Pull
from cachecore.transfer.transport import Failed, Fetched, Outcome
from workers.engine import TransferMetrics, TransferOutcome, TransferReport
from workers.transfer.loads import Load


class PullLog:
    """Of one generation that came with plans."""

    def __init__(self, metrics: TransferMetrics) -> None:
        self._metrics = metrics
        self._bad: tuple[TransferOutcome, str] | None = None
        """The first plan that came to nothing."""
        self._tokens = 0
        self._payload_bytes = 0
        self._seconds = 0.0
        self._sources: set[Holder] = set()
        self.codec = RAW
        """That something came in; where several were, one that loses something."""

    @property
    def has_fetched(self) -> bool:
        return bool(self._sources)

    def refuse(self, reason: Reason) -> None:
        """A plan is not carried out."""
        self._note(TransferOutcome.REFUSED, reason.value)

    def hold(self, count: int) -> None:
        """Plans that turned out not to be needed."""
        self._metrics.pulls[TransferOutcome.HELD.value, ""] += count

    def settle(self, load: Load, size: int, now: float) -> None:
        """A load is over."""
        self._seconds = now - load.began
        for run in load.runs:
            if run.outcome is not None:
                self._settle_run(run.pull, run.outcome, (run.end_block - run.first_block) * size)
        for passage in load.passages:
            if passage.outcome is not None:
                self._settle_run(passage.pull, passage.outcome, passage.end - passage.start)

    def report(self) -> TransferReport:
        outcome, reason = self._bad or (TransferOutcome.FETCHED if self._sources else TransferOutcome.HELD, "")
        return TransferReport(outcome, reason, self._tokens, self._payload_bytes, self._seconds, len(self._sources))

    def _settle_run(self, pull: Pull, outcome: Outcome, tokens: int) -> None:
        if not isinstance(outcome, Fetched):
            kind = TransferOutcome.FAILED if isinstance(outcome, Failed) else TransferOutcome.REFUSED
            self._note(kind, outcome.reason.value)
            return
        self._tokens += tokens
        self._payload_bytes += outcome.payload_bytes
        self._sources.add(pull.plan.source)
        self.codec = pull.plan.codec if self.codec == RAW else self.codec
        metrics = self._metrics
        metrics.pulls[TransferOutcome.FETCHED.value, ""] += 1
        metrics.pulled_tokens += tokens
        metrics.pulled_bytes += outcome.payload_bytes
        metrics.pull_seconds += outcome.seconds

    def _note(self, outcome: TransferOutcome, reason: str) -> None:
        self._bad = self._bad or (outcome, reason)
        self._metrics.pulls[outcome.value, reason] += 1

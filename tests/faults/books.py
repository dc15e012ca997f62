"""The client's account, the workers' and the gateway's, held against each other."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.faults.accounts import End
from tests.faults.asker import Asked
from tests.faults.questions import Question
from workers.simulated.access_log import Entry

ATTEMPTS_MAX = 3
TOLD_SECONDS_MAX = 1.0
"""Within which a worker learns that nobody waits for its answer."""


class Attempt(NamedTuple):
    """A request as a worker received it."""

    worker: str
    received: Entry
    ended: Entry | None
    """None where the worker was killed first, or has not ended it yet."""
    lives: bool
    """Whether the worker that received it still does."""
    stood_still: bool
    """Whether the worker did, for a part of the time."""

    @property
    def client_id(self) -> str:
        """The gateway writes an id of its own behind the client's."""
        return self.received.request_id.partition("-")[0]

    @property
    def answered(self) -> bool:
        return self.ended is not None and self.ended.status == 200 and self.ended.complete


class Books:
    """`wrong` is what does not add up, `violations` the requests whose ends were no good ones."""

    def __init__(
        self,
        attempts: Iterable[Attempt],
        tenant_of_salt: Callable[[str], str | None],
        samples: Mapping[str, float],
        asked: Sequence[Asked],
    ) -> None:
        """`samples` are the gateway's metrics."""
        self.wrong: list[str] = []
        self._tenant_of_salt = tenant_of_salt
        self._asked = {each.question.id: each for each in asked}
        self._attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
        for attempt in sorted(attempts, key=lambda attempt: attempt.received.at):
            self._attempts[attempt.client_id].append(attempt)
        self.received = sum(map(len, self._attempts.values()))
        self.sent = int(total(samples, "ropeway_worker_sent_requests_total"))
        self.lost = self.sent - self.received
        for name, of_one in self._attempts.items():
            self._check_attempts(name, of_one)
        for each in asked:
            self._check_answer(each, self._attempts.get(each.question.id, []))
        self._check_lost(samples)
        self.violations = [self.told(each) for each in asked if each.verdict.end is End.VIOLATION]

    def told(self, asked: Asked) -> str:
        """What became of a request, and where it was."""
        attempts = self._attempts.get(asked.question.id, [])
        where = ", ".join(f"{attempt.worker} at {attempt.received.at:.2f}" for attempt in attempts) or "none"
        verdict = asked.verdict
        return (
            f"{asked.question.id}, sent at {asked.sent_at:.2f}, received by {where}: "
            f"{verdict.end} after {asked.seconds:.1f} s: {verdict.detail}"
        )

    def _check_attempts(self, name: str, attempts: Sequence[Attempt]) -> None:
        asked = self._asked.get(name)
        if asked is None:
            self.wrong.append(f"{name}: nobody has asked that, and workers were sent it")
            return
        if len(attempts) > ATTEMPTS_MAX:
            self.wrong.append(f"{name}: received {len(attempts)} times")
        for attempt in attempts:
            self._check_attempt(asked.question, attempt)
        for earlier, later in pairwise(attempts):
            self._check_apart(name, earlier, later.received.at)

    def _check_attempt(self, question: Question, attempt: Attempt) -> None:
        if attempt.ended is None and attempt.lives:
            self.wrong.append(f"{question.id}: {attempt.worker} has it still under way")
        tenant = self._tenant_of_salt(attempt.received.cache_salt)
        if tenant != question.tenant:
            self.wrong.append(f"{question.id}: of {question.tenant}, sent with a salt of {tenant}")

    def _check_apart(self, name: str, earlier: Attempt, then: float) -> None:
        """An attempt that nobody waits for has ended when the next one begins, or its worker could not know."""
        ended = earlier.ended
        if ended is not None and ended.at > then + TOLD_SECONDS_MAX and not earlier.stood_still:
            self.wrong.append(f"{name}: at two workers at once for {ended.at - then:.1f} s")

    def _check_answer(self, asked: Asked, attempts: Sequence[Attempt]) -> None:
        question, verdict = asked.question, asked.verdict
        # An attempt that was lost may have left the whole prompt in the cache.
        own = len(question.prompt) if len(attempts) > 1 else asked.own_tokens
        if verdict.cached_tokens > own:
            self.wrong.append(f"{question.id}: {verdict.cached_tokens} tokens cached, {own} its tenant's own")
        # Who was killed may have answered without having written it down.
        answered = any(attempt.answered or attempt.ended is None for attempt in attempts)
        if verdict.end is End.COMPLETE and not answered:
            self.wrong.append(f"{question.id}: answered, and no worker has")

    def _check_lost(self, samples: Mapping[str, float]) -> None:
        """What was written to a worker and not received: lost with its connection, which failed or was dropped."""
        failed = int(total(samples, "ropeway_retries_total"))
        for ending in ("client_gone", "refused"):
            failed += int(total(samples, "ropeway_requests_total", f'ending="{ending}"'))
        if not 0 <= self.lost <= failed:
            self.wrong.append(f"{self.sent} sent, {self.received} received, {failed} attempts failed")


def total(samples: Mapping[str, float], name: str, label: str = "") -> float:
    """Of all samples of a metric, or of those with a label."""
    return sum(value for sample, value in samples.items() if sample.partition("{")[0] == name and label in sample)

"""What speaks for and against what we believe of a worker's cache: samples of its index, its answers, its counters.

Free of I/O and clocks. What follows from it is for `gateway.fleet.trust`.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from cachecore.blocks import Chain
from cachecore.holders import Worker

GRACE_SECONDS: Final = 2.0
"""After an answer, for its blocks to be announced."""
BEHIND_SECONDS_MAX: Final = 20.0
"""How long an intake that has yet to take in what came is waited for."""
SAMPLES_MAX: Final = 16
RECENT_SAMPLES: Final = 8

_ANSWERS_MAX: Final = 4096
_WINDOW_SECONDS_MIN: Final = 5.0
_WINDOW_SECONDS_MAX: Final = 60.0
_WINDOW_ANSWERS_MIN: Final = 4


class StreamFacts(NamedTuple):
    """Of a worker's event streams. Counters are of all together, and only grow."""

    heard: Mapping[Worker, float] = {}
    """When the last live message came of each that has been heard."""
    events: int = 0
    """That could be used."""
    unreadable: int = 0
    """That could not be read, or not be used."""
    gaps: int = 0
    restarts: int = 0
    behind: bool = False
    """Messages wait to be applied, or to be sent again."""

    @property
    def heard_at(self) -> float:
        """When anything was last heard; negative before that."""
        return max(self.heard.values(), default=-1.0)

    @property
    def voids(self) -> int:
        return self.gaps + self.restarts


# ---- samples ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Sample:
    """An answered prompt whose blocks should be in the index."""

    holder: Worker
    chain: Chain
    started_at: float
    finished_at: float
    nameable: bool = True
    """False where the worker had more of the prompt cached than the index knew: what it announces then goes on from
    blocks that nobody may have names for, and that it is missing says nothing of a stream that speaks."""
    late: bool = False
    """They were not there in time."""


class Samples:
    """Bounded: of `SAMPLES_MAX` open ones, no further is taken."""

    def __init__(self) -> None:
        self.open: list[Sample] = []
        self._recent: deque[bool] = deque(maxlen=RECENT_SAMPLES)

    def add(self, sample: Sample) -> None:
        if len(self.open) < SAMPLES_MAX:
            self.open.append(sample)

    def found(self, sample: Sample) -> None:
        self.open.remove(sample)
        self._recent.append(True)

    def weigh(self, facts: StreamFacts, now: float) -> None:
        """Give up those whose time is over. Late ones stay for as long as their streams are silent."""
        grace = BEHIND_SECONDS_MAX if facts.behind else GRACE_SECONDS
        for sample in self.open:
            if sample.late or now - sample.finished_at < grace:
                continue
            sample.late = True
            if sample.nameable and not _silent_since(sample, facts):
                self._recent.append(False)

    def silent(self, facts: StreamFacts) -> int:
        """Late ones from whose streams nothing at all has come since they began."""
        return sum(sample.late and _silent_since(sample, facts) for sample in self.open)

    def drop_spoken(self, facts: StreamFacts) -> None:
        """Late ones of streams that have been heard since are of no further use."""
        self.open = [sample for sample in self.open if not sample.late or _silent_since(sample, facts)]

    def drop_late(self) -> int:
        """How many there were."""
        open_before, self.open = self.open, [sample for sample in self.open if not sample.late]
        return len(open_before) - len(self.open)

    @property
    def missing(self) -> int:
        """Of the `recent` samples of streams that speak, those that were not announced."""
        return self._recent.count(False)

    @property
    def recent(self) -> int:
        return len(self._recent)

    def reset(self) -> None:
        self._recent.clear()


def _silent_since(sample: Sample, facts: StreamFacts) -> bool:
    return facts.heard.get(sample.holder, -1.0) < sample.started_at


# ---- answers ---------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What was believed of an answered request's prompt when it was placed, and what its worker says. In tokens."""

    started_at: float
    confirmed: int
    """By the index, whatever the decision made of it."""
    expected: int
    """By the decision: what was on its way there included, or a guess."""
    guessed: bool
    cached: int | None
    """None when the worker does not say."""


class Threshold(NamedTuple):
    """When a balance raises a doubt: the share of wrong tokens, and the number of answers that were wrong."""

    share: float
    answers: float


class Balance:
    """Tokens that were counted on and those of them that were wrong, of about the last 32 answers."""

    __slots__ = ("_threshold", "_total", "_wrong", "_wrong_answers")

    _KEPT = 1.0 - 1.0 / 32.0
    _HALVED_SECONDS = 30.0
    _SETTLED = 0.5
    """Of the threshold's share."""

    def __init__(self, threshold: Threshold) -> None:
        self._threshold = threshold
        self._total = self._wrong = self._wrong_answers = 0.0

    def add(self, total: float, wrong: float, answers: int = 1) -> None:
        kept = self._KEPT**answers
        self._total = self._total * kept + total
        self._wrong = self._wrong * kept + wrong
        self._wrong_answers = self._wrong_answers * kept + (answers if wrong else 0)

    def fade(self, seconds: float) -> None:
        """What was wrong once counts ever less, though nothing better has come."""
        kept = 0.5 ** (seconds / self._HALVED_SECONDS)
        self._total, self._wrong, self._wrong_answers = (
            self._total * kept,
            self._wrong * kept,
            self._wrong_answers * kept,
        )

    @property
    def share(self) -> float:
        return self._wrong / self._total if self._total else 0.0

    @property
    def bad(self) -> bool:
        return self.share >= self._threshold.share and self._wrong_answers >= self._threshold.answers

    @property
    def good(self) -> bool:
        """Well below what made it bad."""
        return self.share < self._threshold.share * self._SETTLED or self._wrong_answers < 1.0

    def reset(self) -> None:
        self._total = self._wrong = self._wrong_answers = 0.0


@dataclass(slots=True)
class _Window:
    """What was confirmed, and guessed, for requests begun since the engine's counter of hits was read."""

    opened_at: float
    hits: int
    confirmed: int = 0
    guessed: int = 0
    answers: int = 0


class Answers:
    """What answers say, one by one, or in sums where the worker counts its hits and does not report them."""

    def __init__(self) -> None:
        self.phantoms = Balance(Threshold(0.2, 5.0))
        """Of confirmed tokens, those that were computed."""
        # High: engines load from stores of their own that no event announces.
        self.misses = Balance(Threshold(0.8, 12.0))
        """Of cached tokens, those that were not known of."""
        self.contradictions = Balance(Threshold(0.8, 16.0))
        """Of guessed tokens, those that were computed."""
        self.phantoms_since = 0.0
        """Requests that began earlier were placed by what has been forgotten since."""
        self._noted: deque[Answer] = deque(maxlen=_ANSWERS_MAX)
        self._window: _Window | None = None

    def note(self, answer: Answer) -> None:
        self._noted.append(answer)

    def weigh(self, slack_tokens: int) -> None:
        """Settle what was noted. Differences up to `slack_tokens` mean nothing."""
        noted, self._noted = self._noted, deque(maxlen=_ANSWERS_MAX)
        window = self._window
        for answer in noted:
            if answer.cached is not None:
                self._weigh(answer, answer.cached, slack_tokens)
            elif window is not None and answer.started_at >= max(window.opened_at, self.phantoms_since):
                window.confirmed += answer.confirmed
                window.guessed += answer.expected if answer.guessed else 0
                window.answers += 1

    def _weigh(self, answer: Answer, cached: int, slack: int) -> None:
        if answer.confirmed and answer.started_at >= self.phantoms_since:
            self.phantoms.add(answer.confirmed, _beyond(slack, answer.confirmed - cached))
        if cached:
            known = answer.confirmed if answer.guessed else max(answer.confirmed, answer.expected)
            self.misses.add(cached, _beyond(slack, cached - known))
        if answer.guessed and answer.expected:
            self.contradictions.add(answer.expected, _beyond(slack, answer.expected - cached))

    def count_hits(self, hit_tokens: int | None, slack_tokens: int, now: float) -> None:
        """The engine's own counter, for whoever asked it. What was settled before it was read must be in it: at least
        what was confirmed, or some of that was made up. The rest may be others'."""
        window = self._window
        if hit_tokens is None:
            self._window = None
            return
        if window is not None and hit_tokens >= window.hits:
            seconds, few = now - window.opened_at, window.answers < _WINDOW_ANSWERS_MIN
            if seconds < _WINDOW_SECONDS_MIN or (few and seconds < _WINDOW_SECONDS_MAX):
                return
            slack, hits = slack_tokens * window.answers, hit_tokens - window.hits
            for balance, expected in ((self.phantoms, window.confirmed), (self.contradictions, window.guessed)):
                if expected:
                    balance.add(expected, _beyond(slack, expected - hits), window.answers)
        self._window = _Window(now, hit_tokens)


def _beyond(slack: int, tokens: int) -> int:
    return tokens if tokens > slack else 0

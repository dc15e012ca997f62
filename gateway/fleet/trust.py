"""How far what we believe of a worker's cache may be believed. Free of I/O and clocks.

    exact      its events say what it holds: confirmed matches count in full
    history    matches are guesses: by what it was sent, and by what its events said once
    load       not even guesses: it is placed by its load alone

A worker whose events are followed is believed until a doubt is raised, and again when every doubt has been dropped.
A stream that fails does not say so: doubts are raised by evidence from outside it.

* Samples. Of the requests that a worker has answered, one each turn: its prompt's blocks must be in the index soon
  after. A stream that has brought nothing since is silent; one that brings other things leaves prompts unannounced.
* Answers. The worker says how many prompt tokens it had cached: fewer than were confirmed are phantoms, many more were
  missed. Where it does not say, its counter of hits is held against the sum of what was confirmed.
* The stream's own counters: batches lost for good, publishers that start over again and again, events that cannot be
  read.

A doubt that is raised stays for its probation, which doubles each time that it comes back, and then until its evidence
has turned good. What it costs the index is done at once (`Remedy`): where phantoms are, the stream is read again from
as far back as it goes, and if they come back with it everything is forgotten; where a silent publisher speaks again and
what it should have said is not there, removals may be missing as well, and everything is forgotten.

Guesses are doubted in turn: a worker that had next to nothing of what was guessed is placed by load.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from cachecore.blocks import Chain
from cachecore.holders import Worker
from gateway.fleet.evidence import Answers, Balance, Sample, Samples, StreamFacts, Threshold


class TrustLevel(StrEnum):
    EXACT = "exact"
    HISTORY = "history"
    LOAD = "load"


class Doubt(StrEnum):
    """Why a worker is believed less than its events would have it."""

    SILENT = "silent"
    """It answers, and nothing comes from its event stream. This one is an alarm."""
    UNANNOUNCED = "unannounced"
    """Events come, and not those of the prompts that it has answered."""
    UNREADABLE = "unreadable"
    """Events come that cannot be read or used."""
    GAP = "gap"
    """Events were lost for good, and what it held then is not known."""
    UNSTEADY = "unsteady"
    """Its stream starts over again and again: two publishers in one stream, or one that keeps dying."""
    PHANTOM = "phantom"
    """It computed what its events had confirmed."""
    MISSED = "missed"
    """It has far more cached than its events say."""
    CONTRADICTED = "contradicted"
    """It had next to nothing of what was guessed."""

    __hash__ = str.__hash__


class Remedy(StrEnum):
    """What is to become of what the index knows of a worker."""

    REREAD = "reread"
    """Forget it, and read the stream again from as far back as the publisher can show."""
    CLEAR = "clear"
    """Forget it; what comes from now on counts."""


class Raised(NamedTuple):
    doubt: Doubt
    reason: str


class Turn(NamedTuple):
    """What has changed."""

    remedy: Remedy | None = None
    raised: tuple[Raised, ...] = ()
    dropped: tuple[Doubt, ...] = ()


PROBATION_SECONDS: Final = {
    Doubt.SILENT: 3.0,
    Doubt.UNANNOUNCED: 10.0,
    Doubt.UNREADABLE: 10.0,
    Doubt.GAP: 10.0,
    Doubt.UNSTEADY: 60.0,
    Doubt.PHANTOM: 10.0,
    Doubt.MISSED: 30.0,
    Doubt.CONTRADICTED: 30.0,
}
FORGIVEN_SECONDS: Final = 600.0
"""A doubt that stays away for so long comes back as a first one."""
SILENT_SAMPLES: Final = 2
UNANNOUNCED_SAMPLES: Final = 4
UNANNOUNCED_SAMPLES_SETTLED: Final = 1
SPOKEN_SECONDS: Final = 1.0
"""After a silent stream has spoken, before what it should have said is looked for."""
UNSTEADY_VOIDS: Final = 3
UNSTEADY_SECONDS: Final = 60.0

REMEDY_SECONDS: Final = 0.25
"""Until a remedy has been applied: what is decided before says nothing of what comes after it."""
PROBATION_SECONDS_MAX: Final = 300.0


@dataclass(slots=True)
class _Case:
    """A doubt's record: whether it stands and why, until when at least, and how often it was raised."""

    stands: bool = False
    reason: str = ""
    since: float = 0.0
    until: float = 0.0
    times: int = 0
    dropped_at: float = 0.0


class Trust:
    """What is believed of one life of a worker. Each request reads `level` and `curious`, and leaves a note; the rest
    is told once a turn (`gateway.fleet.trust_watch`)."""

    __slots__ = (
        "_answers",
        "_cases",
        "_facts",
        "_followed",
        "_owing",
        "_raised",
        "_samples",
        "_spoke_at",
        "_turned_at",
        "_unreadable",
        "_voided_at",
        "_voids_when_silent",
        "curious",
        "level",
        "note",
        "slack_tokens",
    )

    def __init__(self) -> None:
        self.level = TrustLevel.HISTORY
        self.curious = False
        """Whether the next answered request is to be sampled."""
        self.slack_tokens = 0
        """Differences between tokens confirmed and cached that mean nothing: a block of the engine's, or of ours."""
        self._followed = False
        self._facts = StreamFacts()
        self._samples, self._answers = Samples(), Answers()
        self.note = self._answers.note
        """Leave an `Answer`."""
        self._unreadable = Balance(Threshold(0.1, 8.0))
        self._cases = {doubt: _Case() for doubt in Doubt}
        self._raised: list[Raised] = []
        """In this turn."""
        self._owing = False
        """A silent stream owes what samples had to be announced by it."""
        self._spoke_at: float | None = None
        """When it was heard again, until that is settled."""
        self._turned_at = 0.0
        self._voids_when_silent = 0
        self._voided_at: deque[float] = deque(maxlen=UNSTEADY_VOIDS)

    def __repr__(self) -> str:
        return f"Trust({self.level.value}{''.join(f', {doubt}' for doubt in self.doubts)})"

    @property
    def doubts(self) -> list[Doubt]:
        return [doubt for doubt, case in self._cases.items() if case.stands]

    @property
    def alarmed(self) -> bool:
        """Whether its stream has gone silent under traffic."""
        return self._cases[Doubt.SILENT].stands

    @property
    def guesses_by_index(self) -> bool:
        """Whether guesses may be made by what the events said: not where that turned out to be made up."""
        return not self._cases[Doubt.PHANTOM].stands

    def sample(self, holder: Worker, chain: Chain, started_at: float, now: float, nameable: bool = True) -> None:
        """Look for the blocks of an answered prompt. To be called while `curious`."""
        self.curious = False
        self._samples.add(Sample(holder, chain, started_at, now, nameable))

    # What it is told

    def follow(self, followed: bool) -> None:
        """Whether all its event streams are followed, here or elsewhere, so that the index speaks for it."""
        if followed != self._followed:
            self._followed = followed
            self._samples, self._owing, self._spoke_at = Samples(), False, None
            self._settle()

    def questions(self, now: float) -> list[Sample]:
        """The samples that are to be looked for in the index now; each is answered with `found` if it is there."""
        spoken = self._spoke_at is not None and now >= self._spoke_at + SPOKEN_SECONDS
        return [sample for sample in self._samples.open if spoken or not sample.late]

    def found(self, sample: Sample) -> None:
        self._samples.found(sample)

    def count_hits(self, hit_tokens: int | None, now: float) -> None:
        """The engine's counter of cached prompt tokens; None when it has none. To be told before the turn."""
        self._answers.count_hits(hit_tokens, self.slack_tokens, now)

    def turn(self, facts: StreamFacts, now: float) -> Turn:
        """Weigh what has come up since the last turn."""
        before, self._facts, self._raised = self._facts, facts, []
        self._weigh_stream(before, now)
        remedy = self._weigh_samples(now)
        remedy = self._weigh_answers(now) or remedy
        self._fade(now - self._turned_at)
        dropped = tuple(doubt for doubt in self.doubts if self._drop(doubt, now))
        self._turned_at = now
        self.curious = self._followed
        self._settle()
        return Turn(remedy, tuple(self._raised), dropped)

    # Weighing

    def _weigh_stream(self, before: StreamFacts, now: float) -> None:
        facts = self._facts
        if facts.gaps > before.gaps:
            self._raise(Doubt.GAP, "events were lost for good; what it holds is learned anew", now)
        self._voided_at.extend([now] * (facts.voids - before.voids))
        if len(self._voided_at) == UNSTEADY_VOIDS and now - self._voided_at[0] <= UNSTEADY_SECONDS:
            self._raise(Doubt.UNSTEADY, f"its event stream began anew {UNSTEADY_VOIDS} times in a minute", now)
            self._voided_at.clear()
        unreadable = max(facts.unreadable - before.unreadable, 0)
        events = unreadable + max(facts.events - before.events, 0)
        if events:
            self._unreadable.add(events, unreadable, max(unreadable, 1))
        if self._unreadable.bad:
            self._raise(Doubt.UNREADABLE, f"{self._unreadable.share:.0%} of its events cannot be used", now)

    def _weigh_samples(self, now: float) -> Remedy | None:
        facts, samples = self._facts, self._samples
        remedy = self._settle_silence(now)
        samples.weigh(facts, now)
        if samples.silent(facts) >= SILENT_SAMPLES and not self._owing:
            self._owing, self._voids_when_silent = True, facts.voids
            since = f"for {now - facts.heard_at:.0f} s" if facts.heard_at >= 0 else "at all"
            self._raise(Doubt.SILENT, f"nothing came from its event stream {since} while it answered requests", now)
        if samples.missing >= UNANNOUNCED_SAMPLES:
            shown = f"{samples.missing} of {samples.recent}"
            self._raise(Doubt.UNANNOUNCED, f"{shown} prompts that it answered were not announced", now)
        if not self._owing:
            samples.drop_spoken(facts)
        return remedy

    def _settle_silence(self, now: float) -> Remedy | None:
        """Once a silent stream has spoken: what it should have said is there, or it was read anew since, or it cannot
        be relied on for what it removed either."""
        if not self._owing or self._facts.behind or self._samples.silent(self._facts):
            return None
        if self._spoke_at is None:
            self._spoke_at = now
        if now < self._spoke_at + SPOKEN_SECONDS:
            return None
        self._owing, self._spoke_at = False, None
        self._cases[Doubt.SILENT].until = now + PROBATION_SECONDS[Doubt.SILENT]
        missing = self._samples.drop_late()
        return Remedy.CLEAR if missing and self._facts.voids == self._voids_when_silent else None

    def _weigh_answers(self, now: float) -> Remedy | None:
        answers = self._answers
        answers.weigh(self.slack_tokens)
        if answers.contradictions.bad:
            had = 1.0 - answers.contradictions.share
            self._raise(Doubt.CONTRADICTED, f"it had {had:.0%} of the tokens that were guessed", now)
        if not self._followed or self._owing or self._cases[Doubt.UNANNOUNCED].stands:
            answers.misses.reset()  # for the reason that is known
        if answers.misses.bad:
            unknown = f"{answers.misses.share:.0%} of the tokens that it had cached"
            self._raise(Doubt.MISSED, f"{unknown} were not known by its events", now)
        if not answers.phantoms.bad:
            return None
        answers.phantoms_since = now + REMEDY_SECONDS
        computed = f"it computed {answers.phantoms.share:.0%} of the tokens"
        self._raise(Doubt.PHANTOM, f"{computed} that its events had confirmed", now)
        if self._owing:
            return None  # what a silent stream has removed is settled once it speaks
        case = self._cases[Doubt.PHANTOM]
        return Remedy.REREAD if case.times == 1 and case.since == now else Remedy.CLEAR

    # Doubts

    def _raise(self, doubt: Doubt, reason: str, now: float) -> None:
        """Once more where it stands already: then it stands longer. What raised it is weighed anew from here on."""
        balance = self._balance(doubt)
        if balance is not None:
            balance.reset()
        if doubt is Doubt.UNANNOUNCED:
            self._samples.reset()
        case = self._cases[doubt]
        if not case.stands:
            if now - case.dropped_at > FORGIVEN_SECONDS:
                case.times = 0
            case.stands, case.since = True, now
            case.times += 1
            self._raised.append(Raised(doubt, reason))
        case.reason = reason
        case.until = now + min(PROBATION_SECONDS[doubt] * 2.0 ** min(case.times - 1, 8), PROBATION_SECONDS_MAX)

    def _drop(self, doubt: Doubt, now: float) -> bool:
        case = self._cases[doubt]
        if now < case.until or not self._refuted(doubt):
            return False
        case.stands, case.dropped_at = False, now
        return True

    def _fade(self, seconds: float) -> None:
        """A worker that is doubted may be asked for nothing that would show it right."""
        for doubt in self.doubts:
            balance = self._balance(doubt)
            if balance is not None:
                balance.fade(seconds)

    def _refuted(self, doubt: Doubt) -> bool:
        """Whether the evidence is good again."""
        balance = self._balance(doubt)
        if balance is not None:
            return balance.good
        if doubt is Doubt.SILENT:
            return not self._owing
        return doubt is not Doubt.UNANNOUNCED or self._samples.missing <= UNANNOUNCED_SAMPLES_SETTLED

    def _balance(self, doubt: Doubt) -> Balance | None:
        match doubt:
            case Doubt.UNREADABLE:
                return self._unreadable
            case Doubt.PHANTOM:
                return self._answers.phantoms
            case Doubt.MISSED:
                return self._answers.misses
            case Doubt.CONTRADICTED:
                return self._answers.contradictions
            case _:
                return None

    def _settle(self) -> None:
        if self._followed and not any(doubt is not Doubt.CONTRADICTED for doubt in self.doubts):
            self.level = TrustLevel.EXACT
        else:
            contradicted = self._cases[Doubt.CONTRADICTED].stands
            self.level = TrustLevel.LOAD if contradicted else TrustLevel.HISTORY

    # Views

    def document(self, now: float) -> dict[str, Any]:
        """For the status page."""
        heard_at = self._facts.heard_at
        return {
            "level": self.level.value,
            "followed": self._followed,
            "alarm": self.alarmed,
            "doubts": [
                {"doubt": doubt.value, "reason": case.reason, "seconds": round(now - case.since, 1)}
                for doubt, case in self._cases.items()
                if case.stands
            ],
            "raised": {doubt.value: case.times for doubt, case in self._cases.items() if case.times},
            "silent_seconds": round(now - heard_at, 1) if heard_at >= 0 else None,
            "phantom_share": round(self._answers.phantoms.share, 4),
            "missed_share": round(self._answers.misses.share, 4),
            "unreadable_share": round(self._unreadable.share, 4),
        }

"""Trust by the evidence, without a worker: what raises each doubt, what it costs, and what drops it."""

import itertools
import random

import pytest

from cachecore.blocks import Chain
from cachecore.holders import Epoch, Worker, WorkerName
from gateway.fleet.evidence import SAMPLES_MAX, Answer, StreamFacts
from gateway.fleet.trust import PROBATION_SECONDS, Doubt, Remedy, Trust, TrustLevel, Turn

HOLDER = Worker(WorkerName("w"), Epoch(1))
OTHER_RANK = Worker(WorkerName("w"), Epoch(1), 1)
TURN = 0.5
BLOCK = 16


class Bench:
    """A trust with a clock of its own, told once a turn as the watch tells it."""

    def __init__(self) -> None:
        self.trust = Trust()
        self.trust.slack_tokens = BLOCK
        self.trust.follow(True)
        self.now = 100.0
        self.facts = StreamFacts()
        self.announced = True
        """Whether what is asked for is found in the index."""
        self.speaking = True
        self.turns: list[Turn] = []

    def turn(self) -> Turn:
        self.now += TURN
        if self.speaking:
            self.facts = self.facts._replace(heard={HOLDER: self.now}, events=self.facts.events + 10)
        for sample in self.trust.questions(self.now):
            if self.announced:
                self.trust.found(sample)
        turn = self.trust.turn(self.facts, self.now)
        self.turns.append(turn)
        return turn

    def answer(self, confirmed=0, cached=None, expected=None, guessed=False, seconds=0.1, nameable=True):
        """A request that took so long is answered now; it is sampled where the trust is curious."""
        expected = confirmed if expected is None else expected
        started_at = self.now - seconds
        self.trust.note(Answer(started_at, confirmed, expected, guessed, cached))
        if self.trust.curious:
            self.trust.sample(HOLDER, Chain(bytes(16)), started_at, self.now, nameable)

    def run(self, seconds, answers_a_turn=2, **answer) -> None:
        for _ in range(round(seconds / TURN)):
            for _ in range(answers_a_turn):
                self.answer(**answer)
            self.turn()

    def until(self, doubt, seconds_max, **answer) -> float:
        """Seconds of traffic until the doubt stands."""
        began = self.now
        while doubt not in self.trust.doubts:
            assert self.now - began < seconds_max, f"{doubt} was not raised"
            self.run(TURN, **answer)
        return self.now - began

    def until_exact(self, seconds_max, **answer) -> float:
        began = self.now
        while self.trust.level is not TrustLevel.EXACT:
            assert self.now - began < seconds_max, f"{self.trust} has not recovered"
            self.run(TURN, **answer)
        return self.now - began

    @property
    def remedies(self) -> list[Remedy]:
        return [turn.remedy for turn in self.turns if turn.remedy is not None]

    @property
    def raised(self) -> list[Doubt]:
        return [raised.doubt for turn in self.turns for raised in turn.raised]


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ---- levels ----------------------------------------------------------------------------------------------------------


def test_who_publishes_nothing_is_guessed_about() -> None:
    trust = Trust()
    assert trust.level is TrustLevel.HISTORY
    trust.follow(True)
    assert trust.level is TrustLevel.EXACT
    trust.follow(False)
    assert (trust.level, trust.doubts, repr(trust)) == (TrustLevel.HISTORY, [], "Trust(history)")


def test_good_evidence_raises_nothing(bench: Bench) -> None:
    bench.run(120, confirmed=64, cached=64)
    assert (bench.trust.level, bench.raised, bench.remedies) == (TrustLevel.EXACT, [], [])


def test_an_idle_worker_is_not_doubted_however_long_it_says_nothing(bench: Bench) -> None:
    bench.speaking = False
    bench.run(600, answers_a_turn=0)
    assert bench.trust.level is TrustLevel.EXACT


def test_one_request_each_turn_is_sampled(bench: Bench) -> None:
    bench.announced = False
    bench.turn()
    for _ in range(10):
        bench.answer()
    assert len(bench.trust.questions(bench.now)) == 1
    for _ in range(100):
        bench.speaking = False
        bench.run(TURN)
    assert len(bench.trust.questions(bench.now)) <= SAMPLES_MAX


# ---- silence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every_turns", [1, 6])
def test_silence_under_traffic_raises_an_alarm_within_ten_seconds(bench: Bench, every_turns: int) -> None:
    bench.run(10, cached=0)
    bench.speaking = bench.announced = False
    began = bench.now
    for turn in itertools.count():
        if turn % every_turns == 0:
            bench.answer(cached=0)
        bench.turn()
        if bench.trust.alarmed:
            break
    assert bench.now - began < 10.0
    assert bench.trust.level is TrustLevel.HISTORY
    (raised,) = bench.turns[-1].raised
    assert raised.doubt is Doubt.SILENT
    assert raised.reason.startswith("nothing came from its event stream for ")
    assert bench.trust.document(bench.now)["alarm"] is True


def test_a_stream_that_never_spoke(bench: Bench) -> None:
    bench.speaking = bench.announced = False
    bench.until(Doubt.SILENT, 10.0, cached=0)
    assert bench.turns[-1].raised[0].reason.startswith("nothing came from its event stream at all")


def test_silence_with_everything_announced_before_is_no_silence(bench: Bench) -> None:
    bench.run(10, cached=0)
    bench.speaking = False
    bench.run(60, cached=0)
    assert bench.trust.level is TrustLevel.EXACT


def test_late_events_are_waited_for(bench: Bench) -> None:
    bench.run(5, cached=0)
    bench.announced = False
    bench.facts = bench.facts._replace(behind=True)
    bench.run(15, cached=0)
    assert bench.raised == []
    bench.run(10, cached=0)
    assert bench.raised == [Doubt.UNANNOUNCED]


def test_a_stream_that_speaks_again_and_has_lost_nothing_is_believed_again(bench: Bench) -> None:
    bench.speaking = bench.announced = False
    bench.until(Doubt.SILENT, 10.0, cached=0)
    bench.run(20, cached=0)
    assert bench.trust.alarmed
    bench.speaking = bench.announced = True
    assert bench.until_exact(10.0, cached=0) > PROBATION_SECONDS[Doubt.SILENT]
    assert bench.remedies == []
    assert Doubt.SILENT in bench.turns[-1].dropped


def test_what_was_never_announced_costs_the_index(bench: Bench) -> None:
    bench.speaking = bench.announced = False
    bench.until(Doubt.SILENT, 10.0, cached=0)
    bench.speaking = True
    for _ in range(4):
        bench.turn()
    assert bench.remedies == [Remedy.CLEAR]
    bench.announced = True
    bench.until_exact(10.0, cached=0)
    assert bench.remedies == [Remedy.CLEAR]


def test_a_gap_that_ended_the_silence_has_cost_it_already(bench: Bench) -> None:
    bench.speaking = bench.announced = False
    bench.until(Doubt.SILENT, 10.0, cached=0)
    bench.speaking = True
    bench.facts = bench.facts._replace(gaps=1)
    for _ in range(4):
        bench.turn()
    assert bench.remedies == []
    assert Doubt.GAP in bench.trust.doubts
    bench.announced = True
    bench.until_exact(15.0, cached=0)


def test_a_silent_rank_beside_one_that_speaks(bench: Bench) -> None:
    """It is not told by the worker's stream as a whole."""
    bench.run(5, cached=0)
    heard = bench.now
    bench.speaking = bench.announced = False
    for _ in range(20):
        bench.facts = bench.facts._replace(heard={HOLDER: heard, OTHER_RANK: bench.now})
        bench.run(TURN, cached=0)
    assert bench.trust.level is TrustLevel.HISTORY


# ---- streams that speak, and say the wrong things --------------------------------------------------------------------


def test_prompts_that_are_not_announced(bench: Bench) -> None:
    bench.run(5, cached=0)
    bench.announced = False
    assert bench.until(Doubt.UNANNOUNCED, 10.0, cached=0) < 10.0
    assert bench.turns[-1].raised[0].reason == "4 of 8 prompts that it answered were not announced"
    bench.run(20, cached=0)
    assert bench.trust.level is TrustLevel.HISTORY
    bench.announced = True
    bench.until_exact(60.0, cached=0)
    assert bench.remedies == []


def test_prompts_whose_beginning_nobody_can_name_speak_for_silence_alone(bench: Bench) -> None:
    """The engine still has it cached, and the index was told to forget it: what follows has a parent without a name."""
    bench.run(5, cached=0)
    bench.announced = False
    bench.run(60, cached=0, nameable=False)
    assert bench.trust.level is TrustLevel.EXACT
    bench.speaking = False
    assert bench.until(Doubt.SILENT, 10.0, cached=0, nameable=False) < 10.0


def test_events_that_cannot_be_read(bench: Bench) -> None:
    bench.run(5)
    bench.facts = bench.facts._replace(unreadable=4)
    bench.run(5)
    assert bench.trust.level is TrustLevel.EXACT, "a few are no reason"
    for _ in range(8):
        bench.facts = bench.facts._replace(unreadable=bench.facts.unreadable + 10)
        bench.run(TURN)
    assert bench.raised == [Doubt.UNREADABLE]
    bench.until_exact(60.0)


def test_a_gap_costs_trust_for_a_while_and_each_further_one_longer(bench: Bench) -> None:
    spans = []
    for _ in range(3):
        bench.facts = bench.facts._replace(gaps=bench.facts.gaps + 1)
        bench.turn()
        assert bench.trust.doubts[-1] is Doubt.GAP
        spans.append(bench.until_exact(200.0))
        bench.run(70, answers_a_turn=0)
    assert spans == [10.0, 20.0, 40.0]
    bench.run(700, answers_a_turn=0)
    bench.facts = bench.facts._replace(gaps=4)
    bench.turn()
    assert bench.until_exact(60.0) == 10.0


def test_restarts_cost_no_trust_until_they_come_in_threes(bench: Bench) -> None:
    for count in (1, 2):
        bench.facts = bench.facts._replace(restarts=count)
        bench.run(10, answers_a_turn=0)
    assert bench.trust.level is TrustLevel.EXACT
    bench.facts = bench.facts._replace(restarts=3)
    bench.turn()
    assert bench.trust.doubts == [Doubt.UNSTEADY]
    assert bench.until_exact(100.0) == 60.0
    for count in (4, 5, 6):
        bench.facts = bench.facts._replace(restarts=count)
        bench.run(70, answers_a_turn=0)
    assert bench.raised == [Doubt.UNSTEADY]


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_phantoms_are_read_anew_and_what_comes_back_is_forgotten(bench: Bench) -> None:
    bench.run(30, confirmed=640, cached=640)
    assert bench.until(Doubt.PHANTOM, 10.0, confirmed=640, cached=0) < 10.0
    assert bench.trust.level is TrustLevel.HISTORY
    assert not bench.trust.guesses_by_index
    assert bench.remedies == [Remedy.REREAD]
    bench.run(5, confirmed=640, cached=0)
    assert bench.remedies == [Remedy.REREAD] + [Remedy.CLEAR] * (len(bench.remedies) - 1)
    assert len(bench.remedies) > 1
    bench.until_exact(400.0, confirmed=0, cached=0)
    assert bench.trust.guesses_by_index


def test_phantoms_that_are_gone_once_read_anew(bench: Bench) -> None:
    bench.until(Doubt.PHANTOM, 10.0, confirmed=640, cached=0)
    span = bench.until_exact(30.0, confirmed=640, cached=640)
    assert span == PROBATION_SECONDS[Doubt.PHANTOM]
    assert bench.remedies == [Remedy.REREAD]


def test_answers_that_were_placed_before_the_remedy_say_nothing_of_it(bench: Bench) -> None:
    bench.until(Doubt.PHANTOM, 10.0, confirmed=640, cached=0)
    raised_at = bench.now
    for _ in range(8):
        bench.answer(confirmed=640, cached=0, seconds=bench.now + 1.0 - raised_at)
        bench.turn()
    assert bench.remedies == [Remedy.REREAD]


@pytest.mark.parametrize("cached", [640 - BLOCK, 640, 700])
def test_a_block_more_or_less_is_no_phantom(bench: Bench, cached: int) -> None:
    bench.run(60, confirmed=640, cached=cached)
    assert bench.raised == []


def test_now_and_then_a_block_is_gone_before_its_turn_comes(bench: Bench) -> None:
    drawn = random.Random(4)
    for _ in range(200):
        for _ in range(4):
            bench.answer(confirmed=640, cached=0 if drawn.random() < 0.05 else 640)
        bench.turn()
    assert bench.raised == []


def test_a_worker_that_has_far_more_than_its_events_say(bench: Bench) -> None:
    bench.until(Doubt.MISSED, 20.0, confirmed=0, cached=640)
    assert bench.trust.level is TrustLevel.HISTORY
    bench.run(60, confirmed=0, expected=640, guessed=True, cached=640)
    assert bench.trust.level is TrustLevel.HISTORY
    bench.until_exact(100.0, confirmed=640, expected=640, guessed=True, cached=640)
    assert bench.remedies == []


def test_who_is_not_followed_is_not_blamed_for_what_nobody_told(bench: Bench) -> None:
    bench.trust.follow(False)
    bench.run(60, confirmed=0, cached=640)
    assert bench.raised == []
    bench.trust.follow(True)
    bench.turn()
    assert bench.trust.level is TrustLevel.EXACT


def test_what_is_on_its_way_there_is_not_missed(bench: Bench) -> None:
    bench.run(60, confirmed=0, expected=640, cached=640)
    assert bench.raised == []


def test_guesses_that_are_contradicted_are_given_up_and_tried_again(bench: Bench) -> None:
    bench.trust.follow(False)
    bench.until(Doubt.CONTRADICTED, 20.0, expected=640, guessed=True, cached=0)
    assert bench.trust.level is TrustLevel.LOAD
    assert bench.turns[-1].raised[0].reason == "it had 0% of the tokens that were guessed"
    bench.run(PROBATION_SECONDS[Doubt.CONTRADICTED] + TURN, expected=0, cached=0)
    assert bench.trust.level is TrustLevel.HISTORY


def test_half_of_a_guess_is_worth_it(bench: Bench) -> None:
    bench.trust.follow(False)
    bench.run(60, expected=640, guessed=True, cached=320)
    assert bench.trust.level is TrustLevel.HISTORY


def test_contradicted_guesses_do_not_matter_once_events_are_believed(bench: Bench) -> None:
    bench.trust.follow(False)
    bench.until(Doubt.CONTRADICTED, 20.0, expected=640, guessed=True, cached=0)
    bench.trust.follow(True)
    assert bench.trust.level is TrustLevel.EXACT


# ---- workers that count their hits and do not report them ------------------------------------------------------------


class Counting(Bench):
    """Scraped every two seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = 5_000

    def turn(self) -> Turn:
        if round(self.now / TURN) % 4 == 0:
            self.trust.count_hits(self.hits, self.now + TURN)
        return super().turn()

    def answer(self, confirmed=0, cached=None, expected=None, guessed=False, seconds=0.1):
        self.hits += cached
        super().answer(confirmed, None, expected, guessed, seconds)


def test_a_counter_that_grows_as_it_should() -> None:
    bench = Counting()
    bench.run(120, confirmed=640, cached=640)
    assert bench.raised == []


def test_hits_of_others_do_no_harm() -> None:
    bench = Counting()
    bench.run(60, confirmed=640, cached=5000)
    assert bench.raised == []


def test_a_counter_that_does_not_grow_shows_phantoms() -> None:
    bench = Counting()
    bench.run(20, confirmed=640, cached=640)
    assert bench.until(Doubt.PHANTOM, 15.0, confirmed=640, cached=0) <= 15.0
    assert bench.remedies == [Remedy.REREAD]


def test_a_counter_that_starts_over_is_taken_up_again() -> None:
    bench = Counting()
    bench.run(20, confirmed=640, cached=640)
    bench.hits = 0
    bench.run(60, confirmed=640, cached=640)
    assert bench.raised == []


def test_a_counter_shows_contradicted_guesses() -> None:
    bench = Counting()
    bench.trust.follow(False)
    bench.until(Doubt.CONTRADICTED, 60.0, expected=640, guessed=True, cached=0)


def test_without_a_counter_or_a_report_nothing_is_held_against_it(bench: Bench) -> None:
    bench.trust.count_hits(None, bench.now)
    bench.run(60, confirmed=640, cached=None)
    assert bench.trust.level is TrustLevel.EXACT


# ---- all together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_it_recovers(seed: int) -> None:
    """Random faults for some minutes, then none: every worker comes back, and says why it was gone."""
    drawn, bench = random.Random(seed), Bench()
    for _ in range(400):
        bench.speaking, bench.announced = drawn.random() < 0.7, drawn.random() < 0.7
        change = {"gaps": 1} if drawn.random() < 0.02 else {"restarts": 1} if drawn.random() < 0.05 else {}
        counters = {name: getattr(bench.facts, name) + more for name, more in change.items()}
        bench.facts = bench.facts._replace(**counters, behind=drawn.random() < 0.1)
        confirmed = drawn.choice((0, 640))
        bench.run(TURN, confirmed=confirmed, cached=drawn.choice((0, confirmed)), expected=drawn.choice((0, 640)))
        assert (bench.trust.level is TrustLevel.EXACT) == (not bench.trust.doubts)
    assert bench.raised
    bench.speaking = bench.announced = True
    bench.facts = bench.facts._replace(behind=False)
    bench.until_exact(700.0, confirmed=640, cached=640)

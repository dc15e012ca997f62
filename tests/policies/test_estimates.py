from math import nan
from random import Random

import pytest

from policies.estimates import (
    Calibration,
    DecodeModel,
    DecodePrior,
    FleetEstimates,
    LinkModel,
    LinkPrior,
    PrefillModel,
    PrefillPrior,
)
from policies.state.inflight import AnswerSample, PrefillSample

TRUE = PrefillModel(PrefillPrior(0.004, 35.4e-6, 6.6e-10))
MIX = [(30, 0), (500, 3000), (2000, 0), (100, 8000), (8000, 0), (30_000, 10_000)]


def prior(scale, base_scale=None):
    return PrefillPrior(0.004 * (base_scale or scale), 35.4e-6 * scale, 6.6e-10 * scale)


def teach(model, observations, random, noise=0.1, truth=TRUE):
    for _ in range(observations):
        new, context = random.choice(MIX)
        observe(model, new, context, truth.prefill_seconds(new, context) * random.lognormvariate(0, noise))


def observe(model, new, context, seconds):
    model.observe(1, model.prior_seconds(new, context), seconds)


def errors(model, truth=TRUE):
    return [model.prefill_seconds(*shape) / truth.prefill_seconds(*shape) for shape in MIX]


def test_the_formula():
    model = PrefillModel(PrefillPrior(0.01, 1e-4, 1e-8, 1e-7, 1000))
    assert model.prefill_seconds(200, 1000) == pytest.approx(0.01 + 0.02 + 1e-8 * 200 * 1100)
    assert model.prefill_seconds(200, 1000, 50_000) == pytest.approx(0.03 + 0.0022 + 0.005 * 1.2)
    assert model.prefill_seconds(0, 1000) == 0.01


def test_a_split_prompt_costs_what_the_whole_costs():
    model = PrefillModel(PrefillPrior(0.0, 1e-4, 1e-8))
    whole = model.prefill_seconds(3000, 0)
    assert model.prefill_seconds(1000, 0) + model.prefill_seconds(2000, 1000) == pytest.approx(whole)


@pytest.mark.parametrize("scale", [0.02, 0.33, 0.5, 1.0, 2.0, 3.0, 30.0])
def test_wrong_priors_become_harmless(scale):
    model = PrefillModel(prior(scale))
    teach(model, 150, Random(3))
    assert errors(model) == pytest.approx([1.0] * len(MIX), rel=0.12)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_twenty_observations_are_enough_for_common_errors(scale):
    model = PrefillModel(prior(scale))
    teach(model, 20, Random(4))
    assert errors(model) == pytest.approx([1.0] * len(MIX), rel=0.2)


def test_base_and_tokens_are_told_apart():
    """The prior's base is right and its price per token ten times too low: no single scale fits."""
    model = PrefillModel(prior(0.1, base_scale=1.0))
    teach(model, 200, Random(5))
    assert errors(model) == pytest.approx([1.0] * len(MIX), rel=0.15)
    assert model.calibration.variable == pytest.approx(10, rel=0.1)


def test_one_prompt_length_alone_scales_both():
    model = PrefillModel(prior(1 / 3))
    for _ in range(60):
        observe(model, 1000, 0, TRUE.prefill_seconds(1000, 0))
    assert model.prefill_seconds(1000, 0) == pytest.approx(TRUE.prefill_seconds(1000, 0), rel=0.03)
    assert model.prefill_seconds(4000, 0) == pytest.approx(TRUE.prefill_seconds(4000, 0), rel=0.3)


def test_an_outlier_hardly_moves_it():
    for seconds in (100.0, 1e-9):
        model = PrefillModel()
        teach(model, 50, Random(6), noise=0.02)
        observe(model, 2000, 0, seconds)
        assert errors(model) == pytest.approx([1.0] * len(MIX), rel=0.15)


def test_outliers_in_a_row_are_healed_by_a_few_good_observations():
    model = PrefillModel()
    teach(model, 50, Random(6), noise=0.02)
    for _ in range(3):
        observe(model, 2000, 0, 100.0)
    assert max(errors(model)) > 2
    teach(model, 15, Random(7), noise=0.02)
    assert errors(model) == pytest.approx([1.0] * len(MIX), rel=0.15)


def test_thousands_of_equal_requests_do_not_freeze_it():
    """Base and tokens share the time evenly and can never be told apart; then the worker slows down fourfold."""
    model = PrefillModel(PrefillPrior(0.01, 1e-4, 0.0))
    for _ in range(5000):
        observe(model, 100, 0, 0.02)
    for _ in range(40):
        observe(model, 100, 0, 0.08)
    assert model.prefill_seconds(100, 0) == pytest.approx(0.08, rel=0.05)


def test_a_slow_first_request_is_outgrown():
    model = PrefillModel()
    observe(model, 500, 0, 20.0)
    assert max(errors(model)) < 3.5
    teach(model, 15, Random(7))
    assert max(errors(model)) < 1.3


def test_nonsense_is_ignored():
    model = PrefillModel()
    for seconds in (0.0, -1.0, nan):
        observe(model, 100, 0, seconds)
    assert model.calibration.observations == 0
    assert errors(model) == [1.0] * len(MIX)


def test_a_change_of_speed_is_followed():
    model = PrefillModel()
    teach(model, 300, Random(8))
    slower = PrefillModel(prior(4.0))
    teach(model, 200, Random(9), truth=slower)
    assert errors(model, slower) == pytest.approx([1.0] * len(MIX), rel=0.15)


def test_multipliers_stay_positive_and_bounded():
    random, calibration = Random(10), Calibration()
    for _ in range(3000):
        calibration.observe(random.random(), random.random() ** 4, 10 ** random.uniform(-6, 6))
        assert 0.001 <= calibration.fixed <= 1000
        assert 0.001 <= calibration.variable <= 1000


def test_prior_seconds_know_no_calibration():
    calibrated, raw = PrefillModel(prior(1.0), Calibration(2.0, 5.0)), PrefillModel(prior(1.0))
    for new, context in MIX:
        for decoding in (0, 100_000):
            expected = raw.prefill_seconds(new, context, decoding)
            assert calibrated.prior_seconds(new, context, decoding) == pytest.approx(expected)
            assert 2 * expected <= calibrated.prefill_seconds(new, context, decoding) <= 5 * expected


def test_stretches_teach_as_single_requests_do():
    """Up to eight requests a sample, seen twenty samples late: no overshoot."""
    random, model, truth = Random(11), PrefillModel(prior(1 / 3)), TRUE
    late, highest = [], 0.0
    for _ in range(300):
        shapes = [random.choice(MIX) for _ in range(random.randrange(1, 9))]
        told = sum(model.prior_seconds(*shape) for shape in shapes)
        late.append((len(shapes), told, sum(truth.prefill_seconds(*shape) for shape in shapes)))
        if len(late) > 20:
            model.observe(*late.pop(0))
        highest = max(highest, *errors(model))
    assert errors(model) == pytest.approx([1.0] * len(MIX), rel=0.05)
    assert highest < 1.1


def test_documents():
    assert PrefillModel().document() == {
        "base_ms": 4.0,
        "token_us": pytest.approx(35.4),
        "quadratic_ns": pytest.approx(0.66),
        "tokens_per_second": pytest.approx(28_248.6, rel=1e-4),
        "observations": 0,
    }
    assert DecodeModel().document() == {
        "step_ms": 10.5,
        "context_token_ns": pytest.approx(17.4),
        "observations": 0,
    }
    assert LinkModel().document() == {"latency_ms": 5.0, "bytes_per_second": 1e10, "observations": 0}
    assert repr(PrefillModel()) == (
        "PrefillModel(4 ms + 35.4 us/token, Calibration(fixed=1.000, variable=1.000, observations=0))"
    )


def test_decode_learns_step_and_context():
    random, model = Random(12), DecodeModel(DecodePrior(0.05, 1e-8))
    for _ in range(200):
        context = random.randrange(1_000_000)
        model.observe(context, 0.012 + 20e-9 * context)
    assert model.step_seconds(0) == pytest.approx(0.012, rel=0.1)
    assert model.step_seconds(500_000) == pytest.approx(0.022, rel=0.03)


def test_a_network_is_taken_for_nine_tenths_of_what_it_is_sold_as() -> None:
    fleet = FleetEstimates(link=LinkPrior.of_network(400))
    assert fleet.link("a", "b").transfer_seconds(45_000_000_000) == pytest.approx(1.0 + LinkPrior().latency_seconds)


def test_link_learns_latency_and_bandwidth():
    random, model = Random(13), LinkModel(LinkPrior(0.005, 1e9))
    for _ in range(200):
        size = random.randrange(1, 2_000_000_000)
        model.observe(size, 0.001 + size / 5e9)
    assert model.transfer_seconds(1_000_000_000) == pytest.approx(0.201, rel=0.03)
    assert model.document()["bytes_per_second"] == pytest.approx(5e9, rel=0.05)


class TestFleet:
    @staticmethod
    def sample(worker, seconds=0.3, prior_seconds=0.1):
        return PrefillSample(worker, 0, 1, prior_seconds, seconds)

    def test_a_new_worker_starts_from_its_peers(self):
        fleet = FleetEstimates()
        for worker in "abc":
            for _ in range(50):
                fleet.observe_prefill(self.sample(worker))
        assert fleet.prefill(("new", 0)).prefill_seconds(2000, 0) == pytest.approx(
            3 * PrefillModel().prefill_seconds(2000, 0), rel=0.1
        )
        assert fleet.prefill(("new", 0)).calibration.observations == 0

    def test_models_are_kept_by_worker_and_forgotten_with_it(self):
        fleet = FleetEstimates()
        model = fleet.prefill(("a", 0))
        assert fleet.prefill(("a", 0)) is model
        assert fleet.prefill(("a", 1)) is not model
        fleet.observe_link("a", "b", 1000, 0.1, 0.0), fleet.observe_link("b", "c", 1000, 0.1, 0.0)
        fleet.decode(("a", 0))
        fleet.forget(("a", 0))
        assert fleet.prefill(("a", 0)) is not model
        assert list(fleet.document()["links"]) == ["b>c"]
        assert fleet.document()["decode"] == {}

    def test_a_worker_that_looked_slow_and_is_no_longer_seen_drifts_back(self):
        fleet = FleetEstimates()
        for _ in range(20):
            fleet.observe_prefill(self.sample("slow", seconds=1.0))
        before = fleet.prefill(("slow", 0)).prefill_seconds(2000, 0)
        for _ in range(64 * 20):
            fleet.observe_prefill(self.sample("a", seconds=0.1))
        after = fleet.prefill(("slow", 0)).prefill_seconds(2000, 0)
        peer = fleet.prefill(("a", 0)).prefill_seconds(2000, 0)
        assert before > 5 * peer
        assert after < 1.8 * peer

    @staticmethod
    def answers(fleet, scale, count=60):
        random = Random(14)
        decode = DecodePrior()
        for _ in range(count):
            output = random.randrange(20, 60)
            told = 0.05 + output * (decode.step_seconds + decode.context_token_seconds * 1000)
            seconds = scale * told * random.lognormvariate(0, 0.2)
            fleet.observe_answer(AnswerSample("a", 0, 0.05, 1000, output, seconds))

    @pytest.mark.parametrize("scale", [0.25, 4.0])
    def test_whole_answers_teach_the_scale(self, scale):
        fleet = FleetEstimates()
        self.answers(fleet, scale)
        prior = PrefillModel().prefill_seconds(1500, 0)
        assert fleet.prefill(("a", 0)).prefill_seconds(1500, 0) == pytest.approx(scale * prior, rel=0.25)
        assert fleet.prefill(("a", 0)).calibration.observations == 0

    @pytest.mark.parametrize("whole", [True, False])
    def test_workers_never_seen_go_by_those_that_were(self, whole):
        """Else the first worker that proves slower than the priors say would lose its conversations to the others."""
        fleet = FleetEstimates()
        models = [fleet.prefill((name, 0)) for name in "ab"]
        if whole:
            self.answers(fleet, 4.0, count=1)
        else:
            fleet.observe_prefill(self.sample("a"))
        seen, unseen = (model.prefill_seconds(1500, 0) for model in models)
        assert seen == unseen > 1.5 * PrefillModel().prefill_seconds(1500, 0)
        for _ in range(10):
            fleet.observe_prefill(self.sample("b", seconds=0.1))
        seen, unseen = (model.prefill_seconds(1500, 0) for model in models)
        # First tokens of b are worth more than the guess about both; what was seen of a stays.
        assert seen == unseen if whole else seen > 1.4 * unseen

    def test_where_first_tokens_are_seen_whole_answers_say_nothing(self):
        fleet = FleetEstimates()
        fleet.observe_prefill(self.sample("a"))
        before = fleet.prefill(("a", 0)).prefill_seconds(1500, 0)
        self.answers(fleet, 4.0)
        assert fleet.prefill(("a", 0)).prefill_seconds(1500, 0) == before

    def test_document_names_everything(self):
        fleet = FleetEstimates()
        fleet.observe_prefill(self.sample("a"))
        fleet.decode(("a", 0))
        fleet.observe_link("a", "b", 1000, fleet.link("a", "b").transfer_seconds(1000), 0.0)
        document = fleet.document()
        assert document["prefill"]["a/0"]["observations"] == 1
        assert document["decode"]["a/0"]["step_ms"] == 10.5
        assert document["links"]["a>b"]["latency_ms"] == pytest.approx(5.0)


class TestLinks:
    SIZE = 50_000_000

    @classmethod
    def move(cls, fleet, source, seconds, times=20, now=0.0):
        for _ in range(times):
            fleet.observe_link(source, "t", cls.SIZE, seconds, now)

    def test_a_link_is_known_by_what_moved_over_it(self):
        fleet = FleetEstimates()
        self.move(fleet, "a", 0.5)
        self.move(fleet, "b", 0.02)
        assert fleet.link("a", "t").transfer_seconds(self.SIZE) == pytest.approx(0.5, rel=0.05)
        assert fleet.link("b", "t").transfer_seconds(self.SIZE) == pytest.approx(0.02, rel=0.05)

    def test_of_a_new_link_the_others_are_asked_and_with_less_confidence(self):
        fleet = FleetEstimates()
        for source in "abc":
            self.move(fleet, source, 0.5)
        new = fleet.link("new", "t")
        assert new.transfer_seconds(self.SIZE) == pytest.approx(0.5, rel=0.2)
        assert new.spread(self.SIZE) > 2 * fleet.link("a", "t").spread(self.SIZE)
        assert new.calibration.observations == 0
        assert "new>t" not in fleet.document()["links"]

    def test_asking_makes_nothing(self):
        fleet = FleetEstimates()
        for number in range(100):
            fleet.link(str(number), "t")
        assert fleet.document()["links"] == {}

    def test_one_stalled_transfer_hardly_counts(self):
        fleet = FleetEstimates()
        self.move(fleet, "a", 0.05, times=50)
        self.move(fleet, "a", 60.0, times=1)
        assert fleet.link("a", "t").transfer_seconds(self.SIZE) < 0.08

    def test_a_link_that_was_slow_is_tried_again_in_the_end(self):
        fleet = FleetEstimates()
        self.move(fleet, "slow", 5.0)
        self.move(fleet, "a", 0.05)
        for second in range(0, 1800, 10):
            fleet.relax_links(float(second))
        assert fleet.link("slow", "t").transfer_seconds(self.SIZE) < 0.1
        assert fleet.link("slow", "t").spread(self.SIZE) > 0.6

    @pytest.mark.parametrize("seconds", [0.0, -1.0, nan])
    def test_nonsense_changes_nothing(self, seconds):
        fleet = FleetEstimates()
        before = fleet.link("a", "t").transfer_seconds(self.SIZE)
        self.move(fleet, "a", seconds)
        assert fleet.link("a", "t").transfer_seconds(self.SIZE) == before

"""Who is asked for what, what workers are told, and what is learned from their answers. No sockets."""

import json
import time
from typing import Any

import pytest

from cachecore.blocks import Chain, PrefixHash
from cachecore.holders import Epoch, Pool, Tier, Worker, WorkerName
from cachecore.index.contract import Match, Place
from cachecore.index.schema import holder_id
from cachecore.scope import DEFAULT_TENANT, Fidelity, Keyring
from cachecore.store.pools import Extent
from cachecore.store.pools.journal import RunDocument
from cachecore.transfer.errors import REASONS, Reason
from cachecore.transfer.plan import PARAMETER, read_plan
from gateway.config import WorkerConfig
from gateway.edge.http1 import parse_request_head
from gateway.edge.server import Inbound
from gateway.fleet.engines.contract import Discovery, OpenPool, TransferAbility
from gateway.fleet.pools import PoolKnowledge
from gateway.fleet.trust import Trust
from gateway.fleet.worker import ModelPool, WorkerRecord
from gateway.requests import Kind, Request
from gateway.tenants import Tenant
from gateway.transfers import (
    CAPABILITY_SECONDS,
    SOURCES_MAX,
    Flight,
    Identity,
    Promise,
    Task,
    Transfers,
    TransferSettings,
    read_report,
)
from gateway.views.transfers import OUTCOMES, TransferCollector
from policies.contract import WorkerView
from policies.estimates import FleetEstimates, PrefillModel
from policies.state.guard import GuardSettings, QualityGuard, Sample
from policies.state.inflight import WorkerAccount
from policies.transfer import DeadlineBounds, PullOption, Pulls, Supply

TENANT = Tenant(DEFAULT_TENANT)
BLOCK = 16
BLOCKS = 100
PROMPT = BLOCKS * BLOCK + 5
CLASS = "c1" * 16
CHAIN = Chain(b"".join(bytes([number]) * 16 for number in range(BLOCKS)))
ROOT = PrefixHash(b"r" * 16)
REASON_NAMES = [reason.value for reason in REASONS]


class Fleet:
    """Workers as probes would have found them."""

    def __init__(
        self, names: str = "ab", pools: PoolKnowledge | None = None, guard: QualityGuard | None = None, **settings: Any
    ) -> None:
        self.keyring = Keyring.generate()
        self.records: dict[str, WorkerRecord] = {}
        self.estimates = FleetEstimates()
        wanted = {"fidelity": Fidelity.QUANTIZED, "codecs": ("i8", "raw"), "bounds": DeadlineBounds(), **settings}
        self.transfers = Transfers(TransferSettings(**wanted), self.keyring, self.records, self.estimates, pools, guard)
        self.pool = ModelPool("m", block_size_tokens=BLOCK)
        for name in names:
            self.add(name)

    def add(self, name: str, **ability: Any) -> WorkerRecord:
        record = WorkerRecord.of(WorkerConfig(url=f"http://127.0.0.1:{8000 + len(self.records)}", name=name))
        fields = {
            "holder": Worker(WorkerName(f"{name}.internal"), Epoch(7), 0),
            "addresses": (f"tcp://10.0.0.{len(self.records)}:7100",),
            "compatibility": CLASS,
            "codecs": frozenset({"raw", "i8"}),
            "bytes_per_token": 20_000,
        }
        discovery = Discovery({}, epoch=7, block_size_tokens=BLOCK)
        discovery.transfer = TransferAbility(**{**fields, **ability})
        record.discovery, record.epoch, record.healthy = discovery, Epoch(7), True
        record.trust.follow(True)
        record.holders = (record.holder(),)
        self.records[name] = record
        self.pool.workers.append(record)
        return record

    def change(self, name: str, **ability: Any) -> None:
        discovery = self.records[name].discovery
        assert discovery is not None
        assert discovery.transfer is not None
        fields = {field: getattr(discovery.transfer, field) for field in TransferAbility.__dataclass_fields__}
        discovery.transfer = TransferAbility(**{**fields, **ability})

    def pulls(self, depths: dict[Any, int], accepted: Fidelity = Fidelity.QUANTIZED, now: float = 0.0) -> Pulls | None:
        """`depths`: by worker, or by (worker, fidelity), or by place."""
        match = Match(BLOCKS, {self.place(key): depth for key, depth in depths.items()})
        return self.transfers.pulls(self.request(accepted), self.pool, CHAIN, match, PROMPT, now)

    def request(self, fidelity: Fidelity | None = None) -> Request:
        head = parse_request_head(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x")
        request = Request("r", "r", Kind.CHAT, Inbound(head, "/v1/chat/completions", b"", ""), None, TENANT)
        request.fidelity = fidelity
        return request

    def place(self, key: Any) -> Place:
        if isinstance(key, Place):
            return key
        name, fidelity = key if isinstance(key, tuple) else (key, Fidelity.EXACT)
        return Place(Worker(WorkerName(name), Epoch(7), 0), Tier.L0, fidelity)

    def option(self, depths: dict[Any, int], target: str = "b", **fields: Any) -> PullOption | None:
        matched = fields.pop("matched", 0)
        pulls = self.pulls(depths, **fields)
        view = WorkerView(target, 0, WorkerAccount(target, 0), PrefillModel(), matched, matched)
        return None if pulls is None else pulls.option(view, 0.0)

    def task(self, target: str = "b", request_id: str = "r1", accepted: Fidelity = Fidelity.QUANTIZED) -> Task:
        identity = Identity(self.keyring.key_id(DEFAULT_TENANT), ROOT)
        return Task(request_id, self.records[target], identity, CHAIN, BLOCK, accepted)

    def fly(self, depths: dict[Any, int], now: float = 0.0, **fields: Any) -> Flight:
        option = self.option(depths, now=now, **fields)
        assert option is not None
        flight = self.transfers.plan(option, self.task(), now)
        assert flight is not None
        return flight

    def answer(self, flight: Flight, text: str, now: float = 0.0) -> None:
        headers = [(b"x-ropeway-fidelity", b"quantized"), (b"x-ropeway-transfer", text.encode())]
        assert self.transfers.answered(flight, headers, now) == read_report(text.encode())


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


class TestWhoCanGive:
    def test_a_confirmed_holder_of_the_same_class(self, fleet: Fleet) -> None:
        option = fleet.option({"a": BLOCKS})
        assert option is not None
        assert (str(option.source), option.codec, option.fidelity) == ("a", "i8", Fidelity.QUANTIZED)
        assert (option.first_token, option.end_token) == (0, BLOCKS * BLOCK)
        assert option.size_bytes == pytest.approx(BLOCKS * BLOCK * 20_000 / 1.94, rel=0.001)

    def test_a_full_hit_leaves_its_last_block_to_be_computed(self, fleet: Fleet) -> None:
        match = Match(BLOCKS, {fleet.place("a"): BLOCKS})
        pulls = fleet.transfers.pulls(fleet.request(), fleet.pool, CHAIN, match, BLOCKS * BLOCK, 0.0)
        view = WorkerView("b", 0, WorkerAccount("b", 0), PrefillModel(), 0, 0)
        assert pulls is not None
        option = pulls.option(view, 0.0)
        assert option is not None
        assert option.end_token == (BLOCKS - 1) * BLOCK

    @pytest.mark.parametrize(
        "change",
        [
            {"healthy": False},
            {"trust": Trust()},
            {"epoch": Epoch(8)},
            {"discovery": None},
        ],
    )
    def test_nobody_else(self, fleet: Fleet, change: dict[str, Any]) -> None:
        for name, value in change.items():
            setattr(fleet.records["a"], name, value)
        assert fleet.option({"a": BLOCKS}) is None

    @pytest.mark.parametrize(
        "ability",
        [{"compatibility": "c2" * 16}, {"codecs": frozenset({"lm3h"})}, {"addresses": ()},
         {"addresses": ("tcp+tls://10.0.0.0:7100",)}, {"holder": Worker(WorkerName("a"), Epoch(7), 1)}],
    )  # fmt: skip
    def test_nobody_who_cannot(self, fleet: Fleet, ability: dict[str, Any]) -> None:
        fleet.change("a", **ability)
        assert fleet.option({"a": BLOCKS}) is None

    def test_over_a_transport_of_both(self, fleet: Fleet) -> None:
        """TLS is one: who has it exchanges nothing with who has not."""
        safe = "tcp+tls://10.0.0.0:7100"
        fleet.change("b", addresses=("nixl://10.0.0.1:7101", safe))
        assert fleet.option({"a": BLOCKS}) is None
        fleet.change("a", addresses=(safe,))
        assert fleet.option({"a": BLOCKS}) is not None
        fleet.change("b", addresses=())  # it only pulls, and does not say over what
        assert fleet.option({"a": BLOCKS}) is not None

    def test_names_must_mean_the_same(self, fleet: Fleet) -> None:
        for name in "ab":
            discovery = fleet.records[name].discovery
            assert discovery is not None
            discovery.block_size_tokens = 2 * BLOCK
            assert fleet.option({"a": BLOCKS}) is None
            discovery.block_size_tokens = BLOCK

    def test_not_oneself_and_not_who_is_gone(self, fleet: Fleet) -> None:
        assert fleet.option({"b": BLOCKS}) is None
        assert fleet.option({"gone": BLOCKS}) is None
        assert fleet.pulls({}) is None

    def test_what_is_there_is_not_pulled(self, fleet: Fleet) -> None:
        option = fleet.option({"a": BLOCKS}, matched=40 * BLOCK)
        assert option is not None
        assert (option.first_token, option.tokens) == (40 * BLOCK, 60 * BLOCK)
        assert fleet.option({"a": 40}, matched=40 * BLOCK) is None

    def test_the_deepest_are_weighed_and_of_those_as_deep_the_least_burdened(self) -> None:
        fleet = Fleet("abcdefgh")
        for number, name in enumerate("acdefgh"):
            fleet.transfers.accounts.begin(name, name, (7 - number) * 10**6, ends_at=10.0)
        option = fleet.option(dict.fromkeys("acdefgh", BLOCKS))
        assert option is not None
        assert (str(option.source), option.ahead_bytes) == ("h", 10**6)
        option = fleet.option(dict.fromkeys("acdef", BLOCKS) | {"g": 50, "h": 20})
        assert option is not None
        assert str(option.source) == "f"
        assert SOURCES_MAX < 5


class TestFidelity:
    def test_who_wants_exact_kv_gets_the_engines_bytes(self, fleet: Fleet) -> None:
        option = fleet.option({"a": BLOCKS}, accepted=Fidelity.EXACT)
        assert option is not None
        assert (option.codec, option.fidelity) == ("raw", Fidelity.EXACT)
        assert fleet.option({("a", Fidelity.QUANTIZED): BLOCKS}, accepted=Fidelity.EXACT) is None

    def test_of_what_is_held_twice_the_deeper_that_is_good_enough(self, fleet: Fleet) -> None:
        held = {"a": 60, ("a", Fidelity.QUANTIZED): 80, ("a", Fidelity.FUSED): 100}
        depths = {accepted: option.end_token // BLOCK for accepted in Fidelity
                  if (option := fleet.option(held, accepted=accepted)) is not None}  # fmt: skip
        assert depths == {Fidelity.EXACT: 60, Fidelity.QUANTIZED: 80, Fidelity.ROTATED: 80, Fidelity.FUSED: 100}

    def test_what_is_quantized_moves_as_it_is(self, fleet: Fleet) -> None:
        option = fleet.option({("a", Fidelity.QUANTIZED): BLOCKS})
        assert option is not None
        assert (option.codec, option.fidelity) == ("raw", Fidelity.QUANTIZED)
        assert Fleet(codecs=("i8",)).option({("a", Fidelity.QUANTIZED): BLOCKS}) is None

    def test_the_codec_that_is_liked_best_and_both_have(self, fleet: Fleet) -> None:
        fleet.change("b", codecs=frozenset({"raw"}))
        option = fleet.option({"a": BLOCKS})
        assert option is not None
        assert option.codec == "raw"


class TestGuard:
    """A codec that was found wanting is not planned for whom it failed."""

    @pytest.fixture
    def guard(self) -> QualityGuard:
        return QualityGuard(GuardSettings({"i8": 1e-3}, samples_min=4, window=20))

    def trip(self, guard: QualityGuard, tenant: str, model: str = "m") -> None:
        for _ in range(20):
            guard.record(model, Sample(tenant, "i8", "quantized", 0.0, 0.5, 0.9), 0.0)

    def test_then_the_next_codec_is_taken(self, guard: QualityGuard) -> None:
        fleet = Fleet(guard=guard)
        self.trip(guard, TENANT.id)
        option = fleet.option({"a": BLOCKS})
        assert option is not None
        assert (option.codec, option.fidelity) == ("raw", Fidelity.EXACT)
        # And what is there already is not taken either.
        assert fleet.transfers.accepted(fleet.request(), fleet.pool, 0.0) is Fidelity.EXACT
        assert fleet.option({("a", Fidelity.QUANTIZED): BLOCKS}) is None

    def test_others_go_on(self, guard: QualityGuard) -> None:
        fleet = Fleet(guard=guard)
        self.trip(guard, "somebody else")
        self.trip(guard, TENANT.id, model="another")
        option = fleet.option({"a": BLOCKS})
        assert option is not None
        assert option.codec == "i8"

    def test_after_a_rest_it_is_tried_again(self, guard: QualityGuard) -> None:
        fleet = Fleet(guard=guard)
        self.trip(guard, TENANT.id)
        option = fleet.option({"a": BLOCKS}, now=4000.0)
        assert option is not None
        assert option.codec == "i8"


class TestPlans:
    def test_what_a_worker_is_told(self, fleet: Fleet) -> None:
        flight = fleet.fly({"a": 90}, matched=40 * BLOCK)
        document = json.loads(flight.body)
        (plan,) = document[PARAMETER]
        target = Worker(WorkerName("b.internal"), Epoch(7), 0)
        pull = read_plan(plan, fleet.keyring, target, time.time())
        assert pull.plan.source == Worker(WorkerName("a.internal"), Epoch(7), 0)
        assert plan["source"] == holder_id(pull.plan.source).decode()
        assert pull.plan.addresses == ("tcp://10.0.0.0:7100",)
        assert (pull.plan.run.first_block, pull.plan.run.blocks) == (40, 50)
        assert (pull.plan.run.parent, pull.plan.run.tail) == (bytes([39]) * 16, bytes([89]) * 16)
        assert pull.plan.source_position == pull.plan.target_position == 40 * BLOCK
        assert pull.plan.deadline_seconds == flight.option.deadline_seconds
        assert pull.capability.key_id == fleet.keyring.key_id(DEFAULT_TENANT)
        assert pull.capability.fidelity is Fidelity.QUANTIZED
        left = pull.capability.expires_at - time.time()
        # To the millisecond: rounded when it was written.
        assert CAPABILITY_SECONDS - 5 < left <= CAPABILITY_SECONDS + flight.option.deadline_seconds + 0.001
        assert fleet.transfers.metrics.plans == {("worker", "i8"): 1}

    def test_from_the_beginning_the_parent_is_the_root(self, fleet: Fleet) -> None:
        (run,) = fleet.fly({"a": 90}).runs
        assert (run.parent, run.first_block) == (ROOT, 0)

    def test_a_key_that_is_gone_is_no_plan_and_no_failure(self, fleet: Fleet) -> None:
        option = fleet.option({"a": 90})
        assert option is not None
        task = fleet.task()
        task = task._replace(identity=Identity(task.identity.key_id.__class__(DEFAULT_TENANT, 9), ROOT))
        assert fleet.transfers.plan(option, task, 0.0) is None
        assert fleet.transfers.metrics.unsigned == 1
        assert len(fleet.transfers.accounts) == 0

    def test_pulls_under_way_go_first_until_they_should_be_done(self, fleet: Fleet) -> None:
        fleet.add("c")
        flight = fleet.fly({"a": BLOCKS})
        later = fleet.option({"a": BLOCKS}, target="c")
        assert later is not None
        assert later.ahead_bytes == flight.option.size_bytes
        assert later.load_seconds > flight.option.load_seconds
        done = fleet.option({"a": BLOCKS}, target="c", now=flight.option.load_seconds)
        assert done is not None
        assert done.ahead_bytes == 0

    def test_a_worker_that_does_not_answer_frees_its_source(self, fleet: Fleet) -> None:
        fleet.transfers.abandoned(fleet.fly({"a": BLOCKS}))
        assert len(fleet.transfers.accounts) == 0


class TestReports:
    def test_a_report(self) -> None:
        report = read_report(b"outcome=fetched; tokens=1888; bytes=43515904; seconds=0.041; sources=1")
        assert report == ("fetched", "", 1888, 43_515_904, 0.041)
        assert read_report(b"outcome=failed; reason=deadline; tokens=0").reason == "deadline"

    @pytest.mark.parametrize(
        "text",
        [b"", b"fetched", b"outcome=FETCHED", b"outcome=a b", b"outcome=fetched; tokens=x", b"\xff=\xff",
         b"outcome=fetched; tokens=-1", b"outcome=failed; reason=<script>", b"outcome=fetched; bytes=1e9"],
    )  # fmt: skip
    def test_what_says_nothing(self, text: bytes) -> None:
        assert read_report(text).outcome == "malformed"

    def test_a_link_is_learned_with_what_went_first(self, fleet: Fleet) -> None:
        fleet.add("c")
        fleet.fly({"a": BLOCKS})
        option = fleet.option({"a": BLOCKS}, target="c")
        assert option is not None
        flight = fleet.transfers.plan(option, fleet.task("c", "r2"), 0.0)
        assert flight is not None
        size = flight.option.size_bytes
        fleet.answer(flight, f"outcome=fetched; tokens=1600; bytes={size}; seconds={option.load_seconds}; sources=1")
        link = fleet.estimates.link("a", "c")
        assert link.calibration.observations == 1
        assert link.transfer_seconds(2 * size) == pytest.approx(option.load_seconds, rel=0.01)

    def test_what_a_codec_leaves_is_learned(self, fleet: Fleet) -> None:
        fleet.answer(fleet.fly({"a": BLOCKS}), "outcome=fetched; tokens=1600; bytes=8000000; seconds=0.01; sources=1")
        option = fleet.option({"a": BLOCKS})
        assert option is not None
        assert option.size_bytes == 8_000_000

    @pytest.mark.parametrize("reason", REASON_NAMES)
    def test_a_source_that_disappoints_is_left_alone_for_a_while(self, fleet: Fleet, reason: str) -> None:
        harmless = {Reason.STALE, Reason.EXPIRED, Reason.OTHER_EPOCH, Reason.OTHER_SOURCE, Reason.OTHER_TARGET}
        harmless |= {Reason.OTHER_TENANT}
        fleet.answer(fleet.fly({"a": BLOCKS}), f"outcome=failed; reason={reason}; tokens=0")
        assert (fleet.option({"a": BLOCKS}) is not None) is (reason in harmless)
        # With or without: what it may have taught of the link is forgotten, too.
        assert fleet.option({"a": BLOCKS}, now=3600.0) is not None
        assert fleet.transfers.metrics.outcomes == {("failed", reason): 1}

    def test_a_missed_deadline_says_that_the_link_is_slower(self, fleet: Fleet) -> None:
        flight = fleet.fly({"a": BLOCKS})
        before = fleet.estimates.link("a", "b").transfer_seconds(10**8)
        fleet.answer(flight, "outcome=failed; reason=deadline; tokens=0")
        assert fleet.estimates.link("a", "b").transfer_seconds(10**8) > 1.3 * before

    def test_no_report(self, fleet: Fleet) -> None:
        fleet.transfers.answered(fleet.fly({"a": BLOCKS}), [(b"content-type", b"x")], 0.0)
        assert fleet.transfers.metrics.outcomes == {("unreported", ""): 1}
        fleet.transfers.answered(None, [(b"x-ropeway-fidelity", b"exact")], 0.0)
        assert fleet.transfers.metrics.answers == {Fidelity.EXACT: 1}

    def test_labels_are_bounded_whatever_a_worker_writes(self, fleet: Fleet) -> None:
        for number in range(50):
            fleet.answer(fleet.fly({"a": BLOCKS}), f"outcome={'abcde'[number % 5]}{'f' * (number // 5)}; reason=x")
        assert fleet.transfers.metrics.outcomes == {("other", "other"): 50}
        samples = [s for family in TransferCollector(fleet.transfers.metrics, lambda: 0).collect() for s in
                   family.samples]  # fmt: skip
        (outcome,) = [s for s in samples if s.name == "ropeway_transfer_outcomes_total"]
        assert (outcome.labels, outcome.value) == ({"outcome": "other", "reason": "other"}, 50)
        assert "fetched" in OUTCOMES


class TestPools:
    RUN_BLOCKS = 8
    HOLDER = Pool("shared", 3)

    @pytest.fixture
    def fleet(self) -> Fleet:
        knowledge = PoolKnowledge()
        for first in range(0, 80, self.RUN_BLOCKS):
            self.store(knowledge, first)
        fleet = Fleet(pools=knowledge)
        fleet.change("b", pools=(OpenPool("shared", 3, self.RUN_BLOCKS, "i8"),))
        self.knowledge = knowledge
        return fleet

    def store(self, knowledge: PoolKnowledge, first: int) -> None:
        names = ROOT + CHAIN
        document: dict[str, Any] = {
            "pool": "shared",
            "generation": 3,
            "parent": names[first * 16 : (first + 1) * 16],
            "chain": CHAIN[first * 16 : (first + self.RUN_BLOCKS) * 16],
            "first_block": first,
            "scope": b"s" * 16,
            "tenant": DEFAULT_TENANT,
            "key_epoch": 0,
            "compatibility": bytes.fromhex(CLASS),
            "layers": Extent(0, 4),
            "heads": Extent(0, 2),
            "codec": "i8",
            "fidelity": Fidelity.QUANTIZED,
        }
        knowledge.store(RunDocument(**document))

    def test_a_plan_for_each_run(self, fleet: Fleet) -> None:
        flight = fleet.fly({}, matched=10 * BLOCK)
        option = flight.option
        assert (str(option.source), option.codec) == ("pool:shared", "i8")
        assert (option.first_token, option.end_token) == (10 * BLOCK, 80 * BLOCK)
        plans = json.loads(flight.body)[PARAMETER]
        assert [plan["start_block"] for plan in plans] == list(range(8, 80, 8))
        target = Worker(WorkerName("b.internal"), Epoch(7), 0)
        pulls = [read_plan(plan, fleet.keyring, target, time.time()) for plan in plans]
        assert {pull.plan.source for pull in pulls} == {self.HOLDER}
        assert fleet.transfers.metrics.plans == {("pool", "i8"): 1}

    def test_only_what_the_target_has_open_and_the_request_accepts(self, fleet: Fleet) -> None:
        assert fleet.option({}, target="a") is None
        assert fleet.option({}, accepted=Fidelity.EXACT) is None
        fleet.change("b", pools=(OpenPool("shared", 2, self.RUN_BLOCKS, "i8"),))
        assert fleet.option({}) is None

    def test_the_better_of_a_peer_and_a_pool(self, fleet: Fleet) -> None:
        for _ in range(20):
            fleet.estimates.observe_link("pool:shared", "b", 10**7, 1.0, 0.0)
            fleet.estimates.observe_link("a", "b", 10**7, 0.002, 0.0)
        option = fleet.option({"a": 80})
        assert option is not None
        assert str(option.source) == "a"

    def test_a_run_that_was_not_there_is_doubted(self, fleet: Fleet) -> None:
        flight = fleet.fly({})
        # Two runs came, the third did not.
        fleet.answer(flight, f"outcome=failed; reason=stale; tokens={2 * self.RUN_BLOCKS * BLOCK}; bytes=9; seconds=1")
        again = fleet.option({})
        assert again is not None
        assert again.end_token == 2 * self.RUN_BLOCKS * BLOCK
        assert self.knowledge.stats.doubted == 1


class TestPromises:
    """What a worker will have computed, whatever is known of it now."""

    def promised(self, fleet: Fleet, blocks: int = BLOCKS, **settings: Any) -> Supply | None:
        promise = Promise(fleet.request(settings.get("fidelity")), fleet.pool, fleet.records["b"], 0, blocks)
        found = fleet.transfers.promised(promise, fleet.records["a"], 0, 0.0)
        return None if found is None else found[0]

    def test_a_promise_needs_no_events(self, fleet: Fleet) -> None:
        fleet.records["a"].trust.follow(False)
        supply = self.promised(fleet)
        assert supply is not None
        assert (str(supply.source), supply.tokens, supply.codec) == ("a", BLOCKS * BLOCK, "i8")
        assert supply.fidelity is Fidelity.QUANTIZED

    def test_it_comes_as_what_the_request_accepts(self, fleet: Fleet) -> None:
        supply = self.promised(fleet, fidelity=Fidelity.EXACT)
        assert supply is not None
        assert (supply.codec, supply.fidelity) == ("raw", Fidelity.EXACT)

    @pytest.mark.parametrize(
        ("name", "ability"),
        [
            ("a", {"compatibility": "d2" * 16}),
            ("a", {"addresses": ()}),
            ("a", {"codecs": frozenset({"other"})}),
            ("a", {"holder": Worker(WorkerName("a.internal"), Epoch(7), 1)}),
            ("b", {"holder": Worker(WorkerName("b.internal"), Epoch(7), 1)}),
        ],
    )
    def test_whose_kv_cannot_come(self, fleet: Fleet, name: str, ability: dict[str, Any]) -> None:
        fleet.change(name, **ability)
        assert self.promised(fleet) is None

    def test_a_worker_that_moves_nothing(self, fleet: Fleet) -> None:
        for name in "ab":
            fleet.records[name].discovery.transfer = None  # type: ignore[union-attr]
            assert self.promised(fleet) is None

    def test_one_that_failed_this_target_is_left_alone(self, fleet: Fleet) -> None:
        fleet.transfers.accounts.failed("a", "b", "unreachable", 0.0)
        assert self.promised(fleet) is None

    def test_a_prompt_of_less_than_a_block(self, fleet: Fleet) -> None:
        assert self.promised(fleet, blocks=0) is None

    def test_what_is_under_way_goes_first(self, fleet: Fleet) -> None:
        flight = fleet.fly({"a": BLOCKS})
        supply = self.promised(fleet)
        assert supply is not None
        assert supply.ahead_bytes == flight.option.size_bytes

"""Passages that are held elsewhere: found at any offset, as long as a chain holds them, and only where it pays."""

import json
import random
import time
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest

from cachecore.blocks import pack_tokens, split_chain
from cachecore.events import BlockRemoved, BlockStored
from cachecore.holders import Epoch, Place, Tier, Worker, WorkerName
from cachecore.index.content import MemoryContentIndex
from cachecore.index.content_feed import ContentFeed
from cachecore.prompts.naming import PromptNamer
from cachecore.prompts.plain import PlainRenderer
from cachecore.rekey import Rekeyer
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, KeyId, Keyring, Naming, Salt, TenantId
from cachecore.transfer.plan import read_plan
from gateway.prompts import Prompts
from gateway.requests import Kind
from gateway.shifted import NO_PASSAGES, Asked, PassagePlanner, Passages, ShiftedRun, worthwhile
from policies.state.guard import GuardSettings, QualityGuard, Sample
from tests.gateway.test_transfers import Fleet

SIZE = 16
RING = Keyring({0: bytes(range(32))}, 0)
A, B, C = (Worker(WorkerName(name), Epoch(1)) for name in "abc")


def naming(tenant=DEFAULT_TENANT):
    return Naming.of(IdentityScope("m", KeyId(tenant, 0), SIZE), RING)


OURS = naming()


def text(seed, count):
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(count)]


class World:
    """Workers that have answered prompts."""

    def __init__(self):
        self.feed = ContentFeed(MemoryContentIndex())
        self.rekeyers = {}
        self.of = OURS

    def answered(self, holder, prompt, medium="GPU", salt=None):
        full = prompt[: len(prompt) // SIZE * SIZE]
        event = BlockStored(self.handles(full), None, full, SIZE, medium, cache_salt=salt)
        self._tell(holder, event)

    def evicted(self, holder, prompt, block):
        self._tell(holder, BlockRemoved((self.handles(prompt)[block],)))

    def handles(self, prompt):
        chain = self.of.hasher.chain(self.of.root, pack_tokens(prompt))
        return tuple(int.from_bytes(name[:8], "little") for name in split_chain(chain))

    def find(self, prompt, start=0, usable=lambda holder: True, target=A, of=None):
        return Passages(self.feed, of or self.of, pack_tokens(prompt[:-1])).find(start, usable, target)

    def _tell(self, holder, event):
        rekeyer = self.rekeyers.setdefault(holder, Rekeyer(SIZE, lambda salt, adapter: self.of, with_texts=True))
        self.feed.apply(holder, rekeyer.rekey([event]))


@pytest.fixture
def world():
    return World()


SYSTEM, DOCUMENTS = text("system", 37), [text(f"document {number}", 120) for number in range(4)]
QUESTION = text("question", 23)
FIRST = [*SYSTEM, *DOCUMENTS[0], *DOCUMENTS[1], *DOCUMENTS[2]]


def spans(runs):
    return [(run.source_position, run.target_position, run.tokens) for run in runs]


def check(prompt, source, runs):
    """The runs say what the prompt says, and are named as the source's blocks are."""
    names = [OURS.root, *split_chain(OURS.hasher.chain(OURS.root, pack_tokens(source)))]
    for run in runs:
        target = prompt[run.target_position : run.target_position + run.tokens]
        assert source[run.source_position : run.source_position + run.tokens] == target
        first, blocks = run.run.first_block, run.run.blocks
        assert (run.run.parent, run.run.tail) == (names[first], names[first + blocks])
        assert (run.source_position, run.tokens) == (first * SIZE, blocks * SIZE)


def test_passages_in_another_order_are_found_at_their_offsets(world):
    world.answered(B, FIRST)
    prompt = [*SYSTEM, *DOCUMENTS[2], *DOCUMENTS[3], *DOCUMENTS[0], *QUESTION]
    runs = world.find(prompt, start=32)
    check(prompt, FIRST, runs)
    # Whole blocks of what document 2 and document 0 were: a passage loses what its blocks shared with neighbours.
    assert spans(runs) == [(288, 48, 96), (48, 288, 96)]
    assert {run.place for run in runs} == {Place(B, Tier.L0)}


def test_what_is_there_already_is_not_looked_for(world):
    world.answered(B, FIRST)
    assert spans(world.find(FIRST, start=0)) == [(0, 0, 384)]
    assert spans(world.find(FIRST, start=160)) == [(160, 160, 224)]


def test_a_run_ends_where_the_holder_has_a_hole_and_begins_again_behind_it(world):
    world.answered(B, FIRST)
    world.evicted(B, FIRST, 5)
    prompt = [*text("other", 50), *FIRST[48:160], *QUESTION]
    assert spans(world.find(prompt)) == [(48, 50, 32), (96, 98, 64)]


def test_blocks_of_several_chains_are_no_run(world):
    world.answered(B, [*text(1, 32), *DOCUMENTS[0][:32]])
    world.answered(B, [*text(2, 64), *DOCUMENTS[0][32:64]])
    prompt = [*text(3, 5), *DOCUMENTS[0][:64], *QUESTION]
    assert spans(world.find(prompt)) == [(32, 5, 32), (64, 37, 32)]


def test_the_longest_run_goes_first_then_the_workers_own(world):
    world.answered(B, DOCUMENTS[0][:64])
    world.answered(A, DOCUMENTS[0][:32])
    prompt = [1, 2, 3, *DOCUMENTS[0], *QUESTION]
    assert [run.place.holder for run in world.find(prompt)] == [B]
    world.answered(C, DOCUMENTS[0][:64], medium="CPU")
    world.answered(A, DOCUMENTS[0][:64], medium="CPU")
    assert [run.place for run in world.find(prompt)] == [Place(A, Tier.L1)]
    assert [run.place for run in world.find(prompt, target=C)] == [Place(C, Tier.L1)]


def test_only_usable_holders_and_the_target_itself(world):
    world.answered(B, DOCUMENTS[0])
    prompt = [1, 2, 3, *DOCUMENTS[0], *QUESTION]
    assert world.find(prompt, usable=lambda holder: holder != B) == []
    assert len(world.find(prompt, usable=lambda holder: False, target=B)) == 1


def test_the_last_token_is_left_to_be_computed(world):
    world.answered(B, DOCUMENTS[0][:64])
    assert spans(world.find([1, *DOCUMENTS[0][:64]])) == [(0, 1, 48)]


def test_other_tenants_texts_are_not_found(world):
    world.answered(B, FIRST)
    assert world.find([1, *FIRST], of=naming(TenantId("acme"))) == []


def test_a_text_that_repeats_itself_takes_a_bounded_time(world):
    for number in range(40):
        world.answered(B, [number, *[7] * 79])
    runs = world.find([*[7] * 4000, *QUESTION])
    assert runs
    assert all(later.target_position >= run.target_position + run.tokens for run, later in pairwise(runs))
    passages = Passages(world.feed, OURS, pack_tokens([7] * 4000))
    passages.find(0, lambda holder: False, A)
    assert passages._extensions == 0


def test_a_false_find_comes_to_nothing(world):
    """A fingerprint that two texts share leads to the one that is held; its names do not fit the prompt's tokens."""
    world.answered(B, DOCUMENTS[0])
    prompt = [*text("elsewhere", 40), *QUESTION]
    windows = world.feed.fingerprinter(OURS).windows(pack_tokens(prompt))
    [content] = OURS.hasher.contents(pack_tokens(DOCUMENTS[0][:SIZE]))
    world.feed.index._by_fingerprint[int(windows[3])] = content
    assert world.find(prompt) == []


# ---- what pays -------------------------------------------------------------------------------------------------------


class Linear(NamedTuple):
    constant: float
    per_token: float

    def prefill_seconds(self, new_tokens, context_tokens, decoding_tokens=0):
        return self.constant + self.per_token * new_tokens


def run_of(position, tokens):
    return ShiftedRun(Place(B, Tier.L0), None, 0, position, tokens)


@pytest.mark.parametrize(
    ("tokens", "load", "kept"),
    [(96, 0.0, True), (96, 0.055, True), (96, 0.065, False), (96, 0.09, False), (16, 0.0, False)],
)
def test_a_run_must_save_more_than_it_costs(tokens, load, kept):
    """At a millisecond a token: 0.83 of a run's tokens are saved, and the question's 20 are computed twice."""
    runs = [run_of(100, tokens)]
    prompt_tokens = 100 + tokens + 20
    kept_runs, saved = worthwhile(runs, prompt_tokens, 100, Linear(0.0, 0.001), lambda run: load)
    assert kept_runs == (runs if kept else [])
    assert saved == pytest.approx(round(tokens * 0.83) / 1000 - load - 0.02 if kept else 0.0)


def test_cheap_runs_pay_for_the_question_together_and_dear_ones_are_left_out():
    runs = [run_of(100, 32), run_of(150, 32), run_of(200, 320)]
    loads = {100: 0.001, 150: 0.5, 200: 0.01}
    chosen, _ = worthwhile(runs, 560, 96, Linear(0.01, 0.001), lambda run: loads[run.target_position])
    assert [run.target_position for run in chosen] == [100, 200]


def test_nothing_found_is_nothing_planned():
    assert worthwhile([], 500, 0, Linear(0.0, 1.0), lambda run: 0.0) == ([], 0.0)


# ---- plans -----------------------------------------------------------------------------------------------------------


NOW = 100.0


class Gateway(World):
    """What plans are made from: a fleet whose workers `a`, `b` and `c` move KV, and what they have answered."""

    def __init__(self, guard=None):
        super().__init__()
        self.fleet = Fleet("abc", guard=guard)
        for record in self.fleet.records.values():
            record.discovery.transfer = replace(record.discovery.transfer, shifted=True)
        self.of = Naming.of(IdentityScope("m", self.fleet.keyring.key_id(DEFAULT_TENANT), SIZE), self.fleet.keyring)
        self.planner = PassagePlanner(self.feed, self.fleet.transfers, self.fleet.keyring)
        self.request = self.fleet.request(Fidelity.FUSED)

    def holder(self, name):
        return self.fleet.records[name].holder()

    def plans(self, prompt, target="a", start=32, per_token=0.001):
        record = self.fleet.records[target]
        prefill = Linear(0.0, per_token)
        tokens = pack_tokens(prompt)
        return self.planner.plans(Asked(self.request, self.fleet.pool, self.of, tokens, start, record, 0, prefill), NOW)

    def read(self, documents, target="a"):
        """As the target reads them."""
        holder = self.fleet.records[target].transfer.holder
        return [read_plan(document, self.fleet.keyring, holder, time.time()) for document in documents]


PROMPT = [*SYSTEM, *DOCUMENTS[2], *DOCUMENTS[3], *DOCUMENTS[0], *QUESTION]


@pytest.fixture
def gateway():
    return Gateway()


def test_plans_are_signed_for_the_target_and_say_where_from_and_where_to(gateway):
    gateway.answered(gateway.holder("b"), FIRST)
    plans = gateway.plans(PROMPT)
    pulls = gateway.read(plans.documents)
    assert [(pull.plan.source_position, pull.plan.target_position) for pull in pulls] == [(288, 48), (48, 288)]
    source = gateway.fleet.records["b"].transfer
    for pull in pulls:
        assert (pull.plan.source, pull.plan.addresses, pull.plan.codec) == (source.holder, source.addresses, "i8")
        assert (pull.capability.fidelity, pull.plan.run.blocks) == (Fidelity.FUSED, 6)
    assert (plans.tokens, plans.fraction) == (192, 0.15)
    assert plans.prefill_seconds == pytest.approx((len(PROMPT) - 32 - 159) / 1000)
    assert json.loads(plans.body) == {"ropeway": plans.documents, "ropeway_recompute_fraction": 0.15}


def test_its_own_passages_need_no_address_and_no_codec(gateway):
    gateway.answered(gateway.holder("a"), FIRST)
    gateway.answered(gateway.holder("b"), FIRST)
    own = gateway.fleet.records["a"].transfer
    plans = [pull.plan for pull in gateway.read(gateway.plans(PROMPT).documents)]
    assert [(plan.source, plan.addresses, plan.codec) for plan in plans] == [(own.holder, (), "raw")] * 2


def spoil(gateway, name):
    record, request = gateway.fleet.records["b"], gateway.request
    match name:
        case "other class":
            record.discovery.transfer = replace(record.transfer, compatibility="other")
        case "serves nothing":
            record.discovery.transfer = replace(record.transfer, addresses=())
        case "speaks TLS":
            record.discovery.transfer = replace(record.transfer, addresses=("tcp+tls://10.0.0.1:7100",))
        case "moves nothing":
            record.discovery.transfer = None
        case "restarted":
            record.epoch = Epoch(8)
        case "unhealthy":
            record.healthy = False
        case "unconfirmed":
            record.trust.follow(False)
        case "paused":
            gateway.fleet.transfers.accounts.failed("b", "a", "unreachable", NOW)
        case "turns nothing":
            gateway.fleet.records["a"].discovery.transfer = replace(own_of(gateway), shifted=False)
        case "rotated is too little":
            request.fidelity = Fidelity.ROTATED
        case "nothing said":
            request.fidelity = None


def own_of(gateway):
    return gateway.fleet.records["a"].transfer


@pytest.mark.parametrize(
    "name",
    [
        "other class",
        "serves nothing",
        "speaks TLS",
        "moves nothing",
        "restarted",
        "unhealthy",
        "unconfirmed",
        "paused",
        "turns nothing",
        "rotated is too little",
        "nothing said",
    ],
)
def test_nothing_is_planned_where(gateway, name):
    gateway.answered(gateway.holder("b"), FIRST)
    assert gateway.plans(PROMPT).documents
    spoil(gateway, name)
    assert gateway.plans(PROMPT) == NO_PASSAGES


def test_a_slow_link_or_a_fast_worker_computes(gateway):
    gateway.answered(gateway.holder("b"), FIRST)
    assert gateway.plans(PROMPT, per_token=1e-7) == NO_PASSAGES
    for _ in range(50):
        gateway.fleet.estimates.observe_link("b", "a", 1_000_000, 20.0, NOW)
    assert gateway.plans(PROMPT) == NO_PASSAGES


def test_what_was_quantized_once_goes_as_it_is(gateway):
    salt = gateway.fleet.keyring.mint_salt(Salt(gateway.fleet.keyring.key_id(DEFAULT_TENANT), Fidelity.QUANTIZED))
    gateway.answered(gateway.holder("b"), FIRST, salt=salt)
    assert {pull.plan.codec for pull in gateway.read(gateway.plans(PROMPT).documents)} == {"raw"}


def test_the_guard_switches_repairs_off_or_has_more_recomputed():
    guard = QualityGuard(GuardSettings(budgets={"fused": 0.01}))
    gateway = Gateway(guard)
    gateway.answered(gateway.holder("b"), FIRST)
    assert gateway.plans(PROMPT).fraction == guard.recompute_fraction("m", DEFAULT_TENANT)
    fractions = []
    while (plans := gateway.plans(PROMPT)).documents:
        fractions.append(plans.fraction)
        guard.record("m", Sample(DEFAULT_TENANT, "raw", "fused", plans.fraction, 9.0, 0.0), NOW)
        assert len(fractions) < 1000
    assert sorted(set(fractions)) == [0.15, 0.3, 0.5]
    assert plans == NO_PASSAGES


# ---- what a prompt says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (Kind.CHAT, {"messages": [{"role": "user", "content": "hello"}]}, True),
        (Kind.COMPLETION, {"prompt": "hello"}, True),
        (Kind.COMPLETION, {"prompt": [1, 2, 3]}, True),
        (Kind.COMPLETION, {"prompt": ["two", "prompts"]}, False),
        (Kind.COMPLETION, {"prompt": [[1], [2]]}, False),
    ],
)
def test_tokens_are_those_that_the_prompt_was_named_by(gateway, kind, values, said):
    prompts = Prompts(gateway.fleet.keyring, PromptNamer(1 << 20), 10**6)
    pool, request = gateway.fleet.pool, gateway.request
    pool.renderer, request.kind, request.values = PlainRenderer(), kind, values
    found = prompts.passages_of(request, pool)
    assert (found is not None) is said
    if found is not None:
        naming, tokens = found
        expected = values.get("prompt") if isinstance(values.get("prompt"), list) else None
        assert len(tokens) % 4 == 0
        assert expected is None or tokens == pack_tokens(expected)
        assert (naming.scope.key_id, naming.root) == prompts.identity(request, pool)


def test_without_a_renderer_only_the_worker_knows(gateway):
    prompts = Prompts(gateway.fleet.keyring, PromptNamer(1 << 20), 10**6)
    gateway.request.values = {"messages": [{"role": "user", "content": "hello"}]}
    assert prompts.passages_of(gateway.request, gateway.fleet.pool) is None

"""The audit's engine beside a naive one, beside the simulated worker's scheduler, and by itself."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecore.blocks import BlockHasher, split_chain
from loadtest.audit.engine import Engine, EngineShape, Job
from tests.loadtest.audit.naive_engine import NaiveEngine, NaiveJob
from workers.engine import Generation, Sampling
from workers.simulated.cache import BlockCache
from workers.simulated.scheduler import Scheduler, SchedulerLimits
from workers.timing import DYNAMO_POLYNOMIAL, LLAMA_3_70B_TP8, TimingProfile

BLOCK = 4
PROFILES = [
    replace(LLAMA_3_70B_TP8, batch_tokens_max=24, sequences_max=4),
    replace(DYNAMO_POLYNOMIAL, batch_tokens_max=24, sequences_max=4, decode_sequence_seconds=1e-4),
]


def names_of(path: Sequence[int]) -> list[bytes]:
    """Chained: equal names only after equal paths."""
    return [bytes(str(path[: end + 1]).encode()) for end in range(len(path))]


def random_jobs(random: Random, count: int, *, priorities: bool = False) -> list[NaiveJob]:
    """Prompts that grow out of few beginnings, bursts and pauses; each fits into 24 blocks."""
    jobs, arrival = [], 0.0
    for order in range(count):
        arrival += random.choice([0.0, 0.003, 0.03, 0.4]) * random.random()
        path = [random.randrange(2) for _ in range(random.randrange(1, 12))]
        prompt_tokens = len(path) * BLOCK + random.choice([0, 0, 1, 3])
        priority = random.random() if priorities else 0.0
        outputs = random.choice([1, 2, random.randrange(1, 40)])
        jobs.append(NaiveJob(arrival, names_of(path), prompt_tokens, outputs, priority, order))
    return jobs


def run(engine: Engine, jobs: Sequence[NaiveJob]) -> list[tuple[float, float, int]]:
    """First token, end and hits of each, as the event loop of a fleet has it."""
    coming = sorted(range(len(jobs)), key=lambda number: jobs[number].arrival)
    results = [(inf, inf, 0)] * len(jobs)
    while coming or engine.ends_at != inf:
        now = min(engine.ends_at, jobs[coming[0]].arrival if coming else inf)
        if engine.ends_at == now:
            happened = engine.advance()
            for job in happened.first_tokens:
                results[job.number] = (now, inf, job.cached_tokens)
            for job in happened.finished:
                results[job.number] = (results[job.number][0], now, job.cached_tokens)
        while coming and jobs[coming[0]].arrival <= now:
            number = coming.pop(0)
            job = jobs[number]
            engine.submit(Job(number, job.names, job.prompt_tokens, job.output_tokens, job.order, job.priority), now)
        engine.start(now)
    return results


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
@given(seed=st.integers(0, 10**9), blocks=st.integers(24, 60), priorities=st.booleans())
def test_it_does_at_every_moment_what_a_naive_engine_does(
    profile: TimingProfile, seed: int, blocks: int, priorities: bool
) -> None:
    jobs = random_jobs(Random(seed), 40, priorities=priorities)
    shape = EngineShape(profile, BLOCK, blocks)
    naive, engine = NaiveEngine(shape), Engine(shape)
    naive.run(jobs)
    results = run(engine, jobs)
    for job, (first_token_at, finished_at, cached_tokens) in zip(jobs, results, strict=True):
        assert first_token_at == pytest.approx(job.first_token_at, abs=1e-9)
        assert finished_at == pytest.approx(job.finished_at, abs=1e-9)
        assert cached_tokens == job.cached_tokens
    journal = engine.take_journal()
    assert journal is not None
    assert journal.evicted == naive.evicted
    assert [name for job, first, end in journal.stored for name in job.names[first:end]] == naive.stored
    assert (engine.running, engine.waiting, engine.decoding, engine.pinned_blocks) == (0, 0, 0, 0)
    assert engine.cached_blocks == len(naive.cached)


@given(seed=st.integers(0, 10**9))
def test_it_keeps_the_time_of_the_simulated_worker(seed: int) -> None:
    profile = PROFILES[0]
    jobs = random_jobs(Random(seed), 25)
    scheduler = Scheduler(
        BlockCache(10_000),
        BlockHasher(bytes(32), BLOCK),
        SchedulerLimits(profile.batch_tokens_max, profile.sequences_max),
    )
    tokens = [prompt_of(job) for job in jobs]
    expected = run_scheduler(scheduler, profile, jobs, tokens)
    hasher = BlockHasher(bytes(32), BLOCK)
    named = [
        replace(job, names=list(split_chain(hasher.chain(hasher.root(b""), prompt.tobytes()))))
        for job, prompt in zip(jobs, tokens, strict=True)
    ]
    results = run(Engine(EngineShape(profile, BLOCK, 10_000)), named)
    for (first_token_at, finished_at, cached_tokens), wanted in zip(results, expected, strict=True):
        assert (first_token_at, finished_at) == pytest.approx(wanted[:2], abs=1e-9)
        assert cached_tokens == wanted[2]


def prompt_of(job: NaiveJob) -> "array[int]":
    """Tokens that are equal where names are."""
    text = [int(digit) for digit in job.names[-1].decode() if digit.isdigit()]
    tokens = [10 * digit + place for digit in text for place in range(BLOCK)]
    return array(
        "I", [*tokens, *range(1000 * job.order + 100, 1000 * job.order + 100 + job.prompt_tokens - len(tokens))]
    )


def run_scheduler(
    scheduler: Scheduler, profile: TimingProfile, jobs: Sequence[NaiveJob], prompts: Sequence["array[int]"]
) -> list[tuple[float, float, int]]:
    coming = sorted(range(len(jobs)), key=lambda number: jobs[number].arrival)
    results, works, now = [(inf, inf, 0)] * len(jobs), {}, 0.0
    while coming or scheduler.busy:
        while coming and jobs[coming[0]].arrival <= now:
            number = coming.pop(0)
            sampling = Sampling(jobs[number].output_tokens)
            works[scheduler.add(Generation(str(number), prompts[number], sampling), repeat(999_999))] = number
        step = scheduler.schedule()
        if not step.shares:
            now = jobs[coming[0]].arrival
            continue
        now += profile.step_seconds(step.chunks, step.decode_load)
        for said in scheduler.complete(step):
            number = works[said.work]
            if said.work.outputs == 1:
                results[number] = (now, inf, said.work.cached_tokens or 0)
            if said.finish_reason is not None:
                results[number] = (results[number][0], now, results[number][2])
    return results


def decoding_engine(outputs: int = 100) -> Engine:
    """One sequence decodes, in a leap."""
    engine = Engine(EngineShape(LLAMA_3_70B_TP8, BLOCK, 1000))
    engine.submit(Job(0, names_of([0]), 6, outputs, 0), 0.0)
    engine.start(0.0)
    assert engine.advance().first_tokens[0].number == 0
    engine.start(prefill(6))
    return engine


def prefill(tokens: int, context: int = 0) -> float:
    return LLAMA_3_70B_TP8.prompt_seconds(tokens, context)


def test_a_run_of_decode_steps_is_one_leap() -> None:
    engine = decoding_engine(outputs=100)
    context = LLAMA_3_70B_TP8.decode_context_seconds
    steps = sum(LLAMA_3_70B_TP8.decode_constant_seconds + context * (7 + step) for step in range(99))
    assert engine.ends_at == pytest.approx(prefill(6) + steps)
    assert [job.number for job in engine.advance().finished] == [0]


def test_a_request_that_arrives_cuts_a_leap_at_the_end_of_the_step_under_way() -> None:
    engine = decoding_engine()
    step = LLAMA_3_70B_TP8.decode_constant_seconds
    engine.submit(Job(1, names_of([1]), 8, 2, 1), prefill(6) + 2.5 * step)
    assert engine.ends_at == pytest.approx(prefill(6) + 3 * step, rel=1e-4)
    now = engine.ends_at
    assert engine.advance() == ([], [])
    engine.start(now)
    happened_at = engine.ends_at
    assert [job.number for job in engine.advance().first_tokens] == [1]
    assert happened_at - now == pytest.approx(step + prefill(8), rel=1e-3)


def test_what_cannot_be_admitted_cuts_no_leap() -> None:
    engine = Engine(EngineShape(LLAMA_3_70B_TP8, BLOCK, 30))
    engine.submit(Job(0, names_of([0]), 6, 100, 0), 0.0)
    engine.start(0.0)
    engine.advance()
    engine.submit(Job(1, names_of([1]), 8, 8, 1), 0.1)
    engine.start(0.1)
    ends_at = engine.ends_at
    engine.submit(Job(2, names_of([2]), 8, 8, 2), 0.2)
    assert engine.ends_at == ends_at
    engine.submit(Job(3, names_of([3]), 8, 2, 3, priority=-1.0), 0.2)
    assert engine.ends_at < 0.23


def test_siblings_of_one_step_hit_what_the_first_of_them_computes() -> None:
    engine = Engine(EngineShape(LLAMA_3_70B_TP8, BLOCK, 1000))
    for number in range(3):
        engine.submit(Job(number, names_of([0] * 10), 40, 2, number), 0.0)
    engine.start(0.0)
    assert [job.cached_tokens for job in engine.advance().first_tokens] == [0, 36, 36]
    journal = engine.take_journal()
    assert journal is not None
    assert [(job.number, first, end) for job, first, end in journal.stored] == [(0, 0, 10)]


def test_kv_from_elsewhere_is_hit_like_what_was_computed() -> None:
    engine = Engine(EngineShape(LLAMA_3_70B_TP8, BLOCK, 12))
    job = Job(0, names_of([0] * 8), 34, 2, 0)
    assert engine.take_in(job, 5) == 5
    assert engine.take_in(job, 6) == 1
    assert engine.take_in(job, 6) == 0
    engine.submit(job, 0.0)
    engine.start(0.0)
    assert engine.ends_at == pytest.approx(prefill(10, 24))
    journal = engine.take_journal()
    assert journal is not None
    assert [(first, end) for _, first, end in journal.stored] == [(0, 5), (5, 6), (6, 8)]
    assert engine.take_in(Job(1, names_of([1] * 8), 34, 2, 1), 8) == -1
    assert engine.take_journal() is None


def test_kv_from_elsewhere_drives_out_what_was_used_longest_ago() -> None:
    engine = Engine(EngineShape(LLAMA_3_70B_TP8, BLOCK, 8))
    old, new = Job(0, names_of([0] * 4), 16, 1, 0), Job(1, names_of([1] * 4), 16, 1, 1)
    engine.take_in(old, 4)
    engine.take_in(new, 4)
    engine.take_in(old, 4)
    engine.take_journal()
    assert engine.take_in(Job(2, names_of([2]), 4, 1, 2), 1) == 1
    journal = engine.take_journal()
    assert journal is not None
    assert journal.evicted == [new.names[3]]


@pytest.mark.parametrize(
    ("profile", "blocks", "size"),
    [
        (LLAMA_3_70B_TP8, 0, 16),
        (LLAMA_3_70B_TP8, 16, 0),
        (replace(DYNAMO_POLYNOMIAL, decode_usage_seconds=(1.0, 1.0, 1.0, 1.0)), 16, 16),
    ],
)
def test_an_engine_that_cannot_be_is_refused(profile: TimingProfile, blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"engine needs blocks|degree 2"):
        EngineShape(profile, size, blocks)

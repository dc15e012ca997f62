"""What all pools share: keys and runs, where chains are cut, what is worth keeping, reading ahead, and the gate."""

import asyncio
import dataclasses
import random
from itertools import pairwise

import pytest

from cachecore.blocks import PrefixHash
from cachecore.scope import KeyId, TenantId
from cachecore.store import Unavailable
from cachecore.store.breaker import Breaker
from cachecore.store.pools import Extent, PoolBounds, run_ends
from cachecore.store.pools.contract import CREDITS_MAX, LATENCY_BOUNDS_SECONDS, Latency, renewed
from cachecore.store.pools.front import batches
from cachecore.store.pools.gate import Gate
from cachecore.store.pools.hckv import FrameRecord
from tests.cachecore.store.pools.runs import make_run

KEY = make_run(1).key


@pytest.mark.parametrize(
    "change",
    [
        {"compatibility": b"c"},
        {"scope": b""},
        {"tail": PrefixHash(b"t" * 15)},
        {"blocks": 0},
        {"blocks": 5000},
        {"layers": Extent(3, 3)},
        {"layers": Extent(-1, 3)},
        {"heads": Extent(0, 5000)},
        {"codec": ""},
        {"codec": "i 8"},
        {"codec": "I8"},
        {"codec": "../i8"},
        {"codec": "x" * 33},
    ],
)
def test_a_key_that_no_run_can_have_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"run|range|codec"):
        dataclasses.replace(KEY, **change)


def test_a_run_whose_description_contradicts_itself_is_refused() -> None:
    run = make_run(1)
    for change in ({"chain": run.chain[:-16]}, {"chain": run.chain[::-1]}, {"parent": b""}, {"first_block": -1}):
        with pytest.raises(ValueError, match=r"run|position"):
            dataclasses.replace(run, **change)


def test_names_of_codec_and_tenant_cannot_run_into_each_other() -> None:
    keys = [
        dataclasses.replace(KEY, codec=codec, key_id=KeyId(TenantId(tenant), 7))
        for codec, tenant in (("i8", "ann"), ("i8a", "nn"), ("i", "8ann"))
    ]
    assert len({key.canonical() for key in keys}) == 3


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, 32, [(16, 16), (32, 16)]),
        (0, 37, [(16, 16), (32, 16), (36, 4)]),
        (31, 54, [(32, 16), (48, 16), (52, 4)]),
        (118, 119, []),
        (119, 120, [(120, 4)]),
        (127, 128, [(128, 16)]),
        (0, 3, []),
        (3, 5, [(4, 4)]),
    ],
)
def test_chains_are_cut_where_every_process_cuts_them(first: int, end: int, expected: list[tuple[int, int]]) -> None:
    assert list(run_ends(first, end, 4)) == expected


@pytest.mark.parametrize("short", [1, 4, 5])
def test_however_a_chain_comes_its_runs_hold_all_but_its_last_blocks(short: int) -> None:
    rng = random.Random(short)
    for _ in range(100):
        steps = sorted(rng.sample(range(1, 200), rng.randrange(1, 9)))
        runs = {run for first, end in pairwise([0, *steps]) for run in run_ends(first, end, short)}
        assert all(end % size == 0 and end <= steps[-1] for end, size in runs)
        assert len(runs) == sum(len(list(run_ends(first, end, short))) for first, end in pairwise([0, *steps]))
        held = {block for end, size in runs for block in range(end - size, end)}
        assert held == set(range(steps[-1] // short * short))


def test_worth_is_recency_with_credit_for_use() -> None:
    fresh = 1000.0
    once = renewed(500.0, fresh, 60.0)
    assert once == fresh + 60
    often = once
    for _ in range(5):
        often = renewed(often, fresh, 60.0)
    assert often == fresh + 6 * 60
    for _ in range(1000):
        often = renewed(often, fresh, 60.0)
    assert often == fresh + CREDITS_MAX * 60
    assert renewed(often, often + 10_000, 60.0) == often + 10_060  # what it was used for once does not count for ever


def test_bounds_are_checked() -> None:
    for wrong in ({"bytes_max": 0}, {"bytes_max": 1, "tenant_bytes_max": -1}, {"bytes_max": 1, "idle_seconds_max": 0}):
        with pytest.raises(ValueError, match="positive"):
            PoolBounds(**wrong)  # type: ignore[arg-type]
    bounds = PoolBounds(100, tenant_bytes_max=10, quotas={TenantId("ann"): 50, TenantId("bob"): 500})
    assert [bounds.quota(TenantId(name)) for name in ("ann", "bob", "cat")] == [50, 100, 10]


def test_latencies_fall_into_their_buckets() -> None:
    latency = Latency()
    for seconds in (0.0, 0.001, 0.0011, 5.0, 5.1):
        latency.observe(seconds)
    assert latency.counts[:2] == [2, 1]
    assert latency.counts[-2:] == [1, 1]
    assert len(latency.counts) == len(LATENCY_BOUNDS_SECONDS) + 1
    assert latency.seconds == pytest.approx(10.1021)


def test_frames_are_read_together_up_to_a_bound_that_grows() -> None:
    sizes = [10, 20, 30, 100, 5, 5, 10, 15, 7]
    offsets = [sum(sizes[:place]) for place in range(len(sizes))]
    records = [
        FrameRecord(Extent(n, n + 1), offset, size, 0)
        for n, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    ]

    def read(records: list[FrameRecord], bytes_max: int) -> list[list[int]]:
        return [[record.size for record in group] for group in batches(records, bytes_max)]

    assert read(records, 8 * 30) == [[10, 20], [30], [100, 5, 5, 10], [15, 7]]
    assert read(records, 8 * 15) == [[10], [20], [30], [100, 5, 5, 10], [15, 7]]
    assert read(records, 1) == [[size] for size in sizes]
    assert read(records[3:], 10_000) == [sizes[3:]]
    assert read([], 60) == []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_the_gate_asks_nobody_while_the_store_is_away() -> None:
    clock, asked = Clock(), 0
    gate = Gate("store", Breaker(), clock)

    async def silent() -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(60)

    async def sound() -> str:
        nonlocal asked
        asked += 1
        return "answer"

    for _ in range(3):
        with pytest.raises(Unavailable, match=r"no answer within 0\.01 s"):
            await gate.ask(silent, 0.01)
    for _ in range(3):
        with pytest.raises(Unavailable, match="not asked while it is away"):
            await gate.ask(sound, 0.01)
    assert asked == 3
    clock.now += 0.2
    probes = await asyncio.gather(*(gate.ask(silent, 0.01) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(probe, Unavailable) for probe in probes)
    assert asked == 4  # one probe at a time
    clock.now += 2
    assert await gate.ask(sound, 0.01) == "answer"
    assert await gate.ask(sound, 0.01) == "answer"


async def test_an_error_that_is_an_answer_keeps_the_gate_open() -> None:
    gate = Gate("store", Breaker(threshold=1))

    async def absent() -> None:
        raise FileNotFoundError

    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            await gate.ask(absent, 1.0)

"""Faults of event streams that operators have reported: each by its kind, on a live gateway.

A scripted worker says it over real sockets, and the gateway's own explanation of a request tells what it has made of
it. Which case is held where is in `tests/cases/table.py`.
"""

import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from policies import POLICIES
from tests.gateway.end_to_end.processes import Gateway, candidate, eventually
from tests.gateway.end_to_end.scripted import MODEL, ScriptedWorker, Stream

BLOCK = 16


class Bench(NamedTuple):
    gateway: Gateway
    first: ScriptedWorker
    second: ScriptedWorker

    def confirmed(self, tokens: Sequence[int], **fields: Any) -> tuple[int, int]:
        """Tokens of a prompt that each worker has, by its events."""
        receipt = self.gateway.explain(body(tokens, **fields))
        return tuple(  # type: ignore[return-value]
            candidate(receipt, worker.name)["confirmed_tokens"] for worker in (self.first, self.second)
        )

    def becomes(self, expected: tuple[int, int], tokens: Sequence[int], **fields: Any) -> None:
        eventually(lambda: self.confirmed(tokens, **fields) == expected, f"{expected} tokens are known")

    def settled(self, worker: ScriptedWorker, rank: int = 0) -> dict[str, Any]:
        """The stream's counters once all that the worker has said has been taken in."""

        def done() -> dict[str, Any] | None:
            stream = self.gateway.worker(worker.name)["events"][rank]
            taken = stream["intake"]
            return stream if taken["batches"] >= worker.streams[rank].due and not taken["queued"] else None

        return eventually(done, "all batches are applied")  # type: ignore[no-any-return]


def body(tokens: Sequence[int], model: str = MODEL, **fields: Any) -> dict[str, Any]:
    # One token more: the last one is always computed again.
    return {"model": model, "prompt": [*tokens, 3], "max_tokens": 1, **fields}


_next_token = iter(range(1000, 10**9, 4096))


def blocks(count: int, size: int = BLOCK) -> list[int]:
    """Tokens of so many blocks that no other test has."""
    start = next(_next_token)
    return list(range(start, start + count * size))


def stored(handles: list[Any], tokens: Sequence[int], parent: Any = None, size: int = BLOCK, **more: Any) -> Any:
    return {
        "type": "BlockStored",
        "block_hashes": handles,
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": size,
        **more,
    }


def removed(handles: list[Any], **more: Any) -> Any:
    return {"type": "BlockRemoved", "block_hashes": handles, **more}


CLEARED = {"type": "AllBlocksCleared"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with (
        ScriptedWorker(adapters=("X",)) as first,
        ScriptedWorker(adapters=("X",)) as second,
        Gateway(tmp_path_factory.mktemp("cases"), [first.url, second.url]) as gateway,
    ):
        for worker in (first, second):
            worker.stream.subscribed()
        yield Bench(gateway, first, second)


@pytest.fixture
def bench(stack: Bench) -> Iterator[Bench]:
    """Two workers that hold nothing."""
    yield stack
    for worker in (stack.first, stack.second):
        worker.stream.say(CLEARED)


def test_a_block_counts_behind_its_own_prefix_only(bench: Bench) -> None:
    one, other = blocks(1), blocks(1)
    bench.first.stream.say(stored([1], one))
    bench.second.stream.say(stored([2], other))
    bench.becomes((0, BLOCK), [*other, *one])
    bench.becomes((BLOCK, 0), one)


def test_an_image_divides_from_its_block_on(bench: Bench) -> None:
    tokens = blocks(3)
    keys = [None, [["image-x", 0]], [["image-x", -BLOCK]]]
    bench.first.stream.say(stored([1, 2, 3], tokens, extra_keys=keys))
    bench.second.stream.say(stored([1, 2, 3], tokens, extra_keys=[None, None, [["image-y", 4]]]))
    bench.becomes((BLOCK, 2 * BLOCK), tokens)


def test_adapter_salt_and_neither_are_three_scopes(bench: Bench) -> None:
    tokens = blocks(2)
    bench.first.stream.say(stored([1], tokens[:BLOCK], lora_id=7, lora_name="X", extra_keys=[["X"]]))
    bench.second.stream.say(stored([1], tokens[:BLOCK], extra_keys=[["X"]]))
    # Children say neither.
    bench.first.stream.say(stored([2], tokens[BLOCK:], 1))
    bench.second.stream.say(stored([2], tokens[BLOCK:], 1))
    bench.becomes((2 * BLOCK, 0), tokens, model="X")
    bench.becomes((0, 2 * BLOCK), tokens, cache_salt="X")
    assert bench.confirmed(tokens) == (0, 0)
    assert bench.confirmed(tokens, model="X", cache_salt="X") == (0, 0)
    assert bench.confirmed(tokens, cache_salt="Y") == (0, 0)


@pytest.mark.parametrize("size", [64, 32, 8, 4])
def test_engine_blocks_of_any_ratio(tmp_path: Path, size: int) -> None:
    """Two engines in one pool: names are made of the greatest common divisor of their blocks."""
    tokens = blocks(8)
    with (
        ScriptedWorker(block_tokens=BLOCK) as first,
        ScriptedWorker(block_tokens=size) as second,
        Gateway(tmp_path, [first.url, second.url]) as gateway,
    ):
        bench = Bench(gateway, first, second)
        for worker in (first, second):
            worker.stream.subscribed()
        first.stream.say(stored(list(range(8)), tokens))
        handles = list(range(100, 100 + len(tokens) // size))
        second.stream.say(stored(handles, tokens, size=size))
        bench.becomes((128, 128), tokens)
        second.stream.say(removed([handles[-1]]))
        bench.becomes((128, 128 - size), tokens)


def test_sizes_that_do_not_divide_cost_the_trust(tmp_path: Path) -> None:
    """What is said in blocks of 24 cannot be told in blocks of 16: counted, and soon told to everybody."""
    with ScriptedWorker(block_tokens=BLOCK) as worker, Gateway(tmp_path, [worker.url]) as gateway:
        worker.stream.subscribed()
        for number in range(30):
            worker.stream.say(stored([number], blocks(1, 24), size=24))

        def doubted() -> bool:
            trust = gateway.worker(worker.name)["trust"]
            return trust["level"] == "history" and trust["doubts"][0]["doubt"] == "unreadable"

        eventually(doubted, "its events are not believed")
        assert gateway.worker(worker.name)["events"][0]["rekey"]["refused"] == {"block_size": 30}
        answer = gateway.post(body(blocks(2)), path="/v1/completions")
        assert answer.headers["x-ropeway-trust"] == "history"
        assert f"worker {worker.name}: unreadable: 100% of its events cannot be used" in gateway.said()


def test_prompts_shorter_than_a_block_are_spread(bench: Bench) -> None:
    answers = [bench.gateway.post(body([number] * 5), path="/v1/completions") for number in range(12)]
    counts = [sum(a.headers["x-ropeway-worker"] == w.name for a in answers) for w in (bench.first, bench.second)]
    assert sum(counts) == 12
    assert min(counts) >= 4


def test_each_rank_has_its_own_blocks(tmp_path: Path) -> None:
    tokens = blocks(2)
    with ScriptedWorker(ranks=2) as worker, Gateway(tmp_path, [worker.url]) as gateway:
        for stream in worker.streams:
            stream.subscribed()

        def confirmed() -> list[int]:
            return [entry["confirmed_tokens"] for entry in gateway.explain(body(tokens))["candidates"]]

        worker.streams[0].say(stored([1], tokens[:BLOCK]), rank=0)
        worker.streams[1].say(stored([1, 2], tokens), rank=1)
        eventually(lambda: confirmed() == [BLOCK, 2 * BLOCK], "each rank has its own")
        worker.streams[1].say(CLEARED, rank=1)
        eventually(lambda: confirmed() == [BLOCK, 0], "the other rank's stay")


def test_each_block_follows_the_one_before(bench: Bench) -> None:
    tokens = blocks(4)
    bench.first.stream.say(stored([9], tokens[:BLOCK]))
    bench.first.stream.say(stored([1, 2, 3], tokens[BLOCK:], parent=9))
    bench.becomes((4 * BLOCK, 0), tokens)
    assert bench.confirmed(tokens[3 * BLOCK :]) == (0, 0)


def test_copies_are_counted_by_tier(bench: Bench) -> None:
    tokens, stream = blocks(1), bench.first.stream
    for event in (stored([5], tokens), stored([5], tokens), removed([5])):
        stream.say(event)
    bench.becomes((BLOCK, 0), tokens)
    stream.say(stored([5], tokens, medium="CPU"), removed([5]))
    bench.becomes((BLOCK, 0), tokens)
    stream.say(removed([5], medium="CPU"))
    bench.becomes((0, 0), tokens)
    # One removal more than there were copies owes nothing.
    stream.say(removed([5]), removed([5]), stored([5], tokens))
    bench.becomes((BLOCK, 0), tokens)


def test_what_contradicts_itself_costs_itself_only(bench: Bench) -> None:
    good, more = blocks(2), blocks(2)
    stream = bench.first.stream
    # Among so many good ones the bad ones raise no doubt, whenever they are counted.
    stream.say(stored([1, 2], good), *(stored([100 + number], blocks(1)) for number in range(200)))
    stream.say(
        stored([4, 3], more, parent=3),
        stored([5, 5], more),
        stored([6], blocks(3)),
        stored([7, 8, 9], blocks(1)),
        stored([], blocks(1)),
        stored([10], [], size=0),
        {"type": "BlockStored", "block_hashes": "?"},
        {"type": "SomethingNew", "block_hashes": [1]},
        removed([11]),
        stored([11], blocks(1), parent=12),
        stored([20], more[:BLOCK]),
    )
    stream.say_bytes(b"\xc1 no batch at all")
    # A block that was partial, is full under another hash, and is said once more under the dead one.
    stream.say(stored([30], more[BLOCK : BLOCK + 7], 20, 7), removed([30]), stored([31], more[BLOCK:], 20))
    stream.say(stored([30], more[BLOCK : BLOCK + 7], 20, 7))
    bench.becomes((2 * BLOCK, 0), more)
    assert bench.confirmed(good) == (2 * BLOCK, 0)
    assert bench.settled(bench.first)["intake"]["malformed"] == 2


def test_a_gap_is_filled_by_replay(bench: Bench) -> None:
    tokens, stream = blocks(3), bench.first.stream
    stream.say(stored([1], tokens[:BLOCK]))
    stream.say(stored([2], tokens[BLOCK : 2 * BLOCK], 1), sent=False)
    stream.say(stored([3], tokens[2 * BLOCK :], 2))
    bench.becomes((3 * BLOCK, 0), tokens)
    assert bench.settled(bench.first)["intake"]["gaps"] == 0


def test_a_gap_that_nobody_fills_costs_what_was_known(tmp_path: Path) -> None:
    tokens, later = blocks(3), blocks(1)
    with ScriptedWorker() as worker, Gateway(tmp_path, [worker.url]) as gateway:
        bench, stream = Bench(gateway, worker, worker), worker.stream
        stream.subscribed()
        stream.say(stored([1, 2, 3], tokens))
        bench.becomes((3 * BLOCK, 3 * BLOCK), tokens)
        stream.say(removed([3]), kept=False, sent=False)
        stream.say(stored([8], later))
        assert bench.settled(worker)["intake"]["gaps"] == 1
        eventually(lambda: gateway.worker(worker.name)["trust"]["level"] == "history", "it is doubted")
        assert gateway.explain(body(tokens))["matched_tokens"] == 0
        # What was said since is right, and counts as a guess until the doubt is dropped.
        receipt = gateway.explain(body(later))
        assert (receipt["matched_tokens"], receipt["evidence"], receipt["trust"]) == (BLOCK, "history", "exact")
        assert f"worker {worker.name}: gap: events were lost for good" in gateway.said()


def test_a_late_replay_raises_nothing_from_the_dead(bench: Bench) -> None:
    tokens, stream = blocks(2), bench.first.stream
    bench.settled(bench.first)
    stream.answering.clear()
    stream.say(stored([1, 2], tokens), sent=False)
    stream.say(removed([2]))
    time.sleep(0.1)
    assert bench.confirmed(tokens) == (0, 0)
    stream.answering.set()
    bench.becomes((BLOCK, 0), tokens)


def test_one_gap_is_one_recovery(bench: Bench) -> None:
    stream = bench.first.stream
    replays = bench.settled(bench.first)["intake"]["replays"]
    stream.say(stored([1], blocks(1)), sent=False)
    for number in range(100):
        stream.say(stored([100 + number], blocks(1)))
    taken = bench.settled(bench.first)["intake"]
    assert taken["replays"] == replays + 1
    assert taken["replays_failed"] == 0


def test_a_parent_that_comes_later(bench: Bench) -> None:
    tokens, stream = blocks(2), bench.first.stream
    stream.say(stored([7], tokens[BLOCK:], parent=6))
    assert bench.settled(bench.first)["rekey"]["pending"] == 1
    assert bench.confirmed(tokens[BLOCK:]) == bench.confirmed(tokens) == (0, 0)
    stream.say(stored([6], tokens[:BLOCK]))
    bench.becomes((2 * BLOCK, 0), tokens)


@pytest.mark.parametrize("form", ["map", "array", "signed", "digest"])
def test_every_spelling_of_one_event(bench: Bench, form: str) -> None:
    tokens, handle = blocks(1), 0x8FFF_0000_1234_5678
    name: Any = {"signed": handle - 2**64, "digest": struct.pack(">QQQQ", 1, 2, 3, handle)}.get(form, handle)
    event: Any = stored([name], tokens, later="x")
    if form == "array":
        event = ["BlockStored", [handle], None, tokens, BLOCK, None, "GPU", None, None, 0, "full_attention", None, "x"]
    bench.first.stream.say(event)
    bench.becomes((BLOCK, 0), tokens)
    bench.first.stream.say(removed([handle]))
    bench.becomes((0, 0), tokens)


def test_windows_and_states_say_nothing_of_prefixes(bench: Bench) -> None:
    tokens, stream = blocks(2), bench.first.stream
    stream.say(stored([1], tokens[:BLOCK], group_idx=1, kv_cache_spec_kind="sliding_window"))
    stream.say(stored([2], tokens[:BLOCK], group_idx=2, kv_cache_spec_kind="mamba"))
    stream.say(stored([1, 2], tokens, group_idx=0, kv_cache_spec_kind="full_attention"))
    stream.say(removed([1], group_idx=1), removed([2], group_idx=2))
    bench.becomes((2 * BLOCK, 0), tokens)
    bench.first.stream.say(removed([1], group_idx=0))
    bench.becomes((0, 0), tokens)


def test_offloaded_blocks_count_and_are_not_pulled(bench: Bench) -> None:
    """Farther tiers are scored; a worker that cannot be pulled from is not, whatever tier its blocks lie in."""
    tokens = blocks(3)
    bench.first.stream.say(
        stored([1], tokens[:BLOCK]),
        stored([2], tokens[BLOCK : 2 * BLOCK], 1, medium="CPU"),
        stored([3], tokens[2 * BLOCK :], 2, medium="STORAGE"),
    )
    bench.becomes((3 * BLOCK, 0), tokens)
    receipt = bench.gateway.explain(body(tokens))
    assert candidate(receipt, bench.first.name)["tier_tokens"] == [BLOCK, 2 * BLOCK, 3 * BLOCK]
    assert receipt["pull"] is None


def test_a_publisher_that_starts_over(tmp_path: Path) -> None:
    """Its numbers begin again below the last: what it said before is void, though its process has not changed."""
    tokens, later = blocks(1), blocks(1)
    with ScriptedWorker() as worker, Gateway(tmp_path, [worker.url]) as gateway:
        bench = Bench(gateway, worker, worker)
        stream: Stream = worker.stream
        stream.subscribed()
        for number in range(5):
            stream.say(stored([number], tokens if number == 0 else blocks(1)))
        bench.becomes((BLOCK, BLOCK), tokens)
        stream.sequence = 0
        stream._kept.clear()
        stream.say(stored([9], later))
        bench.becomes((BLOCK, BLOCK), later)
        assert bench.confirmed(tokens) == (0, 0)
        trust = gateway.worker(worker.name)
        assert (trust["events"][0]["intake"]["restarts"], trust["trust"]["level"]) == (1, "exact")


def test_a_cache_emptied_without_a_word_costs_the_trust(tmp_path: Path) -> None:
    """The worker computes what its events have confirmed: soon its matches are guesses, and what it held forgotten."""
    tokens = blocks(8)
    with ScriptedWorker() as worker, Gateway(tmp_path, [worker.url]) as gateway:
        bench = Bench(gateway, worker, worker)
        worker.stream.subscribed()
        worker.stream.say(stored(list(range(8)), tokens))
        bench.becomes((128, 128), tokens)
        worker.cached_tokens = 0
        for _ in range(6):
            answer = gateway.post(body(tokens), path="/v1/completions")
            assert answer.headers["x-ropeway-matched-tokens"] == "128"
        eventually(lambda: gateway.worker(worker.name)["trust"]["level"] == "history", "it is believed no longer")
        doubts = gateway.worker(worker.name)["trust"]["doubts"]
        assert [doubt["doubt"] for doubt in doubts] == ["phantom"]
        answer = gateway.post(body(tokens), path="/v1/completions")
        assert answer.headers["x-ropeway-matched-tokens"] == "0"
        assert answer.headers["x-ropeway-trust"] == "history"
        assert gateway.status()["receipts"][0]["trust"] == "history"
        metrics = gateway.operator.get("/metrics").text
        assert f'ropeway_doubts_total{{doubt="phantom",worker="{worker.name}"}} 1.0' in metrics
        assert f'ropeway_worker_trust{{level="history",worker="{worker.name}"}} 1.0' in metrics


def test_every_policy_does_without_its_options(tmp_path: Path, stack: Bench) -> None:
    with Gateway(tmp_path, [stack.first.url], {"policy_header_allowed": True}) as gateway:
        for policy in POLICIES:
            for session in ({}, {"x-ropeway-session": ""}):
                answer = gateway.post(body([1, 2]), {"x-ropeway-policy": policy, **session}, "/v1/completions")
                assert (answer.status_code, answer.headers["x-ropeway-policy"]) == (200, policy)


def test_a_clients_mistakes_are_not_the_workers(bench: Bench) -> None:
    """A worker that refuses bad requests is well."""
    for _ in range(20):
        assert bench.gateway.post(body([1]), path="/v1/embeddings").status_code == 404
    assert bench.gateway.healthy() == 2
    assert bench.gateway.post(body([1, 2]), path="/v1/completions").status_code == 200


def test_two_models_share_nothing(tmp_path: Path) -> None:
    tokens = blocks(2)
    with (
        ScriptedWorker(model="one") as one,
        ScriptedWorker(model="two") as two,
        Gateway(tmp_path, [one.url, two.url]) as gateway,
    ):
        for worker in (one, two):
            worker.stream.subscribed()
        one.stream.say(stored([1, 2], tokens))
        gateway.wait_confirmed(body(tokens, "one"), one.name, 2 * BLOCK)
        (entry,) = gateway.explain(body(tokens, "two"))["candidates"]
        assert (entry["worker"], entry["matched_tokens"]) == (two.name, 0)

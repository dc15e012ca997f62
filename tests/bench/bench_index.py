"""The index in memory beside Dynamo's RadixTree (wheel ai-dynamo-runtime), in one process, calls alternating.

    PYTHONPATH=. .venv-bench/bin/python tests/bench/bench_index.py [--json FILE] [--blocks N] [--rounds N]

64 workers, a million distinct blocks: conversations of 512 blocks that share 16 system prompts of 32, and three chains
of 4,096 blocks that are queried: held by one worker, held whole by all, held by each to another depth. Both indexes are
given the same names (ours 16 bytes, Dynamo's their first 8) and every answer is compared. Times are microseconds, the
least and the median of the rounds; hashing of the query is in neither. Rates are the best of five, by the clock and by
the process's CPU time (Dynamo's threads included), which a busy machine distorts less. Without the wheel, ours is
measured alone.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from cachecore.blocks import HASH_BYTES, BlockHasher, Chain, PrefixHash, pack_tokens
from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.contract import Removed, Stored
from cachecore.index.memory import MemoryIndex

WORKERS = 64
DEPTH = 4096
PROMPTS, PROMPT_BLOCKS, CONVERSATION_BLOCKS = 16, 32, 512
EVENT_BLOCKS = 128
BLOCK_TOKENS = 16
ROOT = PrefixHash(bytes(HASH_BYTES))


def holder(worker: int) -> Worker:
    return Worker(WorkerName(f"w{worker}"), Epoch(0))


@dataclass(frozen=True)
class Store:
    """One store event, as either index wants it."""

    worker: int
    parent: bytes
    chain: bytes

    def ours(self) -> Stored:
        return Stored(PrefixHash(self.parent), Chain(self.chain))

    def dynamo(self) -> bytes:
        blocks = [{"block_hash": name, "tokens_hash": name} for name in words(self.chain)]
        parent = None if self.parent == ROOT else words(self.parent)[0]
        return event_json({"stored": {"parent_hash": parent, "blocks": blocks}})


def event_json(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode()


def words(chain: bytes) -> list[int]:
    found: list[int] = np.frombuffer(chain, dtype="<u8")[::2].tolist()
    return found


@dataclass(frozen=True)
class Fleet:
    """What 64 workers hold, and the chains that are queried."""

    one: bytes
    hot: bytes
    staggered: bytes
    missing: bytes
    stores: list[Store]

    @classmethod
    def build(cls, blocks: int, seed: int = 1) -> "Fleet":
        rng = np.random.default_rng(seed)

        def chain(count: int) -> bytes:
            return rng.bytes(count * HASH_BYTES)

        one, hot, staggered, missing = (chain(DEPTH) for _ in range(4))
        prompts = [chain(PROMPT_BLOCKS) for _ in range(PROMPTS)]
        stores = list(pieces(0, one))
        unique = CONVERSATION_BLOCKS - PROMPT_BLOCKS
        for number in range((blocks - 3 * DEPTH) // unique):
            stores += pieces(number % WORKERS, prompts[int(rng.integers(PROMPTS))] + chain(unique))
        for worker in range(WORKERS):
            stores += pieces(worker, hot)
            stores += pieces(worker, staggered[: (worker + 1) * (DEPTH // WORKERS) * HASH_BYTES])
        return cls(one, hot, staggered, missing, stores)


def pieces(worker: int, chain: bytes, blocks: int = EVENT_BLOCKS) -> Iterator[Store]:
    step = blocks * HASH_BYTES
    for start in range(0, len(chain), step):
        yield Store(worker, chain[start - HASH_BYTES : start] if start else ROOT, chain[start : start + step])


class Ours:
    """The index in memory behind the calls that are measured."""

    name = "ropeway"

    def __init__(self) -> None:
        self.index = MemoryIndex()
        self._sequence = 0

    def prepare(self, store: Store) -> tuple[Worker, Stored]:
        return holder(store.worker), store.ours()

    def apply(self, prepared: tuple[Worker, Any]) -> None:
        self._sequence += 1
        self.index.apply(prepared[0], self._sequence, (prepared[1],))

    def query(self, chain: bytes) -> Chain:
        return Chain(chain)

    def match(self, query: Chain) -> Any:
        return self.index.match(query).depths

    def scores(self, answer: Any) -> dict[int, int]:
        return {int(place.holder.name[1:]): depth for place, depth in answer.items()}

    def removal(self, worker: int, chain: bytes) -> tuple[Worker, Any]:
        return holder(worker), Removed(Chain(chain))

    def forget(self, worker: int) -> None:
        self.index.forget(holder(worker))

    def sweep(self) -> None:
        while self.index.sweep(64):
            pass


class Dynamo:
    """Dynamo's RadixTree behind the same calls. A block's engine hash is the same on every worker, as it requires."""

    name = "dynamo"

    def __init__(self) -> None:
        from dynamo._core import RadixTree

        self.tree = RadixTree()

    def prepare(self, store: Store) -> tuple[int, bytes]:
        return store.worker, store.dynamo()

    def apply(self, prepared: tuple[int, bytes]) -> None:
        self.tree.apply_event(prepared[0], prepared[1])

    def query(self, chain: bytes) -> list[int]:
        return words(chain)

    def match(self, query: list[int]) -> Any:
        return self.tree.find_matches(query)

    def scores(self, answer: Any) -> dict[int, int]:
        return {worker: depth for (worker, _), depth in answer.scores.items()}

    def removal(self, worker: int, chain: bytes) -> tuple[int, bytes]:
        return worker, event_json({"removed": {"block_hashes": words(chain)}})

    def forget(self, worker: int) -> None:
        self.tree.remove_worker(worker)


Subject = Ours | Dynamo


def subjects() -> list[Callable[[], Subject]]:
    try:
        import dynamo._core  # noqa: F401
    except ImportError:
        print("ai-dynamo-runtime is not installed: ours alone", file=sys.stderr)
        return [Ours]
    return [Ours, Dynamo]


def timed_us(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def summary(samples: Sequence[float]) -> dict[str, float]:
    return {"min": round(min(samples), 2), "median": round(statistics.median(samples), 2)}


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def accounted_bytes(index: MemoryIndex) -> int:
    """What the index's structures say of their own size."""
    total = sys.getsizeof(index._runs) + index._locator.size_bytes() + sys.getsizeof(index._locator.runs)
    for run in index._runs.values():
        parts = (run, run.names, run.depths, run.masks, run.copies, run.number)
        total += sum(sys.getsizeof(part) for part in parts) + sys.getsizeof(run.first)
        total += sum(sys.getsizeof(number) for kept in (run.depths, run.masks) for number in kept.values())
    return total


def fill(subject: Subject, fleet: Fleet) -> dict[str, float]:
    """Build the fleet's index; bytes per block as the process grows by."""
    before = resident_bytes()
    for store in fleet.stores:
        subject.apply(subject.prepare(store))  # type: ignore[arg-type]
    grown = resident_bytes() - before
    distinct = len(
        {store.chain[at : at + 8] for store in fleet.stores for at in range(0, len(store.chain), HASH_BYTES)}
    )
    result = {"distinct_blocks": distinct, "resident_bytes_per_block": round(grown / distinct, 1)}
    if isinstance(subject, Ours):
        result["accounted_bytes_per_block"] = round(accounted_bytes(subject.index) / distinct, 1)
    return result


def bench_queries(built: list[Subject], fleet: Fleet, rounds: int) -> Iterator[dict[str, Any]]:
    for kind in ("one", "hot", "staggered", "missing"):
        for blocks in (64, 512, 4096):
            chain = getattr(fleet, kind)[: blocks * HASH_BYTES]
            queries = [subject.query(chain) for subject in built]
            answers = [s.scores(s.match(q)) for s, q in zip(built, queries, strict=True)]  # type: ignore[arg-type]
            if any(answer != answers[0] for answer in answers):
                raise SystemExit(f"{kind}/{blocks}: the answers differ: {answers}")
            samples: list[list[float]] = [[] for _ in built]
            for _ in range(rounds):
                for subject, query, kept in zip(built, queries, samples, strict=True):
                    kept.append(timed_us(lambda s=subject, q=query: s.match(q)))  # type: ignore[misc]
            row = {subject.name: summary(kept) for subject, kept in zip(built, samples, strict=True)}
            yield {"case": f"match {kind}", "blocks": blocks, "holders": len(answers[0]), **row}


def bench_removals(built: list[Subject], fleet: Fleet, rounds: int) -> Iterator[dict[str, Any]]:
    for order in ("forwards", "backwards"):
        samples: list[list[float]] = [[] for _ in built]
        chain = fleet.one if order == "forwards" else np.frombuffer(fleet.one, dtype="V16")[::-1].tobytes()
        for _ in range(rounds):
            for subject, kept in zip(built, samples, strict=True):
                event = subject.removal(0, chain)
                kept.append(timed_us(lambda s=subject, e=event: s.apply(e)))  # type: ignore[misc]
                for store in pieces(0, fleet.one):
                    subject.apply(subject.prepare(store))  # type: ignore[arg-type]
        row = {subject.name: summary(kept) for subject, kept in zip(built, samples, strict=True)}
        yield {"case": f"remove {order}", "blocks": DEPTH, **row}
    row = {subject.name: summary([timed_us(lambda s=subject: s.forget(1))]) for subject in built}  # type: ignore[misc]
    yield {"case": "forget a worker", "blocks": None, **row}
    yield from (
        {"case": "... and sweep", "blocks": None, s.name: summary([timed_us(s.sweep)])}
        for s in built
        if isinstance(s, Ours)
    )


def bench_ingest(makers: list[Callable[[], Subject]], total: int) -> Iterator[dict[str, Any]]:
    """Blocks per second applied, from events of several sizes; Dynamo's include its JSON decoding."""
    rng = np.random.default_rng(2)
    chains = [rng.bytes(1024 * HASH_BYTES) for _ in range(total // 1024)]
    for blocks in (1, 16, 128, 1024):
        stores = [store for number, chain in enumerate(chains) for store in pieces(number % WORKERS, chain, blocks)]
        row = {}
        for make in makers:
            best = best_cpu = 0.0
            for _ in range(5):
                subject = make()
                prepared = [subject.prepare(store) for store in stores]
                cpu = time.process_time()
                took = timed_us(lambda s=subject, p=prepared: ingest(s, p, chains[-1]))  # type: ignore[misc]
                best_cpu = max(best_cpu, len(chains) * 1024 / (time.process_time() - cpu))
                best = max(best, len(chains) * 1024 / took * 1e6)
            row[subject.name] = {"blocks_per_s": round(best), "blocks_per_cpu_s": round(best_cpu)}
        yield {"case": "ingest", "blocks": blocks, **row}


def ingest(subject: Subject, prepared: list[Any], last: bytes) -> None:
    """Apply, and ask for the last chain, so that whatever was left to another thread is waited for."""
    for event in prepared:
        subject.apply(event)
    if list(subject.scores(subject.match(subject.query(last))).values()) != [len(last) // HASH_BYTES]:  # type: ignore[arg-type]
        raise SystemExit(f"{subject.name} has lost blocks")


class EngineStore(msgspec.Struct, tag="BlockStored", array_like=True):
    """A store as an engine announces it, for the price of the whole way from its bytes to the index."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int


def bench_intake(total: int) -> Iterator[dict[str, Any]]:
    """Decoding an engine's event, naming its blocks from the tokens, applying: one core."""
    rng = np.random.default_rng(3)
    hasher, decoder = BlockHasher(bytes(32), BLOCK_TOKENS), msgspec.msgpack.Decoder(EngineStore)
    for blocks in (1, 16, 128, 1024):
        messages = []
        for number in range(total // 1024):
            parent = None
            for _ in range(1024 // blocks):
                names: list[int] = rng.integers(2**63, size=blocks).tolist()
                tokens: list[int] = rng.integers(150_000, size=blocks * BLOCK_TOKENS).tolist()
                store = EngineStore(names, parent, tokens, BLOCK_TOKENS)
                messages.append((number % WORKERS, msgspec.msgpack.encode(store)))
                parent = names[-1]
        cpu = time.process_time()
        took = timed_us(lambda m=messages: intake(m, hasher, decoder))  # type: ignore[misc]
        rate = {
            "blocks_per_s": round(total / took * 1e6),
            "blocks_per_cpu_s": round(total / (time.process_time() - cpu)),
        }
        yield {"case": "decode, hash, apply", "blocks": blocks, Ours.name: rate}


def intake(messages: list[tuple[int, bytes]], hasher: BlockHasher, decoder: Any) -> None:
    index, handles = MemoryIndex(), [dict[int, PrefixHash]() for _ in range(WORKERS)]
    for sequence, (worker, message) in enumerate(messages):
        event = decoder.decode(message)
        known = handles[worker]
        parent = ROOT if event.parent_block_hash is None else known[event.parent_block_hash]
        chain = hasher.chain(parent, pack_tokens(event.token_ids))
        for at, handle in enumerate(event.block_hashes):
            known[handle] = PrefixHash(chain[at * HASH_BYTES : (at + 1) * HASH_BYTES])
        index.apply(holder(worker), sequence, (Stored(parent, chain),))


def show(row: dict[str, Any]) -> None:
    cells = [f"{row['case']:<22}{row['blocks'] or '':>6}"]
    for name in (Ours.name, Dynamo.name):
        value = row.get(name)
        if value and "min" in value:
            cells.append(f"{name} {value['min']:>9.1f} / {value['median']:>9.1f} us")
        elif value:
            cells.append(
                f"{name} {value['blocks_per_s']:>10,} blocks/s {value['blocks_per_cpu_s']:>10,} per CPU second"
            )
    if Dynamo.name in row and "min" in row[Ours.name]:
        cells.append(f"x{row[Ours.name]['median'] / row[Dynamo.name]['median']:.2f}")
    print("   ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="distinct blocks (default 1,000,000)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each query (default 60)")
    parser.add_argument("--ingest-blocks", type=int, default=262_144, help="blocks ingested per size (default 262,144)")
    options = parser.parse_args()
    fleet, makers = Fleet.build(options.blocks), subjects()
    built, memory = [], {}
    for make in makers:
        subject = make()
        memory[subject.name] = fill(subject, fleet)
        print(f"{subject.name}: {memory[subject.name]}", flush=True)
        built.append(subject)
    rows = []
    for row in bench_queries(built, fleet, options.rounds):
        show(row)
        rows.append(row)
    for row in bench_removals(built, fleet, max(3, options.rounds // 6)):
        show(row)
        rows.append(row)
    built.clear()
    for row in (*bench_ingest(makers, options.ingest_blocks), *bench_intake(options.ingest_blocks // 4)):
        show(row)
        rows.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"memory": memory, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()

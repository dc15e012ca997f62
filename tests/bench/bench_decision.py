"""What a decision costs whole, index lookup included: `python tests/bench/bench_decision.py [--json FILE]`.

64 busy workers whose events are followed, prompts of 4,096 blocks, a mirror's copy of the index with a million blocks
in it (`--blocks`). The prompt is held by one worker, whole by all (hot), by each to another depth (staggered), by
nobody; and, staggered, with pulls that could be offered. Each figure is of single calls: match, beliefs, `kv-aware`,
and what a receipt keeps. CPU time counts what other work on the machine does not; the clock is beside it.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import perf_counter_ns, thread_time_ns

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash
from cachecore.index.contract import Match, Stored
from cachecore.index.memory import MemoryIndex
from gateway.config import WorkerConfig
from gateway.fleet.knowledge import Knowledge
from gateway.fleet.worker import ModelPool, WorkerRecord
from policies import create
from policies.contract import Query, Receipt, candidate_fields
from policies.state.beliefs import Inquiry
from policies.transfer import Candidate, DeadlineBounds, Pulls, Supply

WORKERS, BLOCK_TOKENS, DEPTH = 64, 16, 4096
CONVERSATION_BLOCKS = 512
ROOT = PrefixHash(bytes(HASH_BYTES))
KV_TOKENS = 2_000_000


class Fleet:
    """What a gateway knows of 64 busy workers."""

    def __init__(self, blocks: int, random: Random) -> None:
        self.index = MemoryIndex()
        self.knowledge = Knowledge(self.index)
        self.pool = ModelPool("m")
        self.chains = {name: os.urandom(DEPTH * HASH_BYTES) for name in ("one", "hot", "staggered", "missing")}
        for number in range(WORKERS):
            self._add_worker(number, random)
        self.pool.refresh_block_size()
        for number in range(max(blocks - 3 * DEPTH, 0) // CONVERSATION_BLOCKS):
            self._store(self.pool.workers[number % WORKERS], os.urandom(CONVERSATION_BLOCKS * HASH_BYTES))
        self._store(self.pool.workers[0], self.chains["one"])
        for number, record in enumerate(self.pool.workers):
            self._store(record, self.chains["hot"])
            self._store(record, self.chains["staggered"][: (number + 1) * (DEPTH // WORKERS) * HASH_BYTES])

    def _add_worker(self, number: int, random: Random) -> None:
        record = WorkerRecord.of(
            WorkerConfig(url=f"http://127.0.0.1:{number + 1}", name=f"w{number}", block_size_tokens=BLOCK_TOKENS)
        )
        record.healthy = True
        record.holders = (record.holder(),)
        record.trust.follow(followed=True)
        self.pool.workers.append(record)
        accounting, predictions = self.knowledge.accounting, self.knowledge.predictions
        self.knowledge.declare_capacity(record.holder(), 256, KV_TOKENS)
        for request in range(12):
            name = f"r{number}-{request}"
            accounting.dispatch(name, record.name, 0, 0.01 * request, 8000, 0.2)
            predictions.predict(name, (record.name, 0), os.urandom(64 * HASH_BYTES), 0.0)
            if random.random() < 0.8:
                accounting.first_token(name, 0.01 * request + 0.2)

    def _store(self, record: WorkerRecord, chain: bytes) -> None:
        holder = record.holder()
        sequence = (self.index.sequence(holder) or 0) + 1
        self.index.apply(holder, sequence, (Stored(ROOT, Chain(chain)),))


class Link:
    def transfer_seconds(self, size_bytes: int) -> float:
        return 0.005 + size_bytes / 45e9

    def spread(self, size_bytes: int) -> float:
        return 0.2


def decision_of(fleet: Fleet, name: str, pulls: bool) -> Callable[[], object]:
    """One decision, from the chain to the receipt."""
    knowledge, pool, random, policy = fleet.knowledge, fleet.pool, Random(2), create("kv-aware")
    chain, tokens, now, link = Chain(fleet.chains[name]), DEPTH * BLOCK_TOKENS + 5, 0.3, Link()
    candidates = list(pool.workers)

    def offers(view: Candidate) -> list[tuple[Supply, Link]]:
        return [(Supply("w63", DEPTH * BLOCK_TOKENS, 0, "raw", 327_680), link)]

    def decide() -> object:
        match = fleet.index.match(chain)
        assert isinstance(match, Match)
        snapshot = knowledge.snapshot(pool, candidates, match, chain, tokens, now, False)
        if pulls:
            inquiry = Inquiry(chain, tokens, BLOCK_TOKENS)
            burst = knowledge.burst(inquiry, snapshot.workers, now, link.transfer_seconds)
            options = Pulls(tokens, max(match.depths.values()) * BLOCK_TOKENS, offers, DeadlineBounds())
            snapshot = snapshot._replace(pulls=options, burst=burst)
        query = Query(tokens)
        decision, views = policy.decide(query, snapshot, random), snapshot.workers
        fields = candidate_fields(views)
        return Receipt("r", "m", "kv-aware", query, 16, decision, views.index(decision.worker), fields, now, 0.0)

    return decide


def percentiles(decide: Callable[[], object], calls: int) -> dict[str, float]:
    """Microseconds."""
    for _ in range(calls // 10):
        decide()
    cpu, clock = [], []
    for _ in range(calls):
        started, began = perf_counter_ns(), thread_time_ns()
        decide()
        cpu.append(thread_time_ns() - began)
        clock.append(perf_counter_ns() - started)
    cpu.sort()
    clock.sort()
    at = {"p50": calls // 2, "p99": calls * 99 // 100}
    return {
        **{f"cpu_us_{name}": cpu[place] / 1e3 for name, place in at.items()},
        **{f"clock_us_{name}": clock[place] / 1e3 for name, place in at.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=5000)
    arguments = parser.parse_args()
    fleet = Fleet(arguments.blocks, Random(1))
    gc.collect()
    gc.freeze()  # as the gateway does once it is up
    cases = [("one", False), ("hot", False), ("staggered", False), ("missing", False), ("staggered", True)]
    figures = {
        f"{name}{'_pulls' if pulls else ''}": percentiles(decision_of(fleet, name, pulls), arguments.calls)
        for name, pulls in cases
    }
    if arguments.json:
        arguments.json.write_text(json.dumps({"workers": WORKERS, "blocks": DEPTH, "cases": figures}, indent=1))
    for name, values in figures.items():
        print(f"{name:<18}" + "".join(f"{key:>14} {value:8.1f}" for key, value in values.items()))


if __name__ == "__main__":
    main()

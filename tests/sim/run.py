"""Play histories, one for each seed, and say which of them broke the contract.

    python tests/sim/run.py [--seeds 2000] [--first 0] [--jobs 2] [--verbose]

A failure is printed with the command that repeats it.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sim.verdict import judge
from tests.sim.world import World, play

BATCH = 25


class Told(NamedTuple):
    seed: int
    violations: list[str]
    requests: int
    complete: int
    served: int


def tell(world: World) -> Told:
    asked = [request for client in world.clients for request in client.requests]
    served = sum(len(worker.served) for worker in world.workers)
    return Told(world.seed, judge(world), len(asked), sum(one.complete for one in asked), served)


def play_batch(seeds: Sequence[int]) -> list[Told]:
    told = [tell(play(seed)) for seed in seeds]
    gc.collect()
    return told


def repeat(seed: int) -> str:
    """The command that plays a history again."""
    return f"python tests/sim/run.py --first {seed} --seeds 1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--failures-max", type=int, default=5)
    parser.add_argument("--verbose", action="store_true", help="tell what happens, as it does")
    arguments = parser.parse_args()
    if arguments.verbose:
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            print(seed, play(seed, narrate=print).climate)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    started, failures = time.monotonic(), 0
    requests = complete = served = played = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        results = pool.map(play_batch, batches) if arguments.jobs > 1 else map(play_batch, batches)
        for told in (one for batch in results for one in batch):
            played += 1
            requests, complete, served = requests + told.requests, complete + told.complete, served + told.served
            if told.violations:
                failures += 1
                print(f"seed {told.seed}: {repeat(told.seed)}")
                print("".join(f"    {violation}\n" for violation in told.violations), end="", flush=True)
            if failures >= arguments.failures_max:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.monotonic() - started
    print(f"{played} histories in {seconds:.1f} s: {requests} requests, {complete} complete answers, {served} upstream")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())

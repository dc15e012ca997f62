"""Fuzzes the parser of `.hckv` files: whatever the bytes, they are `Broken` or just what a writer could have written.

    python tests/bench/fuzz_hckv.py --seconds 600 [--seed 0]

Files of many shapes are mutated (in most of them the CRC of the index is made right again, or the parser would see
little of what was done) and read in the two ways there are: whole, and by their end with single frames after it. Both
must agree, nothing but Broken may be raised, and the process may not grow. Exits with 1 at the first fault, and says
by which seed it is found again.
"""

import argparse
import random
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cachecore.scope import Fidelity
from cachecore.store.pools import Extent, hckv
from tests.cachecore.store.pools.mutations import mutate
from tests.cachecore.store.pools.runs import ANN, BOB, content, make_frames, make_run

GROWTH_BYTES_MAX = 32 << 20


def sample(rng: random.Random) -> bytes:
    start = rng.choice([0, 0, 3, 500])
    layers = Extent(start, start + rng.choice([1, 2, 6, 30]))
    run = make_run(
        rng.randrange(1000),
        tenant=rng.choice([ANN, BOB]),
        blocks=rng.choice([1, 2, 16, 300]),
        layers=layers,
        heads=Extent(0, rng.choice([1, 8])),
        codec=rng.choice(["raw", "i8", "x" * 32]),
        fidelity=rng.choice(list(Fidelity)),
    )
    frames = make_frames(run, rng.choice([1, 7, 100, 3000]), rng.choice([1, 2, 30]), pieces=1)
    return b"".join(hckv.encode(run, frames, rng.randbytes(8)).buffers)


def read_whole(file: bytes) -> str:
    try:
        index, frames = hckv.decode(file)
    except hckv.Broken as error:
        return f"broken: {re.sub(r'[0-9]+|: .*', '...', str(error))}"
    if b"".join(hckv.encode(index.run, frames, index.identity).buffers) != file:
        raise AssertionError("it was taken, and is not what a writer would have written")
    return "sound"


def read_by_its_end(rng: random.Random, file: bytes) -> str:
    try:
        tail = file[-rng.choice([hckv.TRAILER_BYTES, 300, hckv.TAIL_GUESS_BYTES]) :]
        trailer = hckv.read_trailer(tail, len(file))
        index = hckv.read_index(file[-trailer.tail_bytes :], trailer)
        for record in index.frames:
            frames = hckv.split(memoryview(file)[record.offset :][: record.size], [record])
            if len(content(frames[0])) != record.size:
                raise AssertionError("a frame of another size than it says")
    except hckv.Broken:
        return "broken"
    return "sound"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    seed, ending = options.seed, time.monotonic() + options.seconds
    grown_from = None
    while time.monotonic() < ending:
        rng = random.Random(seed)
        file = sample(rng)
        for _ in range(50):
            mutated = mutate(rng, file)
            try:
                whole, by_end = read_whole(mutated), read_by_its_end(rng, mutated)
                # The first bytes alone are looked at only where the whole is read.
                if (whole == "sound") > (by_end == "sound"):
                    raise AssertionError(f"whole it is {whole}, by its end {by_end}")
            except Exception:
                print(f"seed {seed}")
                raise
            counts[whole] += 1
        seed += 1
        if seed == options.seed + 200:
            grown_from = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - (grown_from or 0)
    print(f"{sum(counts.values())} files, {options.seconds:g} s, grown by {grown >> 10} KiB")
    for what, count in counts.most_common():
        print(f"  {count:>9}  {what}")
    if grown_from is not None and grown > GROWTH_BYTES_MAX:
        sys.exit("the process has grown: the parser believes what files declare")


if __name__ == "__main__":
    main()

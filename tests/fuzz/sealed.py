"""What is authenticated or has checksums: frames, messages, capabilities, plans and `.hckv` files.

Bytes damaged at random end at the first check, so these inputs are made by their checks, which seal some of them anew.
They are those of tests/bench/fuzz_frames.py and fuzz_hckv.py, under one roof with the others.
"""

from collections.abc import Callable
from random import Random

from tests.bench import fuzz_frames, fuzz_hckv
from tests.cachecore.store.pools.mutations import mutate
from tests.fuzz.engine import Check, Target


def _made(make_and_check: Callable[[Random], None]) -> Check:
    def check(data: bytes, random: Random) -> None:
        make_and_check(random)

    return check


def _check_pool_file(random: Random) -> None:
    file = fuzz_hckv.sample(random)
    for _ in range(10):
        mutated = mutate(random, file)
        whole, by_end = fuzz_hckv.read_whole(mutated), fuzz_hckv.read_by_its_end(random, mutated)
        # The first bytes alone are looked at only where the whole is read.
        if (whole == "sound") > (by_end == "sound"):
            raise AssertionError(f"whole it is {whole}, by its end {by_end}")


TARGETS = (
    *(
        Target(check.__name__.removeprefix("fuzz_").replace("_", "-"), lambda: [b""], _made(check))
        for check in fuzz_frames.TARGETS
    ),
    Target("hckv", lambda: [b""], _made(_check_pool_file)),
)

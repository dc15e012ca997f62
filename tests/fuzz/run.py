"""Fuzz every parser of what others send.

    python tests/fuzz/run.py [--seconds 600] [--seed N] [--jobs 1] [--crashes DIRECTORY] [TARGET ...]
    python tests/fuzz/run.py --repeat FILE TARGET

Each target runs so many seconds of processor time, from a seed that is printed: the inputs of one seed are always the
same. The first finding of a target ends it; its input is printed and, with `--crashes`, written to that directory.
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fuzz.engine import GROWTH_BYTES_MAX, Finding, Told, described, repeat, run
from tests.fuzz.targets import TARGETS


def fuzz(name: str, seed: int, seconds: float) -> Told | tuple[str, bytes]:
    """What a target came to: how much was tried, or (a finding, its input)."""
    try:
        return run(TARGETS[name], seed, seconds)
    except Finding as finding:
        return described(finding), finding.data


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=600.0, help="of each target")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--crashes", type=Path, help="where inputs that fail are written")
    parser.add_argument("--repeat", type=Path, help="check this input alone")
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no target {min(unknown)!r}; there are {', '.join(TARGETS)}")
    names = arguments.targets or list(TARGETS)
    if arguments.repeat is not None:
        repeat(TARGETS[names[0]], arguments.repeat.read_bytes())
        return 0
    # A process for each: what one target leaves in memory is not another's growth.
    with ProcessPoolExecutor(arguments.jobs, max_tasks_per_child=1) as pool:
        running = {name: pool.submit(fuzz, name, arguments.seed, arguments.seconds) for name in names}
        results = {
            name: _tell(name, future.result(), arguments.seed, arguments.crashes) for name, future in running.items()
        }
    return 0 if all(results.values()) else 1


def _tell(name: str, came: Told | tuple[str, bytes], seed: int, crashes: Path | None) -> bool:
    if isinstance(came, Told):
        grown = f"grown by {came.grown_bytes >> 20} MiB"
        print(
            f"{name}: {came.inputs} inputs from seed {seed}, {came.corpus} kept, {came.lines} lines, {grown}",
            flush=True,
        )
        if came.grown_bytes > GROWTH_BYTES_MAX:
            print(f"{name}: a parser keeps, or allocates, what inputs declare")
        return came.grown_bytes <= GROWTH_BYTES_MAX
    text, data = came
    print(f"{text}\n{name}: again by `python tests/fuzz/run.py --seed {seed} {name}`", flush=True)
    if crashes is not None:
        crashes.mkdir(parents=True, exist_ok=True)
        path = crashes / f"{name}-{sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        print(f"or by `python tests/fuzz/run.py --repeat {path} {name}`", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())

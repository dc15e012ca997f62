"""A fuzzer: inputs are bred from a corpus, kept where they reach lines that none before them has, and checked.

Every few inputs are run under a tracer, which tells what of our own code they reach; tracing all of them would cost
more than it finds. An input that fails is printed and, where wanted, written to a directory; it fails again by
`--repeat FILE`, or with the seed, as the inputs of one seed are always the same.
"""

import gc
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TRACED_EVERY = 12
"""Inputs of which one is traced."""
CORPUS_MAX = 4000
INPUT_BYTES_MAX = 200_000
INPUT_SECONDS_MAX = 30.0
"""Of processor time, for one input: what takes longer may never end."""
GROWTH_BYTES_MAX = 192 << 20
"""What the process may grow by, the corpus and the tracer's notes among it."""

Check = Callable[[bytes, Random], None]


class Target(NamedTuple):
    name: str
    corpus: Callable[[], list[bytes]]
    """Inputs to begin with. None where the check makes its own."""
    check: Check
    """Raises at a finding, and only then. What it draws at random decides how, not whether."""
    words: tuple[bytes, ...] = ()
    """What means something in this language."""


class Finding(Exception):
    """An input that did what none may."""

    def __init__(self, target: str, number: int, data: bytes, cause: BaseException) -> None:
        super().__init__(f"{target}: input {number} ({len(data)} bytes): {cause!r}")
        self.target = target
        self.number = number
        self.data = data
        self.cause = cause


class Told(NamedTuple):
    inputs: int
    corpus: int
    lines: int
    """Of our own code, reached by traced inputs."""
    grown_bytes: int


# Mutation

_EDGES = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\x00" * 4, b"\xff" * 4, b"\xff\xff\xff\x7f", b"\xff" * 8, b"\xc3\x28")
_OPENERS = (b"[", b"{", b'{"a":', b"- ", b"\x91", b"\x81\xa1a", b"&a ")
_NUMBERS = (b"0", b"-1", b"1", b"9" * 20, b"1e400", b"2147483648", b"18446744073709551616", b"0x10", b"1_0", b"nan")


def mutate(data: bytes, random: Random, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        at = random.randrange(len(changed) + 1)
        end = min(len(changed), at + random.choice((1, 1, 2, 4, 8, 30, 200)))
        match random.randrange(10 if random.random() < 0.1 else 9):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << random.randrange(8)
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = changed[at:end] * random.choice((1, 1, 2, 30))
            case 3:
                changed[at:end] = random.choice(_EDGES)
            case 4:
                changed[at:end] = random.choice(_NUMBERS)
            case 5 if words:
                changed[at : at if random.random() < 0.6 else end] = random.choice(words)
            case 6:
                other = random.choice(others)
                start = random.randrange(len(other) + 1)
                changed[at:] = other[start:]
            case 7:
                del changed[at:]
            case 9:
                # Deeper than any reader may go that calls itself.
                changed[at:at] = random.choice(_OPENERS) * random.choice((900, 3000))
            case _:
                changed[at:end] = random.randbytes(end - at)
    return bytes(changed[:INPUT_BYTES_MAX])


# Coverage

Line = tuple[CodeType, int]


class Coverage:
    """Which lines of our packages were reached."""

    def __init__(self) -> None:
        self.lines: set[Line] = set()
        self._new = False
        self._packages = tuple(str(ROOT / name) for name in ("cachecore", "gateway", "loadtest", "policies", "workers"))
        self._ours: dict[CodeType, bool] = {}

    def __call__(self, check: Callable[[], None]) -> bool:
        """Run it; whether it has reached anything new."""
        self._new = False
        sys.settrace(self._on_call)
        try:
            check()
        finally:
            sys.settrace(None)
        return self._new

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            ours = self._ours[code] = code.co_filename.startswith(self._packages)
        return self._on_line if ours else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        line = (frame.f_code, frame.f_lineno)
        if line not in self.lines:
            self.lines.add(line)
            self._new = True
        return self._on_line


# The loop


def run(target: Target, seed: int, seconds: float, inputs_max: int | None = None) -> Told:
    """Try a target for so many seconds of processor time, however busy the machine is. Raises Finding."""
    corpus, coverage = target.corpus(), Coverage()
    for number, data in enumerate(corpus):
        with _attributed(target.name, -1 - number, data):
            coverage(lambda data=data: target.check(data, Random(0)))  # type: ignore[misc]
    ends_at, number, settled_bytes = time.process_time() + seconds, 0, 0
    while time.process_time() < ends_at and number != inputs_max:
        random = Random(f"{seed}:{number}")
        data = mutate(random.choice(corpus), random, corpus, target.words)
        with _attributed(target.name, number, data):
            if number % TRACED_EVERY:
                target.check(data, random)
            elif coverage(lambda data=data, random=random: target.check(data, random)) and len(corpus) < CORPUS_MAX:  # type: ignore[misc]
                corpus.append(data)
        number += 1
        if number == 500:
            gc.collect()
            settled_bytes = _peak_bytes()
    grown = _peak_bytes() - settled_bytes if settled_bytes else 0
    return Told(number, len(corpus), len(coverage.lines), grown)


def repeat(target: Target, data: bytes) -> None:
    """Check one input. Raises Finding."""
    with _attributed(target.name, 0, data):
        target.check(data, Random(0))


@contextmanager
def _attributed(target: str, number: int, data: bytes) -> Iterator[None]:
    """Whatever goes wrong with an input, or does not end, is the input's finding."""
    earlier = signal.signal(signal.SIGPROF, _took_too_long)
    signal.setitimer(signal.ITIMER_PROF, INPUT_SECONDS_MAX)
    try:
        yield
    except Exception as error:
        raise Finding(target, number, data, error) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, earlier)


def _took_too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"more than {INPUT_SECONDS_MAX:g} seconds of processor time")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def described(finding: Finding) -> str:
    cause = "".join(traceback.format_exception(finding.cause))
    shown = finding.data if len(finding.data) < 2000 else finding.data[:2000] + b"..."
    return f"{cause}\n{finding}\n{shown!r}"

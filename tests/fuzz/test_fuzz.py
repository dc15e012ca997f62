"""A few inputs for each target, and that the fuzzer finds what there is to be found."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from gateway.edge.http1 import FramingError, parse_response_head
from tests.fuzz import engine
from tests.fuzz.engine import Coverage, Finding, Target, repeat, run
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
INPUTS = 40


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_inputs(name: str) -> None:
    target = TARGETS[name]
    told = run(target._replace(corpus=lambda: target.corpus()[:8]), seed=1, seconds=60.0, inputs_max=INPUTS)
    assert told.inputs == INPUTS


def _planted(data: bytes, random: Random) -> None:
    with suppress(FramingError):
        if parse_response_head(data).length == 7:
            raise ZeroDivisionError


PLANTED = Target("planted", lambda: [b"HTTP/1.1 200 OK\r\nContent-Length: 8"], _planted, (b"7", b"8"))


def test_a_planted_fault_is_found_and_found_again() -> None:
    with pytest.raises(Finding, match=r"planted: input \d+ .*ZeroDivisionError") as found:
        run(PLANTED, seed=3, seconds=60.0, inputs_max=20_000)
    with pytest.raises(Finding, match="ZeroDivisionError"):
        repeat(PLANTED, found.value.data)
    with pytest.raises(Finding) as again:
        run(PLANTED, seed=3, seconds=60.0, inputs_max=20_000)
    assert (again.value.number, again.value.data) == (found.value.number, found.value.data)


def test_an_input_that_does_not_end_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "INPUT_SECONDS_MAX", 0.05)

    def check(data: bytes, random: Random) -> None:
        while data:
            pass

    with pytest.raises(Finding, match=r"input -1 .*TimeoutError.*seconds of processor time"):
        run(Target("endless", lambda: [b"endless"], check), seed=1, seconds=60.0)


def test_inputs_that_reach_new_lines_are_kept() -> None:
    coverage, check = Coverage(), TARGETS["response-heads"].check
    assert coverage(lambda: check(b"HTTP/1.1 200 OK", Random(0)))
    assert not coverage(lambda: check(b"HTTP/1.1 200 OK", Random(0)))
    assert coverage(lambda: check(b"HTTP/1.1 200 OK\r\nContent-Length: 8", Random(0)))


def test_the_command_tells_the_seed_and_ends_well() -> None:
    command = [sys.executable, "tests/fuzz/run.py", "--seconds", "0.2", "--seed", "5", "chunks"]
    told = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("chunks: ")
    assert "from seed 5" in told.stdout

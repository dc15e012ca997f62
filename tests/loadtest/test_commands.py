"""What this package's commands have in common."""

import argparse
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.commands import EXIT_USAGE, UsageError, factor, guarded, known, listed, positive, progress_bars, readable

WORK = """
from loadtest.commands import progress_bars
with progress_bars() as progress:
    for done in range(3):
        progress("replays", done + 1, 3)
    import time; time.sleep(0.3)
"""


def test_progress_says_nothing_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as progress:
        progress("replays", 1, 2)
        progress("replays", 2, 2)
    assert capsys.readouterr() == ("", "")


def test_progress_is_a_bar_on_a_terminals_stderr() -> None:
    own, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", WORK],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=60,
        check=True,
    )
    os.close(theirs)
    said = b""
    while chunk := _read(own):
        said += chunk
    os.close(own)
    assert b"replays" in said
    assert b"100%" in said
    assert done.stdout == b""


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4_096)
    except OSError:  # the other end is closed
        return b""


def test_usage_errors_are_one_line_and_others_pass(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(arguments: argparse.Namespace) -> int:
        raise arguments.error

    run = guarded(fails, KeyError)
    assert run(argparse.Namespace(error=UsageError("no such thing"))) == EXIT_USAGE
    assert capsys.readouterr().err == "ropeway: error: no such thing\n"
    assert run(argparse.Namespace(error=KeyError("k"))) == EXIT_USAGE
    with pytest.raises(ValueError, match="bug"):
        run(argparse.Namespace(error=ValueError("bug")))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (positive, "0", "at least 1 is needed, not 0"),
        (positive, "1.5", "a whole number is expected, not '1.5'"),
        (factor, "0", "more than 0 is needed, not 0"),
        (factor, "nan", "more than 0 is needed, not nan"),
        (factor, "inf", "more than 0 is needed, not inf"),
        (factor, "x", "a number is expected, not 'x'"),
        (listed(positive), " , ", "the list is empty"),
        (listed(positive), "1,a", "a whole number is expected, not 'a'"),
        (readable, "/nonexistent", "/nonexistent: no such file"),
    ],
)
def test_arguments_that_are_wrong(kind, text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message.replace(".", r"\.")):
        kind(text)


def test_arguments_that_are_right() -> None:
    assert listed(positive)("1, 2,3") == [1, 2, 3]
    assert factor("0.5") == 0.5
    assert readable(__file__) == Path(__file__)
    assert known({"a": 1}.__getitem__)("a") == 1

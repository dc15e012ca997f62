"""Commands run by a shell as somebody types them, and what is wrong with how they ended."""

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

COMMAND_SECONDS_MAX = 600.0
READY_SECONDS_MAX = 180.0
END_SECONDS_MAX = 40.0
LINES_SHOWN = 20
MARK = "DOCUMENT_COMMAND"
"""A variable that all descendants of a command have, in whatever session they are."""

TRACEBACK = "Traceback (most recent call last)"


class Running:
    """A command that has been started: a group of processes, with its outputs in files."""

    def __init__(self, command: str, directory: Path, environment: Mapping[str, str]) -> None:
        self.command = command
        self._mark = uuid.uuid4().hex
        self.out, self.err = (directory / f"{self._mark}.{kind}" for kind in ("out", "err"))
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self._popen = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", command],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**environment, MARK: self._mark},
                start_new_session=True,
                preexec_fn=_heed_interrupts,
            )

    def wait(self, seconds_max: float = COMMAND_SECONDS_MAX) -> list[str]:
        """Until it ends by itself; what is wrong with how it did."""
        try:
            status = self._popen.wait(seconds_max)
        except subprocess.TimeoutExpired:
            self.kill()
            return [self._said(f"has not ended after {seconds_max:.0f} s")]
        return self._problems(status)

    def wait_ready(self, ready: Callable[["Running"], bool], seconds_max: float = READY_SECONDS_MAX) -> list[str]:
        limit = time.monotonic() + seconds_max
        while self._popen.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if ready(self):
                    return []
            if time.monotonic() > limit:
                return [self._said(f"is not ready after {seconds_max:.0f} s")]
            time.sleep(0.1)
        return [self._said(f"ended with {self._popen.returncode} before it was ready")]

    def interrupt(self, ends_with: int = 0) -> list[str]:
        """Ctrl-C, as a terminal sends it; what is wrong with the end, or that it had ended before."""
        if self._popen.poll() is not None:
            return [self._said(f"has not stayed: it ended with {self._popen.returncode}")]
        os.killpg(self._popen.pid, signal.SIGINT)
        try:
            status = self._popen.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            return [self._said(f"has not ended {END_SECONDS_MAX:.0f} s after Ctrl-C")]
        return self._problems(status, ends_with)

    def close(self) -> list[str]:
        """Ctrl-C, if it has not ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._problems(self._popen.wait(0.5))
        return self.interrupt()

    def kill(self) -> None:
        """It and whatever it has left."""
        for process in [self._popen.pid, *self.left()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._popen.wait()

    def left(self) -> list[int]:
        """Processes that it started, or that those did, which live."""
        return [process for process in _processes() if self._mark in _environment(process) and _lives(process)]

    def _problems(self, status: int, expected: int = 0) -> list[str]:
        problems = [] if status == expected else [self._said(f"ended with {status}")]
        if TRACEBACK in self.err.read_text(errors="replace"):
            problems.append(self._said("shows a traceback"))
        if left := self._left_for_good():
            problems.append(self._said(f"has left {left} behind"))
            self.kill()
        return problems

    def _left_for_good(self, seconds_max: float = 3.0) -> list[int]:
        """A process that is just becoming another program shows no environment: nothing is there that two looks in a
        row do not find."""
        limit = time.monotonic() + seconds_max
        before = True
        while ((left := self.left()) or before) and time.monotonic() < limit:
            before = bool(left)
            time.sleep(0.05)
        return left

    def _said(self, problem: str) -> str:
        ends = [line for file in (self.out, self.err) for line in file.read_text(errors="replace").splitlines()]
        return "\n    ".join([f"{self.command}: {problem}", *ends[-LINES_SHOWN:]])


def answers(url: str) -> Callable[[Running], bool]:
    return lambda _: httpx.get(url, trust_env=False, timeout=5).status_code == httpx.codes.OK


def has_spoken(running: Running) -> bool:
    return any(file.read_text(errors="replace").strip() for file in (running.out, running.err))


def not_answered_well(curl_output: str) -> list[str]:
    """Of a curl that writes the status into its last line."""
    status = curl_output.rstrip().rpartition("\n")[2]
    return [] if re.fullmatch(r"2\d\d", status) else [f"it was answered {status}"]


def _heed_interrupts() -> None:
    """What runs in the background of a shell ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/environ").read_text(errors="replace")
    return ""


def _lives(process: int) -> bool:
    """A zombie whom nobody has asked after has an end, too."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False

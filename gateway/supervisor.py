"""Processes that live and die together.

Each part is a process in a group of its own, with its output in a log file. When one ends unasked, the supervisor says
which and shows the end of its output; whoever supervises then stops the rest. Nothing outlives the supervisor: `stop`
ends every group, and should the supervisor itself be killed, the kernel kills its children (Linux).

Everything here polls and nothing is asynchronous: a handful of processes need no more, and a signal handler that only
counts cannot deadlock.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx

from cachecore.store.children import dies_with_parent
from gateway.errors import StartupError

START_SECONDS_MAX = 300.0
STOP_SECONDS_MAX = 12.0
POLL_SECONDS = 0.1
TAIL_LINES = 20


class PartDied(StartupError):
    """A part of the stack ended though nobody asked it to."""


class Stopped(Exception):
    """The operator asked for the end."""


@dataclass(frozen=True, slots=True)
class Part:
    """A process to run and how to know that it serves."""

    name: str
    arguments: Sequence[str]
    ready_urls: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Process:
    """A part that runs."""

    def __init__(self, part: Part, log: Path) -> None:
        self.part = part
        self.log = log
        self._felled = False
        log.unlink(missing_ok=True)
        self._popen = self._launch()

    def _launch(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as output:
            return subprocess.Popen(  # noqa: S603 (our own command line, no shell)
                self.part.arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.part.environment},
                process_group=0,
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def check(self) -> None:
        """Raises PartDied, with the end of the output, when the process is no more, unless it was felled."""
        status = self._popen.poll()
        if status is None or self._felled:
            return
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        raise PartDied(f"{self.part.name} {how}; the end of {self.log}:\n{self.tail()}")

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(f"  {line}" for line in lines) or "  (no output)"

    def signal(self, number: signal.Signals) -> None:
        """To the whole group, of which something may be left when its leader is gone."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def kill(self) -> None:
        """Whatever is left of the group."""
        self.signal(signal.SIGKILL)
        self._popen.wait()

    def fell(self) -> None:
        """Kill it on purpose: nobody misses it until it rises."""
        self._felled = True
        self.kill()

    def rise(self) -> None:
        """Start it again, if it was felled; its output goes on in the same log."""
        if self._felled:
            self._popen = self._launch()
            self._felled = False


class Supervisor:
    """Starts parts, waits for them, watches them and stops them."""

    def __init__(self, log_directory: Path, signals_seen: Callable[[], int]) -> None:
        """`signals_seen` counts the operator's wishes to end, as `stop_signals` does."""
        self.processes: list[Process] = []
        self._log_directory = log_directory
        self._signals_seen = signals_seen
        self._client = httpx.Client(timeout=2.0, trust_env=False)

    def start(self, part: Part) -> None:
        self.processes.append(Process(part, self._log_directory / f"{part.name}.log"))

    def wait_ready(self, seconds_max: float = START_SECONDS_MAX) -> None:
        """Until every part answers 200 at its `ready_urls`. Raises PartDied, Stopped, StartupError when time is up."""
        waiting = [(process, url) for process in self.processes for url in process.part.ready_urls]
        deadline = time.monotonic() + seconds_max
        while waiting:
            self._check()
            waiting = [(process, url) for process, url in waiting if not self._answers(url)]
            if waiting and time.monotonic() > deadline:
                process = waiting[0][0]
                raise StartupError(
                    f"{process.part.name} is not ready after {seconds_max:.0f} s; "
                    f"the end of {process.log}:\n{process.tail()}"
                )
            time.sleep(POLL_SECONDS)

    def watch(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """For ever: raises Stopped when the operator asks for the end, PartDied when a part dies.

        `meanwhile` is called between two looks, and must not wait.
        """
        while True:
            self._check()
            meanwhile()
            time.sleep(POLL_SECONDS)

    def stop(self, seconds_max: float = STOP_SECONDS_MAX) -> None:
        """End every group: the last started first, so that no gateway outlives its workers. Kills what does not end.

        `seconds_max` is for each of the two steps. Another signal from the operator cuts it short.
        """
        for step in (self.processes[-1:], self.processes[:-1]):
            for process in step:
                process.signal(signal.SIGTERM)
            self._wait_ended(step, time.monotonic() + seconds_max)
            for process in step:
                process.kill()
        self._client.close()

    def _wait_ended(self, processes: Sequence[Process], deadline: float) -> None:
        seen = self._signals_seen()
        while time.monotonic() < deadline and self._signals_seen() == seen:
            if all(process.ended for process in processes):
                return
            time.sleep(POLL_SECONDS / 2)

    def _check(self) -> None:
        if self._signals_seen():
            raise Stopped
        for process in self.processes:
            process.check()

    def _answers(self, url: str) -> bool:
        try:
            return self._client.get(url).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Counts SIGINT, SIGTERM and SIGHUP instead of dying of them: whoever polls the count decides what follows."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    watched = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        watched.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield lambda: len(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

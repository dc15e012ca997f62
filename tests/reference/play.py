"""A document, played: its commands one after the other, on a stage, as its reader would."""

import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from tests.reference.exceptions import is_typed, not_run
from tests.reference.running import Running, answers, has_spoken, not_answered_well
from tests.reference.stage import Stage
from tests.reference.substitutions import substituted
from tests.reference.written import Line

PROGRAMS = r"(?:[A-Z_]+=\S+ )?(?:[A-Z_]+=\$\()?(?:\S*\bropeway|\S*\blocust|curl|make|deploy/secrets\.sh)(?: |$)"
"""What commands that are run begin with."""


class Serving(NamedTuple):
    """A command that stays until Ctrl-C."""

    pattern: str
    ready: str
    """The path that answers 200 on its port; none where its first word says so."""
    ends_with: int = 0
    """On Ctrl-C. What only shows something ends as what was interrupted (docs/reference/exit-codes.md)."""


GATEWAY = Serving(r".*\bropeway (up|serve)\b", "/readyz")
DEMO = Serving(r"make .*\bdemo\b", "/readyz", ends_with=-signal.SIGINT)
"""The status is make's own, whatever its command does."""
SERVING = (
    DEMO,
    GATEWAY,
    Serving(r".*\bropeway worker\b", "/health"),
    Serving(r"locust (?!.*--headless)", "/"),
    Serving(r".*\bropeway top(?!.*--(once|duration))", "", ends_with=130),
    Serving(r".*\bropeway events capture (?!.*--seconds)", ""),
)

NEEDS_GATEWAY = r"\bropeway (top|loadtest)\b|\blocust -f |--gateway "

EVENTS, STACK = "events", "stack"
"""What a reader has one of at a time, on whatever port: a capture and its endpoint, a gateway and its workers."""

BESIDE = (
    (r"ropeway events replay .*--connect", "ropeway events capture heard.jsonl --bind --endpoint {there}"),
    (r"ropeway events replay ", "ropeway events capture heard.jsonl --endpoint {there}"),
    (r"ropeway events capture .*--bind", "ropeway events replay earlier-events.jsonl --connect --endpoint {there}"),
)
"""Who must be at the other end meanwhile."""


class Served(NamedTuple):
    place: str
    running: Running
    kind: Serving

    @property
    def claims(self) -> frozenset[int | str]:
        return claims(self.running.command)

    def end(self) -> list[str]:
        return [f"{self.place}: {problem}" for problem in self.running.interrupt(self.kind.ends_with)]


class Play:
    """Collects what goes wrong in `problems` and goes on."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.problems: list[str] = []
        self.ran: list[str] = []
        self._served: list[Served] = []
        self._configured = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for served in self._served:
            served.running.kill()

    def play(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._step(line)
        self._end(self._served)
        self.problems += tracebacks_in(self.stage.directory)

    def _step(self, line: Line) -> None:
        self._prepare(line.text)
        command = substituted(line.text, self.stage)
        began = time.monotonic()
        self._end([served for served in self._served if served.claims & claims(command)])
        self._set_aside(command)
        if serving := serves(command):
            self._serve(str(line), command, serving)
        else:
            self._run(str(line), command)
        self.ran.append(f"{time.monotonic() - began:6.1f} s  {line}: {command}")

    def _prepare(self, text: str) -> None:
        """The files and the gateway that a command takes for granted."""
        asks_gateway = bool(re.search(NEEDS_GATEWAY, text)) or (text.startswith("curl ") and ":8000/" in text)
        if not self._configured and (asks_gateway or re.search(r"-c (gateway|ropeway)\.yaml", text)):
            self.stage.write_configuration()
            self._configured = True
        port = self.stage.port(8000)
        if asks_gateway and not any(port in served.claims for served in self._served):
            command = substituted("ropeway serve -c gateway.yaml", self.stage)
            self._serve(f"{self.stage.path} (the gateway it speaks of)", command, GATEWAY)

    def _set_aside(self, command: str) -> None:
        """Captures and keyrings are not written over others: examples of one page may name the same file."""
        made = re.match(r"ropeway (?:events capture |keys keyring --file )(\S+)", command)
        if made and (file := self.stage.directory / made[1]).exists():
            file.replace(file.with_name(f"earlier-{file.name}"))

    def _serve(self, place: str, command: str, serving: Serving) -> None:
        running = Running(command, self.stage.directory, self.stage.environment)
        ready = answers(f"http://127.0.0.1:{port_of(command)}{serving.ready}") if serving.ready else has_spoken
        if problems := running.wait_ready(ready):
            self._note(place, problems)
            running.kill()
        else:
            self._served.append(Served(place, running, serving))

    def _run(self, place: str, command: str) -> None:
        beside = self._beside(place, command)
        running = Running(command, self.stage.directory, self.stage.environment)
        problems = running.wait()
        if not problems and command.startswith("curl "):
            problems = [f"{command}: {problem}" for problem in not_answered_well(running.out.read_text())]
        self._note(place, problems)
        if beside is not None:
            self._note(place, beside.close())

    def _beside(self, place: str, command: str) -> Running | None:
        for pattern, template in BESIDE:
            if re.match(pattern, command):
                there = f"tcp://127.0.0.1:{self.stage.port(5557)}"
                (self.stage.directory / "heard.jsonl").unlink(missing_ok=True)
                return Running(template.format(there=there), self.stage.directory, self.stage.environment)
        return None

    def _end(self, ending: Sequence[Served]) -> None:
        """The last started first, as its reader would."""
        for served in reversed(ending):
            self._served = [one for one in self._served if one is not served]
            self.problems += served.end()

    def _note(self, place: str, problems: Sequence[str]) -> None:
        self.problems += [f"{place}: {problem}" for problem in problems]


def serves(command: str) -> Serving | None:
    return next((serving for serving in SERVING if re.match(serving.pattern, command)), None)


def claims(command: str) -> frozenset[int | str]:
    """What only one command has at a time: ports, a stack, the endpoint of events."""
    if re.match(r"ropeway events ", command):
        return frozenset({EVENTS})
    if not serves(command) or not re.search(_port, command):
        return frozenset()
    counted = re.search(r"worker .*--count (\d+)", command)
    first = port_of(command)
    ports = range(first, first + int(counted[1] if counted else 1))
    return frozenset([*ports, STACK] if serves(command) in (DEMO, GATEWAY) else ports)


def port_of(command: str) -> int:
    found = re.search(_port, command)
    assert found, f"{command} says no port"
    return int(found[1])


_port = r"(?:--port |--web-port |\bPORT=)(\d+)"


def is_run(line: Line) -> bool:
    return not_run(line) is None and is_typed(line)


def is_known(line: Line) -> bool:
    """Whether a line that is run begins with a program that is known here: all others have to be accounted for."""
    return re.match(PROGRAMS, line.text) is not None


def tracebacks_in(directory: Path) -> list[str]:
    """In what programs wrote down for themselves."""
    logs = sorted(directory.glob("home/**/*.log"))
    return [f"{log.name} shows a traceback" for log in logs if "Traceback" in log.read_text(errors="replace")]

"""The commands of README, CONTRIBUTING and docs do what they are there for: each one is run, in the order of its page.

A page has a stage of its own: a directory, ports, workers, a server, files. Commands that serve become ready, stay for
those that follow, and end well on Ctrl-C; all others end by themselves, well, with nothing left behind.
"""

import http.server
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference.exceptions import NOT_RUN, NOT_TYPED, NotRun, exists, is_typed, not_run
from tests.reference.play import Play, Serving, claims, is_known, is_run, serves
from tests.reference.running import Running, answers, has_spoken, not_answered_well
from tests.reference.stage import Stage, fetched_model
from tests.reference.substitutions import SUBSTITUTIONS, substituted
from tests.reference.written import Line, shell_lines

LINES = shell_lines()
RUN = [line for line in LINES if is_run(line)]
PAGES = sorted({line.path for line in RUN})

NEEDS_MODEL = r"make demo|smollm2|/models/|ropeway (worker reference|quality|up$|up --port|benchmark)"


@pytest.fixture
def directory() -> Iterator[Path]:
    """As short as homes are: a server's socket in it must not have a path of over 103 bytes, and pytest's are long."""
    with tempfile.TemporaryDirectory(prefix="ropeway-") as directory:
        yield Path(directory)


@pytest.mark.documents
@pytest.mark.parametrize("path", PAGES)
def test_every_command_of_a_page_does_what_it_is_there_for(path: str, directory: Path) -> None:
    lines = [line for line in RUN if line.path == path]
    if any(re.search(NEEDS_MODEL, line.text) for line in lines) and not fetched_model().exists():
        pytest.skip("the model was not fetched: ropeway model fetch smollm2")
    if any(line.text.startswith("curl ") for line in lines) and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    with Stage(path, directory) as stage, Play(stage) as play:
        play.play(lines)
    print("", *play.ran, sep="\n")
    assert len(play.ran) == len(lines)
    assert play.problems == [], "\n".join(play.problems)


# ---- nothing is left out ---------------------------------------------------------------------------------------------


def test_every_line_is_run_or_accounted_for() -> None:
    assert len(RUN) >= 100
    assert [f"{line}: {line.text}" for line in RUN if not is_known(line)] == []


def test_no_line_is_left_out_twice() -> None:
    assert [str(line) for line in LINES if not_run(line) and not is_typed(line)] == []


@pytest.mark.parametrize("row", NOT_RUN, ids=lambda row: row.pattern)
def test_what_is_not_run_is_written_and_tried_elsewhere(row: NotRun) -> None:
    assert any(not_run(line) is row for line in LINES), "no line is like that any more"
    assert exists(row.covered_by)


@pytest.mark.parametrize("pattern", NOT_TYPED)
def test_what_is_not_typed_is_written(pattern: str) -> None:
    for alternative in pattern.split("|") if "(" not in pattern else [pattern]:
        assert any(re.match(alternative, line.text) for line in LINES), "no line is like that any more"


class Names:
    def __getitem__(self, name: str, /) -> str:
        return name.upper()


def test_every_substitution_has_something_to_do() -> None:
    for row in SUBSTITUTIONS:
        texts = [line.text for line in RUN]
        assert any(re.search(row.pattern, before) for before in [*texts, *map(_partly, texts)]), row.pattern


def _partly(text: str) -> str:
    """With what earlier rows have made of it."""
    return substituted(text, Names())


@pytest.mark.parametrize(
    ("written", "run"),
    [
        ("ropeway serve --worker http://10.0.0.1:8000 ...", "ropeway serve --worker WORKER_1 --port PORT_8000"),
        ("ropeway up --port 9000", "ropeway up --port PORT_9000"),
        ("ropeway top --once", "ropeway top GATEWAY --once"),
        ("curl localhost:8000/x -d ...", "curl --silent --show-error --max-time 60 --write-out '\\n%{http_code}' "
         "127.0.0.1:PORT_8000/x -d 'CHAT'"),
        ("A=1 ropeway serve -c gateway.yaml", "A=1 ropeway serve -c gateway.yaml --port PORT_8000"),
    ],
)  # fmt: skip
def test_substitutions_change_what_they_are_for(written: str, run: str) -> None:
    assert substituted(written, Names()) == run


# ---- the runner sees what is wrong -----------------------------------------------------------------------------------

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("exit 3", "ended with 3"),
        ("false | true", "ended with 1"),
        ("echo 'Traceback (most recent call last):' >&2", "shows a traceback"),
        ("nohup setsid sleep 30 >/dev/null 2>&1 &", "behind"),
    ],
)
def test_a_command_that_fails_is_seen(command: str, problem: str, tmp_path: Path) -> None:
    assert problem in "".join(Running(command, tmp_path, ENVIRONMENT).wait())


def test_a_command_that_is_right_is_right(tmp_path: Path) -> None:
    assert Running("echo done", tmp_path, ENVIRONMENT).wait() == []


def test_a_command_that_does_not_end_is_seen(tmp_path: Path) -> None:
    running = Running("sleep 30", tmp_path, ENVIRONMENT)
    assert "has not ended after 0 s" in "".join(running.wait(0.2))
    assert running.left() == []


def test_a_command_that_never_becomes_ready_is_seen(tmp_path: Path) -> None:
    running = Running("sleep 30", tmp_path, ENVIRONMENT)
    assert "is not ready after 0 s" in "".join(running.wait_ready(answers("http://127.0.0.1:9/readyz"), 0.3))
    running.kill()
    ended = Running("exit 0", tmp_path, ENVIRONMENT)
    assert "before it was ready" in "".join(ended.wait_ready(answers("http://127.0.0.1:9/readyz"), 5))


@pytest.mark.parametrize(
    ("at_the_end", "problem"),
    [
        ("exit 0", ""),
        ("exit 1", "ended with 1"),
        ("echo Traceback '(most recent call last)' >&2; exit 0", "shows a traceback"),
    ],
)
def test_how_a_server_ends_is_seen(at_the_end: str, problem: str, tmp_path: Path) -> None:
    command = f'trap "{at_the_end}" INT; echo ready; while :; do sleep 0.1; done'
    running = Running(command, tmp_path, ENVIRONMENT)
    assert running.wait_ready(has_spoken, 10) == []
    problems = running.interrupt()
    assert problem in "".join(problems)
    assert bool(problems) == bool(problem)


def test_a_server_that_does_not_stay_is_seen(tmp_path: Path) -> None:
    running = Running("echo ready; sleep 0.2", tmp_path, ENVIRONMENT)
    assert running.wait_ready(has_spoken, 10) == []
    assert running.wait() == []
    assert "has not stayed" in "".join(running.interrupt())


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that finds nothing."""

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_an_answer_that_is_none_is_seen(refusing: str, tmp_path: Path) -> None:
    running = Running(substituted(f"curl {refusing}/x", Names()), tmp_path, ENVIRONMENT)
    assert running.wait() == []
    assert not_answered_well(running.out.read_text()) == ["it was answered 404"]
    assert not_answered_well("{}\n200") == []


def test_a_line_that_nobody_knows_is_seen() -> None:
    line = Line("docs/x.md", 1, "frobnicate --all")
    assert is_run(line)
    assert not is_known(line)
    assert not exists("make nothing")
    assert not exists("tests/test_cli.py::test_nothing_of_the_kind")


@pytest.mark.parametrize(
    ("command", "claimed"),
    [
        ("ropeway worker simulated --count 3 --port 8101", {8101, 8102, 8103}),
        ("ropeway up --simulated --workers 8 --port 8000", {8000, "stack"}),
        ("make -C /x demo PORT=8000", {8000, "stack"}),
        ("ropeway events replay events.jsonl --endpoint tcp://127.0.0.1:1", {"events"}),
        ("ropeway audit --workload chat", set()),
    ],
)
def test_one_command_at_a_time_has_a_port(command: str, claimed: set[int | str]) -> None:
    assert claims(command) == claimed


def test_commands_that_serve_are_told_from_those_that_end() -> None:
    assert isinstance(serves("ropeway top http://x"), Serving)
    assert serves("ropeway top http://x --once") is None
    assert serves("locust -f x --headless") is None
    assert serves("ropeway events capture x --seconds 2") is None

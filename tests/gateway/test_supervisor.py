"""Supervision is shown on real processes: small servers that are told how to live and how to die."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.errors import StartupError
from gateway.ports import free_port_range
from gateway.supervisor import Part, PartDied, Stopped, Supervisor, stop_signals

REPOSITORY = Path(__file__).parents[2]

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments): pass
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
GRACEFUL = (
    "import signal, sys, time; signal.signal(15, lambda *_: (print('bye', flush=True), sys.exit(0))); time.sleep(60)"
)


def python(name: str, code: str, *arguments: str, ready_urls: tuple[str, ...] = ()) -> Part:
    return Part(name, [sys.executable, "-c", code, *arguments], ready_urls)


def server(name: str) -> Part:
    port = free_port_range("127.0.0.1", 1, 20_000 + os.getpid() % 20_000)[0]
    return python(name, SERVER, str(port), ready_urls=(f"http://127.0.0.1:{port}/",))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def eventually(condition: Callable[[], bool], seconds_max: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds_max
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def signals() -> list[int]:
    """What the operator has sent so far."""
    return []


@pytest.fixture
def supervisor(tmp_path: Path, signals: list[int]) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path, lambda: len(signals))
    yield supervisor
    supervisor.stop(seconds_max=0.5)


def test_waits_until_every_part_answers(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(server("one"))
    supervisor.wait_ready()
    supervisor.start(server("two"))
    supervisor.wait_ready()
    assert (tmp_path / "two.log").read_text() == "serving\n"


def test_a_part_that_dies_is_named_with_the_end_of_its_output(supervisor: Supervisor) -> None:
    supervisor.start(server("steady"))
    code = "import sys; print(*range(100), sep=chr(10)); sys.exit('no weights')"
    supervisor.start(python("worker-2", code, ready_urls=("http://127.0.0.1:9/",)))
    with pytest.raises(PartDied) as caught:
        supervisor.wait_ready()
    message = str(caught.value)
    assert message.startswith("worker-2 ended with exit code 1; the end of ")
    assert message.endswith("  98\n  99\n  no weights")
    assert "\n  80\n" not in message


def test_a_part_that_is_killed_is_noticed_while_watching(supervisor: Supervisor) -> None:
    supervisor.start(server("worker-1"))
    supervisor.wait_ready()
    os.kill(supervisor.processes[0].pid, signal.SIGKILL)
    with pytest.raises(PartDied, match="worker-1 was killed by SIGKILL"):
        supervisor.watch()


def test_a_part_that_never_answers_is_named(supervisor: Supervisor) -> None:
    supervisor.start(python("slow", GRACEFUL, ready_urls=("http://127.0.0.1:9/",)))
    with pytest.raises(StartupError, match="slow is not ready after 0 s"):
        supervisor.wait_ready(seconds_max=0.2)


def test_stop_is_asked_for_before_it_is_forced(supervisor: Supervisor, tmp_path: Path, signals: list[int]) -> None:
    supervisor.start(python("stubborn", STUBBORN))
    supervisor.start(python("graceful", GRACEFUL))
    assert eventually(lambda: (tmp_path / "stubborn.log").read_text() == "deaf\n")
    time.sleep(0.3)  # the second has no way to say that its handler is in place
    signals.append(signal.SIGINT)
    with pytest.raises(Stopped):
        supervisor.watch()
    pids = [process.pid for process in supervisor.processes]
    supervisor.stop(seconds_max=1.0)
    assert (tmp_path / "graceful.log").read_text() == "bye\n"
    assert all(gone(pid) for pid in pids)


def test_children_of_a_part_end_with_it(supervisor: Supervisor, tmp_path: Path) -> None:
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).pid, flush=True)"
    supervisor.start(python("parent", code + "; import time; time.sleep(60)"))
    log = tmp_path / "parent.log"
    assert eventually(lambda: "deaf" in log.read_text())
    child = int(next(line for line in log.read_text().splitlines() if line.isdigit()))
    supervisor.stop(seconds_max=0.3)
    assert eventually(lambda: gone(child))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from gateway.supervisor import Part, Supervisor
supervisor = Supervisor(Path({str(tmp_path)!r}), lambda: 0)
supervisor.start(Part("part", [sys.executable, "-c", "import time; time.sleep(60)"]))
print(supervisor.processes[0].pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        assert not gone(pid)
        killed.kill()
    assert eventually(lambda: gone(pid))


def test_signals_are_counted_and_handlers_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as seen:
        assert seen() == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert eventually(lambda: seen() == 2)
    assert signal.getsignal(signal.SIGTERM) is before

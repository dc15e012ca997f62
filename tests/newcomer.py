"""The path of somebody new: what README says, typed into a clone of its own, with each step timed.

    python tests/newcomer.py [--repository PATH] [--port P] [--json FILE] [--keep]

Needs what README says that it needs, and nothing of any environment but pip's cache: home and cache of models are new.
What is run has to stand in the clone's README. A step that fails ends the path, and its reason is the last line.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

DEFAULT_PORT = 8000
DEMO_SECONDS_MAX = 1800.0
STEP_SECONDS_MAX = 600.0
END_SECONDS_MAX = 60.0
ANSWER_SECONDS_MAX = 120.0
LINES_SHOWN = 25

DEMO = "make demo"
DASHBOARD = "Open http://127.0.0.1:8000/ for the dashboard"
PLAYGROUND = "a playground to chat in, with the receipt beside each answer"
TOP = ".venv/bin/ropeway top --once"
AUDIT = ".venv/bin/ropeway audit --workload multi-agent-swe --nodes 4 --gpu h100"
LOCUST = ".venv/bin/locust -f loadtest/locustfile.py --headless -u 4 -r 1 -t 1m -H http://127.0.0.1:8000"
WRITTEN = (DEMO, DASHBOARD, PLAYGROUND, TOP, AUDIT, LOCUST)
"""What README has to say for the path to be found."""

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class StepError(Exception):
    """A step did not do what it is there for."""


class Step(NamedTuple):
    name: str
    what: str
    seconds: float
    failure: str = ""


class Whereabouts(NamedTuple):
    """Where the newcomer is."""

    repository: Path
    directory: Path
    port: int

    @property
    def clone(self) -> Path:
        return self.directory / "ropeway"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def here(self, command: str) -> str:
        """As written, but for the port where another one was asked for."""
        if self.port == DEFAULT_PORT:
            return command
        return f"{DEMO} PORT={self.port}" if command == DEMO else command.replace(f":{DEFAULT_PORT}", f":{self.port}")


def missing(readme: str) -> list[str]:
    """Of what is done, what README does not say. Lines may break anywhere."""
    said = " ".join(readme.split())
    return [words for words in WRITTEN if words not in said]


class Newcomer:
    """Goes the path; `steps` says how far, and how long each one took."""

    def __init__(self, where: Whereabouts) -> None:
        self.where = where
        self.steps: list[Step] = []
        self._environment = environment(where.directory)
        self._demo: subprocess.Popen[bytes] | None = None
        self._request_id = ""

    def walk(self) -> None:
        """Raises StepError, of the step that is last in `steps`."""
        where = self.where
        self._step("clone", f"git clone {where.repository}", self._clone)
        try:
            self._step("demo", where.here(DEMO), self._start_demo)
            self._step("question", "the curl line that it prints", self._ask_printed)
            self._step("dashboard", f"GET {where.url}/ and its feed", self._look_at_dashboard)
            self._step("playground", "a chat, as the page sends it", self._chat)
            self._step("receipt", "of that chat, as the page shows it", self._read_receipt)
            self._step("top", TOP, lambda: self._run(TOP, "workers healthy"))
            self._step("audit", AUDIT, lambda: self._run(AUDIT, "kv-aware"))
            self._step("locust", where.here(LOCUST), lambda: self._run(LOCUST, "Aggregated"))
            self._step("Ctrl-C", "the demo ends and leaves nothing", self._end_demo)
        finally:
            self._kill_demo()

    def _step(self, name: str, what: str, act: Callable[[], None]) -> None:
        print(f"{name}: {what}", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            act()
        except (StepError, OSError, ValueError, LookupError) as error:
            failure = str(error) or type(error).__name__
            self.steps.append(Step(name, what, time.monotonic() - began, failure))
            raise StepError(f"{name}: {failure}") from error
        self.steps.append(Step(name, what, time.monotonic() - began))

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def _clone(self) -> None:
        command = ["git", "clone", "--quiet", str(self.where.repository), str(self.where.clone)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StepError(f"git clone ended with {done.returncode}: {done.stderr.strip()}")
        if gaps := missing((self.where.clone / "README.md").read_text()):
            raise StepError(f"README does not say: {'; '.join(gaps)}")

    def _start_demo(self) -> None:
        if _listens(self.where.port):
            raise StepError(f"something listens on port {self.where.port}; choose another one with --port")
        with self._log.open("wb") as log:
            self._demo = subprocess.Popen(
                self.where.here(DEMO).split(),
                cwd=self.where.clone,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
            )
        limit = time.monotonic() + DEMO_SECONDS_MAX
        while self._printed_curl() is None:
            if self._demo.poll() is not None:
                raise StepError(f"it ended with {self._demo.returncode}:\n{_tail(self._log.read_text())}")
            if time.monotonic() > limit:
                raise StepError(f"it has printed no curl line after {DEMO_SECONDS_MAX:.0f} s:\n{self._log.read_text()}")
            time.sleep(0.1)

    def _ask_printed(self) -> None:
        line = self._printed_curl()
        if line is None or shutil.which("curl") is None:
            raise StepError("there is no curl")
        said = self._shell(line)
        if not re.match(r"HTTP/1\.1 200 ", said) or "x-ropeway-worker: " not in said:
            raise StepError(f"it was answered\n{_tail(said)}")

    def _look_at_dashboard(self) -> None:
        with self._get("/") as page:
            text = page.read().decode()
        if "Ropeway" not in text or "<html" not in text:
            raise StepError("the page is not the dashboard")
        with self._get("/status/feed") as feed:
            first = next(_events(feed))
        if not first["whole"] or len(first["workers"]) != 2:
            raise StepError(f"the feed began with {json.dumps(first)[:500]}")

    def _chat(self) -> None:
        body = {
            "model": self._model(),
            "messages": [{"role": "user", "content": "What is a ropeway?"}],
            "max_tokens": 32,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._post("/v1/chat/completions", body) as answer:
            self._request_id = answer.headers["x-request-id"]
            pieces = list(_events(answer))
        text = "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])
        if not text.strip():
            raise StepError("the answer has no text")

    def _read_receipt(self) -> None:
        for _ in range(20):
            with self._get(f"/status/receipts/{self._request_id}") as answer:
                receipt = json.load(answer)
            if receipt["reported_prompt_tokens"] is not None:
                break
            time.sleep(0.25)
        if not receipt["words"].startswith(receipt["worker"]) or not receipt["reported_prompt_tokens"]:
            raise StepError(f"the receipt says {json.dumps(receipt)[:500]}")

    def _run(self, command: str, expected: str) -> None:
        if expected not in (said := self._shell(self.where.here(command))):
            raise StepError(f"it does not say {expected!r}:\n{_tail(said)}")

    def _end_demo(self) -> None:
        assert self._demo is not None
        os.killpg(self._demo.pid, signal.SIGINT)
        try:
            self._demo.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise StepError(f"the demo has not ended after {END_SECONDS_MAX:.0f} s") from None
        if "Traceback" in (said := self._log.read_text()):
            raise StepError(f"it ended with a traceback:\n{_tail(said)}")
        if left := _processes_in(self.where.clone):
            raise StepError(f"processes are left: {left}")

    def _kill_demo(self) -> None:
        if self._demo is not None and self._demo.poll() is None:
            os.killpg(self._demo.pid, signal.SIGTERM)
            try:
                self._demo.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                os.killpg(self._demo.pid, signal.SIGKILL)

    # ---- means -------------------------------------------------------------------------------------------------------

    @property
    def _log(self) -> Path:
        return self.where.directory / "demo.log"

    def _printed_curl(self) -> str | None:
        return next((line for line in self._log.read_text().splitlines() if line.startswith("curl ")), None)

    def _model(self) -> str:
        with self._get("/v1/models") as answer:
            return str(json.load(answer)["data"][0]["id"])

    def _get(self, path: str) -> Any:
        return _direct.open(self.where.url + path, timeout=ANSWER_SECONDS_MAX)

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.where.url + path, json.dumps(body).encode(), headers)
        return _direct.open(request, timeout=ANSWER_SECONDS_MAX)

    def _shell(self, command: str) -> str:
        """What a command says on both of its outputs. Raises StepError unless it ends well."""
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.where.clone,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=self._environment,
                timeout=STEP_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise StepError(f"it has not ended after {STEP_SECONDS_MAX:.0f} s") from None
        if done.returncode or "Traceback" in done.stderr:
            raise StepError(f"it ended with {done.returncode}:\n{_tail(done.stdout + done.stderr)}")
        return done.stdout + done.stderr


def environment(directory: Path) -> dict[str, str]:
    """That of a new user of this machine, who finds in pip's cache what pip has downloaded before."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "PYTEST", "PYTHON", "ROPEWAY", "VIRTUAL_ENV", "XDG_"))
    }
    own = str(Path(sys.executable).parent)
    paths = [path for path in kept["PATH"].split(os.pathsep) if path != own or sys.prefix == sys.base_prefix]
    asked = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False)
    cache = asked.stdout.strip() or str(Path.home() / ".cache" / "pip")
    home = directory / "home"
    home.mkdir()
    return {**kept, "PATH": os.pathsep.join(paths), "HOME": str(home), "PIP_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}


def _events(answer: Any) -> Iterator[Any]:
    """The documents of server-sent events, up to `[DONE]`."""
    for line in answer:
        data = line.decode().strip().removeprefix("data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == "[DONE]":
            return
        yield json.loads(data)
    raise StepError("the stream broke off")


def _heed_interrupts() -> None:
    """What runs in the background of a shell ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _processes_in(directory: Path) -> list[int]:
    """Those that run a program of the clone's environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES_SHOWN:])


@contextmanager
def _new_directory(keep: bool) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="ropeway-newcomer-"))
    try:
        yield directory
    finally:
        if keep:
            print(f"Kept: {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)


def table(steps: list[Step]) -> str:
    width = max(len(step.what) for step in steps)
    rows = [
        f"{step.name:<11} {step.what:<{width}} {step.seconds:8.1f} s{'  FAILED' * bool(step.failure)}" for step in steps
    ]
    total = sum(step.seconds for step in steps)
    return "\n".join([*rows, f"{'all':<11} {'':<{width}} {total:8.1f} s"])


def report(steps: list[Step], load: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "steps": [step._asdict() for step in steps],
        "seconds": round(sum(step.seconds for step in steps), 1),
        "processors": os.cpu_count(),
        "load_before": list(load),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=Path, default=Path(__file__).resolve().parents[1], metavar="PATH")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, metavar="P", help="default: as written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the steps there")
    parser.add_argument("--keep", action="store_true", help="leave the clone and the logs where they are")
    options = parser.parse_args()
    load, failure = os.getloadavg(), ""
    with _new_directory(options.keep) as directory:
        newcomer = Newcomer(Whereabouts(options.repository.resolve(), directory, options.port))
        try:
            newcomer.walk()
        except StepError as error:
            failure = str(error)
    print(table(newcomer.steps))
    if options.json:
        options.json.write_text(json.dumps(report(newcomer.steps, load), indent=2) + "\n")
    if failure:
        print(f"newcomer: {failure}", file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())

"""`ropeway up`: a whole stack on one machine, started in order, watched, and taken down as one.

The stack is made of the commands that an operator would type: `ropeway worker ...` for each worker (one for a whole
simulated fleet), then `ropeway serve ...` in front of them. All share one keyring, so that workers name blocks as the
gateway does. Nothing is started when the gateway's port is taken.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from cachecore.scope import Keyring
from gateway.chaos import (
    DEFAULT_BOUNDS,
    FREEZE,
    KILL,
    Bounds,
    Chaos,
    PartTarget,
    Target,
    ValkeyTarget,
    Victim,
    schedule,
)
from gateway.errors import StartupError
from gateway.ports import free_port_range, require_free_port
from gateway.supervisor import Part, Stopped, Supervisor, stop_signals

WORKER_HOST = "127.0.0.1"
FETCHED_MODEL = "smollm2"
SIMULATED_GIGABITS = 400
"""Between simulated workers that move KV."""
RECOVERY_SECONDS = {"simulated": 3.0, "reference": 20.0}
"""What a worker that was killed takes to serve again, about."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What stack to start."""

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 2
    """Of both roles; none where the next two say how many there are of each."""
    prefill: int = 0
    decode: int = 0
    simulated: bool = False
    policy: str | None = None
    model: str = FETCHED_MODEL
    """`smollm2`, or the directory of a model."""
    redis: str = "embedded"
    state_directory: Path | None = None
    as_json: bool = False
    chaos_seed: int | None = None
    """Of the faults that befall the stack while it serves (docs/chaos.md); none where it is None."""
    chaos_bounds: Bounds = DEFAULT_BOUNDS

    @property
    def roles(self) -> list[str]:
        """One for each worker."""
        if self.prefill or self.decode:
            return ["prefill"] * self.prefill + ["decode"] * self.decode
        return ["both"] * self.workers


def up(options: UpOptions, console: Console | None = None) -> int:
    """Run a stack until Ctrl-C, SIGTERM or the death of a part. Returns the exit code; raises StartupError."""
    console = console or Console(stderr=True)
    if options.chaos_seed is not None:
        victims(options)
    require_free_port(options.host, options.port)
    directory = (options.state_directory or _state_directory(options.port)).resolve()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    model = None if options.simulated else _model_directory(options.model)
    with stop_signals() as signals_seen:
        supervisor = Supervisor(directory, signals_seen)
        try:
            _start(options, supervisor, directory, model, console)
            with _chaos(options, supervisor, directory, console) as meanwhile:
                supervisor.watch(meanwhile)
        except Stopped:
            console.print("Stopping.")
        finally:
            supervisor.stop()
    return 0


@contextmanager
def _chaos(
    options: UpOptions, supervisor: Supervisor, directory: Path, console: Console
) -> Iterator[Callable[[], None]]:
    """What to call now and then, so that what is to befall the stack does."""
    if options.chaos_seed is None:
        yield lambda: None
        return
    parts = {process.part.name: process for process in supervisor.processes}
    targets: dict[str, Target] = {
        victim.name: PartTarget(parts[victim.name]) if victim.name in parts else ValkeyTarget(_valkey(directory))
        for victim in victims(options)
    }

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    faults = schedule(options.chaos_seed, victims(options), options.chaos_bounds)
    chaos = Chaos(options.chaos_seed, faults, targets, say)
    try:
        yield chaos.tick
    finally:
        chaos.end()


def victims(options: UpOptions) -> list[Victim]:
    """Whom faults befall: of the workers of a role not all at once. Raises StartupError where that is nobody."""
    roles, recovery = options.roles, RECOVERY_SECONDS["simulated" if options.simulated else "reference"]
    found = [
        Victim(f"worker-{number}", (KILL, FREEZE), role, recovery)
        for number, role in enumerate(roles, start=1)
        if roles.count(role) > 1
    ]
    if options.redis == "embedded":
        found.append(Victim("valkey", (KILL, FREEZE)))
    if not found:
        raise StartupError("--chaos needs two workers of one kind, or the embedded Valkey, to do something to")
    return found


def _start(options: UpOptions, supervisor: Supervisor, directory: Path, model: Path | None, console: Console) -> None:
    keyring = _keyring(directory)
    parts, urls = worker_parts(options, keyring, model)
    kind = "reference" if model else "simulated"
    with _step(console, f"{len(urls)} {kind} worker{'s' if len(urls) > 1 else ''}"):
        for part in parts:
            supervisor.start(part)
        supervisor.wait_ready()
    with _step(console, "gateway"):
        supervisor.start(gateway_part(options, keyring, model, urls, directory))
        supervisor.wait_ready()
    _announce(options, supervisor, urls, console)


@contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    began = time.monotonic()
    with console.status(f"starting: {what}"):
        yield
    console.print(f"ready: {what} ({time.monotonic() - began:.1f} s)", highlight=False)


def worker_parts(options: UpOptions, keyring: Path, model: Path | None) -> tuple[list[Part], list[str]]:
    """The processes of the workers, and the workers' URLs (a simulated fleet is one process, unless its
    members are to fail one by one)."""
    count = len(options.roles)
    ports = free_port_range(WORKER_HOST, count, options.port + 1)
    urls = [f"http://{WORKER_HOST}:{port}" for port in ports]
    if model is None:
        what = ["--keyring", str(keyring), "--kv-link", str(SIMULATED_GIGABITS)] if options.prefill else []
        if options.chaos_seed is not None:
            return [_simulated(f"worker-{number}", [url], what) for number, url in enumerate(urls, start=1)], urls
        return [_simulated("workers", urls, what)], urls
    what = ["--model", str(model), "--served-model-name", served_name(options), "--keyring", str(keyring)]
    environment = _thread_share(count)
    return [
        Part(
            f"worker-{number}",
            _ropeway("worker", "reference", *what, "--host", WORKER_HOST, "--port", str(port)),
            [f"{url}/health"],
            environment,
        )
        for number, (port, url) in enumerate(zip(ports, urls, strict=True), start=1)
    ], urls


def _simulated(name: str, urls: Sequence[str], what: Sequence[str]) -> Part:
    """A process with a simulated worker at each of these URLs, whose ports follow each other."""
    where = ["--host", WORKER_HOST, "--port", urls[0].rpartition(":")[2], "--count", str(len(urls))]
    return Part(name, _ropeway("worker", "simulated", *where, *what), [f"{url}/health" for url in urls])


def gateway_part(options: UpOptions, keyring: Path, model: Path | None, urls: Sequence[str], directory: Path) -> Part:
    arguments = ["--host", options.host, "--port", str(options.port), "--keyring", str(keyring)]
    environment = {"ROPEWAY_SHARING_DIRECTORY": str(_valkey(directory))}
    if options.prefill:
        workers = [{"url": url, "role": role} for url, role in zip(urls, options.roles, strict=True)]
        environment["ROPEWAY_WORKERS"] = msgspec.json.encode(workers).decode()
    else:
        arguments += [word for url in urls for word in ("--worker", url)]
    if model is not None:
        arguments += ["--tokenizer", f"{served_name(options)}={model}"]
    if options.policy is not None:
        arguments += ["--policy", options.policy]
    arguments += ["--redis", options.redis]
    return Part("gateway", _ropeway("serve", *arguments), [f"{_gateway_url(options)}/readyz"], environment)


def served_name(options: UpOptions) -> str:
    """How the workers call a real model: by its own short name, or its directory's."""
    return options.model if options.model == FETCHED_MODEL else Path(options.model).resolve().name


def _ropeway(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ropeway", *arguments]


def _gateway_url(options: UpOptions) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)  # noqa: S104 (compared, not bound)
    return f"http://{host}:{options.port}"


def _thread_share(processes: int) -> dict[str, str]:
    """Threads for each of several torch processes: more of them than cores spin against each other."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, _cores() // processes))}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keyring(directory: Path) -> Path:
    path = directory / "keyring.json"
    if not path.exists():
        Keyring.generate().save(path)
    return path


def _valkey(directory: Path) -> Path:
    """Where the embedded one lives."""
    return directory / "valkey"


def _state_directory(port: int) -> Path:
    """Logs, keyring and index of the stack on this port; the keyring is kept, so that names stay the same."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "ropeway" / f"up-{port}"


def _model_directory(model: str) -> Path:
    """Where the model lies, fetched first where needed. Its progress goes to the terminal, its answer comes here."""
    if model != FETCHED_MODEL:
        directory = Path(model).expanduser().resolve()
        if not directory.is_dir():
            raise StartupError(f"there is no model directory {directory}; give another, or {FETCHED_MODEL!r}")
        return directory
    fetch = subprocess.run(  # noqa: S603 (our own command line, no shell)
        _ropeway("model", "fetch", FETCHED_MODEL, "--json"), stdout=subprocess.PIPE, check=False
    )
    if fetch.returncode:
        raise StartupError(f"the model {FETCHED_MODEL!r} could not be fetched")
    return Path(msgspec.json.decode(fetch.stdout)["directory"])


def _announce(options: UpOptions, supervisor: Supervisor, urls: Sequence[str], console: Console) -> None:
    url = _gateway_url(options)
    model = _served_model(urls[0])
    curl = curl_line(url, model)
    if options.as_json:
        logs = {process.part.name: {"pid": process.pid, "log": str(process.log)} for process in supervisor.processes}
        document = {"url": url, "model": model, "workers": urls, "curl": curl, "processes": logs}
        print(msgspec.json.encode(document).decode(), flush=True)
        return
    print(f"\nRopeway serves on {url}, {len(urls)} workers behind it. Ask it something:\n\n{curl}\n", flush=True)
    console.print(f"Logs: {supervisor.processes[0].log.parent}. Ctrl-C stops everything.")


def _served_model(worker_url: str) -> str:
    models = httpx.get(f"{worker_url}/v1/models", trust_env=False).raise_for_status().json()
    return str(models["data"][0]["id"])


def curl_line(url: str, model: str) -> str:
    """A request that a shell can run as it stands."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 32,
    }
    data = shlex.quote(msgspec.json.encode(body).decode())
    return f"curl -i {url}/v1/chat/completions -H 'content-type: application/json' -d {data}"

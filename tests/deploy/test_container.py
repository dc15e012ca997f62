"""The container image: built from a Debian made here, and run as `docs/deploy.md` says."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from tests.gateway.end_to_end.processes import HOST, Process, chat, free_ports

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
USER = 65532
SUITE = "bookworm"
BASE = f"localhost/ropeway-test-base:{SUITE}"
"""Stays among podman's images: it is made once."""
IMAGE = f"localhost/ropeway-test:{os.getpid()}"
ADDED_BYTES_MAX = 220_000_000
"""Of the image over its base."""

# Limits that need no right to raise them, which podman's own would.
LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
# As deploy/compose.yaml has it, but for the network: workers and tests are on the machine's loopback.
CONFINED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=host")


class Engine(NamedTuple):
    """Podman with a runtime that can start containers on this machine."""

    runtime: str

    def run(self, *arguments: str) -> list[str]:
        return ["podman", "--runtime", self.runtime, "run", "--rm", *LIMITS, *CONFINED, *arguments]


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"podman {shlex.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def inspected(image: str) -> dict[str, Any]:
    (document,) = json.loads(podman("image", "inspect", image))
    return document  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian with its Python, for want of a registry."""
    needed = [name for name in ("podman", "debootstrap") if shutil.which(name) is None]
    if os.geteuid() != 0:
        needed.append("to be root")
    if needed:
        pytest.skip(f"needed: {', '.join(needed)} (make test-deploy says how to install them)")
    if subprocess.run(["podman", "image", "exists", BASE]).returncode == 0:
        return BASE
    tree = tmp_path_factory.mktemp("base") / "tree"
    packages = "--include=python3,python3-venv,ca-certificates"
    made = subprocess.run(["debootstrap", "--variant=minbase", packages, SUITE, tree], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    archive = tree.with_suffix(".tar")
    downloads = ("--exclude=./var/lib/apt/lists/*", "--exclude=./var/cache/apt/*")
    subprocess.run(["tar", "--create", "--file", archive, "--directory", tree, *downloads, "."], check=True)
    shutil.rmtree(tree)
    podman("import", "--quiet", str(archive), BASE)
    archive.unlink()
    return BASE


@pytest.fixture(scope="module")
def image(base: str) -> Iterator[str]:
    """Built from the working tree, with this machine's package index."""
    options = [f"--build-arg=BASE={base}"]
    for name in ("PIP_INDEX_URL", "PIP_CERT"):
        if value := os.environ.get(name):
            options.append(f"--build-arg={name}={value}")
    if certificates := os.environ.get("PIP_CERT"):
        options.append(f"--volume={certificates}:{certificates}:ro")
    # A chroot is allowed in more places than a container is.
    where = ("--isolation=chroot", "--network=host", "--layers=false", "--force-rm")
    podman("build", *where, *options, f"--file={ROOT}/deploy/Containerfile", f"--tag={IMAGE}", str(ROOT))
    yield IMAGE
    podman("rmi", "--force", IMAGE)


@pytest.fixture(scope="module")
def engine(base: str) -> Engine:
    """The first runtime that can start a container: crun, for one, knows no mixture of both kinds of cgroups."""
    reasons = []
    for runtime in filter(shutil.which, ("crun", "runc")):
        tried = subprocess.run(Engine(runtime).run(base, "true"), capture_output=True, text=True)
        if tried.returncode == 0:
            return Engine(runtime)
        reasons.append(f"{runtime}: {tried.stderr.strip()}")
    pytest.skip(f"no container can be started here: {'; '.join(reasons) or 'crun or runc is needed'}")


class Container(Process):
    """`podman run` in the foreground, which hands signals on and ends as the container does."""

    start_seconds_max = 60.0

    def __init__(
        self, engine: Engine, image: str, directory: Path, name: str, *flags: str, command: Sequence[str] = ()
    ):
        self.container = f"ropeway-test-{os.getpid()}-{name}"
        self.run = engine.run(f"--name={self.container}", *flags, image)
        super().__init__(name, command, directory)

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [*self.run, *arguments]

    def _end(self, number: Any) -> None:
        try:
            super()._end(number)
        finally:
            subprocess.run(["podman", "rm", "--force", "--ignore", self.container], capture_output=True)


class Deployed(NamedTuple):
    gateway: Container
    url: str


@pytest.fixture
def deployed(engine: Engine, image: str, tmp_path: Path) -> Iterator[Deployed]:
    """A gateway and two simulated workers, of the same image."""
    port, *workers = free_ports(3)
    config = tmp_path / "ropeway.yaml"
    config.write_text(yaml.safe_dump({"port": port, "workers": [f"http://{HOST}:{worker}" for worker in workers]}))
    config.chmod(0o644)
    simulated = ("worker", "simulated", "--port", str(workers[0]), "--count", "2")
    mounted = f"--volume={config}:/etc/ropeway/ropeway.yaml:ro"
    url = f"http://{HOST}:{port}"
    with Container(engine, image, tmp_path, "workers", command=simulated) as fleet:
        fleet.wait_for(lambda: "ready http" in fleet.said(), "listening")
        with Container(engine, image, tmp_path, "gateway", mounted) as gateway:
            gateway.wait_for(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200, "ready")
            yield Deployed(gateway, url)
    assert fleet.process.returncode == 0, fleet.tail()


def inside(engine: Engine, image: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(engine.run("--entrypoint=sh", image, "-c", script), capture_output=True, text=True)


def test_it_is_small_and_says_how_it_is_run(base: str, image: str) -> None:
    document = inspected(image)
    config = document["Config"]
    assert config["User"] == f"{USER}:{USER}"
    assert config["StopSignal"] in ("SIGTERM", "15")
    assert set(config["ExposedPorts"]) == {"8000/tcp", "9090/tcp"}
    assert config["Entrypoint"] + config["Cmd"] == ["ropeway", "serve", "--config", "/etc/ropeway/ropeway.yaml"]
    assert document["Size"] - inspected(base)["Size"] < ADDED_BYTES_MAX
    # What the builder was told of its machine is not told on.
    assert not [variable for variable in config["Env"] if variable.startswith("PIP_")]


def test_it_has_what_it_needs_and_nothing_to_build_with(engine: Engine, image: str) -> None:
    asked = inside(
        engine, image, "id -u; id -g; ROPEWAY_NATIVE=1 python -c 'import cachecore.native'; ropeway --version"
    )
    assert asked.returncode == 0, asked.stderr
    uid, gid, version = asked.stdout.splitlines()
    assert int(uid) == int(gid) == USER
    assert version.startswith("ropeway ")
    absent = inside(engine, image, "command -v gcc || command -v pip || ls /source || python -c 'import torch'")
    assert absent.returncode != 0
    assert absent.stdout == ""
    assert "No module named 'torch'" in absent.stderr


def test_nothing_but_its_temporary_files_can_be_written(engine: Engine, image: str) -> None:
    assert inside(engine, image, "touch /tmp/file").returncode == 0
    for place in ("/", "/opt/ropeway", "/etc", "/var/lib"):
        refused = inside(engine, image, f"touch {place}/file")
        assert refused.returncode != 0, place
        assert "Read-only file system" in refused.stderr


def test_it_answers_and_compose_finds_it_healthy(deployed: Deployed) -> None:
    answer = httpx.post(f"{deployed.url}/v1/chat/completions", json=chat("hello"), trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    service = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["gateway"]
    kind, *command = service["healthcheck"]["test"]
    assert kind == "CMD"
    port = deployed.url.rpartition(":")[2]
    podman("exec", deployed.gateway.container, *(word.replace("8000", port) for word in command))


def test_what_is_under_way_is_finished_when_it_is_stopped(deployed: Deployed) -> None:
    body = chat("tell me more", max_tokens=150, stream=True)
    with httpx.stream("POST", f"{deployed.url}/v1/chat/completions", json=body, trust_env=False) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        deployed.gateway.process.terminate()
        rest = [line for line in lines if line]
    assert len(rest) >= 150
    assert rest[-1] == "data: [DONE]"
    assert deployed.gateway.process.wait(15) == 0, deployed.gateway.tail()

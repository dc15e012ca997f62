"""What a document's reader has: workers, a server, a model, files; in a directory and on ports of the stage's own."""

import asyncio
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from cachecore.store.embedded import EmbeddedValkey
from tests.cachecore.transfer.certificates import Authority
from tests.gateway.end_to_end.processes import HOST, Fleet, eventually, free_ports
from tests.reference.pages import REPOSITORY
from tests.reference.substitutions import substituted
from tests.reference.written import blocks
from workers.reference.fetch import default_cache_dir

PORTS = {8000: 1, 8089: 1, 8101: 10, 9000: 1, 7101: 8, 5556: 1, 5557: 2}
"""Those of the documents, and how many follow each."""

LINKED = (".venv", "loadtest")
"""Of a clone, what commands use without changing it; `deploy` is a copy."""


class Stage:
    """For one document; `self["name"]` is what a substitution puts in."""

    def __init__(self, path: str, directory: Path) -> None:
        self.path = path
        self.directory = directory
        self.admin_key = secrets.token_urlsafe(16)
        self._ports: dict[int, range] = {}
        self._valkey: EmbeddedValkey | None = None
        self._blocks = [block for block in blocks() if block.path == path]
        self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "fleet" in self.__dict__:
            self.fleet.stop()
        if self._valkey is not None:
            asyncio.run(self._valkey.stop())

    def __getitem__(self, name: str) -> str:
        if name.startswith("port_"):
            return str(self.port(int(name[5:])))
        return str(getattr(self, name))

    def port(self, written: int) -> int:
        """The free one that stands for it."""
        first = max(start for start in PORTS if start <= written)
        if first not in self._ports:
            self._ports[first] = free_ports(PORTS[first])
        return self._ports[first][written - first]

    @property
    def gateway(self) -> str:
        return f"http://{HOST}:{self.port(8000)}"

    @cached_property
    def fleet(self) -> Fleet:
        """Two workers of any engine, one of which has been asked something."""
        directory = self.directory / "fleet"
        directory.mkdir()
        events = free_ports(4)
        fleet = Fleet(directory, "--speed", "50", "--kv-events-port", str(events[0]), count=2)
        self._events = events
        chat = {"model": "simulated", "messages": [{"role": "user", "content": "What have you cached? " * 20}]}
        httpx.post(f"{fleet.urls[0]}/v1/chat/completions", json=chat, trust_env=False).raise_for_status()
        return fleet

    @property
    def worker_1(self) -> str:
        return self.fleet.urls[0]

    @property
    def worker_2(self) -> str:
        return self.fleet.urls[1]

    @property
    def worker_1_name(self) -> str:
        return self.fleet.names[0]

    @property
    def events(self) -> str:
        """Where the first worker publishes."""
        return f"{self.fleet.urls and self._events[0]}"

    @property
    def events_again(self) -> str:
        """Where it replays."""
        return f"{self.fleet.urls and self._events[1]}"

    @cached_property
    def redis(self) -> str:
        self._valkey = EmbeddedValkey(self.directory / "valkey")
        (self.directory / "valkey").mkdir(mode=0o700)
        asyncio.run(self._valkey.start())
        return self._valkey.url

    @property
    def repository(self) -> str:
        return str(REPOSITORY)

    @property
    def model_directory(self) -> str:
        return str(fetched_model())

    @property
    def key_id(self) -> str:
        """Of the newest key in the file."""
        return str(json.loads((self.directory / "keys.jsonl").read_text().splitlines()[-1])["key_sha256"][:12])

    @property
    def model(self) -> str:
        """Whatever the gateway serves."""
        listed = eventually(self._models, "the gateway lists a model", 30.0)
        return str(listed[0]["id"])

    @property
    def chat(self) -> str:
        """A body of a chat."""
        return json.dumps({"model": self.model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]})

    def _models(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.gateway}/v1/models", trust_env=False, timeout=10)
        return answer.json()["data"] if answer.is_success else []

    @property
    def environment(self) -> dict[str, str]:
        """The reader's: of who runs the tests only what programs need."""
        return {
            "HOME": str(self.directory / "home"),
            "KEY": self.admin_key,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }

    # ---- files -------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        for name in LINKED:
            (self.directory / name).symlink_to(REPOSITORY / name)
        shutil.copytree(REPOSITORY / "deploy", self.directory / "deploy", ignore=shutil.ignore_patterns("secrets"))
        for name in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
            (self.directory / "home" / name).mkdir(parents=True)
        (self.directory / "home" / ".cache").mkdir()
        (self.directory / "home" / ".cache" / "ropeway").symlink_to(default_cache_dir())
        (self.directory / "requests.jsonl").write_text("".join(_jsonl(_requests())))
        (self.directory / "conversation_trace.jsonl").write_text("".join(_jsonl(_trace())))
        (self.directory / "handbook.txt").write_text(_handbook())
        (self.directory / "admin.key").write_text(self.admin_key)
        self._certify()

    def _certify(self) -> None:
        authority = Authority.make(self.directory, "fleet-ca")
        authority.certify("worker")

    def write_configuration(self) -> None:
        """The page's own where it shows one, else one with two workers; done when a command asks for it."""
        shown = [block.text for block in self._blocks if block.text.startswith("# gateway.yaml")]
        text = substituted(shown[0], self) if shown else self._configuration()
        for name in ("gateway.yaml", "ropeway.yaml"):
            (self.directory / name).write_text(text)

    def _configuration(self) -> str:
        workers = [{"name": f"worker-{number}", "url": url} for number, url in enumerate(self.fleet.urls, start=1)]
        document: dict[str, Any] = {"workers": workers}
        if any("$KEY" in block.text for block in self._blocks):
            document["admin"] = {"key_file": "admin.key"}
        return yaml.safe_dump(document)


def fetched_model() -> Path:
    """The model's directory; where it was not fetched there is none."""
    return default_cache_dir() / "models" / "smollm2"


def _jsonl(rows: Iterator[Mapping[str, Any]]) -> list[str]:
    return [json.dumps(row) + "\n" for row in rows]


def _requests() -> Iterator[Mapping[str, Any]]:
    """Bodies as clients send them: some conversations about three handbooks."""
    for number in range(24):
        system = f"You answer from handbook {number % 3}. " + "Be brief and say where it stands. " * 20
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"What does page {number} say?"}]
        yield {"model": "llama", "max_tokens": 8, "messages": messages}


def _trace() -> Iterator[Mapping[str, Any]]:
    """In Mooncake's form, 14 minutes of it: each request has two blocks of 512 tokens with many and one of its own."""
    for number in range(280):
        ids = [number % 7, 100 + number % 20, 1000 + number]
        yield {"timestamp": 3000 * number, "input_length": 1300, "output_length": 20, "hash_ids": ids}


def _handbook() -> str:
    parts = ("pumps", "valves", "ropes", "brakes", "cabins", "towers", "motors", "gears")
    return "\n---\n".join(
        f"On {part}\n" + " ".join(f"Rule {rule}: look at the {part} {rule} times a day." for rule in range(1, 9))
        for part in parts
    )

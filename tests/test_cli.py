"""The command line as a user meets it."""

import argparse
import importlib.metadata
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ropeway
from gateway.api_keys import read_key_file
from gateway.config import GatewayConfig
from gateway.settings.commands import serve_config
from gateway.tenants import Tenants, roster_of

REPOSITORY = Path(__file__).parents[1]
ROOM_COMMANDS = {"up", "serve", "keys new", "worker reference", "worker simulated", "model fetch"}


def commands(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each parser below, with the words that lead to it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield f"{name} {word}".strip(), child
                yield from commands(child, f"{name} {word}".strip())


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ropeway", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def config_of(*arguments: str) -> GatewayConfig:
    return serve_config(ropeway.parser().parse_args(["serve", *arguments]))


def test_the_commands_that_others_rely_on_are_there() -> None:
    assert set(dict(commands(ropeway.parser()))) >= ROOM_COMMANDS


@pytest.mark.parametrize(("name", "parser"), list(commands(ropeway.parser())), ids=lambda value: str(value)[:24])
def test_every_command_has_help_with_an_example(name: str, parser: argparse.ArgumentParser) -> None:
    text = parser.format_help()
    examples = text.partition("example")[2]
    assert f"ropeway {name}" in examples
    assert parser.description


def test_every_command_that_ends_a_command_line_can_run() -> None:
    leaves = [(name, parser) for name, parser in commands(ropeway.parser()) if not list(commands(parser))]
    assert {name for name, _ in leaves} >= ROOM_COMMANDS
    assert [name for name, parser in leaves if not callable(parser.get_default("run"))] == []


def test_version_and_help_of_the_module() -> None:
    try:
        version = importlib.metadata.version("ropeway")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    assert run("--version").stdout == f"ropeway {version}\n"
    help_text = run("--help")
    assert help_text.returncode == 0
    assert "examples:\n  ropeway up" in help_text.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "argument COMMAND: invalid choice: 'fly'"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot 1"),
        (["serve", "--port", "0"], "argument --port: a port lies in 1..65535, not 0"),
        (["serve", "--tokenizer", "m"], "argument --tokenizer: MODEL=DIR is expected, not 'm'"),
        (["serve", "-c", "/nonexistent.yaml"], "/nonexistent.yaml: No such file or directory"),
        (["serve", "--worker", "localhost:8001"], "--worker: workers[0]: 'localhost:8001' is not a URL"),
        (["serve", "--redis", "redis://localhost"], "configuration: keyring: gateways that share an index"),
        (["up", "--workers", "0"], "argument --workers: at least 1 is needed, not 0"),
        (["keys", "new", "--tenant", "public", "--file", "/nonexistent/k"], "/nonexistent/k: 'public' is what all"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code = ropeway.main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    said = capsys.readouterr()
    assert code == 2
    assert said.err.startswith(f"ropeway: error: {message}")
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("command", [["serve"], ["up", "--simulated"]])
def test_a_port_in_use_is_a_clear_error(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run(*command, "--port", str(port))
    assert done.returncode == 1
    assert done.stderr == f"ropeway: error: port {port} on 127.0.0.1 is in use; choose another with --port\n"


def test_flags_of_serve_reach_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("{workers: [http://a:1], port: 1, policy: session, tokenizers: {m: /file}}")
    config = config_of(
        *("-c", str(tmp_path / "gateway.yaml"), "--worker", "http://b:2", "--worker", "http://c:3"),
        *("--tokenizer", "n=/flag", "--port", "9000", "--host", "::1", "--redis", "none"),
        *("--keyring", "/k.json", "--api-keys", "/a.jsonl", "--admin-key-file", "/admin", "--log-level", "debug"),
    )
    assert [worker.url for worker in config.workers] == ["http://b:2", "http://c:3"]
    assert config.tokenizers == {"m": Path("/file"), "n": Path("/flag")}
    assert (config.host, config.port, config.policy, config.log_level) == ("::1", 9000, "session", "debug")
    assert (config.keyring, config.tenants.api_keys_file) == (Path("/k.json"), Path("/a.jsonl"))
    assert config.admin.key_file == Path("/admin")


def test_variables_reach_serve_and_lose_to_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_PORT", "9001")
    monkeypatch.setenv("ROPEWAY_POLICY", "round-robin")
    config = config_of("--policy", "least-loaded")
    assert (config.port, config.policy) == (9001, "least-loaded")


def test_a_new_key_is_printed_once_and_works(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    plain = run("keys", "new", "--tenant", "acme", "--file", str(path))
    document = json.loads(run("keys", "new", "--tenant", "globex", "--file", str(path), "--json").stdout)
    tenants = Tenants(roster_of(read_key_file(path), 0.0, public=False))
    assert tenants.authenticate(f"Bearer {plain.stdout.strip()}".encode()).id == "acme"
    assert tenants.authenticate(f"Bearer {document['key']}".encode()).id == document["tenant"] == "globex"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert plain.stdout.strip() not in path.read_text()


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(path: Path, tenant: str, **settings: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("gateway.api_keys.add_api_key", interrupted)
    assert ropeway.main(["keys", "new", "--tenant", "a", "--file", "k"]) == 130
    assert capsys.readouterr().err == ""

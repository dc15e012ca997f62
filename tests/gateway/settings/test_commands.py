"""`ropeway config check` and `show`, as an operator meets them."""

import json
from pathlib import Path

import pytest
import yaml

import ropeway
from gateway.settings.loading import load

WRONG = """\
host: 0.0.0.0
polcy: session
workers:
  - http://10.0.0.1:8001
  - {url: "http://10.0.0.2:8001", role: prefil}
limits:
  body_bytes_max: 12
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROPEWAY_PORT", "ROPEWAY_POLICY", "ROPEWAY_WORKERS"):
        monkeypatch.delenv(name, raising=False)


def write(directory: Path, text: str) -> str:
    path = directory / "gateway.yaml"
    path.write_text(text)
    return str(path)


def test_check_says_everything_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, WRONG)
    assert ropeway.main(["config", "check", "-c", path]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        f"ropeway: error: {path}:2:1: unknown key 'polcy'; did you mean 'policy'?",
        f"ropeway: error: {path}:5:35: workers[1].role: 'prefil' is unknown; did you mean 'prefill'?",
        f"ropeway: error: {path}:7:3: limits.body_bytes_max: Expected `int` >= 1024",
    ]


def test_check_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, WRONG)
    assert ropeway.main(["config", "check", "-c", path, "--json"]) == 2
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert problems[2] == {
        "place": f"{path}:7:3",
        "key": "limits.body_bytes_max",
        "message": "Expected `int` >= 1024",
    }


def off(name: str) -> str:
    return f"its routes are off: set {name}.key_file, or a loopback {name}.host with a port"


def test_what_is_suspicious_is_said_and_counts_when_it_is_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPEWAY_POLICI", "session")
    path = write(tmp_path, "host: 0.0.0.0\nworkers: [http://10.0.0.1:8001]\nsharing: {budget_ms: 5}\n")
    assert ropeway.main(["config", "check", "-c", path]) == 0
    said = capsys.readouterr()
    assert said.out == f"{path} is right: 3 values said; 5 suspicious\n"
    assert said.err.splitlines() == [
        "ropeway: warning: ROPEWAY_POLICI: is not a setting; did you mean ROPEWAY_POLICY?",
        f"ropeway: warning: {path}:1:1: host: everyone who can reach it is served: set tenants.api_keys_file",
        f"ropeway: warning: {path}: admin: {off('admin')}",
        f"ropeway: warning: {path}: metrics: {off('metrics')}",
        f"ropeway: warning: {path}:3:1: sharing: without redis nothing is shared",
    ]
    assert ropeway.main(["config", "check", "-c", path, "--strict"]) == 1


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("workers: []", "workers: there are none: nothing is served until one is registered at /admin/workers"),
        ("workers: [{url: 'http://a:1', draining: true}]", "workers: all of them are draining: nothing is served"),
        ("admin: {host: 10.0.0.1, port: 9000}", "admin.host: everyone who can reach it is let in: set admin.key_file"),
        ("admin: {port: 8000}", "admin.port: is the gateway's own port: leave admin.port out"),
        ("transfer: {shifted: true}", "transfer: without a keyring that the workers have no KV is moved: set keyring"),
        (
            "admission: {enabled: false, requests_max: 3}",
            "admission: admission.enabled is false: the rest of it has no effect",
        ),
        (
            "routing: {shadow: [kv-aware]}",
            "routing.shadow: 'kv-aware' decides already, and would only agree with itself",
        ),
        ("tokenizers: {m: /nowhere}", "tokenizers.m: /nowhere does not exist on this machine"),
    ],
)
def test_suspicions(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, warning: str) -> None:
    path = write(tmp_path, text)
    assert ropeway.main(["config", "check", "-c", path]) == 0
    assert any(line.endswith(f": {warning}") for line in capsys.readouterr().err.splitlines())


def test_a_quiet_configuration_is_not_suspicious(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "workers: [http://127.0.0.1:8001]\npolicy: session\n")
    assert ropeway.main(["config", "check", "-c", path, "--strict"]) == 0
    assert capsys.readouterr() == (f"{path} is right: 2 values said\n", "")


def test_show_says_where_each_value_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPEWAY_POLICY", "session")
    path = write(
        tmp_path,
        """\
policy: round-robin
workers:
  - {url: "http://user:secret@10.0.0.1:8001", name: one}
  - http://10.0.0.2:8001
tokenizers: {"m:1": /models/m}
keyring: keys.json
redis: redis://:hunter2@10.0.0.9:6379/0
""",
    )
    assert ropeway.main(["config", "show", "-c", path, "--port", "9000", "--stated"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "port: 9000 # --port",
        "workers:",
        f"- url: http://REDACTED@10.0.0.1:8001 # {path}:3:6",
        f"name: one # {path}:3:47",
        f"- url: http://10.0.0.2:8001 # {path}:4:5",
        "policy: session # ROPEWAY_POLICY",
        f"redis: redis://REDACTED@10.0.0.9:6379/0 # {path}:7:1",
        "tokenizers:",
        f"m:1: /models/m # {path}:5:14",
        f"keyring: keys.json # {path}:6:1",
    ]


def test_what_is_shown_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path,
        "{workers: [{url: 'http://a:1', events: {endpoint: 'tcp://a:2', topic: 'off'}}], tokenizers: {m: /m}, "
        "admission: {weights: {acme: 2}}, prompts: {template_defaults: {m: {deep: {list: [1, 'yes', null]}}}}, "
        "rate_limits: {tenants: {acme: {requests_per_minute: 6}}}}",
    )
    assert ropeway.main(["config", "show", "-c", path]) == 0
    shown = capsys.readouterr().out
    assert load(Path(write(tmp_path, shown)), {}) == load(Path(path), {})
    assert "policy: kv-aware" in shown
    assert yaml.safe_load(shown)["prompts"]["template_defaults"] == {"m": {"deep": {"list": [1, "yes", None]}}}


def test_show_as_json_has_values_and_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "limits: {connections_max: 7}")
    assert ropeway.main(["config", "show", "-c", path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["config"]["limits"]["connections_max"] == 7
    assert document["origins"]["limits.connections_max"] == {"kind": "file", "place": f"{path}:1:10"}


def test_what_is_wrong_cannot_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, WRONG)
    assert ropeway.main(["config", "show", "-c", path]) == 2
    message = f"{path}:2:1: unknown key 'polcy'; did you mean 'policy'? (2 more: 'ropeway config check' lists them)"
    assert capsys.readouterr().err == f"ropeway: error: {message}\n"

"""TLS by the workers' flags: what is wrong with them is one line and ends the command at once."""

from pathlib import Path

import pytest

import ropeway
from cachecore.scope import Keyring
from tests.cachecore.transfer.certificates import Authority


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, str]:
    files = Authority.make(tmp_path).certify("a")
    Keyring.generate().save(tmp_path / "keyring.json")
    return {
        "--kv-tls-cert": str(files.certificate),
        "--kv-tls-key": str(files.key),
        "--kv-tls-ca": str(files.authority),
        "--keyring": str(tmp_path / "keyring.json"),
    }


def refusal(capsys: pytest.CaptureFixture[str], kind: str, flags: dict[str, str], *more: str) -> str:
    words = [word for pair in flags.items() for word in pair]
    assert ropeway.main(["worker", kind, "--port", "0", *words, *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(("kind", "more"), [("simulated", ("--kv-link", "10")), ("reference", ())])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--kv-tls-cert": "/nowhere/a.crt"}, "cannot read /nowhere/a.crt: No such file or directory"),
        ({"--kv-tls-ca": "/nowhere/ca.crt"}, "cannot read /nowhere/ca.crt: No such file or directory"),
        ({"--kv-tls-key": __file__}, "not a certificate and its key in PEM"),
        ({"--kv-tls-ca": ""}, "peers would not believe"),
        ({"--kv-tls-cert": ""}, "TLS for KV needs a certificate: --kv-tls-cert FILE"),
        ({"--kv-tls-name": "other.test"}, "not valid for 'other.test'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
    flags: dict[str, str],
    kind: str,
    more: tuple[str, ...],
    change: dict[str, str],
    message: str,
) -> None:
    given = {name: value for name, value in {**flags, **change}.items() if value}
    assert message in refusal(capsys, kind, given, *more)


def test_tls_for_a_worker_that_moves_no_kv(capsys: pytest.CaptureFixture[str], flags: dict[str, str]) -> None:
    assert "it needs --kv-link" in refusal(capsys, "simulated", flags)
    assert "no --no-transfer" in refusal(capsys, "reference", flags, "--no-transfer")

"""Shell completion, asked of the shells themselves."""

import shutil
import subprocess
from pathlib import Path

import pytest

import ropeway
from gateway.completion import SHELLS, script

CASES = [
    (["ropeway", ""], {"up", "serve", "keys", "completion"}),
    (["ropeway", "ke"], {"keys"}),
    (["ropeway", "keys", "n"], {"new"}),
    (["ropeway", "keys", "new", "--ten"], {"--tenant"}),
    (["ropeway", "serve", "--policy", "round"], {"round-robin"}),
    (["ropeway", "serve", "--port", "80", "--log"], {"--log-level"}),
    (["ropeway", "completion", "f"], {"fish"}),
]


def ask(shell: str, directory: Path, words: list[str]) -> set[str]:
    """What a shell offers when these have been typed."""
    path = directory / "completion"
    path.write_text(script(ropeway.parser(), shell))
    if shell == "bash":
        typed = " ".join(f"'{word}'" for word in words)
        text = (
            f'. {path}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _ropeway; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        command = ["bash", "-c", text]
    else:
        command = ["fish", "--no-config", "-c", f'source {path}; complete -C "{" ".join(words)}"']
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=directory)
    assert done.stderr == ""
    return {line.partition("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(
    ("words", "offered"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_what_is_offered(shell: str, words: list[str], offered: set[str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    found = ask(shell, tmp_path, words)
    assert found >= offered
    if words[-1]:
        assert found == offered


def test_zsh_takes_its_script(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh")
    path = tmp_path / "_ropeway"
    path.write_text(script(ropeway.parser(), "zsh"))
    text = f"autoload -Uz compinit; compinit -u -d {tmp_path}/dump; source {path}; print $_comps[ropeway]"
    done = subprocess.run(["zsh", "-f", "-c", text], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("_ropeway\n", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_in_the_script(shell: str) -> None:
    text = script(ropeway.parser(), shell)
    for word in ("config", "check", "undrain", "tenant", "policy", "replay-endpoint"):
        assert (word in text) == (word != "undrain")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert ropeway.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == script(ropeway.parser(), "zsh")

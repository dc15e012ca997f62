"""What README and docs tell people to type is what the program takes: commands, make's targets, configuration."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

import ropeway
from gateway.config import GatewayConfig
from gateway.settings.loading import Request, inspect
from tests.reference.commands import commands
from tests.reference.pages import REPOSITORY
from tests.reference.written import DOCUMENTS, Block, blocks, calls, lines, shell_lines, without_remark

_inline = re.compile(r"`(ropeway [a-z][^`\n]*|make [a-z-]+[^`\n]*)`")


class Typed(NamedTuple):
    """A command as somebody would type it."""

    place: str
    words: list[str]

    def __str__(self) -> str:
        return self.place


def typed() -> list[Typed]:
    """Every call of `ropeway` or `make` in the blocks for a shell."""
    return [Typed(str(line), words) for line in shell_lines() for words in calls(line.text)]


def is_ours(text: str) -> bool:
    """Whether any key at the top is one of a gateway's: other files are Kubernetes', Prometheus' and the like."""
    keys = set(re.findall(r"^([a-z_]+):", text, re.MULTILINE))
    return not keys.isdisjoint(GatewayConfig.__struct_fields__) and "apiVersion:" not in text


TYPED = typed()
ROPEWAY = [one for one in TYPED if one.words[0] == "ropeway" and len(one.words) > 1]
MAKE = [one for one in TYPED if one.words[0] == "make"]
YAML = [block for block in blocks() if block.language == "yaml" and is_ours(block.text)]


def test_something_is_looked_at() -> None:
    assert len(ROPEWAY) >= 20
    assert MAKE
    assert YAML


@pytest.mark.parametrize("one", ROPEWAY, ids=str)
def test_a_written_command_is_one_that_the_program_takes(
    one: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in one.words:
        if re.fullmatch(r"[\w-]+\.(jsonl?|txt|ya?ml)", word):  # a file that is there for whoever types it
            (tmp_path / word).touch()
    code: object = 0
    try:
        ropeway.parser().parse_args(one.words[1:])
    except SystemExit as ended:
        code = ended.code
    assert code == 0, f"{shlex.join(one.words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("one", MAKE, ids=str)
def test_a_written_target_is_one_of_the_makefile(one: Typed) -> None:
    wanted = [word for word in one.words[1:] if not word.startswith("-") and "=" not in word]
    assert [target for target in wanted if target not in targets()] == []


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_command_in_a_sentence_exists(path: Path) -> None:
    known = {name for name, _ in commands(ropeway.parser())}
    groups = {name.rpartition(" ")[0] for name in known}
    wrong = []
    for said in _inline.findall(path.read_text()):
        words = re.findall(r"[a-z][a-z-]*", said.split(" -")[0].partition("=")[0])
        if words[0] == "make":
            wrong += [said] if words[1] not in targets() else []
        elif f"ropeway {words[1]}" not in known or (
            f"ropeway {words[1]}" in groups and len(words) > 2 and " ".join(words[:3]) not in known
        ):
            wrong.append(said)
    assert wrong == []


@pytest.mark.parametrize("block", YAML, ids=str)
def test_a_written_configuration_is_right(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(block.text)
    # What a page leaves out (a keyring, tokenizers) it may leave out: what it says has to be right.
    problems = inspect(Request(path), {}).problems
    assert [str(problem) for problem in problems if problem.place != str(path)] == []


def test_the_checkers_see_what_is_wrong() -> None:
    assert list(calls("$ KEY=$(ropeway keys new --tenant a --file k) && make test | tee log")) == [
        ["ropeway", "keys", "new", "--tenant", "a", "--file", "k"],
        ["make", "test"],
    ]
    assert list(calls("python -m ropeway up ...   # starts")) == [["ropeway", "up"]]
    assert list(calls("A=1 ropeway audit --json > out.json")) == [["ropeway", "audit", "--json"]]
    assert list(calls("ropeway up --json      as JSON, it's said")) == [["ropeway", "up", "--json"]]
    assert list(calls("ropeway: error: no such file")) == []
    assert list(lines("a \\\n  b\nc")) == [(0, "a b"), (2, "c")]
    assert without_remark("$ ropeway up   says what it does") == "ropeway up"

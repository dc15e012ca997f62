"""What README and docs tell people to type is what the program takes: commands, make's targets, configuration."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import ropeway
from gateway.config import GatewayConfig
from gateway.settings.loading import Request, inspect
from tests.reference.commands import commands
from tests.reference.pages import REPOSITORY

DOCUMENTS = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")])
SHELLS = ("", "sh", "bash", "shell", "console", "text")

_fence = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_inline = re.compile(r"`(ropeway [a-z][^`\n]*|make [a-z-]+[^`\n]*)`")
_assignment = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


class Block(NamedTuple):
    path: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


class Typed(NamedTuple):
    """A command as somebody would type it."""

    place: str
    words: list[str]

    def __str__(self) -> str:
        return self.place


def blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        text = path.read_text()
        for match in _fence.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            yield Block(path.relative_to(REPOSITORY).as_posix(), line, match[1], match[2])


def typed() -> list[Typed]:
    """Every call of `ropeway` or `make` in the blocks for a shell."""
    found: list[Typed] = []
    for block in blocks():
        if block.language in SHELLS:
            for offset, line in lines(block.text):
                place = f"{block.path}:{block.line + offset}"
                found += [Typed(place, words) for words in calls(line)]
    return found


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations."""
    held, started = "", 0
    for offset, line in enumerate(text.splitlines()):
        started = offset if not held else started
        held += line.rstrip()
        if held.endswith("\\"):
            held = held[:-1] + " "
            continue
        yield started, held
        held = ""


def calls(line: str) -> Iterator[list[str]]:
    """Of a shell's line the commands that are ours, as words."""
    line = re.split(r"(?<=\S) {3,}(?=\S)", line.strip().removeprefix("$ "))[0]  # what follows says what it does
    if not re.match(r"[A-Za-z_.$(/]", line):
        return
    for part in re.split(r"\$\(|&&|\|\||[|;&)]", line):
        try:
            words = shlex.split(part, comments=True)
        except ValueError:
            continue  # a quote that goes on in the next line
        while words and _assignment.match(words[0]):
            words.pop(0)
        if words[:3] == ["python", "-m", "ropeway"]:
            words = words[2:]
        redirected = next((place for place, word in enumerate(words) if re.match(r"\d?[<>]", word)), len(words))
        if words and words[0].rpartition("/")[2] in ("ropeway", "make"):
            yield [words[0].rpartition("/")[2], *(word for word in words[1:redirected] if word != "...")]


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
    assert list(lines("a \\\n  b\nc")) == [(0, "a    b"), (2, "c")]

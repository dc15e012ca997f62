"""What README, CONTRIBUTING and docs tell people to type: blocks of text, and the commands in those for a shell."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tests.reference.pages import REPOSITORY

DOCUMENTS = sorted([REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")])
SHELLS = ("", "sh", "bash", "shell", "console", "text")

_block = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```|(?<=\n\n)((?: {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_assignment = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_remark = re.compile(r"(?<=\S) {3,}(?=\S)")
"""What follows says what the command does."""


class Block(NamedTuple):
    """Fenced, or indented by four."""

    path: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


class Line(NamedTuple):
    """One of a block for a shell, with its continuations and without what is said about it."""

    path: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


def blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        text = path.read_text()
        for match in _block.finditer(text):
            inside = 2 if match[3] is None else 3
            line = text.count("\n", 0, match.start(inside)) + 1
            yield Block(path.relative_to(REPOSITORY).as_posix(), line, match[1] or "", match[inside])


def shell_lines() -> list[Line]:
    """Every line of the blocks for a shell, whether it is a command or not."""
    return [
        Line(block.path, block.line + offset, without_remark(line))
        for block in blocks()
        if block.language in SHELLS
        for offset, line in lines(block.text)
        if line.strip()
    ]


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations."""
    held, started = "", 0
    for offset, line in enumerate(text.splitlines()):
        started = offset if not held else started
        held += line.strip() if held else line.rstrip()
        if held.endswith("\\"):
            held = held[:-1].rstrip() + " "
            continue
        yield started, held
        held = ""


def without_remark(line: str) -> str:
    return _remark.split(line.strip().removeprefix("$ "))[0]


def calls(line: str) -> Iterator[list[str]]:
    """Of a shell's line the commands that are ours, as words."""
    line = without_remark(line)
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

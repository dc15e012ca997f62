"""The command lines of docs/vllm.md, as they stand there, with a test's own model, files and ports."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tests.gateway.end_to_end.processes import REPOSITORY

_BLOCK = re.compile(r"^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_OMITTED = "..."


@cache
def serve_lines() -> tuple[Sequence[str], Sequence[str]]:
    """Of `vllm serve`: the one without the connector, and the one with it, whose `...` stands for the first."""
    blocks = _BLOCK.findall((REPOSITORY / "docs/vllm.md").read_text())
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    plain, moving = (shlex.split(line) for line in lines if line.startswith("vllm serve MODEL --port 8001"))
    assert _OMITTED in moving
    assert _OMITTED not in plain
    return plain, moving


def flags(*, moves: bool) -> list[str]:
    """What follows `vllm serve MODEL --port 8001`."""
    plain, moving = (line[5:] for line in serve_lines())
    return [*plain, *(word for word in moving if word != _OMITTED)] if moves else list(plain)


def with_values(flags: Sequence[str], changes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Flags whose values are JSON objects, with other values under keys that those have; `changes` by flag. A key of an
    inner object is written `outer.inner`."""
    words = list(flags)
    for flag, values in changes.items():
        at = words.index(flag) + 1
        document = json.loads(words[at])
        for path, value in values.items():
            *outer, key = path.split(".")
            inner = document
            for name in outer:
                inner = inner[name]
            inner[key] = value
        words[at] = json.dumps(document)
    return words

"""Lua steps as files, and calls of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self


@dataclass(frozen=True)
class Script:
    """One atomic step. It runs by its digest where the server knows it, and by its text where not."""

    name: str
    text: str = field(repr=False)
    sha1: str = field(init=False)

    def __post_init__(self) -> None:
        # The protocol names scripts by SHA-1; nothing rests on its strength.
        object.__setattr__(self, "sha1", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(path.stem, path.read_text(encoding="utf-8"))


class Call(NamedTuple):
    """One run of a script; in a cluster all its keys lie in one slot."""

    script: Script
    keys: Sequence[bytes]
    args: Sequence[bytes | int | str] = ()

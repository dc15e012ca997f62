"""What every parser is given, what it hands back, and how a file's format is told by its beginning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from cachecore.prompts.contract import Renderer
from loadtest.traces.building import Draft
from loadtest.traces.rows import Progress, csv_columns, is_json_lines, json_rows

SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a caller may say about a file; a file that says it by itself is believed first."""

    block_size_tokens: int | None = None
    """Of files with block ids it is known better than inferred; of others, what their prompts are cut into."""
    renderer: Renderer | None = None
    """Turns bodies and texts into tokens. Without one, four bytes of a plain rendering are a token."""
    rate: float = 1.0
    """Conversations a second (Poisson) where the file holds no times."""
    seed: int = 0
    output_tokens: int = 128
    """Of an answer, where the file says nothing of it."""
    think_seconds: float = 1.0
    """Between an answer and the next turn, where the file says nothing of it."""
    progress: Progress | None = None


@dataclass(slots=True)
class Parsed:
    drafts: Sequence[Draft]
    block_size_tokens: int
    notes: list[str] = field(default_factory=list)
    names_are_ids: bool = False
    """Whether the names are ids of the file, which may turn out to name texts and not prefixes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """How a file begins."""

    text: str
    """Its first SAMPLE_BYTES."""
    row: Any = None
    """The first row of a JSON file."""
    columns: Sequence[str] = ()
    """The fields of the first line, where that is no JSON."""
    suffix: str = ""

    @property
    def keys(self) -> Mapping[str, Any]:
        return self.row if isinstance(self.row, dict) else {}

    def has(self, *names: str) -> bool:
        return all(name in self.keys for name in names)


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    summary: str
    """One line for `--help`: whose it is, and what it holds."""
    matches: Callable[[Sample], bool]
    read: Callable[[Path, ReadOptions], Parsed]


def sample(path: Path) -> Sample:
    """Raises OSError, and TraceError for a document that is no JSON."""
    with path.open("rb") as file:
        text = file.read(SAMPLE_BYTES).decode("utf-8-sig", "replace")
    begins = text.lstrip()[:1]
    if begins == "{" or (begins == "[" and not text.startswith("[[")):
        return Sample(text, row=_first_row(path), suffix=path.suffix)
    return Sample(text, columns=csv_columns(text.splitlines()[0]) if text.strip() else (), suffix=path.suffix)


def _first_row(path: Path) -> Any:
    """The first that is valid: one broken line does not hide what a file is."""
    if is_json_lines(path):
        with path.open("rb") as file:
            for line, _ in zip(file, range(100), strict=False):
                try:
                    return orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
        return None
    return next(json_rows(path), (0, None))[1]

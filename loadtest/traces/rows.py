"""Rows of a file, each with the place it stands at, so that what is wrong with one can be said where it is.

JSON lines are rows, and so are the elements of a JSON array; any other JSON document is one row. Of CSV, the lines.
A row that cannot be understood is left out and named in the notes, as long as such rows are few.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from loadtest.traces.contract import TraceError

Progress = Callable[[int, int], None]
"""Called now and then with how much is done, and of how much."""

DOCUMENT_BYTES_MAX = 2 << 30
"""A JSON document is read whole."""
NUMBER_MAX = 1e19
"""Nanoseconds of this age of the world fit."""
TOKENS_MAX = 1 << 24
PROGRESS_BYTES = 1 << 16
MALFORMED_NAMED_MAX = 5
MALFORMED_MIN = 10
MALFORMED_SHARE_MAX = 0.05
"""More malformed rows than both, or more than half, say that the file is something else."""
_REASON_CHARACTERS_MAX = 160


class RowError(ValueError):
    """Why one row cannot be understood."""


class Row(NamedTuple):
    place: int
    """Number of its line, or of the element of an array; from 1."""
    value: Any


@dataclass(slots=True)
class Tally:
    """What became of a file's rows."""

    path: Path
    format: str
    noun: str = "line"
    rows: int = 0
    malformed: list[str] = field(default_factory=list)
    malformed_count: int = 0

    def skip(self, place: int, reason: object) -> None:
        self.malformed_count += 1
        if len(self.malformed) < MALFORMED_NAMED_MAX:
            text = " ".join(str(reason).split())[:_REASON_CHARACTERS_MAX]
            self.malformed.append(f"{self.noun} {place}: {text}")

    def check(self) -> None:
        """Raises TraceError when too little of the file was understood."""
        if self.rows == 0:
            raise TraceError(f"{self.path}: no rows; read as {self.format}")
        count = self.malformed_count
        if 2 * count > self.rows or count > max(MALFORMED_MIN, self.rows * MALFORMED_SHARE_MAX):
            shown = "; ".join(self.malformed)
            raise TraceError(f"{self.path}: {count} of {self.rows} rows are malformed; read as {self.format}: {shown}")

    def notes(self) -> list[str]:
        if not self.malformed_count:
            return []
        more = self.malformed_count - len(self.malformed)
        shown = "; ".join(self.malformed) + (f"; and {more} more" if more else "")
        return [f"{self.malformed_count} of {self.rows} rows are malformed and left out: {shown}"]


def understood(rows: Iterable[Row | tuple[int, RowError]], read: Callable[[Any], None], tally: Tally) -> None:
    """Hand each row's value to `read`, which raises RowError (or fails on a missing key or a wrong type)."""
    for row in rows:
        tally.rows += 1
        place, value = row
        if isinstance(value, RowError):
            tally.skip(place, value)
            continue
        try:
            read(value)
        except KeyError as error:
            tally.skip(place, f"no {error.args[0]!r}" if error.args else "a key is missing")
        except (RowError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            tally.skip(place, error)
    tally.check()


def json_rows(path: Path, progress: Progress | None = None) -> Iterator[Row | tuple[int, RowError]]:
    """Rows of a JSON file of either kind. A line that is no JSON comes as the error. Raises TraceError."""
    if not is_json_lines(path):
        yield from _document_rows(path)
        return
    size, done, told = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        for place, line in enumerate(file, start=1):
            done += len(line)
            if progress is not None and done - told >= PROGRESS_BYTES:
                progress(done, size)
                told = done
            if line.isspace():
                continue
            try:
                yield Row(place, orjson.loads(line))
            except orjson.JSONDecodeError as error:
                yield place, RowError(f"no JSON: {error}")
    if progress is not None:
        progress(size, size)


def is_json_lines(path: Path) -> bool:
    """Whether the first line that says anything is an object by itself."""
    with path.open("rb") as file:
        for line in file:
            if not line.isspace():
                break
        else:
            return False
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        # Broken or torn, a line of JSON lines still ends as an object does; of a document, the first line does not.
        text = line.strip()
        return text.startswith(b'{"') and text.endswith(b"}")


def _document_rows(path: Path) -> Iterator[Row]:
    if path.stat().st_size > DOCUMENT_BYTES_MAX:
        raise TraceError(f"{path}: a JSON document of more than {DOCUMENT_BYTES_MAX >> 30} GiB; use JSON lines")
    try:
        document = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path}: no JSON: {error}") from error
    for place, value in enumerate(document if isinstance(document, list) else [document], start=1):
        yield Row(place, value)


def csv_rows(path: Path, progress: Progress | None = None) -> Iterator[Row]:
    """Lines of a CSV file with a header, each as a mapping from its columns."""
    size, done = path.stat().st_size, 0
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for row in reader:
            done += sum(len(field) + 1 for field in row.values() if isinstance(field, str))
            if progress is not None and reader.line_num % 4096 == 0:
                progress(min(done, size), size)
            yield Row(reader.line_num, row)
    if progress is not None:
        progress(size, size)


def bare_csv_rows(path: Path) -> Iterator[Row]:
    """Lines of a CSV file without a header, each as a list."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        for row in reader:
            if row:
                yield Row(reader.line_num, row)


def csv_columns(line: str) -> list[str]:
    return next(csv.reader(io.StringIO(line)), [])


def whole(row: Mapping[str, Any], key: str, minimum: int = 0) -> int:
    """A count under a key. Raises KeyError, RowError."""
    value = row[key]
    if isinstance(value, str | float):
        number = float(value)
        value = int(number) if number == int(number) else value
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise RowError(f"{key!r} is {value!r}, not a whole number of at least {minimum}")
    return value


def tokens(row: Mapping[str, Any], key: str, minimum: int = 0) -> int:
    """How many tokens a prompt or an answer has. Raises KeyError, RowError."""
    count = whole(row, key, minimum)
    if count > TOKENS_MAX:
        raise RowError(f"{key!r} is {count}, and no model reads more than {TOKENS_MAX} tokens")
    return count


def number(row: Mapping[str, Any], key: str, minimum: float = -NUMBER_MAX) -> float:
    """A number of reasonable size under a key. Raises KeyError, RowError."""
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise RowError(f"{key!r} is {value!r}, not a number")
    result = float(value)
    if not minimum <= result <= NUMBER_MAX:
        raise RowError(f"{key!r} is {value!r}, not a number from {minimum:g} to {NUMBER_MAX:g}")
    return result


def numbers(row: Mapping[str, Any], key: str) -> list[int]:
    """Whole numbers under a key. Raises KeyError, RowError."""
    value = row[key]
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise RowError(f"{key!r} is no list of whole numbers")
    return value

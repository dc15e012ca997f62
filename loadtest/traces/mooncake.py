"""Mooncake's traces: milliseconds, lengths in tokens, block ids that hold for the whole file (usually 512 tokens).

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

GuideLLM reads the same keys as seconds; nothing in such a file says so, hence a format of its own that must be named.
A file without ids tells lengths alone.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loadtest.traces.blocksizes import settle_block_size
from loadtest.traces.building import Draft, names_of
from loadtest.traces.lengths import finish_lengths
from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample
from loadtest.traces.rows import RowError, Tally, json_rows, number, numbers, tokens, understood

BLOCK_SIZE_TOKENS = 512


def matches(sample: Sample) -> bool:
    others = {"session_id", "chat_id", "messages", "text_input"}
    return sample.has("timestamp", "input_length", "output_length") and others.isdisjoint(sample.keys)


class _Rows:
    """What a file's rows say, seconds_per_unit of its timestamps given."""

    def __init__(self, seconds_per_unit: float) -> None:
        self.seconds_per_unit = seconds_per_unit
        self.drafts: list[Draft] = []
        self.lengths: list[tuple[int, int]] = []
        self.fractions = False

    def add(self, row: Mapping[str, Any]) -> None:
        if "hash_ids" not in row and self.lengths:
            raise RowError("no 'hash_ids'")
        ids, length = numbers(row, "hash_ids") if "hash_ids" in row else None, tokens(row, "input_length", 1)
        stamp, answer = number(row, "timestamp"), tokens(row, "output_length")
        self.drafts.append(Draft(stamp * self.seconds_per_unit, length, answer, names_of(ids or ())))
        if ids is not None:
            self.lengths.append((length, len(ids)))
        self.fractions = self.fractions or not stamp.is_integer()

    def notes(self) -> list[str]:
        if not self.fractions or self.seconds_per_unit == 1.0:
            return []
        return ["timestamps are read as milliseconds; if they are seconds, the format is mooncake-seconds"]


def reader(name: str, seconds_per_unit: float) -> Callable[[Path, ReadOptions], Parsed]:
    def read(path: Path, options: ReadOptions) -> Parsed:
        rows, tally = _Rows(seconds_per_unit), Tally(path, name)
        understood(json_rows(path, options.progress), rows.add, tally)
        if not rows.lengths:
            parsed = finish_lengths(rows.drafts, options, tally)
            parsed.notes += rows.notes()
            return parsed
        block_size, settled = settle_block_size(rows.lengths, BLOCK_SIZE_TOKENS, options.block_size_tokens)
        return Parsed(rows.drafts, block_size, [*settled, *rows.notes(), *tally.notes()], names_are_ids=True)

    return read


MOONCAKE = Format(
    "mooncake",
    "Mooncake: timestamp in ms, input_length, output_length, hash_ids of 512 tokens, global",
    matches,
    reader("mooncake", 1e-3),
)
MOONCAKE_SECONDS = Format(
    "mooncake-seconds",
    "Mooncake's keys with timestamps in seconds, as GuideLLM reads them; to be named, never detected",
    lambda _sample: False,
    reader("mooncake-seconds", 1.0),
)

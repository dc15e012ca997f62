"""Files that tell when and how long, but not what: Azure, BurstGPT, vidur.

    Azure     TIMESTAMP,ContextTokens,GeneratedTokens       a date with seven digits of a second
    BurstGPT  Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,Total tokens,Log Type     seconds
    vidur     arrived_at,num_prefill_tokens,num_decode_tokens                          seconds; of data sets, no times

Nothing is known to be shared, so each prompt is its own; turns of a BurstGPT session continue one another.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft, by_position
from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample
from loadtest.traces.rows import Tally, csv_rows, number, tokens, understood
from loadtest.traces.times import seconds_of

BLOCK_SIZE_TOKENS = 64
OWN_PROMPTS = "the file names no blocks: each prompt is its own"
CONTINUED = "the file names no blocks: turns of a session continue one another, other prompts are their own"

RowReader = Callable[[Mapping[str, Any], Iterator[float]], Draft]
"""The second argument gives times where a row has none."""


def finish_lengths(
    drafts: list[Draft], options: ReadOptions, tally: Tally, usual_block: int = BLOCK_SIZE_TOKENS
) -> Parsed:
    """Drafts without names, named by their position."""
    block_size = options.block_size_tokens or usual_block
    by_position(drafts, block_size)
    note = CONTINUED if any(draft.session for draft in drafts) else OWN_PROMPTS
    return Parsed(drafts, block_size, [note, *tally.notes()])


def _reader(name: str, read_row: RowReader, untimed: bool = False) -> Callable[[Path, ReadOptions], Parsed]:
    def read(path: Path, options: ReadOptions) -> Parsed:
        tally, drafts = Tally(path, name), list[Draft]()
        times = poisson(Random(options.seed), options.rate)
        understood(csv_rows(path, options.progress), lambda row: drafts.append(read_row(row, times)), tally)
        parsed = finish_lengths(drafts, options, tally)
        if untimed:
            parsed.notes.append(f"no times: requests come at {options.rate:g} a second (Poisson, seed {options.seed})")
        return parsed

    return read


def _azure(row: Mapping[str, Any], _times: Iterator[float]) -> Draft:
    return Draft(seconds_of(row["TIMESTAMP"]), tokens(row, "ContextTokens", 1), tokens(row, "GeneratedTokens"))


def _burstgpt(row: Mapping[str, Any], _times: Iterator[float]) -> Draft:
    session = row.get("Session ID") or ""
    return Draft(
        number(row, "Timestamp"),
        tokens(row, "Request tokens", 1),
        tokens(row, "Response tokens"),
        session=f"session-{session}" if session else "",
        tenant=row.get("Model") or "",
    )


def _vidur(row: Mapping[str, Any], _times: Iterator[float]) -> Draft:
    return Draft(number(row, "arrived_at"), tokens(row, "num_prefill_tokens", 1), tokens(row, "num_decode_tokens"))


def _vidur_lengths(row: Mapping[str, Any], times: Iterator[float]) -> Draft:
    lengths = tokens(row, "num_prefill_tokens", 1), tokens(row, "num_decode_tokens")
    return Draft(next(times), *lengths)


def _columns(*names: str) -> Callable[[Sample], bool]:
    return lambda sample: all(name in sample.columns for name in names)


AZURE = Format(
    "azure",
    "Azure LLM inference traces (2023, 2024): TIMESTAMP, ContextTokens, GeneratedTokens",
    _columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    _reader("azure", _azure),
)
BURSTGPT = Format(
    "burstgpt",
    "BurstGPT: Timestamp in s, Request tokens, Response tokens; with or without sessions",
    _columns("Timestamp", "Request tokens", "Response tokens"),
    _reader("burstgpt", _burstgpt),
)
VIDUR = Format(
    "vidur",
    "vidur: arrived_at in s, num_prefill_tokens, num_decode_tokens",
    _columns("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    _reader("vidur", _vidur),
)
VIDUR_LENGTHS = Format(
    "vidur-lengths",
    "vidur's data sets: num_prefill_tokens, num_decode_tokens, no times",
    _columns("num_prefill_tokens", "num_decode_tokens"),
    _reader("vidur-lengths", _vidur_lengths, untimed=True),
)

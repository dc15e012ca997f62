"""ServeGen's clients: how often each asks, window by window, and how long its prompts are; realised by a seed.

    chunk-48-trace.csv     timestamp_s,rate,cv,pattern,shape,scale     no header; a window lasts until the next
    chunk-48-dataset.json  {"0": {"input_tokens": "{48: 2.46e-05, 52: 1.23e-05}", "output_tokens": "{...}"}, ...}

Gaps between a window's arrivals are drawn from its Gamma or Weibull distribution, lengths from the dataset's window. Of
a trace, the dataset beside it is read; without one, lengths are log-normal around 1,000 and 200 tokens. A dataset alone
is realised at a constant rate.
"""

import re
from bisect import bisect, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf, isfinite
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import orjson

from loadtest.traces.arrivals import poisson
from loadtest.traces.building import Draft
from loadtest.traces.contract import TraceError
from loadtest.traces.lengths import finish_lengths
from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample
from loadtest.traces.rows import RowError, Tally, bare_csv_rows, understood

REQUESTS_MAX = 20_000
"""A client's trace covers weeks."""
REQUESTS_OF_DATASET = 4_000
WINDOW_SECONDS = 600.0
_FIELDS = 6
_SHAPE_MAX = 1e6
"""Gaps as even as a clock's. Beyond, Python's way to draw from a Gamma distribution loses digits and may not end."""
_PAIR = re.compile(r"(\d+)\s*:\s*([0-9.eE+-]+)")
_INPUT_TOKENS, _OUTPUT_TOKENS, _SPREAD = 1_000, 200, 0.8


class _Window(NamedTuple):
    start_seconds: float
    pattern: str
    """Empty where nobody asks."""
    shape: float
    scale: float

    def gap(self, rng: Random) -> float:
        if self.pattern == "Gamma":
            return rng.gammavariate(self.shape, self.scale)
        try:
            return rng.weibullvariate(self.scale, self.shape)
        except OverflowError:
            return inf


class _Histogram:
    """Lengths by their share, as a Python dict written out."""

    def __init__(self, text: Any) -> None:
        pairs = _PAIR.findall(text) if isinstance(text, str) else []
        if not pairs:
            raise RowError("a distribution is no text of the form {length: share}")
        self._lengths = [int(length) for length, _ in pairs]
        self._bounds = list(accumulate(float(share) for _, share in pairs))

    def draw(self, rng: Random) -> int:
        return self._lengths[bisect(self._bounds, rng.random() * self._bounds[-1], hi=len(self._bounds) - 1)]


class _Lengths:
    """Of prompts and answers, by time; after the last window, as in that."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        if not document:
            raise RowError("no windows")
        self._starts = sorted(map(float, document))
        self._windows = {
            float(start): (_Histogram(window["input_tokens"]), _Histogram(window["output_tokens"]))
            for start, window in document.items()
        }

    def draw(self, rng: Random, now: float) -> tuple[int, int]:
        start = self._starts[max(bisect_right(self._starts, now) - 1, 0)]
        prompts, answers = self._windows[start]
        return max(prompts.draw(rng), 1), answers.draw(rng)


def _usual_lengths(rng: Random) -> tuple[int, int]:
    prompt, answer = (rng.lognormvariate(0.0, _SPREAD) for _ in range(2))
    return max(round(_INPUT_TOKENS * prompt), 1), max(round(_OUTPUT_TOKENS * answer), 1)


def _read_trace(path: Path, options: ReadOptions) -> Parsed:
    tally, windows = Tally(path, "servegen"), list[_Window]()
    understood(bare_csv_rows(path), lambda row: windows.append(_window(row)), tally)
    beside = path.with_name(path.name.replace("trace.csv", "dataset.json"))
    lengths = _load(beside) if beside != path and beside.is_file() else None
    rng = Random(options.seed)
    drafts: list[Draft] = []
    for arrival in _arrivals(windows, rng):
        if len(drafts) == REQUESTS_MAX:
            break
        prompt, answer = lengths.draw(rng, arrival) if lengths is not None else _usual_lengths(rng)
        drafts.append(Draft(arrival, prompt, answer))
    if not drafts:
        raise TraceError(f"{path}: the client never asks anything; read as servegen")
    parsed = finish_lengths(drafts, options, tally)
    parsed.notes += [
        f"realised with seed {options.seed}"
        + (f", up to the first {REQUESTS_MAX} requests" if len(drafts) == REQUESTS_MAX else ""),
        f"lengths from {beside.name}"
        if lengths is not None
        else f"no {beside.name} beside it: lengths log-normal around {_INPUT_TOKENS} and {_OUTPUT_TOKENS} tokens",
    ]
    return parsed


def _window(row: Sequence[str]) -> _Window:
    if len(row) != _FIELDS:
        raise RowError(f"{len(row)} fields, not {_FIELDS}")
    start, rate, pattern, shape, scale = float(row[0]), float(row[1]), row[3], float(row[4]), float(row[5])
    if not isfinite(start):
        raise RowError(f"a window that starts at {start:g}")
    if rate <= 0.0:
        return _Window(start, "", 0.0, 0.0)
    if pattern not in ("Gamma", "Weibull") or not 0.0 < shape <= _SHAPE_MAX or not 0.0 < scale < inf:
        known = f"Gamma and Weibull, of a shape above 0 and up to {_SHAPE_MAX:g} and a finite scale above 0"
        raise RowError(f"gaps by {pattern!r} of {shape:g} and {scale:g}; known are {known}")
    return _Window(start, pattern, shape, scale)


def _arrivals(windows: Sequence[_Window], rng: Random) -> Iterator[float]:
    starts = [window.start_seconds for window in windows]
    ends = [*starts[1:], starts[-1] + WINDOW_SECONDS] if starts else []
    for window, end in zip(windows, ends, strict=True):
        now = window.start_seconds
        while window.pattern:
            now += window.gap(rng)
            if now >= end:
                break
            yield now


def _read_dataset(path: Path, options: ReadOptions) -> Parsed:
    lengths, rng, tally = _load(path), Random(options.seed), Tally(path, "servegen-lengths", rows=1)
    drafts = [
        Draft(arrival, *lengths.draw(rng, arrival))
        for arrival, _ in zip(poisson(rng, options.rate), range(REQUESTS_OF_DATASET), strict=False)
    ]
    parsed = finish_lengths(drafts, options, tally)
    parsed.notes.append(
        f"lengths alone: {REQUESTS_OF_DATASET} requests at {options.rate:g} a second (Poisson, seed {options.seed})"
    )
    return parsed


def _load(path: Path) -> _Lengths:
    try:
        return _Lengths(orjson.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: no lengths of ServeGen's: {error}") from error


def _is_trace(sample: Sample) -> bool:
    columns = sample.columns
    return len(columns) == _FIELDS and columns[3] in ("", "Gamma", "Weibull") and columns[0].replace(".", "").isdigit()


def _is_dataset(sample: Sample) -> bool:
    first = next(iter(sample.keys.values()), None)
    return isinstance(first, Mapping) and "input_tokens" in first and "output_tokens" in first


SERVEGEN = Format(
    "servegen", "ServeGen: a client's rate and gaps by window, realised by a seed", _is_trace, _read_trace
)
SERVEGEN_LENGTHS = Format(
    "servegen-lengths", "ServeGen: distributions of lengths, at a constant rate", _is_dataset, _read_dataset
)

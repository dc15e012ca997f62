"""LLMServingSim's workloads: nanoseconds; flat requests, with token ids or without, and agents' sessions.

    {"input_toks": 27369, "output_toks": 1626, "arrival_time_ns": 101537000}
    {"input_toks": 3, "output_toks": 1, "arrival_time_ns": 46926808, "input_tok_ids": [1, 2, 3], "output_tok_ids": [4]}
    {"session_id": "task-0", "arrival_time_ns": 4059740,
     "sub_requests": [{"input_toks": 1472, "output_toks": 133, "tool_duration_ns": 127348767}, ...]}

A session's requests come one after another, each as long after the one before as its tool took.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.traces.building import Draft
from loadtest.traces.contract import TraceError
from loadtest.traces.lengths import finish_lengths
from loadtest.traces.parsing import Format, Parsed, ReadOptions
from loadtest.traces.rows import Tally, json_rows, number, numbers, tokens, understood
from loadtest.traces.texts import TextDrafts

_NANOSECONDS = 1e-9


def _read(path: Path, options: ReadOptions) -> Parsed:
    texts, tally, drafts = TextDrafts(options), Tally(path, "llmservingsim"), list[Draft]()

    def add(row: Mapping[str, Any]) -> None:
        arrival = number(row, "arrival_time_ns") * _NANOSECONDS
        if "sub_requests" in row:
            drafts.extend(_session(row, arrival))
        elif "input_tok_ids" in row:
            body = {"prompt": numbers(row, "input_tok_ids")}
            texts.add(body, arrival_seconds=arrival, output_tokens=tokens(row, "output_toks"))
        else:
            drafts.append(Draft(arrival, tokens(row, "input_toks", 1), tokens(row, "output_toks")))

    understood(json_rows(path, options.progress), add, tally)
    if drafts and texts.drafts:
        raise TraceError(f"{path}: rows with token ids beside rows without; read as llmservingsim")
    return texts.parsed(tally) if texts.drafts else finish_lengths(drafts, options, tally)


def _session(row: Mapping[str, Any], arrival_seconds: float) -> list[Draft]:
    session, previous, pause = str(row["session_id"]), None, 0.0
    drafts: list[Draft] = []
    for one in row["sub_requests"]:
        arrival = arrival_seconds if previous is None else previous.arrival_seconds + pause
        lengths = tokens(one, "input_toks", 1), tokens(one, "output_toks")
        previous = Draft(arrival, *lengths, session=session, follows=previous, delay_seconds=pause)
        pause = number(one, "tool_duration_ns", 0.0) * _NANOSECONDS if "tool_duration_ns" in one else 0.0
        drafts.append(previous)
    return drafts


LLMSERVINGSIM = Format(
    "llmservingsim",
    "LLMServingSim: input_toks, output_toks, arrival_time_ns; token ids and agents' sessions",
    lambda sample: sample.has("arrival_time_ns") and ("input_toks" in sample.keys or "sub_requests" in sample.keys),
    _read,
)

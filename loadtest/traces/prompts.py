"""Prompts as benchmarks hand them in: one text a row, with the length of the answer.

GuideLLM    {"prompt": "Hello, how are you?", "output_tokens_count": 5}
vLLM bench  {"prompt": "Hello", "output_tokens": 10}
AIBrix      {"timestamp": 0, "requests": [{"Prompt Length": 3, "Output Length": 22, "prompt": "Where is Beijing"}]}
            {"prompt": "...", "prompt_length": 3, "output_length": 22, "session_id": "0"}
llm-d       {"prompt_hash": "...", "n_gen_tokens": 3, "input_text": "1, 2, 3", "generated": "Hello human!"}
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loadtest.traces.parsing import Format, Parsed, ReadOptions, Sample
from loadtest.traces.rows import RowError, Tally, json_rows, number, tokens, understood
from loadtest.traces.texts import TextDrafts

_MILLISECONDS = 1e-3
_OLD_KEYS = {"Prompt Length": "prompt_length", "Output Length": "output_length"}


def _prompt(row: Mapping[str, Any], key: str = "prompt") -> dict[str, str]:
    if not isinstance(row[key], str):
        raise RowError(f"{key!r} is {type(row[key]).__name__}, not text")
    return {"prompt": row[key]}


def _reader(name: str, keys: tuple[str, ...]) -> Callable[[Path, ReadOptions], Parsed]:
    """Of rows with a prompt and the length of its answer under one of the keys."""

    def read(path: Path, options: ReadOptions) -> Parsed:
        texts, tally = TextDrafts(options), Tally(path, name)

        def add(row: Mapping[str, Any]) -> None:
            key = next((key for key in keys if row.get(key) is not None), None)
            texts.add(_prompt(row), output_tokens=None if key is None else tokens(row, key))

        understood(json_rows(path, options.progress), add, tally)
        return texts.parsed(tally)

    return read


def _read_aibrix(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "aibrix")

    def add_one(row: Mapping[str, Any], arrival_seconds: float | None) -> None:
        renamed = {_OLD_KEYS.get(key, key): value for key, value in row.items()}
        output = tokens(renamed, "output_length") if renamed.get("output_length") is not None else None
        session = str(renamed.get("session_id", ""))
        texts.add(_prompt(renamed), arrival_seconds=arrival_seconds, output_tokens=output, session=session)

    def add(row: Mapping[str, Any]) -> None:
        stamp = number(row, "timestamp") * _MILLISECONDS if "timestamp" in row else None
        for one in row.get("requests", [row]):
            add_one(one, stamp)

    understood(json_rows(path, options.progress), add, tally)
    return texts.parsed(tally)


def _read_llm_d(path: Path, options: ReadOptions) -> Parsed:
    texts, tally = TextDrafts(options), Tally(path, "llm-d-inference-sim", noun="row")

    def add(row: Mapping[str, Any]) -> None:
        texts.add(_prompt({"prompt": row["input_text"]}), output_tokens=tokens(row, "n_gen_tokens"))

    understood(json_rows(path, options.progress), add, tally)
    return texts.parsed(tally)


def _is_aibrix(sample: Sample) -> bool:
    requests = sample.keys.get("requests")
    if sample.has("timestamp") and isinstance(requests, list):
        return not requests or (isinstance(requests[0], dict) and any("rompt" in key for key in requests[0]))
    return sample.has("prompt", "prompt_length", "output_length")


_GUIDELLM_KEYS = ("output_tokens_count", "output_tokens", "output_token_count")

GUIDELLM = Format(
    "guidellm",
    "GuideLLM: prompt, output_tokens_count",
    lambda sample: sample.has("prompt", "output_tokens_count"),
    _reader("guidellm", _GUIDELLM_KEYS),
)
VLLM_CUSTOM = Format(
    "vllm-custom",
    "vLLM bench: custom data sets, a prompt a line, with output_tokens",
    lambda sample: (
        isinstance(sample.keys.get("prompt"), str) and not (sample.keys.keys() - {"prompt", "output_tokens"})
    ),
    _reader("vllm-custom", ("output_tokens",)),
)
AIBRIX = Format(
    "aibrix", "AIBrix workloads: timestamp in ms, requests with prompt and lengths", _is_aibrix, _read_aibrix
)
LLM_D_SIM = Format(
    "llm-d-inference-sim",
    "llm-d's simulator: input_text, n_gen_tokens",
    lambda sample: sample.has("input_text", "n_gen_tokens"),
    _read_llm_d,
)

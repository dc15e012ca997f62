"""Whatever a file holds, reading it ends as a trace or as a TraceError that names the file."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loadtest.traces.contract import TraceError
from loadtest.traces.reading import FORMATS_BY_NAME, read_trace

_CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
_TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
_SPAN = {
    "trace_id": "t",
    "start_time": "2026-02-25T10:00:00",
    "end_time": "2026-02-25T10:00:01",
    "attributes": {"gen_ai.input.messages": json.dumps(_CHAT[:1]), "gen_ai.output.text": "ho"},
}
_MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
_WEKA = {"t": 0.0, "in": 130, "out": 20, "hash_ids": [1, 2], "api_time": 1.0, "think_time": 0.5}
ROWS: dict[str, Any] = {
    "mooncake": _MOONCAKE,
    "mooncake-seconds": _MOONCAKE,
    "qwen-bailian": {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1, **_MOONCAKE},
    "aiperf": {"session_id": "s", "delay": 5, "group_id": 3, **_MOONCAKE},
    "weka": {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": [_WEKA, {"requests": [_WEKA]}]},
    "servegen-lengths": {"0": {"input_tokens": "{5: 0.5}", "output_tokens": "{5: 0.5}"}},
    "llmservingsim": {
        "session_id": "s",
        "arrival_time_ns": 5,
        "sub_requests": [{"input_toks": 5, "output_toks": 5, "tool_duration_ns": 3}],
    },
    "openai-batch": {"custom_id": "1", "method": "POST", "url": "/v1", "body": {"messages": _CHAT, "max_tokens": 3}},
    "request-log": {"timestamp": 5, "request": {"messages": _CHAT}, "response": {"usage": {"completion_tokens": 3}}},
    "sharegpt": {"id": "x", "conversations": _TURNS},
    "fastchat-questions": {"question_id": 1, "turns": ["hi", "ho"]},
    "otel": {"spans": [_SPAN, _SPAN]},
    "swe-agent": {"history": _CHAT, "trajectory": [{"execution_time": 0.5}]},
    "tau-bench": {"task_id": 1, "trial": 0, "traj": _CHAT},
    "bfcl": {"id": "x", "question": [_CHAT[:1]], "function": [{"name": "f", "parameters": {}}], "involved_classes": []},
    "aibrix": {"timestamp": 0, "requests": [{"Prompt Length": 3, "Output Length": 2, "prompt": "hi"}]},
    "guidellm": {"prompt": "hi", "output_tokens_count": 3},
    "vllm-custom": {"prompt": "hi", "output_tokens": 3},
    "llm-d-inference-sim": {"input_text": "hi", "n_gen_tokens": 3},
    "aiperf-inputs": {"data": [{"session_id": "s", "payloads": [{"messages": _CHAT}]}]},
    "aiperf-texts": {"session_id": "s", "turns": [{"text": "hi", "delay": 3}], "timestamp": 5},
    "aiperf-export": {
        "metadata": {"request_start_ns": 5, "conversation_id": None},
        "metrics": {"input_sequence_length": {"value": 5}, "output_sequence_length": {"value": 5}},
    },
}
LINES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
    "burstgpt": "Timestamp,Session ID,Model,Request tokens,Response tokens\n5,1,ChatGPT,472,18\n",
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,4808,10\n",
    "vidur-lengths": "num_prefill_tokens,num_decode_tokens\n4808,10\n",
    "servegen": "0,5.0,1.0,Gamma,1.0,0.2\n600,0,0,,0,0\n",
    "sonnet": "a line of a poem\n" * 9,
    "text": "a text",
}
ODD: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "x", [], {}, [[1]])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    result = copy.deepcopy(document)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


def test_all_formats_are_tried() -> None:
    assert ROWS.keys() | LINES.keys() == FORMATS_BY_NAME.keys()


@pytest.mark.parametrize("name", list(ROWS))
def test_odd_values_anywhere(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[name]))
    assert read_trace(path, name).requests
    for place in places(ROWS[name]):
        for value in ODD:
            path.write_text(json.dumps(changed(ROWS[name], place, value)))
            for format_name in (name, None):
                try:
                    assert read_trace(path, format_name).requests
                except TraceError as error:
                    assert str(path) in str(error)  # noqa: PT017  most are refused, not all


@pytest.mark.parametrize("name", list(LINES))
def test_odd_bytes_anywhere(tmp_path: Path, name: str) -> None:
    path, rng = tmp_path / "a.txt", Random(1)
    path.write_text(LINES[name])
    assert read_trace(path, name).requests
    for _ in range(12):
        data = bytearray(LINES[name].encode())
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice(b'\x00\xff,\n"-e9{')
        path.write_bytes(bytes(data))
        try:
            read_trace(path, name)
        except TraceError as error:
            assert str(path) in str(error)  # noqa: PT017  some are refused, not all

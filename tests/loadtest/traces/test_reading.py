"""What a file is, by its content; and what is said of files that are none of ours."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cachecore.blocks import HASH_BYTES
from loadtest.traces.contract import NO_PREDECESSOR, Trace, TraceError
from loadtest.traces.health import health_notes, longer_than
from loadtest.traces.reading import FORMATS, FORMATS_BY_NAME, detect, read_trace
from loadtest.traces.rows import csv_rows, json_rows
from tests.shared import SHARED, shared

MOONCAKE = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}


def test_names_of_formats_are_their_own() -> None:
    assert len(FORMATS_BY_NAME) == len(FORMATS)
    assert all(one.summary for one in FORMATS)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.json", "", "an empty file of no known format; known are mooncake, "),
        ("a.json", '{"weather": "fine"}', "JSON with the keys weather of no known format"),
        ("a.csv", "a,b,c\n1,2,3\n", "text that begins with 'a,b,c"),
        ("a.md", "# Policy\n\nBe kind.", "a Markdown document: it holds no requests"),
        ("a.json", '{"model_type": "bert", "architectures": []}', "a Hugging Face model's configuration"),
        ("a.json", '{"tokenizer_class": "X"}', "a Hugging Face tokenizer's configuration"),
        ("a.json", '{"cls_token": "x", "pad_token": "y"}', "a Hugging Face tokenizer's configuration"),
        ("a.json", '{"version": "1.0", "added_tokens": [], "model": {}}', "a tokenizer (tokenizer.json)"),
        ("a.json", '{"name": "cat", "description": "d", "parameters": {}}', "BFCL tool schemas: they are read along"),
        ("a.json", '[{"id": "0", "user_scenario": {}}]', "tau2-bench tasks"),
        ("a.json", '{"id": "0", "title": "t", "content": "c"}', "documents (tau2-bench, RAG)"),
        ("a.json", '{"request_throughput": {}, "request_latency": {}}', "an AIPerf summary"),
        ("a.json", '{"input_sequence_length": {"mean": 1}, "number_of_turns": {}}', "statistics of an inference-perf"),
        ("a.json", "{ broken", "no JSON"),
    ],
)
def test_what_cannot_be_read_is_called_by_its_name(tmp_path: Path, name: str, text: str, reason: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert reason in str(refused.value)


def test_what_is_no_file_or_no_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="a directory; a trace is one file"):
        read_trace(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(MOONCAKE))
    with pytest.raises(TraceError, match="no format 'moon'; known are mooncake, "):
        read_trace(path, "moon")
    path.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff\xfe\n")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(path)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "9" * 200_000 + "\n")
    with pytest.raises(TraceError, match="no CSV: field larger than field limit"):
        read_trace(path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rate": 0.0},
        {"rate": -1.0},
        {"block_size_tokens": -1},
        {"block_size_tokens": 10**6},
        {"output_tokens": -1},
        {"think_seconds": -1.0},
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=r"must be above 0|a block has 1 to 65536 tokens"):
        read_trace(tmp_path / "a.jsonl", **arguments)


def test_one_broken_line_hides_no_format(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"timestamp": 0, "input_le}\n' + f"{json.dumps(MOONCAKE)}\n" * 4)
    assert detect(path).name == "mooncake"
    assert any("line 1: no JSON" in note for note in read_trace(path).notes)


def test_reading_tells_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(MOONCAKE)}\n" * 3000)
    seen: list[tuple[int, int]] = []
    read_trace(path, progress=lambda done, total: seen.append((done, total)))
    size = path.stat().st_size
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == 4
    path.write_text("a,b\n" + "1,2\n" * 5000)
    seen.clear()
    assert len(list(csv_rows(path, lambda done, total: seen.append((done, total))))) == 5000
    assert seen[-1] == (path.stat().st_size,) * 2


def test_rows_of_documents_are_the_elements_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[\n  1,\n  2\n]")
    assert list(json_rows(path)) == [(1, 1), (2, 2)]
    path.write_text('{\n  "a": 1\n}')
    assert list(json_rows(path)) == [(1, {"a": 1})]
    path.write_text('\n{"a": 1}\n\n{"a": 2}\n')
    assert list(json_rows(path)) == [(2, {"a": 1}), (4, {"a": 2})]


def rows_at(times: Sequence[int]) -> str:
    return "".join(f"{json.dumps({**MOONCAKE, 'timestamp': time})}\n" for time in times)


def test_health(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(rows_at([3000 * (place // 2) for place in range(80)]))
    notes = read_trace(path).notes
    assert any(note.startswith("arrivals stand on a grid of 3 s (40 stamps for 80 requests)") for note in notes)
    path.write_text(rows_at([0, 5, 5, 9_000]))
    assert "1 of 4 requests share the stamp of another" in read_trace(path).notes
    path.write_text(rows_at([7, 7, 7]))
    assert "all 3 requests arrive at once" in read_trace(path).notes


def test_health_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 100, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": 5000, "output_length": 0, "hash_ids": [3]},
        {"timestamp": 2, "input_length": 512, "output_length": 4, "hash_ids": [5]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path, block_size_tokens=512)
    assert health_notes(trace.requests, 512) == [
        "1 requests name more blocks than their length fills",
        "1 requests are longer than the blocks they name; the rest counts as new each time",
        "1 requests have no output tokens",
    ]
    assert longer_than(trace.requests, 6000) is None
    assert longer_than(trace.requests, 512) == (
        "2 requests need more than a worker's 512 tokens of KV; the longest needs 5000"
    )


PUBLIC_FILES = sorted(path for path in (SHARED / "traces").rglob("*") if path.is_file())
"""Real files of most formats; none where there are none (tests/shared.py)."""
READ_FORMATS = {
    "aibrix",
    "aiperf-export",
    "aiperf-inputs",
    "azure",
    "bfcl",
    "fastchat-questions",
    "llm-d-inference-sim",
    "llmservingsim",
    "mooncake",
    "openai-batch",
    "otel",
    "servegen",
    "servegen-lengths",
    "sharegpt",
    "sonnet",
    "swe-agent",
    "tau-bench",
    "text",
    "vidur",
    "vidur-lengths",
}


def sound(trace: Trace) -> bool:
    """What every trace keeps to, whatever it came from."""
    arrivals = [request.arrival_seconds for request in trace.requests]
    return (
        arrivals[0] == 0.0
        and arrivals == sorted(arrivals)
        and trace.block_size_tokens > 0
        and all(
            request.input_tokens > 0
            and request.output_tokens >= 0
            and len(request.chain) % HASH_BYTES == 0
            and request.blocks <= -(-request.input_tokens // trace.block_size_tokens)
            and NO_PREDECESSOR <= request.follows < place
            and request.delay_seconds >= 0.0
            for place, request in enumerate(trace.requests)
        )
    )


def refused_because(path: Path) -> str:
    """Empty for a file whose format is known."""
    try:
        detect(path)
    except TraceError as refused:
        return str(refused)
    return ""


@pytest.mark.traces
def test_public_files_are_read_or_refused_by_name() -> None:
    shared("traces")
    refused = {path: reason for path in PUBLIC_FILES if (reason := refused_because(path))}
    assert len(refused) <= 25
    for path, reason in refused.items():
        assert reason.startswith(f"{path}: ")
        assert "of no known format" not in reason
    assert {detect(path).name for path in PUBLIC_FILES if path not in refused} == READ_FORMATS


@pytest.mark.traces
def test_public_files_are_sound() -> None:
    shared("traces")
    for path in PUBLIC_FILES:
        if refused_because(path):
            continue
        trace = read_trace(path)
        assert trace.requests, path
        assert sound(trace), path
        assert not any("malformed" in note for note in trace.notes), path

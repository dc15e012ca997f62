"""Formats that tell times and lengths: units, sessions, realisations by a seed."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from cachecore.blocks import split_chain
from loadtest.traces.building import positions
from loadtest.traces.contract import TraceError
from loadtest.traces.reading import read_trace
from loadtest.traces.rows import RowError
from loadtest.traces.times import seconds_of


def test_azure_2023(tmp_path: Path) -> None:
    """CRLF, seven digits, no line end after the last row."""
    path = tmp_path / "a.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8"
    )
    trace = read_trace(path)
    assert trace.format == "azure"
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests] == [(4808, 10), (3180, 8)]
    assert trace.duration_seconds == pytest.approx(0.052, abs=1e-6)
    assert trace.requests[0].blocks == 4808 // 64
    assert set(split_chain(trace.requests[0].chain)).isdisjoint(split_chain(trace.requests[1].chain))


def test_azure_2024_and_a_malformed_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:0x,1,5\n"
        "2024-05-10 00:01:00.009930+00:00,2399,6\n"
    )
    trace = read_trace(path)
    assert trace.duration_seconds == pytest.approx(60.0)
    assert any("line 3: '2024-05-10 00:00:0x' is no time" in note for note in trace.notes)


def test_burstgpt_with_and_without_sessions(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n"
    )
    trace = read_trace(path)
    assert [(r.arrival_seconds, r.tenant, r.session) for r in trace.requests] == [
        (0.0, "ChatGPT", ""),
        (40.0, "GPT-4", ""),
    ]
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,1,3.2,ChatGPT,472,18,490,Conversation log\n45,1,9,ChatGPT,640,230,870,Conversation log\n"
    )
    trace = read_trace(path)
    first, second = trace.requests
    assert first.session == second.session == "session-1"
    assert second.chain[: len(first.chain)] == first.chain
    assert second.blocks == 10


def test_vidur_with_times_and_without(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,4808,10\n0.052,3180,8\n")
    trace = read_trace(path)
    assert (trace.format, trace.duration_seconds) == ("vidur", 0.052)
    path.write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" + "3772,54,3826,69.8\n" * 500)
    trace = read_trace(path, rate=4.0)
    assert trace.format == "vidur-lengths"
    assert trace.duration_seconds == pytest.approx(125.0, rel=0.15)
    assert "no times: requests come at 4 a second (Poisson, seed 0)" in trace.notes


def test_servegen_is_realised_by_its_distributions(tmp_path: Path) -> None:
    path = tmp_path / "chunk-1-trace.csv"
    path.write_text("0,0,0,,0,0\n600,5.0,1.0,Gamma,1.0,0.2\n1200,2.0,1.0,Weibull,1.0,0.5\n1800,0,0,,0,0\n")
    (tmp_path / "chunk-1-dataset.json").write_text(
        json.dumps({"0": {"input_tokens": "{100: 0.5, 200: 0.5}", "output_tokens": "{7: 1.0}"}})
    )
    trace = read_trace(path, seed=4)
    assert trace.format == "servegen"
    early = [r for r in trace.requests if r.arrival_seconds < 599.0]
    assert len(early) == pytest.approx(3000, rel=0.06)
    assert len(trace.requests) - len(early) == pytest.approx(1200, rel=0.1)
    assert trace.duration_seconds == pytest.approx(1200, abs=5)
    assert {r.input_tokens for r in trace.requests} == {100, 200}
    assert fmean(r.input_tokens for r in trace.requests) == pytest.approx(150, abs=3)
    assert {r.output_tokens for r in trace.requests} == {7}
    assert trace.requests == read_trace(path, seed=4).requests
    assert trace.requests != read_trace(path, seed=5).requests


def test_servegen_without_lengths_says_so(tmp_path: Path) -> None:
    path = tmp_path / "chunk-2-trace.csv"
    path.write_text("0,5.0,1.0,Gamma,1.0,0.2\n")
    assert any("no chunk-2-dataset.json beside it" in note for note in read_trace(path).notes)
    path.write_text("0,5.0,1.0,Gamma,1.0,0.2\n" * 3 + "600,1,1,Pareto,1,1\n")
    assert any("line 4: gaps by 'Pareto'" in note for note in read_trace(path).notes)
    path.write_text("0,0,0,,0,0\n")
    with pytest.raises(TraceError, match="never asks anything; read as servegen"):
        read_trace(path)


def test_servegen_lengths_alone(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"0": {"input_tokens": "{48: 0.25, 52: 0.75}", "output_tokens": "{3: 1e-05}"}}))
    trace = read_trace(path, rate=2.0)
    assert trace.format == "servegen-lengths"
    assert fmean(r.input_tokens for r in trace.requests) == pytest.approx(51.0, abs=0.2)
    path.write_text(json.dumps({"0": {"input_tokens": "__import__('os')", "output_tokens": "{3: 1e-05}"}}))
    with pytest.raises(TraceError, match="no lengths of ServeGen's"):
        read_trace(path)


def test_llmservingsim_flat_and_sessions(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"input_toks": 200, "output_toks": 16, "arrival_time_ns": 101_537_000},
        {
            "session_id": "t",
            "arrival_time_ns": 1_101_537_000,
            "sub_requests": [
                {"input_toks": 128, "output_toks": 13, "tool_duration_ns": 2_500_000_000},
                {"input_toks": 256, "output_toks": 12, "tool_duration_ns": 0},
            ],
        },
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert [r.arrival_seconds for r in trace.requests] == pytest.approx([0.0, 1.0, 3.5])
    assert [(r.follows, r.delay_seconds) for r in trace.requests] == [(-1, 0.0), (-1, 0.0), (1, 2.5)]
    assert trace.requests[2].chain[: 16 * 2] == trace.requests[1].chain == positions(2, 128, 64)


def test_llmservingsim_with_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    ids = list(range(1, 41))
    rows = [
        {"input_toks": len(part), "output_toks": 4, "arrival_time_ns": 1, "input_tok_ids": part}
        for part in (ids, ids[:20], [9, *ids[1:]])
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    chains = [request.chain for request in trace.requests]
    assert [request.blocks for request in trace.requests] == [2, 1, 2]
    assert chains[1] == chains[0][:16] != chains[2][:16]
    assert trace.requests[0].body == {"prompt": ids}


def test_aiperf_exports(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    rows = [
        {
            "metadata": {"request_start_ns": 1_762_551_534_000_000_000 + place * 10**9, "conversation_id": None},
            "metrics": {
                "input_sequence_length": {"value": 100 + place, "unit": "tokens"},
                "output_sequence_length": {"value": 20, "unit": "tokens"},
            },
        }
        for place in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert [(r.arrival_seconds, r.input_tokens) for r in trace.requests] == [(0.0, 100), (1.0, 101), (2.0, 102)]


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        (12.5, 12.5),
        ("12.5", 12.5),
        (1_700_000_000, 1.7e9),
        (1_700_000_000_000, 1.7e9),
        (1_700_000_000_000_000, 1.7e9),
        ("1700000000000000000", 1.7e9),
        ("1970-01-02T00:00:00Z", 86_400.0),
        ("1970-01-01 01:00:00.1234567", 3600.123456),
        ("1970-01-01T01:00:00+01:00", 0.0),
    ],
)
def test_times_in_any_unit(stamp: object, seconds: float) -> None:
    assert seconds_of(stamp) == pytest.approx(seconds)


@pytest.mark.parametrize("stamp", ["yesterday", None, True, [1], float("nan")])
def test_what_is_no_time(stamp: object) -> None:
    with pytest.raises(RowError, match="no time"):
        seconds_of(stamp)

"""Formats that name blocks: units, scopes of ids, deltas, block sizes."""

import json
from pathlib import Path

import pytest

from loadtest.audit.ceilings import Ceilings
from loadtest.traces.blocksizes import infer_block_size, settle_block_size
from loadtest.traces.building import names_of
from loadtest.traces.contract import Trace, TraceError, block_name
from loadtest.traces.reading import detect, read_trace


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def shared_blocks(trace: Trace, one: int, other: int) -> int:
    """How many blocks two requests' prompts have in common at their beginning."""
    first, second = trace.requests[one].chain, trace.requests[other].chain
    count = 0
    while first[count : count + 16] and first[count : count + 16] == second[count : count + 16]:
        count += 16
    return count // 16


def test_names_of_ids_are_those_of_the_contract() -> None:
    ids = [0, 7, 2**40, -1]
    assert names_of(ids, 3) == b"".join(block_name(one, 3) for one in ids)
    assert names_of([2**64 - 1]) == names_of([-1])
    assert names_of([]) == b""
    with pytest.raises(OverflowError):
        names_of([2**64])


def test_mooncake_is_milliseconds_and_ids_hold_for_the_file(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        [
            {"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
            {"timestamp": 3500, "input_length": 700, "output_length": 0, "hash_ids": [0, 9]},
        ],
    )
    trace = read_trace(path)
    assert (trace.format, trace.block_size_tokens, trace.name) == ("mooncake", 512, "a.jsonl")
    assert [request.arrival_seconds for request in trace.requests] == [0.0, 3.0]
    assert [(request.input_tokens, request.output_tokens) for request in trace.requests] == [(1100, 5), (700, 0)]
    assert shared_blocks(trace, 0, 1) == 1
    assert trace.requests[0].chain == names_of([0, 1, 2])
    assert "block size 512 tokens, inferred: 100.0%" in trace.notes[0]
    assert "2 of 2 requests begin with one and the same block" in trace.notes


def test_the_same_keys_in_seconds_have_to_be_named(tmp_path: Path) -> None:
    row = {"timestamp": 1.5, "input_length": 10, "output_length": 5, "hash_ids": [0]}
    path = written(tmp_path / "a.jsonl", [{**row, "timestamp": 0}, row])
    assert read_trace(path).duration_seconds == pytest.approx(0.0015)
    assert read_trace(path, "mooncake-seconds").duration_seconds == 1.5


def test_fractions_are_asked_about(tmp_path: Path) -> None:
    row = {"timestamp": 1.5, "input_length": 10, "output_length": 5, "hash_ids": [0]}
    path = written(tmp_path / "a.jsonl", [row])
    assert any("if they are seconds, the format is mooncake-seconds" in note for note in read_trace(path).notes)
    assert not any("if they are" in note for note in read_trace(path, "mooncake-seconds").notes)


def test_mooncake_without_ids_tells_lengths_alone(tmp_path: Path) -> None:
    rows = [{"timestamp": place * 1000, "input_length": 130, "output_length": 5} for place in range(2)]
    trace = read_trace(written(tmp_path / "a.jsonl", rows))
    assert (trace.format, trace.duration_seconds, trace.requests[0].blocks) == ("mooncake", 1.0, 2)
    assert shared_blocks(trace, 0, 1) == 0


def test_ids_that_name_texts_are_chained(tmp_path: Path) -> None:
    """Block 5 stands after 1 and after 2: only prompts that are equal up to it may share it."""
    rows = [
        {"timestamp": place, "input_length": 1024, "output_length": 1, "hash_ids": ids}
        for place, ids in enumerate([[1, 5], [2, 5], [1, 5]])
    ]
    trace = read_trace(written(tmp_path / "a.jsonl", rows))
    assert (shared_blocks(trace, 0, 1), shared_blocks(trace, 0, 2)) == (0, 2)
    assert trace.requests[0].chain[16:] != trace.requests[1].chain[16:]
    assert any("1 ids stand after different ids" in note for note in trace.notes)


@pytest.mark.parametrize("size", [16, 64, 512, 1024])
@pytest.mark.parametrize("partial", [True, False])
def test_block_sizes_are_inferred(size: int, partial: bool) -> None:
    lengths = [(length, (length + (size - 1 if partial else 0)) // size) for length in range(900, 40_000, 997)]
    inferred = infer_block_size(lengths, 512)
    assert (inferred.tokens, inferred.share, inferred.partial) == (size, 1.0, partial)


def test_a_stated_block_size_is_kept_and_judged() -> None:
    lengths = [(length, -(-length // 64)) for length in range(900, 40_000, 997)]
    assert settle_block_size(lengths, 512, 64) == (
        64,
        ["block size 64 tokens, as stated: it explains 100.0% of the rows"],
    )
    size, [note] = settle_block_size(lengths, 512, 128)
    assert size == 128
    assert note.endswith("; 64 would explain 100.0%")


def test_qwen_turns_follow_their_parent(tmp_path: Path) -> None:
    def row(chat: int, parent: int, time: float, length: int, ids: list[int]) -> dict[str, object]:
        return {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": time,
            "input_length": length,
            "output_length": 9,
            "type": "text",
            "turn": 1,
            "hash_ids": ids,
        }

    rows = [row(1, -1, 10.0, 40, [7, 8, 9]), row(2, -1, 11.0, 16, [30]), row(5, 1, 61.114, 64, [7, 8, 9, 12])]
    trace = read_trace(written(tmp_path / "a.jsonl", rows))
    assert (trace.format, trace.block_size_tokens) == ("qwen-bailian", 16)
    assert [request.arrival_seconds for request in trace.requests] == pytest.approx([0.0, 1.0, 51.114])
    assert [request.follows for request in trace.requests] == [-1, -1, 0]
    assert [request.session for request in trace.requests] == ["chat-1", "chat-2", "chat-1"]
    assert shared_blocks(trace, 0, 2) == 3


def weka_request(time: float, tokens: int, ids: list[int], **more: object) -> dict[str, object]:
    return {"t": time, "type": "n", "in": tokens, "out": 20, "hash_ids": ids, **more}


def test_weka_ids_hold_within_a_session(tmp_path: Path) -> None:
    sessions = [
        {
            "id": name,
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": [
                weka_request(0.0, 130, [1, 2], api_time=2.0),
                weka_request(9.5, 200, [1, 2, 3]),
                {"t": 10.0, "type": "subagent", "requests": [weka_request(10.0, 70, [1])]},
            ],
        }
        for name in ("a", "b")
    ]
    trace = read_trace(written(tmp_path / "a.jsonl", sessions))
    assert (trace.format, trace.block_size_tokens) == ("weka", 64)
    places = {(r.session, r.input_tokens): place for place, r in enumerate(trace.requests)}
    first, second, inner = places["a", 130], places["a", 200], places["a", 70]
    assert shared_blocks(trace, first, second) == 2
    assert shared_blocks(trace, first, inner) == 1
    assert shared_blocks(trace, first, places["b", 130]) == 0
    assert trace.requests[second].follows == first
    assert trace.requests[second].delay_seconds == 7.5
    assert (trace.requests[inner].follows, trace.requests[inner].delay_seconds) == (second, 0.5)
    assert trace.requests[places["b", 130]].arrival_seconds != trace.requests[first].arrival_seconds
    assert any(note.startswith("2 sessions start at one time: begun at 1 a second") for note in trace.notes)
    assert all("rounded down" in note for note in trace.notes if "as stated" not in note and "block size" in note)


def test_weka_rows_of_single_requests(tmp_path: Path) -> None:
    rows = [{"id": "s", **weka_request(0.0, 130, [1, 2])}, {"id": "s", **weka_request(4.0, 200, [1, 2, 3])}]
    trace = read_trace(written(tmp_path / "a.jsonl", rows))
    assert [request.follows for request in trace.requests] == [-1, 0]
    assert trace.block_size_tokens == 64


def test_aiperf_sessions_hold_what_is_new(tmp_path: Path) -> None:
    rows = [
        {"session_id": "s", "timestamp": 2000, "input_length": 1024, "output_length": 512, "hash_ids": [0, 1]},
        {"session_id": "t", "timestamp": 3000, "input_length": 1024, "output_length": 10, "hash_ids": [0, 1]},
        {"session_id": "s", "delay": 1500.0, "input_length": 600, "output_length": 40, "hash_ids": [7, 8]},
    ]
    trace = read_trace(written(tmp_path / "a.jsonl", rows))
    assert (trace.format, trace.block_size_tokens) == ("aiperf", 512)
    assert [request.input_tokens for request in trace.requests] == [1024, 1024, 1024 + 512 + 600]
    first, other, turn = trace.requests
    assert [request.arrival_seconds for request in trace.requests] == [0.0, 1.0, 1.5]
    assert (turn.follows, turn.delay_seconds) == (0, 1.5)
    # Both sessions begin with the same text; the answer to the first turn nobody else has.
    assert first.chain == other.chain
    assert turn.chain[:32] == first.chain
    assert turn.blocks == 4


def test_aiperf_sessions_without_times(tmp_path: Path) -> None:
    rows = [
        {"session_id": session, "input_length": 10, "output_length": 1, "hash_ids": [place]}
        for place, session in enumerate("aabbcc")
    ]
    trace = read_trace(written(tmp_path / "a.jsonl", rows), rate=2.0)
    assert sum(request.follows == -1 for request in trace.requests) == 3
    assert len({request.arrival_seconds for request in trace.requests}) == 3
    assert "no times: 3 requests or sessions begin at 2 a second (Poisson, seed 0)" in trace.notes


def test_aiperf_rows_without_sessions(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 10, "hash_ids": [123]},
        {"timestamp": 2000, "input_length": 600, "hash_ids": [4, 5]},
    ]
    trace = read_trace(written(tmp_path / "a.jsonl", rows), output_tokens=33)
    assert [(r.arrival_seconds, r.output_tokens, r.follows) for r in trace.requests] == [(0.0, 33, -1), (1.0, 33, -1)]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": ["x"]}, "hash_ids"),
        ({"timestamp": "soon", "input_length": 10, "output_length": 1, "hash_ids": [1]}, "soon"),
        ({"timestamp": 0, "input_length": -3, "output_length": 1, "hash_ids": [1]}, "input_length"),
        ({"timestamp": 0, "input_length": 10.5, "output_length": 1, "hash_ids": [1]}, "10.5"),
        ({"timestamp": 0, "input_length": True, "output_length": 1, "hash_ids": [1]}, "True"),
        ({"timestamp": 0, "input_length": 10, "hash_ids": [1]}, "no 'output_length'"),
        ({"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [2**70]}, "whole numbers"),
    ],
)
def test_a_malformed_row_is_named_by_its_line(tmp_path: Path, row: dict[str, object], named: str) -> None:
    good = [{"timestamp": place, "input_length": 10, "output_length": 1, "hash_ids": [place]} for place in range(3)]
    trace = read_trace(written(tmp_path / "a.jsonl", [*good[:2], row, good[2]]))
    [note] = [note for note in trace.notes if "malformed" in note]
    assert note.startswith("1 of 4 rows are malformed and left out: line 3: ")
    assert named in note
    assert len(trace.requests) == 3
    with pytest.raises(TraceError, match=r"a\.jsonl: 1 of 1 rows are malformed; read as mooncake: line 1: "):
        read_trace(written(tmp_path / "a.jsonl", [row]), "mooncake")


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"timestamp": place, "input_length": 10, "output_length": 1, "hash_ids": [place]} for place in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"timestamp": 3, "inp')
    trace = read_trace(path)
    assert len(trace.requests) == 3
    assert any("line 4: no JSON" in note for note in trace.notes)


def test_too_many_malformed_rows_are_another_format(tmp_path: Path) -> None:
    good = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}
    rows = [good] * 30 + [{"timestamp": 0}] * 11
    path = written(tmp_path / "a.jsonl", rows)
    with pytest.raises(TraceError, match="11 of 41 rows are malformed; read as mooncake: line 31: no 'hash_ids'"):
        read_trace(path)
    assert len(read_trace(written(path, rows[:-1])).requests) == 30


def test_what_mooncake_shares_is_what_ceilings_count(tmp_path: Path) -> None:
    rows = [
        {"timestamp": place, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for place, ids in enumerate([[0, 1, 2], [0, 1, 3], [0, 4]])
    ]
    path = written(tmp_path / "a.jsonl", rows)
    assert detect(path).name == "mooncake"
    assert Ceilings(read_trace(path)).infinite().blocks == pytest.approx(3 / 8)

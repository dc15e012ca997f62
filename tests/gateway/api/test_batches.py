"""What batches are made of: forms, lines, and what lies on disk."""

import time
from pathlib import Path

import orjson
import pytest

from gateway.api.batches.forms import read_form
from gateway.api.batches.requests import Fault, Line, answered, body_of, faults, read_line, remaining, unanswered
from gateway.api.batches.shelf import Key, Shelf
from gateway.api.calls import Answer
from gateway.config import BatchesConfig
from gateway.errors import BadRequest, NotFound, PayloadTooLarge

CHAT = "/v1/chat/completions"
FORM = (
    b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"content-type: application/octet-stream\r\n\r\n{}\r\n--x\r\n\r\n--B--\r\n"
)
SOUND = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","stream":true}}'


def test_a_form_is_taken_apart() -> None:
    parts = read_form("multipart/form-data; boundary=B", FORM)
    assert parts["purpose"].content == b"batch"
    assert (parts["file"].filename, parts["file"].content) == ("a.jsonl", b"{}\r\n--x\r\n")
    assert read_form('Multipart/Form-Data; boundary="B"', FORM).keys() == {"purpose", "file"}


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", FORM),
        ("multipart/form-data", FORM),
        ("multipart/form-data; boundary=C", FORM),
        ("multipart/form-data; boundary=B", FORM[:-8]),
        ("multipart/form-data; boundary=B", b"--B\r\n\r\nx\r\n--B--"),
        ("multipart/form-data; boundary=B", b""),
    ],
)
def test_what_is_no_form_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(BadRequest):
        read_form(content_type, body)


def test_a_line_is_asked_in_one_piece_with_the_priority_of_batches() -> None:
    line = read_line(1, SOUND, CHAT)
    assert (line.custom_id, orjson.loads(body_of(line, 100))) == ("a", {"model": "m", "priority": 100})


def test_what_becomes_of_a_line() -> None:
    line = Line(1, "a", {})
    good = orjson.loads(answered(line, Answer(200, "req-1", b'{"x":1}')))
    assert good["response"] == {"status_code": 200, "request_id": "req-1", "body": {"x": 1}}
    assert (good["custom_id"], good["error"]) == ("a", None)
    assert orjson.loads(answered(line, Answer(500, "", b"oops")))["response"]["body"] == "oops"
    over = orjson.loads(unanswered(line, "batch_expired", "over"))
    assert (over["response"], over["error"]) == (None, {"code": "batch_expired", "message": "over"})


def test_lines_are_judged_by_number() -> None:
    lines = [(1, SOUND), (3, SOUND), (4, b"[]"), (5, b"{")]
    total, found = faults(lines, CHAT, 10)
    assert total == 1
    assert [(fault["line"], fault["code"]) for fault in found] == [
        (3, "duplicate_custom_id"),
        (4, "invalid_json_line"),
        (5, "invalid_json_line"),
    ]
    with pytest.raises(Fault, match="POST"):
        read_line(1, SOUND.replace(b"POST", b"GET"), CHAT)
    other = SOUND.replace(b'"a"', b'"b"')
    assert [line.custom_id for line in remaining([(1, SOUND), (2, other)], CHAT, {"a"})] == ["b"]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "kept", BatchesConfig(bytes_max=4096, file_bytes_max=2048, keep_seconds=100.0))


def test_files_of_tenants_do_not_meet(shelf: Shelf) -> None:
    document = shelf.add_file("a/../b", "x.jsonl", "batch", b"1\n", 1000.0)
    assert shelf.file("a/../b", document["id"]) == document
    assert (document["bytes"], document["expires_at"]) == (2, 1100)
    for other in ("b", "a", "..", "a%2F..%2Fb"):
        with pytest.raises(NotFound):
            shelf.content(other, document["id"])
    assert [path.name for path in shelf.content("a/../b", document["id"]).parents[1].parent.iterdir()] == [
        "t-a%2F..%2Fb"
    ]


def test_there_is_room_for_so_much(shelf: Shelf) -> None:
    with pytest.raises(PayloadTooLarge):
        shelf.add_file("a", "x", "batch", b"x" * 2049, 0.0)
    shelf.add_file("a", "x", "batch", b"x" * 2048, 0.0)
    with pytest.raises(PayloadTooLarge):
        shelf.add_file("b", "x", "batch", b"x" * 2048, 0.0)


def test_half_a_line_is_cut_off(shelf: Shelf) -> None:
    key = Key("a", shelf.add_batch("a", {"status": "in_progress", "created_at": 1})["id"])
    shelf.append(key, "output", b'{"custom_id":"1"}\n')
    shelf.append(key, "output", b'{"custom_id":"2"')
    assert shelf.recovered(key) == {"output": {"1"}, "errors": set()}
    assert shelf.lines(key, "output").read_bytes() == b'{"custom_id":"1"}\n'
    assert shelf.open_batches() == [key]


def test_one_gateway_runs_the_batches(shelf: Shelf, tmp_path: Path) -> None:
    other = Shelf(tmp_path / "kept", shelf.config)
    assert shelf.lock()
    assert not other.lock()
    shelf.unlock()
    assert other.lock()
    other.unlock()


def test_what_is_old_is_forgotten(shelf: Shelf) -> None:
    now = time.time()
    old = shelf.add_file("a", "x", "batch", b"1", now - 101)
    new = shelf.add_file("a", "x", "batch", b"1", now)
    open_one = shelf.add_batch("a", {"status": "in_progress", "created_at": now - 101})
    ended = shelf.add_batch("a", {"status": "completed", "created_at": now - 101})
    shelf.forget_old(now)
    assert [document["id"] for document in shelf.files("a")] == [new["id"]]
    assert [document["id"] for document in shelf.batches("a")] == [open_one["id"]]
    assert ended["id"] != old["id"]

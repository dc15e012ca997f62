"""The file format of captures: what is written is read again, and what is not whole says so."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecore.captures import (
    VERSION,
    Capture,
    CapturedMessage,
    CaptureError,
    CaptureHeader,
    CaptureWriter,
    write_capture,
)

HEADER = CaptureHeader.new(1_780_000_000.5, "tcp://127.0.0.1:5557", "vLLM 0.32")
FIRST_LINE = (
    b'{"format":"ropeway-kv-events","version":1,"captured_at":1780000000.5,"endpoint":"tcp://127.0.0.1:5557",'
    b'"note":"vLLM 0.32"}\n'
)
MESSAGES = [
    CapturedMessage(0.0, "kv-events", 0, b"\x93\x01", replayed=True),
    CapturedMessage(0.25, "kv@w1@m", 2**64 - 2, b""),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_the_bytes_of_a_file(path: Path) -> None:
    write_capture(path, HEADER, MESSAGES)
    assert path.read_bytes() == FIRST_LINE + (
        b'{"at":0.0,"topic":"kv-events","sequence":0,"payload":"kwE=","replayed":true}\n'
        b'{"at":0.25,"topic":"kv@w1@m","sequence":18446744073709551614,"payload":""}\n'
    )


def test_a_file_is_read_as_often_as_wanted(path: Path) -> None:
    write_capture(path, HEADER, MESSAGES)
    capture = Capture(path)
    assert capture.header == HEADER
    assert [list(capture), list(capture)] == [MESSAGES, MESSAGES]


messages = st.builds(
    CapturedMessage,
    st.floats(0, 1e6),
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=200),
    st.booleans(),
)


@given(st.lists(messages, max_size=5))
def test_whatever_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, kept: list[CapturedMessage]) -> None:
    path = tmp_path_factory.mktemp("capture") / "events.jsonl"
    with CaptureWriter(path, HEADER) as writer:
        for message in kept:
            writer.add(message)
    assert list(Capture(path)) == kept
    assert (writer.messages, writer.bytes) == (len(kept), path.stat().st_size)


def test_keys_that_come_later_are_ignored(path: Path) -> None:
    path.write_bytes(
        b'{"format":"ropeway-kv-events","version":1,"captured_at":1,"engine":"x"}\n'
        b'{"at":0,"topic":"","sequence":1,"payload":"","later":[1]}\n'
    )
    capture = Capture(path)
    assert capture.header == CaptureHeader.new(1.0)
    assert list(capture) == [CapturedMessage(0.0, "", 1, b"")]


def test_a_file_is_not_written_over(path: Path) -> None:
    write_capture(path, HEADER, MESSAGES)
    with pytest.raises(FileExistsError):
        CaptureWriter(path, HEADER)
    assert list(Capture(path)) == MESSAGES


@pytest.mark.parametrize(
    "first",
    [b"", b"\n", b"{}\n", b'{"format":"else","version":1,"captured_at":1}\n', b"\xff\xfe\n", b"[1]\n", FIRST_LINE[:40]],
)
def test_what_is_no_capture(path: Path, first: bytes) -> None:
    path.write_bytes(first)
    with pytest.raises(CaptureError, match=r"events\.jsonl: this is no capture of KV events$"):
        Capture(path)


def test_a_version_that_is_not_known(path: Path) -> None:
    path.write_bytes(FIRST_LINE.replace(b'"version":1', b'"version":2'))
    with pytest.raises(CaptureError, match=f"version 2 is not known here, only {VERSION} is"):
        Capture(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"at":0,"topic":"","sequence":1,"payload":""}', "2: the last line is not whole"),
        (b'{"at":0,"topic":"","sequence":-1,"payload":""}\n', r"2: Expected `int` >= 0 - at `\$.sequence`"),
        (b'{"at":0,"topic":"","sequence":18446744073709551616,"payload":""}\n', "2: "),
        (b'{"at":-1,"topic":"","sequence":1,"payload":""}\n', "2: Expected `float` >= 0"),
        (b'{"at":0,"topic":"","sequence":1,"payload":"%"}\n', "2: Invalid base64 encoded string"),
        (b'{"at":0,"topic":"","sequence":1}\n', "2: Object missing required field `payload`"),
        (b"\n", "2: Input data was truncated"),
    ],
)
def test_a_line_that_is_broken_is_named(path: Path, line: bytes, message: str) -> None:
    path.write_bytes(FIRST_LINE + line)
    with pytest.raises(CaptureError, match=message):
        list(Capture(path))

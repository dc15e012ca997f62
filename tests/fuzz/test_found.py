"""What the fuzzers have found, one by one."""

from pathlib import Path

import msgspec
import pytest

from cachecore.events import decode_batch
from cachecore.scope import Keyring
from cachecore.trtllm_events import TrtllmEvents
from gateway.edge.http1 import CHUNK_LINE_BYTES_MAX, CHUNKED, TRAILER_BYTES_MAX, BodyEnd, FramingError
from gateway.errors import ConfigError
from gateway.settings.loading import load
from gateway.usage import Usage, read_usage
from loadtest.traces.contract import TraceError
from loadtest.traces.reading import read_trace

DEEP = 3000
"""Deeper than a decoder may call itself."""


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * DEEP,
        b"\x81\xa1a" * DEEP,
        b"\x93\x01\x91" + b"\x91" * DEEP + b"\xc0",
        # In a field that is skipped.
        b"\x92\x01\x91\x82\xa4type\xadUnknownEvent1\xa1x" + b"\x91" * DEEP + b"\xc0",
    ],
)
def test_kv_events_nested_without_end_are_malformed(payload: bytes) -> None:
    batch = decode_batch(payload)
    assert (batch.events, batch.malformed) == ((), 1)


def test_one_event_nested_without_end_costs_at_most_its_message() -> None:
    removed = msgspec.msgpack.encode({"type": "BlockRemoved", "block_hashes": [1]})
    assert decode_batch(b"\x92\x01\x92" + removed + b"\x91" * DEEP + b"\xc0").malformed == 1
    assert len(decode_batch(b"\x92\x01\x91" + removed).events) == 1


@pytest.mark.parametrize("inside", [b"", b'{"type":"stored","blocks":'])
def test_events_of_an_engine_that_is_asked_nested_without_end(inside: bytes) -> None:
    nested = inside + b"[" * DEEP + b"]" * DEEP + (b"}" if inside else b"")
    pulled = TrtllmEvents(2).decode(b'[{"event_id":1,"data":' + nested + b"}]")
    assert (pulled.batch.events, pulled.batch.malformed) == ((), 1)


def test_usage_nested_without_end_is_no_usage() -> None:
    nested = b"[" * 1900 + b"]" * 1900
    assert read_usage(b'{"usage":{"prompt_tokens":1,"x":' + nested + b"}}") is None
    assert read_usage(b'{"usage":{"prompt_tokens":1,"x":[[]]}}') == Usage(1, 0, None)


@pytest.mark.parametrize("text", ["a: " + "[" * 1000, "a: " + "{a: " * 1000, "- " * 1000 + "a", "? " * 1000])
def test_a_configuration_nested_without_end_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)) as refused:
        load(path, {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"current":1e999,"secrets":{"0":"' + "ab" * 32 + '"}}'], ids=["nested", "infinite"]
)
def test_what_is_no_keyring_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keyring.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)):
        Keyring.load(path)


@pytest.mark.parametrize(
    "body",
    [
        b"1;" + b"x" * CHUNK_LINE_BYTES_MAX + b"\r\na\r\n0\r\n\r\n",
        b"0\r\nA: " + b"x" * TRAILER_BYTES_MAX + b"\r\n\r\n",
    ],
    ids=["a chunk's header", "a trailer"],
)
def test_a_line_that_is_too_long_is_so_however_it_comes(body: bytes) -> None:
    with pytest.raises(FramingError):
        BodyEnd(CHUNKED).feed(body)
    with pytest.raises(FramingError):
        _feed_in_pieces(BodyEnd(CHUNKED), body)


def _feed_in_pieces(end: BodyEnd, body: bytes) -> None:
    for start in range(0, len(body), 100):
        end.feed(body[start : start + 100])


@pytest.mark.parametrize(
    ("text", "said"),
    [(".nan: 1", "nan"), ("2020-01-01: 1", "2020-01-01"), ("~: 1", "None"), ("limits: {.inf: 1}", "inf")],
)
def test_a_key_that_is_no_text_is_unknown(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"unknown key.*{said}"):
        load(path, {})


def test_an_empty_text_is_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(TraceError, match=r"empty\.txt.*an empty prompt"):
        read_trace(path, "text")


@pytest.mark.parametrize(
    "window",
    [
        "Gamma,1.1e400,0.2",
        "Gamma,nan,0.2",
        "Gamma,1e30,0.2",
        "Gamma,1.0,nan",
        "Weibull,inf,0.2",
        "Weibull,1.0,inf",
    ],
)
def test_gaps_that_nobody_can_draw_are_named_by_line(tmp_path: Path, window: str) -> None:
    path = tmp_path / "chunk-1-trace.csv"
    path.write_text(f"0,5.0,1.0,Gamma,1.0,0.2\n600,5.0,1.0,{window}\n1200,0,0,,0,0\n")
    assert any("line 2: gaps by" in note for note in read_trace(path, "servegen").notes)


@pytest.mark.parametrize("window", ["0,1,1,Gamma,1e6,0.1", "0,1,1,Weibull,1e-300,0.1", "0,1,1,Weibull,1e6,0.1"])
def test_gaps_at_the_bounds_are_drawn(tmp_path: Path, window: str) -> None:
    path = tmp_path / "chunk-1-trace.csv"
    path.write_text(f"0,5.0,1.0,Gamma,1.0,0.2\n600,5.0,1.0,Gamma,1.0,0.2\n{window.replace('0,', '1200,', 1)}\n")
    assert len(read_trace(path, "servegen").requests) > 5000


@pytest.mark.parametrize("start", ["nan", "inf", "-1e999"])
def test_a_window_without_a_time_is_named_by_line(tmp_path: Path, start: str) -> None:
    path = tmp_path / "chunk-1-trace.csv"
    path.write_text(f"0,5.0,1.0,Gamma,1.0,0.2\n{start},5.0,1.0,Gamma,1.0,0.2\n600,0,0,,0,0\n")
    assert any("line 2: a window that starts at" in note for note in read_trace(path, "servegen").notes)

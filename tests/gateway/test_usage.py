"""Usage read off the end of a body as it stood on the wire."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.usage import Usage, UsageStripper, _object_after, _plain_object, read_usage

USAGE = {"prompt_tokens": 12, "total_tokens": 15, "completion_tokens": 3}
WITH_DETAILS = {**USAGE, "prompt_tokens_details": {"cached_tokens": 8}, "completion_tokens_details": {"x": 1}}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(document: object, end: bytes = b"\n\n") -> bytes:
    return b"data: " + json.dumps(document).encode() + end


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (USAGE, Usage(12, 3, None)),
        (WITH_DETAILS, Usage(12, 3, 8)),
        ({**USAGE, "prompt_tokens_details": None}, Usage(12, 3, None)),
        ({**USAGE, "prompt_tokens_details": {}}, Usage(12, 3, None)),
        ({**USAGE, "prompt_tokens_details": {"cached_tokens": None}}, Usage(12, 3, None)),
        ({**USAGE, "prompt_tokens_details": {"cached_tokens": 0}}, Usage(12, 3, 0)),
        ({"prompt_tokens": 5, "total_tokens": 5}, Usage(5, 0, None)),
        ({"prompt_tokens": 5, "completion_tokens": None}, Usage(5, 0, None)),
        ({"input_tokens": 12, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 8}}, Usage(12, 3, 8)),
        ({"input_tokens": 4, "output_tokens": 3, "cache_read_input_tokens": 8}, Usage(12, 3, 8)),
        ({"input_tokens": 12, "output_tokens": 3}, Usage(12, 3, None)),
        ({"input_tokens": 4, "cache_creation_input_tokens": 8, "cache_read_input_tokens": 0}, Usage(12, 0, 0)),
    ],
)
def test_json_bodies(usage: object, expected: Usage) -> None:
    for indent in (None, 2):
        body = json.dumps({"id": "x", "choices": [{"text": "hi"}], "usage": usage, "kv": None}, indent=indent).encode()
        assert read_usage(body) == expected
        assert read_usage(chunk(body) + b"0\r\n\r\n") == expected
        assert read_usage(body[body.index(b'"usage"') :]) == expected


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("wrap", [chunk, bytes], ids=["chunked", "plain"])
def test_streams(end: bytes, wrap: type) -> None:
    events = [
        event({"choices": [{"delta": {"content": "a"}}], "usage": None}, end),
        event({"choices": [], "usage": WITH_DETAILS}, end),
        b"data: [DONE]" + end,
    ]
    assert read_usage(b"".join(map(wrap, events)) + b"0\r\n\r\n") == Usage(12, 3, 8)
    assert read_usage(wrap(b"".join(events))) == Usage(12, 3, 8)


def test_usage_in_the_last_content_event() -> None:
    tail = chunk(event({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}], "usage": USAGE}))
    assert read_usage(tail + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n") == Usage(12, 3, None)


def test_the_last_usage_counts() -> None:
    running = [event({"usage": {**USAGE, "completion_tokens": count}}) for count in (1, 2, 3)]
    assert read_usage(b"".join(map(chunk, running))) == Usage(12, 3, None)
    assert read_usage(chunk(running[2]) + chunk(event({"usage": None}))) == Usage(12, 3, None)


def test_an_object_cut_into_two_chunks() -> None:
    """Wherever: within its key as well."""
    body = json.dumps({"choices": [], "usage": WITH_DETAILS}).encode()
    for cut in range(1, len(body)):
        assert read_usage(chunk(body[:cut]) + chunk(body[cut:])) == Usage(12, 3, 8), cut
        assert read_usage(chunk(b"data: " + body[:cut]) + chunk(body[cut:] + b"\n\n") + DONE) == Usage(12, 3, 8), cut


@pytest.mark.parametrize("line", [b"\ndata: ", b"\r\ndata:", b"\rdata: "])
def test_an_object_in_two_lines_of_data(line: bytes) -> None:
    body = event({"choices": [], "usage": WITH_DETAILS}).replace(b', "completion', line + b', "completion')
    assert read_usage(body + DONE) == read_usage(chunk(body) + chunk(DONE)) == Usage(12, 3, 8)


@pytest.mark.parametrize("prefix", [b"data:", b"data:  ", b"event: message\nid: 4\nretry: 100\ndata: "])
def test_lines_of_other_spellings(prefix: bytes) -> None:
    body = prefix + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
    assert read_usage(chunk(b": before\n\n" + body) + chunk(b": after\n\n")) == Usage(12, 3, None)


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"0\r\n\r\n",
        event({"choices": []}),
        event({"usage": None}),
        b'{"usage": 5}',
        b'{"usage": []}',
        b'{"usage": {}}',
        b'{"usage": {"prompt_tokens": "many"}}',
        b'{"usage": {"prompt_tokens": null}}',
        b'{"usage": {"prompt_tokens": 1e999}}',
        b'{"usage": {"prompt_tokens": 5',
        b'{"usage": {"prompt_tokens": 5, }}',
        b'{"usage": {"prompt_tokens": 5, "prompt_tokens_details": 7}}',
        b'tokens": 12, "total_tokens": 15}}',
        b'{"usage": {' + b"{" * 4000,
    ],
)
def test_no_usage(tail: bytes) -> None:
    assert read_usage(tail) is None


def test_text_that_speaks_of_usage() -> None:
    text = 'then "usage": {"prompt_tokens": 99, "completion_tokens": 99} and "usage"'
    said = event({"choices": [{"delta": {"content": text}}]})
    assert b'\\"usage\\"' in said
    assert read_usage(said) is None
    assert read_usage(event({"usage": USAGE}) + said) == Usage(12, 3, None)
    assert read_usage(json.dumps({"choices": [{"text": text}], "usage": USAGE}).encode()) == Usage(12, 3, None)


# ---- taking it out of a stream ---------------------------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"
HELLO = event({"choices": [{"index": 0, "delta": {"content": 'hello 渐 "usage"'}}], "usage": None})
STOP = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
ALONE = event({"id": "x", "choices": [], "usage": WITH_DETAILS})


def stripped(*pieces: bytes) -> bytes:
    stripper = UsageStripper()
    return b"".join([*map(stripper.feed, pieces), stripper.end()])


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"])
def test_the_event_that_brings_usage_alone_is_taken_out(end: bytes) -> None:
    before = event({"choices": [{"delta": {"content": "a"}}]}, end) + b": keep-alive" + end
    usage = event({"choices": [], "usage": USAGE}, end)
    after = b"event: message\nid: 7\ndata:[DONE]" + end
    assert stripped(before + usage + after) == before + after


def test_wherever_the_stream_is_cut() -> None:
    for newline in (b"\n", b"\r\n"):
        whole = (HELLO + STOP + ALONE + DONE).replace(b"\n", newline)
        expected = (HELLO + STOP + DONE).replace(b"\n", newline)
        for cut in range(len(whole) + 1):
            assert stripped(whole[:cut], whole[cut:]) == expected
        assert stripped(*(bytes([byte]) for byte in whole)) == expected


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(event({"choices": [{"delta": {"content": "last"}}], "usage": USAGE}), id="usage beside content"),
        pytest.param(event({"choices": [], "usage": None}), id="no usage"),
        pytest.param(event({"choices": [], "error": {"usage": 1}}), id="an error"),
        pytest.param(event({"usage": USAGE}), id="no choices"),
        pytest.param(b'data: {"choices": [], "usage": {}\n\n', id="no JSON"),
        pytest.param(b'data: ["usage"]\n\n', id="no object"),
        pytest.param(b'data: {"choices": [], "usage": {"prompt_tokens": 1}}', id="an event without an end"),
        pytest.param(b'{"choices": [], "usage": {}}\n\n', id="no data"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_everything_else_passes_as_it_is(kept: bytes) -> None:
    assert stripped(HELLO, kept, DONE) == HELLO + kept + DONE


def test_data_in_several_lines() -> None:
    usage = b'data: {"choices": [],\ndata: "usage": {"prompt_tokens": 1}}\n\n'
    assert stripped(HELLO, usage, DONE) == HELLO + DONE


def test_whole_events_go_out_at_once_and_what_is_held_is_bounded() -> None:
    stripper = UsageStripper()
    assert stripper.feed(HELLO + STOP[:9]) == HELLO
    assert stripper.feed(STOP[9:]) == STOP
    endless = b"data: " + b"x" * 700_000
    assert stripper.feed(endless) == b""
    assert stripper.feed(endless) == endless * 2
    assert (stripper.feed(b"\n\n" + ALONE), stripper.stripped) == (b"\n\n", ALONE)


@given(st.text(st.sampled_from("{}{} :a\n"), max_size=24).map(str.encode))
def test_objects_found_at_once_are_those_found_step_by_step(after: bytes) -> None:
    found = _plain_object(b'"usage"' + after)
    assert found is None or found[1] == _object_after(b'"usage"' + after, len(b'"usage"'))

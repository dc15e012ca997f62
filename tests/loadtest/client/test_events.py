"""Event streams, cut anywhere."""

import pytest

from loadtest.client.answers import Answer, StreamObserver
from loadtest.client.events import EVENT_BYTES_MAX, EventError, EventReader

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
ONE = b'data: {"choices":[{"index":0,"delta":{"content":"one \xe2\x80\xa8"}}]}\n\n'
TWO = b'data:{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\r\n\r\n'
COMMENT = b": keep-alive\n\n"
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\r\r'
)
DONE = b"data: [DONE]\n\n"
WHOLE = COMMENT + ROLE + ONE + COMMENT + TWO + USAGE + DONE


def observed(*pieces: bytes) -> Answer:
    answer = Answer(0, 0.0)
    observer = StreamObserver(answer)
    for second, piece in enumerate(pieces, start=1):
        observer.received(piece, float(second))
    observer.ended()
    return answer


@pytest.mark.parametrize("cut", range(1, len(WHOLE)))
def test_a_stream_says_the_same_wherever_it_is_cut(cut: int) -> None:
    answer = observed(WHOLE[:cut], WHOLE[cut:])
    assert answer.failure == ""
    assert len(answer.token_times) == 2
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (9, 2, 4)


def test_the_first_token_is_the_first_content() -> None:
    answer = observed(COMMENT, ROLE, b'data: {"choices":[{"delta":null,"text":""}]}\n\n', ONE, TWO, USAGE + DONE)
    assert answer.ttft_seconds == 4.0
    assert answer.token_times == [4.0, 5.0]


def test_chunks_of_every_form_are_read() -> None:
    odd = (
        b'data: {"id":"x"}\n\n',
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"choices":[{"index":2,"delta":null,"finish_reason":"abort"}],"usage":null}\n\n',
        b'data: {"choices":[{"delta":{"reasoning_content":"hm"},"finish_reason":"error"}]}\n\n',
    )
    answer = observed(*odd, USAGE + DONE)
    assert (answer.failure, answer.token_times, answer.output_tokens) == ("", [4.0], 2)


def test_lines_of_data_are_joined() -> None:
    assert [*EventReader().feed(b"event: x\ndata: a\ndata:  b\nid: 3\n\ndata\n\n")] == [b"a\n b"]


def test_a_byte_at_a_time() -> None:
    answer = observed(*(bytes([byte]) for byte in WHOLE))
    assert (answer.failure, len(answer.token_times)) == ("", 2)


@pytest.mark.parametrize(
    ("stream", "failure"),
    [
        (ROLE + ONE, "cut off: the stream ended without [DONE]"),
        (ONE + DONE + b"data: {", "cut off: the stream ended without [DONE]"),
        (ONE + b'data: {"error":{"message":"the worker\\nfailed"}}\n\n', "error in the stream: the worker failed"),
        (b"data: {broken}\n\n" + DONE, "malformed"),
        (b'data: ["list"]\n\n' + DONE, "malformed"),
        (b'data: {"choices":3}\n\n' + DONE, "malformed"),
    ],
)
def test_what_is_not_whole_has_failed(stream: bytes, failure: str) -> None:
    assert observed(stream).failure.startswith(failure)


def test_an_event_without_end_is_given_up() -> None:
    with pytest.raises(EventError):
        list(EventReader().feed(b"x" * (EVENT_BYTES_MAX + 1)))

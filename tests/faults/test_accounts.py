"""The judge itself: what is right passes, and every kind of wrong is seen. These are quick, and run among all tests."""

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.faults.accounts import Answer, End, Verdict, judged
from tests.faults.questions import Moment, Question, Sent, expected_answer, first_blocks_differ, question, questions

TOKENS = 12


def asked(streams: bool) -> Question:
    return question("q1", "acme", 0, "What is carried up, and what comes down?", streams, TOKENS)


def usage(of: Question, cached: int = 16) -> dict[str, Any]:
    return {
        "prompt_tokens": len(of.prompt),
        "completion_tokens": TOKENS,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def head(status: int, framing: str, request_id: str = "q1") -> bytes:
    return f"HTTP/1.1 {status} X\r\nx-request-id: {request_id}\r\n{framing}\r\n\r\n".encode()


def sized(status: int, document: Any, request_id: str = "q1") -> bytes:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return head(status, f"content-length: {len(body)}", request_id) + body


def chunked(*chunks: bytes, ended: bool = True) -> bytes:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head(200, "transfer-encoding: chunked") + framed + (b"0\r\n\r\n" if ended else b"")


def event(document: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(document).encode()


def said(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})


DONE = b"data: [DONE]\n\n"
ERROR = event({"error": {"message": "The worker broke off.", "type": "server_error", "param": None, "code": "x"}})


def verdict(of: Question, data: bytes, piece: int = 7) -> Verdict:
    """Fed in small pieces, as the wire may cut it."""
    answer = Answer()
    for start in range(0, len(data), piece):
        answer.feed(data[start : start + piece])
    return judged(of, answer)


def whole(of: Question, text: str | None = None, finish_reason: str = "length", **other: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": of.expected if text is None else text}
    return {"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage(of), **other}


def events(of: Question) -> list[bytes]:
    """A right stream."""
    text = of.expected
    *firsts, last = [text[:4], text[4:7], text[7:]]
    return [*map(said, firsts), said(last, "length"), event({"choices": [], "usage": usage(of)}), DONE]


def test_a_whole_answer_is_complete() -> None:
    of = asked(streams=False)
    assert verdict(of, sized(200, whole(of))) == (End.COMPLETE, "", 16, 200)


def test_a_whole_stream_is_complete_wherever_the_wire_cuts_it() -> None:
    of = asked(streams=True)
    data = chunked(*events(of))
    for piece in (1, 2, 3, 50, len(data)):
        assert verdict(of, data, piece) == (End.COMPLETE, "", 16, 200)


def test_a_body_that_ends_early_is_broken_off() -> None:
    of = asked(streams=False)
    data = sized(200, whole(of))
    for cut in (1, 20, 200):
        assert verdict(of, data[:-cut]).end is End.BROKEN


def test_a_stream_may_break_off_after_any_of_its_bytes() -> None:
    of = asked(streams=True)
    data = chunked(*events(of))
    begun = data.index(b"\r\n\r\n") + 4
    for cut in range(begun, len(data)):
        assert verdict(of, data[:cut], 1000).end is End.BROKEN, data[:cut]


def test_a_broken_stream_may_say_so() -> None:
    of = asked(streams=True)
    told = verdict(of, chunked(*events(of)[:2], ERROR, ended=False))
    assert told == (End.BROKEN, "with an error event", 0, 200)


@pytest.mark.parametrize(("status", "kind"), [(503, "service_unavailable_error"), (429, "rate_limit_error")])
def test_an_error_object_is_a_refusal(status: int, kind: str) -> None:
    error = {"message": "Not now.", "type": kind, "param": None, "code": "overloaded"}
    assert verdict(asked(streams=True), sized(status, {"error": error})) == (End.REFUSED, "overloaded", 0, status)


OF, OF_STREAM = asked(streams=False), asked(streams=True)
EVENTS = events(OF_STREAM)
REFUSED = {"message": "No.", "type": "service_unavailable_error", "param": None, "code": "x"}


@pytest.mark.parametrize(
    ("of", "data", "detail"),
    [
        pytest.param(OF, b"", "no byte", id="silence"),
        pytest.param(OF, b"HTTP/1.1 200 OK\r\ncontent-", "within the answer's head", id="half a head"),
        pytest.param(OF, sized(200, whole(OF), "q2"), "the answer to q2", id="another's answer"),
        pytest.param(OF, sized(200, whole(OF)) + b"x", "bytes after its end", id="more than an answer"),
        pytest.param(OF, sized(200, whole(OF)) * 2, "bytes after its end", id="the answer twice"),
        pytest.param(OF, sized(200, b""), "JSONDecodeError", id="200 with nothing in it"),
        pytest.param(OF, sized(200, whole(OF, OF.expected[:-1])), "was answered, and not", id="a text cut short"),
        pytest.param(OF, sized(200, whole(OF, OF.expected * 2)), "was answered, and not", id="a text twice"),
        pytest.param(OF, sized(200, whole(OF, None, "abort")), "was answered, and not", id="an end that is none"),
        pytest.param(OF, sized(200, whole(OF, usage=None)), "usage None", id="no usage"),
        pytest.param(
            OF, sized(500, {"error": {**REFUSED, "type": "server_error"}}), "status 500", id="a fault of ours"
        ),
        pytest.param(OF, sized(503, {"detail": "no"}), "KeyError", id="an error of another form"),
        pytest.param(OF, sized(502, {"error": REFUSED}), "status 502 with", id="a type that is another status's"),
        pytest.param(OF, sized(503, {"error": REFUSED})[:-1], "status 503, broken off", id="half an error"),
        pytest.param(OF_STREAM, chunked(*EVENTS[:2]), "0 times", id="a normal end in the middle"),
        pytest.param(OF_STREAM, chunked(*EVENTS[:2], DONE), "an end after", id="a forged end"),
        pytest.param(OF_STREAM, chunked(*EVENTS[:2], DONE, ended=False), "an end after", id="a forged end, broken off"),
        pytest.param(OF_STREAM, chunked(*EVENTS[:2], ERROR), "a normal end after", id="an error, then a normal end"),
        pytest.param(OF_STREAM, chunked(*EVENTS[:2], ERROR, DONE), "an end after", id="an error, then a forged end"),
        pytest.param(
            OF_STREAM, chunked(*EVENTS[:2], ERROR, EVENTS[2], ended=False), "errors amid", id="events after one"
        ),
        pytest.param(OF_STREAM, chunked(*EVENTS[:-1]), "0 times", id="no end of the events"),
        pytest.param(OF_STREAM, chunked(*EVENTS, DONE), "2 times", id="two ends"),
        pytest.param(OF_STREAM, chunked(EVENTS[0], *EVENTS), "was said, and not", id="an event twice"),
        pytest.param(OF_STREAM, chunked(*EVENTS[1:]), "was said, and not", id="an event lost"),
        pytest.param(OF_STREAM, chunked(*EVENTS[:4], DONE[:5]), "a normal end after", id="half an event"),
        pytest.param(OF_STREAM, chunked(*EVENTS[:3], DONE), "usage None", id="no usage in a stream"),
    ],
)
def test_every_kind_of_wrong_is_seen(of: Question, data: bytes, detail: str) -> None:
    found = verdict(of, data)
    assert found.end is End.VIOLATION
    assert detail in found.detail


def test_the_right_answer_is_the_workers_own() -> None:
    """By prompt alone, and as long as was asked for."""
    prompt = asked(streams=False).prompt
    assert expected_answer(prompt, 40)[:TOKENS] == expected_answer(prompt, TOKENS)
    assert len(expected_answer(prompt, 40)) == 40
    assert expected_answer(prompt, 40) != expected_answer(prompt + " ", 40)


def test_questions_are_what_they_should_be() -> None:
    count = 400
    asked_for = list(questions(3, count))
    assert asked_for == list(questions(3, count)) != list(questions(4, count))
    assert sum(each.streams for each in asked_for) == count // 2
    aborts = [each.abort for each in asked_for if each.abort]
    assert len(aborts) == count // 5
    assert {abort.moment for abort in aborts} == set(Moment)
    assert {abort.resets for abort in aborts} == {True, False}
    assert len({each.prompt for each in asked_for}) == count
    assert all(later.document <= earlier.document + 60 for earlier, later in pairwise(asked_for))
    assert first_blocks_differ(asked_for)


def test_what_only_others_have_sent_is_nobodys_to_find() -> None:
    text = "The same words, which fill several blocks of sixteen tokens each."
    sent = Sent()
    one, two = (question(f"q{n}", tenant, 5, text, False, 4) for n, tenant in enumerate(("acme", "globex")))
    sent.add(one)
    assert sent.own_tokens(one) == 0
    assert sent.foreign == 0
    sent.add(two)
    assert sent.own_tokens(two) == 0
    assert sent.foreign == 1
    again = question("q3", "globex", 5, text + " Once more.", False, 4)
    sent.add(again)
    assert sent.own_tokens(again) == 64

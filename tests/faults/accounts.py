"""How a request ended, judged byte by byte against what must have been answered.

There are three good ends: the whole right answer; an error object with a status that says so, before any other byte;
and a beginning of the right answer whose body is visibly broken off. Everything else is a violation: no answer at all,
an answer in no time, a text that is not the right one, an end that looks like one and is none.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from tests.faults.questions import Question

REFUSALS = {429: "rate_limit_error", 502: "server_error", 503: "service_unavailable_error", 504: "server_error"}
"""Statuses with which a request may be refused that is not to blame, and the type that goes with each."""


class End(StrEnum):
    COMPLETE = "complete"
    REFUSED = "refused"
    BROKEN = "broken"
    """After some bytes of the right answer, visibly."""
    GIVEN_UP = "given up"
    """By the client, on purpose."""
    VIOLATION = "violation"


class Verdict(NamedTuple):
    end: End
    detail: str = ""
    cached_tokens: int = 0
    status: int = 0


class Answer:
    """One HTTP/1.1 answer, fed as it comes."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        """Without the framing of chunks."""
        self.complete = False
        self.malformed = ""
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self._buffer += data
        if not self.status and not self._take_head():
            return
        if self.headers.get("transfer-encoding") == "chunked":
            self._take_chunks()
        else:
            self._take_length()
        if self.complete and self._buffer:
            self.malformed = f"bytes after its end: {self._buffer[:80]!r}"

    @property
    def keeps_alive(self) -> bool:
        return self.complete and not self.malformed and self.headers.get("connection", "keep-alive") != "close"

    def _take_head(self) -> bool:
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return False
        status, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(status.split()[1])
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() in self.headers:
                self.malformed = f"the header {name} twice"
            self.headers[name.lower()] = value.strip()
        self._buffer = rest
        return True

    def _take_length(self) -> None:
        if "content-length" not in self.headers:
            self.malformed = "no framing"
            return
        missing = int(self.headers["content-length"]) - len(self.body)
        self.body += self._buffer[:missing]
        self._buffer = self._buffer[missing:]
        self.complete = len(self.body) == int(self.headers["content-length"])

    def _take_chunks(self) -> None:
        while not self.complete:
            size_line, mark, rest = self._buffer.partition(b"\r\n")
            if not mark:
                return
            size = int(size_line, 16)
            if len(rest) < size + 2:
                return
            if rest[size : size + 2] != b"\r\n":
                self.malformed = f"a chunk without its end: {rest[:80]!r}"
                return
            self.body += rest[:size]
            self._buffer = rest[size + 2 :]
            self.complete = size == 0


def judged(question: Question, answer: Answer) -> Verdict:
    """The end of a question that was not given up, once its answer is complete or its connection has ended."""
    if not answer.received_bytes:
        return _violation("no byte of an answer")
    if answer.malformed:
        return _violation(answer.malformed)
    if not answer.status:
        return _violation("the connection ended within the answer's head")
    if answer.headers.get("x-request-id") != question.id:
        return _violation(f"the answer to {answer.headers.get('x-request-id')}")
    try:
        if answer.status != 200:
            return _judged_error(answer)
        return _judged_stream(question, answer) if question.streams else _judged_whole(question, answer)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return _violation(f"{type(error).__name__}: {error} in {answer.body[-300:]!r}")


def _violation(detail: str) -> Verdict:
    return Verdict(End.VIOLATION, detail)


def _judged_error(answer: Answer) -> Verdict:
    if not answer.complete:
        return _violation(f"status {answer.status}, broken off")
    error = json.loads(answer.body)["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"] or not error["code"]:
        return _violation(f"status {answer.status} without an error object: {answer.body[:300]!r}")
    if REFUSALS.get(answer.status) != error["type"]:
        return _violation(f"status {answer.status} with {answer.body[:300]!r}")
    return Verdict(End.REFUSED, error["code"], status=answer.status)


def _judged_whole(question: Question, answer: Answer) -> Verdict:
    if not answer.complete:
        return Verdict(End.BROKEN, status=200)
    document = json.loads(answer.body)
    (choice,) = document["choices"]
    said = choice["message"]["content"], choice["finish_reason"]
    return _compared(question, said, document["usage"])


def _compared(question: Question, said: tuple[str, str | None], usage: Mapping[str, Any] | None) -> Verdict:
    if said != (question.expected, "length"):
        return _violation(f"{said!r} was answered, and not {question.expected!r}")
    if usage is None or usage["completion_tokens"] != question.body["max_tokens"]:
        return _violation(f"usage {usage} of a whole answer")
    if usage["prompt_tokens"] != len(question.prompt):
        return _violation(f"usage {usage} for a prompt of {len(question.prompt)} tokens")
    details = usage["prompt_tokens_details"]
    return Verdict(End.COMPLETE, cached_tokens=int(details["cached_tokens"]) if details else 0, status=200)


class Stream(NamedTuple):
    """What the events of a body say together."""

    text: str
    finish_reason: str | None
    usage: Mapping[str, Any] | None
    done: int
    """How often `[DONE]` came."""
    errors: list[Any]
    rest: bytes
    """What is not a whole event."""
    last: bytes


def read_stream(body: bytes) -> Stream:
    *events, rest = body.split(b"\n\n")
    text, finish_reason, usage, done, errors = "", None, None, 0, []
    for event in events:
        if event == b":":
            continue
        data = event.removeprefix(b"data: ")
        if data == event:
            raise ValueError(f"{event!r} is no event")
        if data == b"[DONE]":
            done += 1
            continue
        document = json.loads(data)
        if "error" in document:
            errors.append(document["error"])
            continue
        usage = document.get("usage") or usage
        for choice in document["choices"]:
            text += choice["delta"].get("content") or ""
            if finish_reason is not None:
                raise ValueError("something is said after the end")
            finish_reason = choice["finish_reason"]
    return Stream(text, finish_reason, usage, done, errors, rest, events[-1] if events else b"")


def _judged_stream(question: Question, answer: Answer) -> Verdict:
    stream = read_stream(answer.body)
    if not question.expected.startswith(stream.text):
        return _violation(f"{stream.text!r} was said, and not {question.expected!r}")
    whole = stream.text == question.expected and stream.finish_reason == "length"
    if (stream.done or stream.finish_reason) and not whole:
        return _violation(f"an end after {stream.text!r}, before that of {question.expected!r}")
    if not answer.complete:
        return _judged_broken(stream)
    if stream.errors or stream.rest:
        return _violation(f"a normal end after {stream.errors or stream.rest!r}")
    if stream.done != 1 or stream.last != b"data: [DONE]":
        return _violation(f"{stream.done} times [DONE] in a body that is complete")
    return _compared(question, (stream.text, stream.finish_reason), stream.usage)


def _judged_broken(stream: Stream) -> Verdict:
    if stream.errors and (len(stream.errors) > 1 or stream.rest or b'"error"' not in stream.last):
        return _violation(f"errors amid events: {stream.errors}")
    detail = "with an error event" if stream.errors else "without a word"
    return Verdict(End.BROKEN, detail, status=200)

"""What came of one request: its times, its tokens, and why it failed if it did.

A request has failed unless its answer is whole: status 200, every event readable, none of them an error, and an end
(`[DONE]` of a stream, the JSON document of an answer in one piece). What merely stops is cut off.

The first token is the first event with content in it: text, reasoning, or a part of a tool call. A role alone, an empty
piece, a comment or a usage report is none (docs/loadtest.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from loadtest.client.events import EventError, EventReader

_DONE = b"[DONE]"


@dataclass(slots=True)
class Answer:
    """Times are seconds of a monotonic clock."""

    number: int
    """Place in the trace."""
    due_at: float
    """When it was to be sent."""
    sent_at: float = 0.0
    ended_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """When each event with content came."""
    failure: str = ""
    """Empty when it was answered whole; else its kind, and after a colon what was said."""
    status: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""
    policy: str = ""
    """By the gateway's `x-ropeway-worker` and `x-ropeway-policy`."""

    @property
    def ttft_seconds(self) -> float | None:
        """From the time it was due: a client that sends late hides no queue. None without a first token."""
        return self.token_times[0] - self.due_at if self.token_times else None

    @property
    def late_seconds(self) -> float:
        """How late this client sent it."""
        return self.sent_at - self.due_at

    @property
    def seconds(self) -> float:
        return self.ended_at - self.due_at

    @property
    def kind_of_failure(self) -> str:
        return self.failure.partition(":")[0]


class StreamObserver:
    """Reads an event stream into an answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._events = EventReader()
        self._done = False

    def received(self, piece: bytes, now: float) -> None:
        answer = self._answer
        try:
            for data in self._events.feed(piece):
                self._event(data, now)
        except (EventError, orjson.JSONDecodeError, TypeError, AttributeError) as error:
            answer.failure = answer.failure or f"malformed: {error}"

    def ended(self) -> None:
        if not self._answer.failure and (not self._done or self._events.unfinished):
            self._answer.failure = "cut off: the stream ended without [DONE]"

    def _event(self, data: bytes, now: float) -> None:
        if data == _DONE:
            self._done = True
            return
        chunk = orjson.loads(data)
        if chunk.get("error"):
            self._answer.failure = self._answer.failure or f"error in the stream: {error_text(chunk)}"
            return
        if any(_has_content(choice) for choice in chunk.get("choices") or ()):
            self._answer.token_times.append(now)
        read_usage(self._answer, chunk.get("usage"))


def read_document(answer: Answer, body: bytes, now: float) -> None:
    """An answer in one piece: its first token is seen with its last."""
    try:
        document = orjson.loads(body)
        if not document.get("choices"):
            answer.failure = "malformed: no choices"
            return
        read_usage(answer, document.get("usage"))
    except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
        answer.failure = f"malformed: {error}"
        return
    answer.token_times.append(now)


def read_usage(answer: Answer, usage: Any) -> None:
    if not isinstance(usage, Mapping):
        return
    answer.prompt_tokens = _count(usage.get("prompt_tokens"))
    answer.output_tokens = _count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    answer.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else 0


def error_text(body: Any) -> str:
    """The message of an error in OpenAI's form, or whatever else it is, in one short line."""
    error = body.get("error") if isinstance(body, Mapping) else body
    message = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(str(message).split())[:200]


def _has_content(choice: Any) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0

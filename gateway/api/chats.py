"""Chat completions as they are answered, read in the pieces that every other form of a chat is made of.

Engines agree on OpenAI's form and add to it: reasoning is `reasoning` or `reasoning_content`, the stop string that was
met is `stop_reason` or `matched_stop`. The first choice is the answer: other forms know of one alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from gateway.usage import EVENT_END, event_data

Document = dict[str, Any]

_DONE = b"[DONE]"


class Text(NamedTuple):
    text: str


class Thought(NamedTuple):
    text: str


class CallBegun(NamedTuple):
    """A call of a tool; its arguments follow."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A part of a call's arguments, which are a JSON text."""

    call: int
    text: str


class Finished(NamedTuple):
    reason: str
    stop: str | None
    """The stop string that was met."""


Piece = Text | Thought | CallBegun | CallArguments | Finished


class Usage(NamedTuple):
    """What an answer cost."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @classmethod
    def of(cls, usage: Any) -> "Usage | None":
        """None where there is none."""
        if not isinstance(usage, dict):
            return None
        return cls(
            _count(usage, "prompt_tokens"),
            _count(usage, "completion_tokens"),
            _count(usage.get("prompt_tokens_details"), "cached_tokens"),
            _count(usage.get("completion_tokens_details"), "reasoning_tokens"),
        )


def _count(holder: Any, key: str) -> int:
    value = holder.get(key) if isinstance(holder, dict) else None
    return value if isinstance(value, int) else 0


def pieces_of_answer(answer: Mapping[str, Any]) -> list[Piece]:
    """The pieces of a whole answer, in the order in which a stream would bring them."""
    choice = _first_choice(answer)
    message = choice.get("message")
    return [*_pieces(message if isinstance(message, dict) else {}), *_finish(choice)]


def pieces_of_chunk(chunk: Mapping[str, Any]) -> list[Piece]:
    """The pieces that one event of a stream brings."""
    choice = _first_choice(chunk)
    delta = choice.get("delta")
    return [*_pieces(delta if isinstance(delta, dict) else {}), *_finish(choice)]


def _first_choice(document: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = document.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("index", 0) == 0:
            return choice
    return {}


def _pieces(said: Mapping[str, Any]) -> Iterator[Piece]:
    thought = said.get("reasoning") or said.get("reasoning_content")
    if isinstance(thought, str) and thought:
        yield Thought(thought)
    for text in (said.get("content"), said.get("refusal")):
        if isinstance(text, str) and text:
            yield Text(text)
    calls = said.get("tool_calls")
    for position, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            yield from _call(call, position)


def _call(call: Mapping[str, Any], position: int) -> Iterator[Piece]:
    index = call.get("index")
    index = index if isinstance(index, int) else position
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    if call.get("id") and function.get("name"):
        yield CallBegun(index, str(call["id"]), str(function["name"]))
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        yield CallArguments(index, arguments)


def _finish(choice: Mapping[str, Any]) -> Iterator[Piece]:
    reason = choice.get("finish_reason")
    if isinstance(reason, str):
        stop = choice.get("stop_reason") or choice.get("matched_stop")
        yield Finished(reason, stop if isinstance(stop, str) else None)


class ChatEvents:
    """The events of a chat's stream, from its bytes as they come. Whatever is no JSON object is passed over."""

    def __init__(self) -> None:
        self._held = b""
        self.done = False
        """`[DONE]` has come."""

    def feed(self, data: bytes) -> Sequence[Document]:
        held, start = self._held + data, 0
        found: list[Document] = []
        while (end := EVENT_END.search(held, start)) is not None:
            self._read(held[start : end.start()], found)
            start = end.end()
        self._held = held[start:]
        return found

    def end(self) -> Sequence[Document]:
        """What was not ended by an empty line."""
        found: list[Document] = []
        self._read(self._held, found)
        self._held = b""
        return found

    def _read(self, event: bytes, found: list[Document]) -> None:
        data = event_data(event).strip()
        if data == _DONE:
            self.done = True
        elif data and (document := json_object(data)) is not None:
            found.append(document)


def json_object(data: bytes | str) -> Document | None:
    """A JSON object; None for anything else."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


def named_event(document: Mapping[str, Any]) -> bytes:
    """A server-sent event that bears its document's `type`."""
    return b"event: %b\ndata: %b\n\n" % (str(document["type"]).encode(), orjson.dumps(document))

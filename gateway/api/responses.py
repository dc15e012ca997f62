"""OpenAI's Responses as chat completions, and their answers back: pure functions, and a state for streams.

Nothing is stored here, so whatever leads to an earlier answer (`previous_response_id`, `conversation`, items by
reference, `background`) is refused, as are the tools that OpenAI runs itself; an answer says `store: false`.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.chats import (
    CallArguments,
    CallBegun,
    Document,
    Finished,
    Piece,
    Text,
    Thought,
    Usage,
    named_event,
    pieces_of_answer,
    pieces_of_chunk,
)
from gateway.api.errors import Untranslatable, message_of

_COPIED = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "user",
    # Of engines, which clients send beside what the API knows.
    "cache_salt",
    "chat_template_kwargs",
    "kv_transfer_params",
    "min_p",
    "priority",
    "seed",
    "stop",
    "top_k",
)
_REFUSED: Mapping[str, str] = {
    "previous_response_id": "responses are not stored here: send the conversation as `input`",
    "conversation": "conversations are not stored here: send them as `input`",
    "background": "answers in the background are not given here",
    "prompt": "prompts are not stored here",
}
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""What an answer repeats of its request, and what stands there where that says nothing."""
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})


# ---- requests --------------------------------------------------------------------------------------------------------


def chat_of_responses(request: Mapping[str, Any]) -> Document:
    """The chat completion that a request asks for. Raises Untranslatable."""
    for key, reason in _REFUSED.items():
        if request.get(key):
            raise Untranslatable(f"{key}: {reason}", param=key)
    chat: Document = {key: request[key] for key in _COPIED if request.get(key) is not None}
    chat |= prompt_of_responses(request)
    if request.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = request["max_output_tokens"]
    if request.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    if chat.get("tools") and request.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(request["tool_choice"])
    if (form := _response_format(request.get("text"))) is not None:
        chat["response_format"] = form
    return chat


def prompt_of_responses(request: Mapping[str, Any]) -> Document:
    """What of the chat its template can see. Raises Untranslatable."""
    messages: list[Document] = []
    instructions = request.get("instructions")
    if isinstance(instructions, str) and instructions:
        messages.append({"role": "system", "content": instructions})
    given = request.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and given:
        _add_items(given, messages)
    else:
        raise Untranslatable("input: text or a list of items is needed", param="input")
    prompt: Document = {"messages": messages}
    if tools := request.get("tools"):
        prompt["tools"] = _tools(tools)
    reasoning = request.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        prompt["reasoning_effort"] = reasoning["effort"]
    if request.get("chat_template_kwargs") is not None:
        prompt["chat_template_kwargs"] = request["chat_template_kwargs"]
    return prompt


def _add_items(items: Sequence[Any], messages: list[Document]) -> None:
    """Thoughts, texts and calls of one turn are one message of the assistant's."""
    turn: Document | None = None
    for index, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "function_call":
            turn = _turn(turn, messages)
            turn.setdefault("tool_calls", []).append(_call(item))
        elif kind == "reasoning":
            if text := _thoughts(item):
                turn = _turn(turn, messages)
                turn["reasoning"] = turn.get("reasoning", "") + text
        elif kind == "message" and item.get("role") == "assistant":
            if turn is None or "content" in turn:
                turn = _turn(None, messages)
            turn["content"] = _content(item.get("content"), f"input[{index}]")
        elif kind == "message" and isinstance(item.get("role"), str):
            turn = None
            messages.append({"role": item["role"], "content": _content(item.get("content"), f"input[{index}]")})
        elif kind == "function_call_output":
            turn = None
            output = _content(item.get("output"), f"input[{index}]")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id") or "", "content": output})
        else:
            raise Untranslatable(f"input[{index}]: items of type {kind!r} are not understood here", param="input")


def _turn(turn: Document | None, messages: list[Document]) -> Document:
    if turn is None:
        turn = {"role": "assistant"}
        messages.append(turn)
    return turn


def _call(item: Mapping[str, Any]) -> Document:
    function = {"name": item.get("name") or "", "arguments": item.get("arguments") or "{}"}
    return {"id": item.get("call_id") or "", "type": "function", "function": function}


def _thoughts(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary")
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for text in texts if isinstance(text, str))


def _content(content: Any, place: str) -> str | list[Document]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Untranslatable(f"{place}.content: text or a list of parts is needed", param="input")
    parts = [_part(part, f"{place}.content[{index}]") for index, part in enumerate(content)]
    alone = len(parts) == 1 and parts[0]["type"] == "text"
    return str(parts[0]["text"]) if alone else parts


def _part(part: Any, place: str) -> Document:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": str(part.get("text") or part.get("refusal") or "")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        image = {"url": part["image_url"]}
        return {"type": "image_url", "image_url": image | ({"detail": part["detail"]} if part.get("detail") else {})}
    raise Untranslatable(f"{place}: parts of type {kind!r} are not understood here", param="input")


def _tools(tools: Any) -> list[Document]:
    if not isinstance(tools, list):
        raise Untranslatable("tools: a list is needed", param="tools")
    return [_tool(tool, index) for index, tool in enumerate(tools)]


def _tool(tool: Any, index: int) -> Document:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise Untranslatable(f"tools[{index}]: only tools of type 'function' are served", param="tools")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name") or ""}}
    if isinstance(choice, str):
        return choice
    raise Untranslatable("tool_choice: auto, none, required or a function is served", param="tool_choice")


def _response_format(text: Any) -> Document | None:
    form = text.get("format") if isinstance(text, dict) else None
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(form, dict) or kind in (None, "text"):
        return None
    if kind == "json_schema":
        schema = {key: form[key] for key in ("name", "description", "schema", "strict") if form.get(key) is not None}
        return {"type": "json_schema", "json_schema": schema}
    return {"type": kind}


# ---- answers ---------------------------------------------------------------------------------------------------------


def response_of_chat(answer: Mapping[str, Any], request: Mapping[str, Any]) -> Document:
    """A whole answer to a request."""
    response = _Response(request)
    response.named(answer)
    for piece in pieces_of_answer(answer):
        response.take(piece)
    response.usage = Usage.of(answer.get("usage"))
    return response.document()


class _Item:
    """An item of an answer's output, as it grows."""

    def __init__(self, kind: str, identifier: str, call: CallBegun | None = None) -> None:
        self.kind = kind
        self.id = identifier
        self.call = call
        self.text = ""

    def part(self) -> Document:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def document(self, status: str) -> Document:
        begun = status == "in_progress"
        if self.call is not None:
            said = {"call_id": self.call.id, "name": self.call.name, "arguments": "" if begun else self.text}
            return {"type": "function_call", "id": self.id, "status": status, **said}
        content = [] if begun else [self.part()]
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


class _Response:
    """An answer, as it grows."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self._id = ""
        self._model: Any = request.get("model")
        self._created_at = int(time.time())
        self.items: list[_Item] = []
        self.calls: dict[int, _Item] = {}
        self.usage: Usage | None = None
        self._reason = "stop"

    def named(self, answer: Mapping[str, Any]) -> None:
        """Called as the chat is called."""
        self._id = str(answer.get("id") or "").removeprefix("chatcmpl-")
        self._model = answer.get("model") or self._model
        if isinstance(answer.get("created"), int):
            self._created_at = answer["created"]

    def take(self, piece: Piece) -> _Item | None:
        """The item that grew by a piece, which may be a new one."""
        if isinstance(piece, Finished):
            self._reason = piece.reason
            return None
        if isinstance(piece, CallBegun):
            item = self.calls[piece.call] = self._new("function_call", "fc", piece)
            return item
        if isinstance(piece, CallArguments):
            found = self.calls.get(piece.call)
        else:
            kind, prefix = ("reasoning", "rs") if isinstance(piece, Thought) else ("message", "msg")
            last = self.items[-1] if self.items else None
            found = last if last is not None and last.kind == kind else self._new(kind, prefix)
        if found is not None:
            found.text += piece.text
        return found

    def _new(self, kind: str, prefix: str, call: CallBegun | None = None) -> _Item:
        item = _Item(kind, f"{prefix}_{self._id}_{len(self.items)}", call)
        self.items.append(item)
        return item

    @property
    def incomplete(self) -> str:
        """Why it ends before its end; empty where it does not."""
        return {"length": "max_output_tokens", "content_filter": "content_filter"}.get(self._reason, "")

    def document(self, status: str = "", error: Document | None = None) -> Document:
        """`status`: of an answer that has not come to its end."""
        incomplete = "" if status else self.incomplete
        status = status or ("incomplete" if incomplete else "completed")
        asked = self._request
        echoed = {key: default if asked.get(key) is None else asked[key] for key, default in _ECHOED.items()}
        begun = status == "in_progress"
        last = "incomplete" if incomplete else "completed"
        ends = [*["completed"] * (len(self.items) - 1), last]
        output = [] if begun else [item.document(end) for item, end in zip(self.items, ends, strict=False)]
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "model": self._model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "usage": None if self.usage is None else _usage(self.usage),
            **echoed,
        }


def _usage(usage: Usage) -> Document:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


class ResponseStream:
    """A chat's stream as Responses' events, numbered. One item is open at a time."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._response = _Response(request)
        self._open: _Item | None = None
        self._number = 0
        self._begun = self._ended = False

    def feed(self, chunk: Mapping[str, Any]) -> bytes:
        """The events that one of the chat's brings."""
        if "error" in chunk and "choices" not in chunk:
            return self.failed(500, message_of(chunk, "the worker failed"))
        response = self._response
        out = b"" if self._begun else self._begin(chunk)
        for piece in pieces_of_chunk(chunk):
            known = len(response.items)
            item = response.take(piece)
            if item is not None and len(response.items) > known:
                out += self._close() + self._start(item)
            if item is not None and not isinstance(piece, CallBegun | Finished):
                out += self._grown(item, piece)
        response.usage = Usage.of(chunk.get("usage")) or response.usage
        return out

    def end(self) -> bytes:
        """The last events."""
        if self._ended:
            return b""
        self._ended = True
        out = (b"" if self._begun else self._begin({})) + self._close()
        kind = "response.incomplete" if self._response.incomplete else "response.completed"
        return out + self._event(kind, response=self._response.document())

    def failed(self, status: int, message: str) -> bytes:
        """The event after which nothing comes."""
        if self._ended:
            return b""
        self._ended = True
        error = {"code": "server_error" if status >= 500 else "invalid_prompt", "message": message}
        out = b"" if self._begun else self._begin({})
        return out + self._event("response.failed", response=self._response.document("failed", error))

    def _begin(self, chunk: Mapping[str, Any]) -> bytes:
        self._begun = True
        self._response.named(chunk)
        begun = self._response.document("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _event(self, kind: str, **fields: Any) -> bytes:
        document = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(document)

    def _place(self, item: _Item) -> Document:
        return {"item_id": item.id, "output_index": self._response.items.index(item)}

    def _start(self, item: _Item) -> bytes:
        self._open = item
        index = self._response.items.index(item)
        out = self._event("response.output_item.added", output_index=index, item=item.document("in_progress"))
        if item.call is None:
            # It has its first text already, which the delta behind this says.
            part = {**item.part(), "text": ""}
            out += self._event("response.content_part.added", **self._place(item), content_index=0, part=part)
        return out

    def _grown(self, item: _Item, piece: Text | Thought | CallArguments) -> bytes:
        place = self._place(item)
        if isinstance(piece, CallArguments):
            return self._event("response.function_call_arguments.delta", **place, delta=piece.text)
        if isinstance(piece, Thought):
            return self._event("response.reasoning_text.delta", **place, content_index=0, delta=piece.text)
        return self._event("response.output_text.delta", **place, content_index=0, delta=piece.text, logprobs=[])

    def _close(self) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        place = self._place(item)
        if item.call is not None:
            named = {"name": item.call.name, "arguments": item.text}
            out = self._event("response.function_call_arguments.done", **place, **named)
        else:
            place["content_index"] = 0
            if item.kind == "reasoning":
                out = self._event("response.reasoning_text.done", **place, text=item.text)
            else:
                out = self._event("response.output_text.done", **place, text=item.text, logprobs=[])
            out += self._event("response.content_part.done", **place, part=item.part())
        done = item.document("incomplete" if self._response.incomplete else "completed")
        return out + self._event("response.output_item.done", output_index=place["output_index"], item=done)

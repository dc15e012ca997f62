"""Anthropic's Messages as chat completions, and their answers back: pure functions, and a state for streams.

The chat that is made of a request is the one that vLLM makes of it, since what an engine renders decides the tokens:

* system blocks are joined without a separator; the line that Claude Code puts before them, another one with every
  request, is left out;
* results of tools come before the rest of their message, each as a message of role `tool`; texts within one result are
  joined with a newline;
* what the assistant thought is `reasoning`; thoughts that were redacted are left out;
* `thinking: disabled` is `reasoning_effort: none`, `output_config.effort` is `reasoning_effort`. A budget of thoughts
  cannot be said.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cachecore.prompts.messages import BILLING_LINE
from gateway.api.chats import (
    CallArguments,
    CallBegun,
    Document,
    Finished,
    Piece,
    Text,
    Thought,
    Usage,
    json_object,
    named_event,
    pieces_of_answer,
    pieces_of_chunk,
)
from gateway.api.errors import Untranslatable, anthropic_error, message_of

_COPIED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    # Of engines, which clients send beside what the API knows.
    "cache_salt",
    "chat_template_kwargs",
    "kv_transfer_params",
    "min_p",
    "priority",
    "seed",
)
_TOOL_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS: Mapping[str, str] = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_PASSED_OVER = frozenset({"redacted_thinking", "tool_reference"})


# ---- requests --------------------------------------------------------------------------------------------------------


def chat_of_messages(request: Mapping[str, Any]) -> Document:
    """The chat completion that a request asks for. Raises Untranslatable."""
    chat: Document = {key: request[key] for key in _COPIED if request.get(key) is not None}
    chat["messages"] = prompt_of_messages(request)["messages"]
    limit = request.get("max_tokens")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise Untranslatable("max_tokens: a positive integer is needed", param="max_tokens")
    chat["max_tokens"] = limit
    if request.get("stop_sequences"):
        chat["stop"] = request["stop_sequences"]
    if request.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    metadata = request.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        chat["user"] = metadata["user_id"]
    chat |= _effort(request)
    return chat | _tools(request)


def prompt_of_messages(request: Mapping[str, Any]) -> Document:
    """What of the chat its template can see. Raises Untranslatable."""
    messages: list[Document] = []
    if system := _system_text(request.get("system")):
        messages.append({"role": "system", "content": system})
    given = request.get("messages")
    if not isinstance(given, list) or not given:
        raise Untranslatable("messages: at least one message is needed", param="messages")
    for index, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Untranslatable(f"messages.{index}: an object with a role is needed", param="messages")
        _add_message(message, messages, f"messages.{index}")
    prompt: Document = {"messages": messages, **_effort(request)}
    tools = _tools(request).get("tools")
    if tools:
        prompt["tools"] = tools
    if request.get("chat_template_kwargs") is not None:
        prompt["chat_template_kwargs"] = request["chat_template_kwargs"]
    return prompt


def _system_text(system: Any) -> str:
    if isinstance(system, str):
        return "" if system.startswith(BILLING_LINE) else system
    texts = [block.get("text") for block in system if isinstance(block, dict)] if isinstance(system, list) else []
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(BILLING_LINE))


def _add_message(message: Mapping[str, Any], messages: list[Document], place: str) -> None:
    role, content = message["role"], message.get("content")
    if role == "system":
        if text := _system_text(content):
            messages.append({"role": "system", "content": text})
    elif isinstance(content, str):
        messages.append({"role": role, "content": content})
    elif isinstance(content, list):
        _add_blocks(role, content, messages, place)
    else:
        raise Untranslatable(f"{place}.content: text or a list of blocks is needed", param="messages")


def _add_blocks(role: str, blocks: Sequence[Any], messages: list[Document], place: str) -> None:
    parts: list[Document] = []
    calls: list[Document] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            messages += _tool_result(block, f"{place}.content.{index}")
        elif kind == "tool_use":
            calls.append(_tool_call(block))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind not in _PASSED_OVER:
            parts += _parts(block, kind, f"{place}.content.{index}")
    said: Document = {"role": role}
    if thoughts:
        said["reasoning"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if parts:
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        said["content"] = parts[0]["text"] if alone else parts
    if len(said) > 1 or role != "user":
        messages.append(said)


def _parts(block: Any, kind: Any, place: str) -> list[Document]:
    """What a block is among the parts of a message."""
    if kind == "text":
        text = block.get("text")
        return [{"type": "text", "text": text}] if isinstance(text, str) and text else []
    source = block.get("source") if isinstance(block, dict) else None
    if kind == "image" and isinstance(source, dict):
        return [{"type": "image_url", "image_url": {"url": _image_url(source)}}]
    if kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        return [{"type": "text", "text": str(source.get("data") or "")}]
    raise Untranslatable(f"{place}: blocks of type {kind!r} are not understood here", param="messages")


def _image_url(source: Mapping[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url") or "")
    return f"data:{source.get('media_type') or 'image/jpeg'};base64,{source.get('data') or ''}"


def _tool_call(block: Mapping[str, Any]) -> Document:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block.get("id") or "", "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any], place: str) -> list[Document]:
    content = block.get("content")
    texts: list[str] = [content] if isinstance(content, str) else []
    images: list[Document] = []
    for index, item in enumerate(content if isinstance(content, list) else ()):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind in _PASSED_OVER:
            continue
        for part in _parts(item, kind, f"{place}.content.{index}"):
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                images.append(part)
    result = {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": "\n".join(texts)}
    return [result, {"role": "user", "content": images}] if images else [result]


def _effort(request: Mapping[str, Any]) -> Document:
    thinking, output = request.get("thinking"), request.get("output_config")
    said: Document = {}
    if isinstance(output, dict):
        if output.get("effort") is not None:
            said["reasoning_effort"] = output["effort"]
        form = output.get("format")
        if isinstance(form, dict) and form.get("schema") is not None:
            schema = {"name": "json_schema", "schema": form["schema"]}
            said["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        said["reasoning_effort"] = "none"
    return said


def _tools(request: Mapping[str, Any]) -> Document:
    tools, choice = request.get("tools"), request.get("tool_choice")
    said: Document = {}
    if isinstance(tools, list) and tools:
        said["tools"] = [_tool(tool, index) for index, tool in enumerate(tools)]
        said["tool_choice"] = "auto"
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "tool":
            said["tool_choice"] = {"type": "function", "function": {"name": choice.get("name") or ""}}
        elif isinstance(kind, str) and kind in _TOOL_CHOICES:
            said["tool_choice"] = _TOOL_CHOICES[kind]
        if choice.get("disable_parallel_tool_use") is not None:
            said["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return said


def _tool(tool: Any, index: int) -> Document:
    if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict):
        raise Untranslatable(
            f"tools.{index}: only tools that the client runs itself, with an input_schema, are served", param="tools"
        )
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


# ---- answers ---------------------------------------------------------------------------------------------------------


def message_of_chat(answer: Mapping[str, Any], model: str) -> Document:
    """A whole answer. `model`: as the client called it."""
    content: list[Document] = []
    arguments: dict[int, str] = {}
    blocks: dict[int, Document] = {}
    finished = Finished("stop", None)
    for piece in pieces_of_answer(answer):
        if isinstance(piece, Finished):
            finished = piece
        elif isinstance(piece, CallArguments):
            arguments[piece.call] = arguments.get(piece.call, "") + piece.text
        else:
            block = _opening(piece)
            content.append(_filled(block, piece))
            if isinstance(piece, CallBegun):
                blocks[piece.call] = block
    for index, block in blocks.items():
        block["input"] = json_object(arguments.get(index, "")) or {}
    stop_reason, stop_sequence = _stop(finished, called=bool(blocks))
    return {
        "id": _message_id(answer),
        "type": "message",
        "role": "assistant",
        "model": answer.get("model") or model,
        # Clients take it for granted that there is a first block.
        "content": content or [{"type": "text", "text": ""}],
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": _usage(Usage.of(answer.get("usage")) or Usage()),
    }


def _message_id(answer: Mapping[str, Any]) -> str:
    return f"msg_{str(answer.get('id') or '').removeprefix('chatcmpl-')}"


def _opening(piece: Piece) -> Document:
    """The block that a piece begins, as yet empty."""
    if isinstance(piece, CallBegun):
        return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
    if isinstance(piece, Thought):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _filled(block: Document, piece: Piece) -> Document:
    if isinstance(piece, Text | Thought):
        block[block["type"]] = piece.text
    return block


def _stop(finished: Finished, called: bool) -> tuple[str, str | None]:
    if finished.reason in _STOP_REASONS:
        return _STOP_REASONS[finished.reason], None
    if called:
        return "tool_use", None
    return ("end_turn", None) if finished.stop is None else ("stop_sequence", finished.stop)


def _usage(usage: Usage) -> Document:
    """What was cached is not among the input tokens."""
    return {
        "input_tokens": max(usage.input_tokens - usage.cached_tokens, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


class MessageStream:
    """A chat's stream as Messages' events. One block is open at a time."""

    def __init__(self, model: str, input_tokens: int = 0) -> None:
        """`input_tokens`: what is known of them ahead; the last event but one says what it was."""
        self._model = model
        self._input_tokens = input_tokens
        self._begun = self._ended = False
        self._blocks = 0
        self._open: str = ""
        """The open block's type."""
        self._calls: dict[int, int] = {}
        """Block by call."""
        self._finished = Finished("stop", None)
        self._usage: Usage | None = None

    def feed(self, chunk: Mapping[str, Any]) -> bytes:
        """The events that one of the chat's brings."""
        if "error" in chunk and "choices" not in chunk:
            return self.failed(500, message_of(chunk, "the worker failed"))
        out = b"" if self._begun else self._begin(chunk)
        for piece in pieces_of_chunk(chunk):
            out += self._take(piece)
        self._usage = Usage.of(chunk.get("usage")) or self._usage
        return out

    def end(self) -> bytes:
        """The last events."""
        if self._ended:
            return b""
        self._ended = True
        out = (b"" if self._begun else self._begin({})) + self._close()
        stop_reason, stop_sequence = _stop(self._finished, called=bool(self._calls))
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        usage = _usage(self._usage or Usage(self._input_tokens))
        return out + _events({"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"})

    def failed(self, status: int, message: str) -> bytes:
        """The event after which nothing comes."""
        if self._ended:
            return b""
        self._ended = True
        return named_event(anthropic_error(status, message))

    def _begin(self, chunk: Mapping[str, Any]) -> bytes:
        self._begun = True
        message: Document = {
            "id": _message_id(chunk),
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model") or self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(self._input_tokens)),
        }
        return named_event({"type": "message_start", "message": message})

    def _take(self, piece: Piece) -> bytes:
        if isinstance(piece, Finished):
            self._finished = piece
            return b""
        if isinstance(piece, CallArguments):
            at = self._calls.get(piece.call)
            delta = {"type": "input_json_delta", "partial_json": piece.text}
            return b"" if at is None else self._delta(at, delta)
        block = _opening(piece)
        out = b""
        if isinstance(piece, CallBegun) or self._open != block["type"]:
            out = self._close() + self._start(block)
        if isinstance(piece, CallBegun):
            self._calls[piece.call] = self._blocks - 1
            return out
        kind = block["type"]
        return out + self._delta(self._blocks - 1, {"type": f"{kind}_delta", kind: piece.text})

    def _start(self, block: Document) -> bytes:
        self._open = block["type"]
        self._blocks += 1
        return named_event({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})

    def _delta(self, index: int, delta: Document) -> bytes:
        return named_event({"type": "content_block_delta", "index": index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        index, out = self._blocks - 1, b""
        if self._open == "thinking":
            out = self._delta(index, {"type": "signature_delta", "signature": ""})
        self._open = ""
        return out + named_event({"type": "content_block_stop", "index": index})


def _events(*documents: Document) -> bytes:
    return b"".join(map(named_event, documents))

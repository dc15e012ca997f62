"""The messages of a chat request as an engine hands them to its template.

Clients say the same thing in several ways (a string or a list of parts, tool arguments as JSON text or as an object).
Engines settle on one form before they render, and what they settle on decides the tokens, so this follows vLLM:

* text parts are joined with a newline for templates that print `message['content']`, and stay a list of
  `{"type": "text", "text": ...}` for templates that iterate over it (`wrap_text`); tool results are always joined;
* `function.arguments` of a tool call becomes an object, since templates serialise it themselves;
* only the keys that an engine knows reach the template; every role keeps its own;
* a template that does not know the role `developer` is shown one system message instead, before all others;
* the line that Claude Code puts before its system prompts, another one with every request, is left out.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cachecore.prompts.contract import PromptError

Message = dict[str, Any]

_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content parts that are text, and the key that holds it."""

_MEDIA_NAMES = {
    "image_url": "image",
    "input_image": "image",
    "image_embeds": "image",
    "image_pil": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}
"""Types of content parts that are media, and what a template sees of them."""


class Conversation(NamedTuple):
    """Messages ready for a template."""

    messages: list[Message]
    media: Sequence[int] = ()
    """Which messages hold something besides text. Their content is the list of parts, media as `{"type": "image"}`."""


BILLING_LINE = "x-anthropic-billing-header"
"""How the line begins that Claude Code puts before its system prompts."""
DEVELOPER = "developer"


def read_conversation(request: Mapping[str, Any], *, wrap_text: bool, knows_developers: bool = True) -> Conversation:
    """Normalise `request["messages"]`. Raises PromptError when they are missing, empty or malformed."""
    raw = request.get("messages")
    if not isinstance(raw, list) or not raw:
        raise PromptError("`messages` must be a list of at least one message")
    messages: list[Message] = []
    media: list[int] = []
    for index, message in enumerate(raw):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"`messages[{index}]` must be an object with a `role`")
        role, content = message["role"], message.get("content")
        if role == "system":
            content = _without_billing_line(content)
        if isinstance(content, str) and not wrap_text:
            normalised: Message = {"role": role, "content": content}
        else:
            parts, has_media = _parts(content, index)
            joined = not has_media and (role == "tool" or not wrap_text)
            normalised = {"role": role, "content": _join(parts) if joined else parts}
            if has_media:
                media.append(index)
        if len(message) > 2 or "content" not in message:
            _copy_role_fields(message, normalised, index)
        messages.append(normalised)
    if not knows_developers and any(message["role"] == DEVELOPER for message in messages):
        return _with_one_system_message(messages, media)
    return Conversation(messages, media)


def _without_billing_line(content: Any) -> Any:
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(BILLING_LINE) else content
    if not isinstance(content, list):
        return content
    kept = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str) or not text.startswith(BILLING_LINE):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _with_one_system_message(messages: Sequence[Message], media: Sequence[int]) -> Conversation:
    """Developers' messages as the system's, and all of those as one, where they are not that already."""
    names = ("system", DEVELOPER)
    systems = [index for index, message in enumerate(messages) if message["role"] in names]
    if systems == [0]:
        first = {key: value for key, value in messages[0].items() if key != "tools"}
        return Conversation([{**first, "role": "system"}, *messages[1:]], media)
    texts = [text for index in systems if (text := _text_of(messages[index]["content"]))]
    others = [index for index, message in enumerate(messages) if message["role"] not in names]
    # What an engine makes of media there has no name.
    moved = [0] if not set(systems).isdisjoint(media) else []
    moved += [at for at, index in enumerate(others, start=1) if index in media]
    merged: Message = {"role": "system", "content": "\n\n".join(texts)}
    if moved[:1] == [0]:
        merged["content"] = [{"type": "text", "text": merged["content"]}, {"type": "unknown"}]
    return Conversation([merged, *(messages[index] for index in others)], moved)


def _text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def read_tools(request: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """`request["tools"]` with the fields an engine's schema fills in and orders; None where there are none."""
    tools = request.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise PromptError("`tools` must be a list")
    return [_tool(tool, index) for index, tool in enumerate(tools)]


def read_flags(request: Mapping[str, Any]) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message). Raises PromptError when both are wanted, as engines do."""
    add = _flag(request, "add_generation_prompt", default=True)
    resume = _flag(request, "continue_final_message", default=False)
    if add and resume:
        raise PromptError("cannot set both `continue_final_message` and `add_generation_prompt` to true")
    return add, resume


def _parts(content: Any, index: int) -> tuple[list[dict[str, str]], bool]:
    """The parts of a message, text as `{"type": "text", "text": ...}`, and whether any of them is not text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}], False
    if content is None:
        return [], False
    if not isinstance(content, list):
        raise PromptError(f"`messages[{index}].content` must be a string or a list of parts")
    parts: list[dict[str, str]] = []
    has_media = False
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text"
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        if key is None:
            has_media = True
            parts.append({"type": _MEDIA_NAMES.get(kind, "unknown") if isinstance(kind, str) else "unknown"})
            continue
        text = part.get(key) if isinstance(part, dict) else part
        if isinstance(text, str):
            parts.append({"type": "text", "text": text})
        elif text is not None:
            raise PromptError(f"`messages[{index}].content`: a {kind} part must hold a string")
    return parts, has_media


def has_media(messages: Any) -> bool:
    """Whether some message holds something besides text."""
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") not in _TEXT_KEYS for part in parts)


def _join(parts: Sequence[Mapping[str, str]]) -> str:
    return "\n".join(part["text"] for part in parts if part["text"])


def _copy_role_fields(message: Mapping[str, Any], result: Message, index: int) -> None:
    role = result["role"]
    if role == "assistant":
        if message.get("tool_calls"):
            result["tool_calls"] = _tool_calls(message["tool_calls"], index)
        reasoning = message.get("reasoning")
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = result["thinking"] = reasoning
    elif role == "tool" and message.get("tool_call_id") is not None:
        result["tool_call_id"] = message["tool_call_id"]
    elif role == "developer" and message.get("tools") is not None:
        result["tools"] = message["tools"]
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]


def _tool_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise PromptError(f"`messages[{index}].tool_calls` must be a list of objects with a `function`")
    return [{**call, "function": {**call["function"], "arguments": _arguments(call["function"])}} for call in calls]


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as an object; what is not one becomes empty, so that a bad turn does not end its conversation."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _tool(tool: Any, index: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise PromptError(f"`tools[{index}]` must be an object with a `function`")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", **tool, "function": {**known, **function}}


def _flag(request: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = request.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise PromptError(f"`{name}` must be a boolean")
    return value

"""The renderer for when nothing is known of a model: bytes of a plain rendering.

A token is a byte, its id the byte's value. The simulated worker and a gateway without a tokenizer both use it, so the
two name the same blocks for the same request. The rendering:

    <|tools|>\\n[...canonical JSON...]\\n          where the request has tools
    <|role|>\\ncontent\\n                          for each message; tool calls follow the content as canonical JSON
    <|assistant|>\\n                              the generation prompt
"""

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from cachecore.prompts.contract import Rendered
from cachecore.prompts.messages import Message, read_conversation, read_flags, read_tools

# Widening each byte to a u32 in C: via latin-1, whose code points are the bytes, then UTF-32 of this machine.
_UTF32 = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
_GENERATION_PROMPT = "<|assistant|>\n"


class PlainRenderer:
    """Renders every model alike. Any cut is safe, so each message is a segment."""

    name = "plain"
    fingerprint = "plain-bytes-1"

    def chat(self, request: Mapping[str, Any]) -> Rendered:
        conversation = read_conversation(request, wrap_text=False)
        add_generation_prompt, continue_final_message = read_flags(request)
        tools = read_tools(request)
        segments = [f"<|tools|>\n{_canonical_json(tools)}\n"] if tools else []
        if conversation.media:
            segments += map(_message_text, conversation.messages[: conversation.media[0]])
            return Rendered(segments, complete=False)
        segments += map(_message_text, conversation.messages)
        if continue_final_message:
            segments[-1] = segments[-1].removesuffix("\n")
        elif add_generation_prompt:
            segments.append(_GENERATION_PROMPT)
        return Rendered(segments)

    def text(self, prompt: str) -> Rendered:
        return Rendered((prompt,))

    def encode(self, segment: str) -> "array[int]":
        data = segment.encode("utf-8", "surrogatepass")
        token_ids = array("I")
        token_ids.frombytes(data.decode("latin-1").encode(_UTF32))
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(list(token_ids)).decode("utf-8", "replace")


def _message_text(message: Message) -> str:
    calls = message.get("tool_calls")
    suffix = f"{_canonical_json(calls)}\n" if calls else ""
    return f"<|{message['role']}|>\n{message['content']}\n{suffix}"


def _canonical_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))

"""Chat bodies for prompts made of pieces, their text drawn by the pieces' keys."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from loadtest.traces.pieces import Beginning, Piece
from loadtest.traces.prose import WORDS, prose

CHARACTERS_PER_TOKEN = 4.0
"""Of English prose in the usual vocabularies; with 1.0 and the plain renderer, a token is a character."""
TOOLS = "tools"
"""The role of pieces that are descriptions of tools."""
_PIECES_CACHED_MAX = 2_048


@lru_cache(maxsize=_PIECES_CACHED_MAX)
def _text(piece: Piece, characters_per_token: float) -> str:
    return prose(piece.key, round(piece.tokens * characters_per_token))


def chat_body(beginning: Beginning, output_tokens: int, characters_per_token: float) -> dict[str, Any]:
    """The chat completion request whose messages are a prompt's pieces; neighbours of one role share a message."""
    body: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    calls = 0
    for piece in beginning.pieces():
        text = _text(piece, characters_per_token)
        if piece.role == TOOLS:
            body.setdefault("tools", []).append(_tool(piece, text))
        elif messages and messages[-1]["role"] == piece.role != "tool":
            messages[-1]["content"] += "\n\n" + text
        else:
            if piece.role == "tool":
                calls += 1
                _call(messages, calls)
            messages.append({"role": piece.role, "content": text} | _call_id(piece, calls))
    return body | {"messages": messages, "max_tokens": output_tokens, "stream": True}


def _tool(piece: Piece, text: str) -> Mapping[str, Any]:
    name = "_".join(str(part) for part in piece.key) if isinstance(piece.key, tuple) else str(piece.key)
    parameters = {"type": "object", "properties": {"subject": {"type": "string"}}, "required": ["subject"]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def _call(messages: list[dict[str, Any]], number: int) -> None:
    """Have the answer before a tool's result ask for it, as the API demands."""
    function = {"name": "look_up", "arguments": '{"subject": "' + WORDS[number % len(WORDS)] + '"}'}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _call_id(piece: Piece, number: int) -> dict[str, str]:
    return {"tool_call_id": f"call_{number}"} if piece.role == "tool" else {}

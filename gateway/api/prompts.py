"""Which prompt a request of another form carries, as the chat or the completion that an engine makes of it."""

from collections.abc import Mapping
from typing import Any

from gateway.api.chats import Document
from gateway.api.errors import MISUNDERSTOOD, Untranslatable
from gateway.api.messages import prompt_of_messages
from gateway.api.responses import prompt_of_responses
from gateway.requests import CHAT_KEYS, Kind, Request

CHARACTERS_PER_TOKEN = 4


def prompt_of(request: Request) -> Document | None:
    """`{"messages", ...}` of a chat or `{"prompt"}` of a completion; None where what an engine makes of it is not
    known."""
    values = request.values
    try:
        if request.kind is Kind.MESSAGES:
            return prompt_of_messages(values)
        if request.kind is Kind.RESPONSES:
            # What came before it only the engine knows.
            return None if values.get("previous_response_id") else prompt_of_responses(values)
    except (Untranslatable, *MISUNDERSTOOD):
        return None
    if request.kind is Kind.EMBEDDING:
        return _embedded(values)
    return None


def _embedded(values: Mapping[str, Any]) -> Document | None:
    if values.get("messages"):
        # Nobody answers it.
        asked = {key: values[key] for key in CHAT_KEYS if key in values}
        return {"add_generation_prompt": False, **asked}
    given = values.get("input")
    return {"prompt": given} if isinstance(given, str | list) and given else None


def weight_tokens(request: Request) -> int:
    """How much there is to compute for a prompt that has no name, roughly."""
    if request.kind is Kind.TOKENS:
        return 0
    characters = len(request.data)
    if request.kind is Kind.SCORING:
        # Each document is read behind the query.
        values = request.values
        query = values.get("query") or values.get("text_1") or values.get("queries")
        documents = values.get("documents") or values.get("text_2") or values.get("items")
        if isinstance(query, str) and isinstance(documents, list):
            characters += len(query) * max(len(documents) - 1, 0)
    return characters // CHARACTERS_PER_TOKEN

"""Chats whose template need not run: the shape of a request, and what requests of one shape have in common.

The shape is all that a template can see of a request but the texts of its messages: roles, flags, variables. A template
that only copies texts (`cachecore.prompts.tracing` proves it) renders all requests of a shape to the same literals with
their texts in between. Requests with tools, documents, images or more to a message than role and text have no shape.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from cachecore.prompts.messages import BILLING_LINE
from cachecore.prompts.native import chats as native

SHAPE_MESSAGES_MAX = 512
SHAPE_CHARACTERS_MAX = 16_384
"""In roles and variables, which a cache of shapes keeps."""

_VARIABLES = ("add_generation_prompt", "continue_final_message", "reasoning_effort")
_UNSHAPED = ("tools", "documents", "chat_template")
_TEMPLATE_KEYS = frozenset((*_VARIABLES, *_UNSHAPED, "chat_template_kwargs"))
_SCALARS = frozenset((str, bool, int, type(None)))

Shape = tuple[Hashable, ...]


class Slot(NamedTuple):
    """A place of a rendering where a message's text stands."""

    message: int
    stripped: bool


class Outline(NamedTuple):
    """A rendering with its texts left out: one literal more than slots, which stand between them."""

    literals: tuple[str, ...]
    slots: tuple[Slot, ...]

    def values(self, texts: Sequence[str]) -> list[str]:
        """What stands in the slots, for the texts of the messages."""
        return [texts[message].strip() if stripped else texts[message] for message, stripped in self.slots]

    def filled(self, texts: Sequence[str]) -> str:
        pairs = zip(self.literals, (*self.values(texts), ""), strict=True)
        return "".join([part for pair in pairs for part in pair])


def read_shape(request: Mapping[str, Any]) -> tuple[Shape, list[str]] | None:
    """The shape of a chat request and the texts of its messages; None for a request that has no shape.

    Says nothing about whether the request is well-formed, except that every message is a role and a text.
    """
    variables: Hashable = None
    if not _TEMPLATE_KEYS.isdisjoint(request) and (variables := _read_variables(request)) is None:
        return None
    return read_messages(variables, request.get("messages"), BILLING_LINE)


def python_read_messages(variables: Hashable, messages: object, unread: str) -> tuple[Shape, list[str]] | None:
    """What a template sees of a list of messages, and their texts; None where one is more than a role and a text, and
    where a system message begins with a line that engines do not read."""
    roles: list[Hashable] = [variables]
    texts: list[str] = []
    for message in messages if type(messages) is list else ():
        if type(message) is not dict or len(message) != 2:
            return None
        role, text = message.get("role"), message.get("content")
        if type(role) is not str or type(text) is not str or not text:
            return None
        if role == "system" and text.startswith(unread):
            return None
        roles.append(role)
        texts.append(text)
    return ((*roles,), texts) if texts else None


read_messages = python_read_messages if native is None else native.read_messages


def is_small(shape: Shape) -> bool:
    """Whether a shape is small enough to be kept."""
    return len(shape) <= SHAPE_MESSAGES_MAX and len(repr(shape)) <= SHAPE_CHARACTERS_MAX


def _read_variables(request: Mapping[str, Any]) -> Hashable:
    """What a template sees of a request besides its messages; None when it is too much."""
    if any(request.get(name) is not None for name in _UNSHAPED) or request.get("continue_final_message") is True:
        return None
    extra = request.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        return None
    values = [*map(request.get, _VARIABLES), *extra.values()]
    kinds = [*map(type, values)]
    # True equals 1, hence the types.
    return (*extra, *kinds, *values) if _SCALARS.issuperset(kinds) else None

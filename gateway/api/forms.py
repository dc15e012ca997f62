"""The forms that are translated: what a request is asked as, and what its client is told."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import orjson

from gateway.api.chats import Document
from gateway.api.errors import MISUNDERSTOOD, Untranslatable, anthropic_error
from gateway.api.messages import MessageStream, chat_of_messages, message_of_chat, prompt_of_messages
from gateway.api.responses import ResponseStream, chat_of_responses, response_of_chat
from gateway.errors import UpstreamFailed


class Stream(Protocol):
    """A chat's stream in another form."""

    def feed(self, chunk: Mapping[str, Any]) -> bytes: ...

    def end(self) -> bytes: ...

    def failed(self, status: int, message: str) -> bytes: ...


class Form(NamedTuple):
    """One form of request. What it asks is asked at `path`."""

    path: str
    ask: Callable[[Mapping[str, Any]], Document]
    """Raises Untranslatable."""
    answer: Callable[[Mapping[str, Any], Mapping[str, Any]], Document]
    """Of a whole answer and the request."""
    stream: Callable[[Mapping[str, Any], int], Stream] | None
    """Of the request, and what is known of its input tokens."""
    error: Callable[[int, str], Document]
    id_header: bytes = b""
    """Where clients look for the request's id."""


def _model(request: Mapping[str, Any]) -> str:
    return str(request.get("model") or "")


def _openai_error(status: int, message: str) -> Document:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _ask_for_tokens(request: Mapping[str, Any]) -> Document:
    return {"model": _model(request), "add_generation_prompt": True, **prompt_of_messages(request)}


def _counted(answer: Mapping[str, Any], _request: Mapping[str, Any]) -> Document:
    count = answer.get("count")
    if not isinstance(count, int):
        raise UpstreamFailed("The worker did not count the tokens.")
    return {"input_tokens": count}


_CHAT = "/v1/chat/completions"
FORMS: Mapping[str, Form] = {
    "/v1/messages": Form(
        _CHAT,
        chat_of_messages,
        lambda answer, request: message_of_chat(answer, _model(request)),
        lambda request, tokens: MessageStream(_model(request), tokens),
        anthropic_error,
        b"request-id",
    ),
    "/v1/messages/count_tokens": Form("/tokenize", _ask_for_tokens, _counted, None, anthropic_error, b"request-id"),
    "/v1/responses": Form(
        _CHAT,
        chat_of_responses,
        response_of_chat,
        lambda request, _tokens: ResponseStream(request),
        _openai_error,
    ),
}
"""By the path that clients ask at."""
ROUTE_OF: Mapping[str, str] = {path: path.removesuffix("/count_tokens") for path in FORMS}
"""Which route an engine must serve for a form to be left as it is: who counts Messages' tokens answers them."""


class Asked(NamedTuple):
    """A request in the client's form, and that form."""

    form: Form
    request: Mapping[str, Any]

    def body(self) -> bytes:
        """What is asked instead. Raises Untranslatable."""
        try:
            return orjson.dumps(self.form.ask(self.request))
        except MISUNDERSTOOD:
            raise Untranslatable("the request is not understood here") from None

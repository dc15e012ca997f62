"""Errors in the forms of other APIs than OpenAI's."""

from collections.abc import Mapping
from typing import Any

import orjson

from gateway.errors import BadRequest, ServiceError

MESSAGES_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Where clients expect Anthropic's form."""
RESPONSES_PATH = "/v1/responses"

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


MISUNDERSTOOD = (TypeError, AttributeError, ValueError, RecursionError)
"""What comes of values of other types than any client would send."""


class Untranslatable(BadRequest):
    """A request asks for something that no engine here could do in place of its API's own servers."""


def error_body(path: str, error: ServiceError) -> bytes:
    """A refusal in the form that the clients of a route know."""
    if path in MESSAGES_PATHS:
        return orjson.dumps(anthropic_error(error.status, error.message))
    return error.body()


def error_event(path: str, error: ServiceError) -> bytes:
    """The last event of a broken stream, in the form that the clients of a route know."""
    if path in MESSAGES_PATHS:
        return b"event: error\ndata: %b\n\n" % error_body(path, error)
    if path == RESPONSES_PATH:
        document = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: %b\n\n" % orjson.dumps(document)
    return b"data: %b\n\n" % error.body()


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def message_of(document: Any, default: str) -> str:
    """What an error object of OpenAI's, or of an engine's own form, says."""
    if not isinstance(document, dict):
        return default
    error = document.get("error")
    for holder in (error, document):
        if isinstance(holder, dict):
            for key in ("message", "detail"):
                if isinstance(text := holder.get(key), str) and text:
                    return text
    return error if isinstance(error, str) and error else default

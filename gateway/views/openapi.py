"""What `/openapi.json` says: the application's routes, those that the edge serves beside it, and how errors look.

Bodies are described as far as the gateway reads them; what else is in them is the engine's to judge, and passes. Routes
of other forms than OpenAI's chat and completion are described by whoever defines those.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.api.openapi import OPERATIONS, SCHEMAS

Schema = dict[str, Any]

_ERRORS = ("400", "401", "403", "404", "405", "408", "413", "429", "500", "502", "503", "504")
_METHODS = frozenset({"get", "put", "post", "delete", "patch"})


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(properties: Mapping[str, Schema], *required: str, **further: Any) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required), **further}


_TEXT: Schema = {"type": "string"}
_TOKEN_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_READ_OF_EVERY_BODY: Mapping[str, Schema] = {
    "model": {"type": "string", "minLength": 1, "description": "A model or an adapter of `/v1/models`."},
    "stream": _or_null({"type": "boolean"}),
    "stream_options": _or_null(_object({"include_usage": {"type": "boolean"}})),
    "max_tokens": _or_null(_COUNT),
    "user": _or_null({"type": "string", "description": "Keeps a conversation at one worker, where it has no prefix."}),
    "cache_salt": _or_null(
        {
            "type": "string",
            "maxLength": 256,
            "description": "Only who says the same shares cached prompts, within a tenant.",
        }
    ),
    "priority": _or_null({"type": "integer", "description": "Lower is served first."}),
}
_PART = _object({"type": {"const": "text"}, "text": _TEXT}, "type", "text")
_MESSAGE = _object(
    {
        "role": {"type": "string", "enum": ["system", "user", "assistant"]},
        "content": {"oneOf": [_TEXT, {"type": "array", "minItems": 1, "items": _PART}]},
    },
    "role",
    "content",
    description="Roles and contents as the model's template knows them; tools and media among them.",
)
_CHAT = _object(
    {**_READ_OF_EVERY_BODY, "messages": {"type": "array", "minItems": 1, "items": _MESSAGE}}, "model", "messages"
)
_COMPLETION = _object(
    {**_READ_OF_EVERY_BODY, "prompt": {"oneOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS]}}, "model", "prompt"
)
_ERROR = _object(
    {
        "error": _object(
            {"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)},
            "message",
            "type",
            "param",
            "code",
        )
    },
    "error",
)
_USAGE = _object({"prompt_tokens": {"type": "integer"}, "completion_tokens": {"type": "integer"}}, "prompt_tokens")
_ANSWER = _object({"id": _TEXT, "object": _TEXT, "choices": {"type": "array"}, "usage": _or_null(_USAGE)}, "choices")
_MODELS = _object(
    {"object": {"const": "list"}, "data": {"type": "array", "items": _object({"id": _TEXT}, "id")}}, "data"
)

COMPONENTS: Mapping[str, Schema] = {
    "ChatRequest": _CHAT,
    "CompletionRequest": _COMPLETION,
    "Answer": _ANSWER,
    "Error": _ERROR,
    "Models": _MODELS,
    **SCHEMAS,
}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _inference(request: str, summary: str) -> Schema:
    """An operation of the edge's."""
    answer = {**_json(_reference("Answer")), "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "description": "The answer is a worker's, byte for byte: one document, or with `stream` server-sent events.",
        "requestBody": {"required": True, "content": _json(_reference(request))},
        "responses": {"200": {"description": "A worker's answer.", "content": answer}},
    }


_EDGE: Mapping[str, Schema] = {
    "/v1/chat/completions": {"post": _inference("ChatRequest", "Chat")},
    "/v1/completions": {"post": _inference("CompletionRequest", "Completion")},
    **OPERATIONS,
}
_BODIES: Mapping[tuple[str, str], Schema] = {
    ("/route/explain", "post"): {"oneOf": [_reference("ChatRequest"), _reference("CompletionRequest")]},
}
_ANSWERS: Mapping[str, Schema] = {
    "/v1/models": _json(_reference("Models")),
    "/metrics": {"text/plain": {"schema": {"type": "string"}}},
}
_REFUSAL: Schema = {"description": "Refused, in OpenAI's form.", "content": _json(_reference("Error"))}


def describe(app: FastAPI, public: bool) -> None:
    """Have the application say so. `public`: the edge's routes are reached where it is."""

    def document() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, public)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, public: bool) -> Schema:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    paths: dict[str, Schema] = schema.setdefault("paths", {})
    if public:
        paths.update({path: {**paths.get(path, {}), **operations} for path, operations in _EDGE.items()})
    for path, operations in paths.items():
        for method, operation in operations.items():
            if method in _METHODS:
                _complete(path, method, operation)
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    components.update(COMPONENTS)
    return schema


def _complete(path: str, method: str, operation: Schema) -> None:
    """What FastAPI cannot know: our errors in place of its own, and bodies that it does not read."""
    responses = operation["responses"]
    responses.pop("422", None)
    if path in _ANSWERS:
        responses["200"] = {**responses["200"], "content": _ANSWERS[path]}
    for status in _ERRORS:
        responses.setdefault(status, _REFUSAL)
    body = _BODIES.get((path, method))
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}

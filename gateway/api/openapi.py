"""What `/openapi.json` says of routes in other forms than OpenAI's two: what is read of their bodies."""

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_ANY: Schema = {}
_MODEL: Schema = {"type": "string", "minLength": 1, "description": "A model or an adapter of `/v1/models`."}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "properties": {"role": _TEXT, "content": _ANY}, "required": ["role", "content"]},
}


def _object(properties: Mapping[str, Schema], *required: str, description: str = "") -> Schema:
    said = {"description": description} if description else {}
    return {"type": "object", "properties": dict(properties), "required": list(required), **said}


def _body(properties: Mapping[str, Schema], *required: str) -> Schema:
    return _object({"model": _MODEL, **properties}, *required)


_PROMPT: Mapping[str, Schema] = {"messages": _MESSAGES, "system": _ANY, "tools": _ANY, "tool_choice": _ANY}
SCHEMAS: Mapping[str, Schema] = {
    "MessagesRequest": _body(
        {**_PROMPT, "max_tokens": _COUNT, "stream": {"type": "boolean"}}, "model", "messages", "max_tokens"
    ),
    "CountTokensRequest": _body(_PROMPT, "model", "messages"),
    "ResponsesRequest": _body(
        {
            "input": {"oneOf": [{"type": "string"}, {"type": "array", "minItems": 1}]},
            "instructions": _ANY,
            "max_output_tokens": _ANY,
            "stream": {"type": "boolean"},
            "tools": _ANY,
        },
        "input",
    ),
    "EmbeddingRequest": _body({"input": {"oneOf": [_TEXT, {"type": "array", "minItems": 1}]}}, "input"),
    "RerankRequest": _body({"query": _ANY, "documents": {"type": "array", "minItems": 1}}, "query", "documents"),
    "ScoreRequest": _body({"text_1": _ANY, "text_2": _ANY, "queries": _ANY, "documents": _ANY, "items": _ANY}),
    "TokenizeRequest": _body({"prompt": _TEXT, "messages": _MESSAGES}),
    "DetokenizeRequest": _body({"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}}, "tokens"),
    "AnthropicError": _object(
        {"type": {"const": "error"}, "error": _object({"type": _TEXT, "message": _TEXT}, "type", "message")},
        "type",
        "error",
    ),
}
_MESSAGES_ERRORS = ("400", "401", "403", "404", "405", "408", "413", "429", "500", "502", "503", "504")


def _content(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _operation(request: str, summary: str, streams: bool = False) -> Schema:
    answer: Schema = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": _content(request)},
        "responses": {"200": {"description": "A worker's answer.", "content": answer}},
    }


def _of_messages(operation: Schema) -> Schema:
    refusal = {"description": "Refused, in Anthropic's form.", "content": _content("AnthropicError")}
    return {**operation, "responses": {**dict.fromkeys(_MESSAGES_ERRORS, refusal), **operation["responses"]}}


OPERATIONS: Mapping[str, Schema] = {
    "/v1/messages": {"post": _of_messages(_operation("MessagesRequest", "Anthropic's messages", streams=True))},
    "/v1/messages/count_tokens": {"post": _of_messages(_operation("CountTokensRequest", "Count a prompt's tokens"))},
    "/v1/responses": {"post": _operation("ResponsesRequest", "Responses", streams=True)},
    "/v1/embeddings": {"post": _operation("EmbeddingRequest", "Embeddings")},
    **{
        path: {"post": _operation("RerankRequest", "Rank documents")}
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
    **{path: {"post": _operation("ScoreRequest", "Score pairs of texts")} for path in ("/v1/score", "/score")},
    "/tokenize": {"post": _operation("TokenizeRequest", "Token ids of a prompt or a chat")},
    "/detokenize": {"post": _operation("DetokenizeRequest", "The text of token ids")},
}
"""By path."""

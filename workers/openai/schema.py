"""Request bodies: the fields a worker reads, checked. Fields it does not know are left alone, as engines leave them.

Bodies are decoded with msgspec into plain objects first (a chat template may use any field) and then checked.
"""

import re
from array import array
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from workers.openai.errors import InvalidRequest

Unit = Annotated[float, Meta(ge=0, le=1)]
Logprobs = Annotated[int, Meta(ge=0, le=20)]
_TOKEN_IDS_MAX = 2**32


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct):
    """What chat and text completions have in common."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Unit | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    prompt_logprobs: Logprobs | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings; empty ones would stop at once and mean nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Rules that span fields. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options can only be set when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is not available when stream is true", param="prompt_logprobs")


class ChatRequest(GenerationRequest):
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidRequest("messages must hold at least one message", param="messages")
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")

    @property
    def logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    prompt: Any = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Logprobs | None = None

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise InvalidRequest("suffix is not supported", param="suffix")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")

    def prompts(self) -> "list[str | array[int]]":
        """The prompts in the four forms OpenAI allows: text, token ids, a list of either."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not isinstance(given, list) or not given:
            raise InvalidRequest("prompt must be text, token ids, or a non-empty list of either", param="prompt")
        if isinstance(given[0], int):
            return [token_array(given, "prompt")]
        return [item if isinstance(item, str) else token_array(item, "prompt") for item in given]


class TokenizeRequest(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def read_document(body: bytes) -> dict[str, Any]:
    """A request body as plain objects. Raises InvalidRequest."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be a JSON object")
    return document


def checked(document: dict[str, Any], kind: type[Body]) -> Body:
    """The fields of `kind`, checked. Raises InvalidRequest that names the field."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        where = re.search(r"\$\.([A-Za-z_]+)", str(error))
        raise InvalidRequest(str(error), param=where.group(1) if where else None) from error


def token_array(token_ids: Any, param: str) -> "array[int]":
    """Token ids as the engine takes them. Raises InvalidRequest."""
    try:
        tokens = array("I", token_ids)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"{param} must hold token ids below {_TOKEN_IDS_MAX}", param=param) from error
    if not tokens:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    return tokens

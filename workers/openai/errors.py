"""What a client is told when its request cannot be served, in OpenAI's form.

ApiError
├── InvalidRequest       400  malformed or impossible
│   └── ContextExceeded  400  longer than the model's context
├── UnknownModel         404
├── BodyTooLarge         413
└── (any other status)   engine refusals, internal failures
"""

from typing import Any

from cachecore.prompts.contract import PromptError
from workers.engine import EngineError


class ApiError(Exception):
    """An answer other than success. `status` is the HTTP status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def document(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class InvalidRequest(ApiError):
    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


class ContextExceeded(InvalidRequest):
    def __init__(self, context_tokens: int, prompt_tokens: int, output_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{prompt_tokens + output_tokens} tokens ({prompt_tokens} in the prompt, {output_tokens} in the "
            "completion). Please reduce the length of the prompt or the completion.",
            code="context_length_exceeded",
        )


class UnknownModel(ApiError):
    def __init__(self, model: str) -> None:
        super().__init__(404, f"The model `{model}` does not exist.", param="model", code="model_not_found")


class BodyTooLarge(ApiError):
    def __init__(self, bytes_max: int) -> None:
        super().__init__(413, f"The body is larger than {bytes_max} bytes.", code="payload_too_large")


def translated(error: Exception) -> ApiError:
    """The answer for an exception from below; anything unforeseen is a 500 that tells nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptError):
        return InvalidRequest(str(error), param="messages")
    if isinstance(error, EngineError):
        return ApiError(error.status, str(error))
    return ApiError(500, "internal error")

"""Everything that may go wrong and be told to someone.

    StartupError                  told to the operator: one line on stderr, the process ends
    ├── ConfigError                 a configuration file, variable or flag
    └── PortInUseError
    ServiceError                  told to the client: an HTTP status and an OpenAI error object
    ├── BadRequest           400
    │   └── DuplicateKey
    ├── Unauthorized         401
    ├── Forbidden            403
    ├── NotFound             404
    │   └── ModelNotFound
    ├── MethodNotAllowed     405
    ├── RequestTimeout       408
    ├── PayloadTooLarge      413
    ├── TooManyRequests      429
    ├── HeaderTooLarge       431
    ├── InternalError        500
    ├── NotSupported         501
    ├── UpstreamFailed       502
    ├── Unavailable          503
    │   ├── NoWorker
    │   ├── Overloaded
    │   ├── ShuttingDown
    │   └── UpstreamUnavailable
    └── UpstreamTimeout      504
        └── DeadlineExceeded

An error is translated into one of these once, where it crosses into the gateway; from there on it knows how it is
answered. Messages are written for the client: they carry no traceback, no address of a worker and no secret.
"""

from collections.abc import Iterable
from typing import ClassVar

import orjson


class StartupError(Exception):
    """A command cannot start or go on, for a reason its operator can act on. The message is one line."""

    exit_code: ClassVar[int] = 1


class ConfigError(StartupError):
    """A configuration file, variable or flag is wrong. The message names the place."""

    exit_code = 2


class PortInUseError(StartupError):
    """Something listens on a port already."""

    def __init__(self, host: str, port: int, remedy: str = "choose another with --port") -> None:
        super().__init__(f"port {port} on {host} is in use; {remedy}")


class ServiceError(Exception):
    """An answer other than the one asked for. Subclasses fix `status`, `type` and a default `code`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after_seconds: int | None = None
    closes_connection: ClassVar[bool] = False
    """Whether the rest of the request is left unread, so that the connection cannot carry another."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if param is not None:
            self.param = param
        if code is not None:
            self.code = code

    def body(self) -> bytes:
        """OpenAI's error object, as JSON."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that belong to this answer besides its length: names in lower case."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_seconds is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_seconds))
        if self.closes_connection:
            headers.append((b"connection", b"close"))
        return headers


class BadRequest(ServiceError):
    status = 400
    type = "invalid_request_error"


class DuplicateKey(BadRequest):
    """A key that the gateway reads or writes is spelled twice, or escaped: two parsers could read two values."""

    code = "duplicate_key"

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} must be spelled once, and without escapes", param=key)


class Unauthorized(ServiceError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class Forbidden(ServiceError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(ServiceError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"
    param = "model"

    def __init__(self, model: str) -> None:
        super().__init__(f"the model {model!r} does not exist here")


class MethodNotAllowed(ServiceError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        self.allowed = tuple(allowed)
        super().__init__(f"{method} is not allowed here; allowed: {', '.join(self.allowed)}")

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"allow", ", ".join(self.allowed).encode())]


class RequestTimeout(ServiceError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"
    closes_connection = True


class PayloadTooLarge(ServiceError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"
    closes_connection = True

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"the body is larger than the {bytes_max} bytes allowed here")


class TooManyRequests(ServiceError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retry_after_seconds: int | None = 1,
        standing: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """`retry_after_seconds`: None where another try would be in vain. `standing`: headers that say what is left."""
        super().__init__(message, code=code)
        self.retry_after_seconds = retry_after_seconds
        self._standing = tuple(standing)

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), *self._standing]


class HeaderTooLarge(ServiceError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"
    closes_connection = True

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"the header fields are larger than the {bytes_max} bytes allowed here")


class InternalError(ServiceError):
    """A fault of ours. The client learns that much; the log has the rest."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("the gateway failed to handle this request")


class NotSupported(ServiceError):
    status = 501
    code = "not_supported"


class UpstreamFailed(ServiceError):
    """A worker answered something that is not HTTP, or hung up before the end of an answer's head."""

    status = 502
    code = "upstream_failed"


class Unavailable(ServiceError):
    """Not now: worth another try."""

    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NoWorker(Unavailable):
    """No healthy worker serves the model at this moment."""

    code = "no_worker"


class Overloaded(Unavailable):
    """No worker can start the request in the time it has."""

    code = "overloaded"


class ShuttingDown(Unavailable):
    """The gateway stops, and does not begin what has not begun yet."""

    code = "shutting_down"


class UpstreamUnavailable(Unavailable):
    """Every worker that was tried refused the connection or closed it unanswered."""

    code = "upstream_unavailable"


class UpstreamTimeout(ServiceError):
    status = 504
    code = "upstream_timeout"


class DeadlineExceeded(UpstreamTimeout):
    """The request's own time is over."""

    code = "deadline_exceeded"

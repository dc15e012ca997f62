"""The lines of a batch: what they must be, and what becomes of each."""

import secrets
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson

from gateway.api.calls import Answer

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses")
ERRORS_MAX = 100
"""That a batch names before the rest is not looked at."""


class Line(NamedTuple):
    number: int
    custom_id: str
    body: dict[str, Any]


class Fault(Exception):
    """A line that is no request. `document`: as a batch's `errors` name it."""

    def __init__(self, number: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.document = {"code": code, "line": number, "message": message, "param": param}


def read_line(number: int, data: bytes, endpoint: str) -> Line:
    """Raises Fault."""
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Fault(number, "invalid_json_line", f"This line is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Fault(number, "invalid_json_line", "This line is no JSON object.")
    custom_id, body = document.get("custom_id"), document.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise Fault(number, "missing_required_parameter", "A custom_id is needed.", "custom_id")
    if document.get("method", "POST") != "POST":
        raise Fault(number, "invalid_method", "The method is POST.", "method")
    if document.get("url") != endpoint:
        raise Fault(number, "mismatched_endpoint", f"The url must be the batch's endpoint, {endpoint}.", "url")
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise Fault(number, "missing_required_parameter", "A body with a model is needed.", "body")
    return Line(number, custom_id, body)


def faults(lines: Iterable[tuple[int, bytes]], endpoint: str, requests_max: int) -> tuple[int, list[dict[str, Any]]]:
    """How many requests there are, and what is wrong with them."""
    seen: set[str] = set()
    found: list[dict[str, Any]] = []
    for number, data in lines:
        try:
            line = read_line(number, data, endpoint)
            if line.custom_id in seen:
                raise Fault(number, "duplicate_custom_id", f"{line.custom_id!r} is given twice.", "custom_id")
            seen.add(line.custom_id)
            if len(seen) > requests_max:
                raise Fault(number, "too_many_requests", f"A batch has at most {requests_max} requests.")
        except Fault as fault:
            found.append(fault.document)
        if len(found) >= ERRORS_MAX or len(seen) > requests_max:
            break
    if not seen and not found:
        found.append(Fault(0, "empty_file", "The file has no requests.").document)
    return len(seen), found


def remaining(lines: Iterable[tuple[int, bytes]], endpoint: str, done: set[str]) -> Iterator[Line]:
    """The requests of a sound file that have not been answered."""
    for number, data in lines:
        line = read_line(number, data, endpoint)
        if line.custom_id not in done:
            yield line


def body_of(line: Line, priority: int) -> bytes:
    """What is asked: in one piece, and after everybody else."""
    body = {key: value for key, value in line.body.items() if key not in ("stream", "stream_options")}
    return orjson.dumps({**body, "priority": priority})


def answered(line: Line, answer: Answer) -> bytes:
    """A line of the output, or of the errors."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": _json(answer.body)}
    return _line(line, response, None)


def unanswered(line: Line, code: str, message: str) -> bytes:
    return _line(line, None, {"code": code, "message": message})


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")


def _line(line: Line, response: Any, error: Any) -> bytes:
    identifier = f"batch_req_{secrets.token_hex(12)}"
    return orjson.dumps({"id": identifier, "custom_id": line.custom_id, "response": response, "error": error}) + b"\n"

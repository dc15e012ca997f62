import json
from collections.abc import Iterator

import pytest

from gateway import errors
from gateway.errors import ServiceError


def subclasses(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


STATUS = {
    "BadRequest": 400,
    "DuplicateKey": 400,
    "Unauthorized": 401,
    "Forbidden": 403,
    "NotFound": 404,
    "ModelNotFound": 404,
    "MethodNotAllowed": 405,
    "RequestTimeout": 408,
    "PayloadTooLarge": 413,
    "TooManyRequests": 429,
    "HeaderTooLarge": 431,
    "InternalError": 500,
    "NotSupported": 501,
    "UpstreamFailed": 502,
    "Unavailable": 503,
    "NoWorker": 503,
    "Overloaded": 503,
    "ShuttingDown": 503,
    "UpstreamUnavailable": 503,
    "UpstreamTimeout": 504,
    "DeadlineExceeded": 504,
}


def test_each_error_knows_its_status() -> None:
    told = {kind.__name__: kind.status for kind in subclasses(ServiceError) if kind.__module__ == errors.__name__}
    assert told == STATUS


def test_the_opening_tree_names_every_error_and_status() -> None:
    assert errors.__doc__ is not None
    words = errors.__doc__.split()
    for name, status in STATUS.items():
        assert name in words
        assert str(status) in words


def test_body_is_an_openai_error_object() -> None:
    error = errors.BadRequest("messages is empty", param="messages", code="empty_messages")
    assert json.loads(error.body()) == {
        "error": {
            "message": "messages is empty",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "empty_messages",
        }
    }


def test_fields_of_one_error_do_not_reach_the_next() -> None:
    errors.BadRequest("a", param="x", code="y")
    assert json.loads(errors.BadRequest("b").body())["error"] == {
        "message": "b",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_duplicate_key_names_the_key() -> None:
    error = errors.DuplicateKey("cache_salt")
    assert (error.status, error.param, error.code) == (400, "cache_salt", "duplicate_key")


@pytest.mark.parametrize("kind", [errors.NoWorker, errors.UpstreamUnavailable])
def test_unavailable_says_when_to_come_back(kind: type[errors.Unavailable]) -> None:
    assert (b"retry-after", b"7") in kind("later", retry_after_seconds=7).headers()
    assert (b"retry-after", b"1") in kind("later").headers()


def test_headers_that_protocols_ask_for() -> None:
    assert (b"www-authenticate", b"Bearer") in errors.Unauthorized("no").headers()
    assert (b"allow", b"GET, POST") in errors.MethodNotAllowed("PUT", ["GET", "POST"]).headers()
    assert (b"connection", b"close") in errors.PayloadTooLarge(1024).headers()
    assert (b"connection", b"close") not in errors.BadRequest("no").headers()


def test_a_fault_of_ours_tells_the_client_nothing_of_its_cause() -> None:
    try:
        try:
            raise KeyError("secret-worker-7")
        except KeyError as cause:
            raise errors.InternalError from cause
    except errors.InternalError as error:
        body = error.body()
    assert json.loads(body)["error"]["code"] == "internal_error"
    assert b"secret-worker-7" not in body
    assert b"Traceback" not in body

"""Streams that are asked for their usage on the gateway's account: accounted for, and nothing for the client to see."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.end_to_end.conftest import Stack
from tests.gateway.end_to_end.processes import Fleet, Gateway, chat, full_hit


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("usage")
    with (
        Fleet(directory, "--speed", "50", count=1) as fleet,
        Gateway(directory, fleet.urls, {"usage": {"requested": True}}) as gateway,
    ):
        yield Stack(fleet, gateway)


def streamed(gateway: Gateway, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = gateway.post({**body, "stream": True})
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_a_client_that_did_not_ask_sees_no_usage(asking: Stack) -> None:
    _, gateway = asking
    body = chat("A prompt of several blocks that will be asked twice, to be cached the second time. " * 2)
    streamed(gateway, body)
    chunks = streamed(gateway, body)
    assert all(chunk["choices"] and not chunk.get("usage") for chunk in chunks)
    receipt = gateway.status()["receipts"][0]
    assert receipt["reported_cached_tokens"] == full_hit(body)
    assert receipt["reported_prompt_tokens"] == receipt["prompt_tokens"]


@pytest.mark.parametrize("options", [{"include_usage": False}, {"continuous_usage_stats": False}, {}])
def test_its_other_options_stay(asking: Stack, options: dict[str, Any]) -> None:
    _, gateway = asking
    body = chat("hi", stream=True, stream_options=options)
    echoed = gateway.post(body, {"x-simulate": '{"echo": true}'}).json()
    sent = json.loads(base64.b64decode(echoed["body_base64"]))
    assert sent["stream_options"] == {**options, "include_usage": True}
    assert all(chunk["choices"] for chunk in streamed(gateway, body))


def test_a_client_that_asked_gets_it(asking: Stack) -> None:
    _, gateway = asking
    last = streamed(gateway, chat("hi", stream_options={"include_usage": True}))[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_whole_answers_are_not_asked(asking: Stack, stream: dict[str, Any]) -> None:
    """An engine refuses stream options of what is no stream."""
    _, gateway = asking
    echoed = gateway.post(chat("hi", **stream), {"x-simulate": '{"echo": true}'}).json()
    assert b"stream_options" not in base64.b64decode(echoed["body_base64"])


def test_unless_it_is_configured_nobody_asks(stack: Stack) -> None:
    body = chat("hi", stream=True)
    echoed = stack.gateway.post(body, {"x-simulate": '{"echo": true}'}).json()
    assert b"stream_options" not in base64.b64decode(echoed["body_base64"])

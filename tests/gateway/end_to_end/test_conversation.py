"""A conversation's next turn goes where its prefix is, and both sides say how much of it was there."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.end_to_end.conftest import Stack
from tests.gateway.end_to_end.processes import (
    MODEL,
    REPOSITORY,
    cached_tokens,
    eventually,
    free_ports,
    matched_tokens,
    token_count,
    whole_blocks,
    worker_of,
)

QUESTIONS = ("Tell me of the mountain. " * 8, "And of the valley below it?", "Which of them has more snow?")


def test_turns_go_where_the_first_one_went(stack: Stack) -> None:
    gateway = stack.gateway
    messages: list[dict[str, Any]] = []
    held = 0
    first = ""
    for turn, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        body = {"model": MODEL, "messages": messages, "max_tokens": 40}
        if turn:
            receipt = gateway.wait_confirmed(body, first, held)
            assert (receipt["worker"], receipt["evidence"]) == (first, "exact")
        answer = gateway.post(body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == token_count(messages)
        assert matched_tokens(answer) == cached_tokens(answer) == held
        assert answer.headers["x-ropeway-policy"] == "kv-aware"
        first = first or worker_of(answer)
        assert worker_of(answer) == first
        messages.append(answer.json()["choices"][0]["message"])
        # The token said last has not been computed; everything before it stays, in whole blocks.
        held = whole_blocks(usage["prompt_tokens"] + usage["completion_tokens"] - 1)
    assert held > 0


def test_an_equal_prompt_is_capped_as_the_engine_caps_a_full_hit(stack: Stack) -> None:
    gateway = stack.gateway
    empty = {"role": "user", "content": ""}
    # Exactly four blocks: the last one is computed again for its last token's logits.
    body = {"model": MODEL, "messages": [{**empty, "content": "x" * (64 - token_count([empty]))}], "max_tokens": 4}
    assert token_count(body["messages"]) == 64  # type: ignore[arg-type]
    first = gateway.post(body)
    gateway.wait_confirmed(body, worker_of(first), 48)
    second = gateway.post(body)
    assert worker_of(second) == worker_of(first)
    assert matched_tokens(second) == cached_tokens(second) == 48


def test_a_streamed_turn_is_found_like_any_other(stack: Stack) -> None:
    gateway = stack.gateway
    question = {"role": "user", "content": "A streamed one. " * 10}
    body = {"model": MODEL, "messages": [question], "max_tokens": 40, "stream": True}
    answer = gateway.post(body)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    said = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)
    messages = [question, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    held = whole_blocks(token_count([question]) + 40 - 1)
    gateway.wait_confirmed({"model": MODEL, "messages": messages}, worker_of(answer), held)
    second = gateway.post({"model": MODEL, "messages": messages, "max_tokens": 4})
    assert worker_of(second) == worker_of(answer)
    assert matched_tokens(second) == cached_tokens(second) == held


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """`ropeway up` with the real model: what it prints once all serve."""
    directory = tmp_path_factory.mktemp("up")
    # The gateway's port, and those of the workers behind it.
    ports = free_ports(3)
    command = [sys.executable, "-m", "ropeway", "up", "--port", str(ports[0]), "--state-dir", str(directory), "--json"]
    with (
        (directory / "up.log").open("wb") as log,
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, (directory / "up.log").read_text()
            yield json.loads(line)
        finally:
            process.terminate()


def all_events_taken_in(http: httpx.Client) -> bool:
    for worker in http.get("/status").json()["workers"]:
        published = httpx.get(f"{worker['url']}/server_info", trust_env=False).json()["kv_events"]["next_sequence"]
        (stream,) = worker["events"]
        if stream["intake"]["batches"] != published or stream["intake"]["queued"]:
            return False
    return True


@pytest.mark.model
@pytest.mark.slow
def test_a_real_model_knows_france_and_its_own_conversation(real: dict[str, Any]) -> None:
    assert len(real["workers"]) == 2
    with httpx.Client(base_url=real["url"], timeout=120, trust_env=False) as http:
        messages: list[dict[str, Any]] = []
        workers: list[str] = []
        for question in ("What is the capital of France?", "Name a river there.", "And a dish from there?"):
            messages.append({"role": "user", "content": question})
            body = {"model": real["model"], "messages": messages, "temperature": 0, "max_tokens": 24}
            eventually(lambda: all_events_taken_in(http), "every event of the workers is taken in")
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            if workers:
                assert matched_tokens(answer) > 0
            assert matched_tokens(answer) == cached_tokens(answer)
            workers.append(worker_of(answer))
            messages.append(answer.json()["choices"][0]["message"])
        assert len(set(workers)) == 1
        assert "Paris" in messages[1]["content"]
        parities = {worker["name"]: worker["parity"] for worker in http.get("/status").json()["workers"]}
    assert list(parities.values()) == ["proven", "proven"]

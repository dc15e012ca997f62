"""Policies that are asked and not followed, and the priorities that engines are told, through the whole gateway."""

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from gateway.settings.loading import load
from tests.gateway.end_to_end.conftest import Stack
from tests.gateway.end_to_end.processes import Fleet, Gateway, chat, full_hit, worker_of

LONG = "every prompt of this conversation begins with these words, again and again. " * 20
ECHO = {"x-simulate": '{"echo": true}'}


@pytest.fixture(scope="module")
def shadowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Served by session alone; two others would do better."""
    directory = tmp_path_factory.mktemp("shadows")
    config = {
        "policy": "session",
        "routing": {"shadow": ["kv-aware", "dynamo"]},
        "priorities": {"by_work": True, "lowest": -2, "highest": 2, "level_seconds": 3.0},
    }
    with Fleet(directory, "--speed", "50", count=2) as fleet, Gateway(directory, fleet.urls, config) as gateway:
        yield Stack(fleet, gateway)


def sent(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    """The body as the worker received it."""
    answer = gateway.post(chat("hi", **fields), ECHO)
    document: dict[str, Any] = json.loads(base64.b64decode(answer.json()["body_base64"]))
    return document


def test_regret_is_reported(shadowed: Stack) -> None:
    _, gateway = shadowed
    body = chat(LONG)
    home = worker_of(gateway.post(body, {"x-ropeway-session": "first"}))
    gateway.wait_confirmed(body, home, full_hit(body))  # by explanations, which count nowhere
    served = [home]
    while served[-1] == home:  # until a session lives at the other worker, which has nothing of it
        served.append(worker_of(gateway.post(body, {"x-ropeway-session": str(len(served))})))
    ours, dynamo = gateway.status()["shadows"]
    assert (ours["policy"], dynamo["policy"]) == ("kv-aware", "dynamo")
    assert ours["decisions"] == dynamo["decisions"] == len(served)
    assert ours["agreed"] < len(served)
    assert ours["regret_tokens_mean"] == pytest.approx(full_hit(body) / len(served))
    assert ours["regret_ms_mean"] > 0
    metrics = gateway.http.get("/metrics").text
    assert f'ropeway_shadow_decisions_total{{policy="dynamo"}} {len(served)}.0' in metrics
    assert 'ropeway_shadow_regret_tokens{policy="kv-aware"} ' in metrics


def test_engines_are_told_arrival_and_work(shadowed: Stack) -> None:
    """Milliseconds since 1970; a client's own level counts as three seconds of waiting, and is clamped to -2 and 2."""
    _, gateway = shadowed
    before = time.time() * 1e3
    plain, urgent, late = (sent(gateway, **fields)["priority"] for fields in ({}, {"priority": -9}, {"priority": 1}))
    after = time.time() * 1e3
    assert before <= plain <= after + 2000
    assert before - 6000 <= urgent <= after - 4000
    assert before + 3000 <= late <= after + 5000


def test_unknown_shadows_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("routing: {shadow: [dynamoo]}\n")
    with pytest.raises(ConfigError, match=r"routing.shadow: 'dynamoo' is unknown; did you mean 'dynamo'\?"):
        load(file, {})
    file.write_text("routing: {shadow: [dynamo, dynamo]}\n")
    with pytest.raises(ConfigError, match=r"routing.shadow: a policy is named twice"):
        load(file, {})

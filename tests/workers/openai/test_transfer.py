"""What requests, answers and `/server_info` say of KV that moves."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cachecore.scope import Fidelity
from tests.workers.openai.test_failures import ScriptedEngine, serving
from workers.engine import StepOutput, TransferInfo, TransferMetrics, TransferOutcome, TransferReport

FETCHED = TransferReport(TransferOutcome.FETCHED, "", 1888, 43_515_904, 0.041, 1)
FAILED = TransferReport(TransferOutcome.FAILED, "deadline", 16, 1024, 0.25, 1)
HELD = TransferReport(TransferOutcome.HELD)
BODIES: Sequence[dict[str, Any]] = [{}, {"stream": True}]


def outputs(fidelity: Fidelity, transfer: TransferReport | None) -> list[StepOutput]:
    first = StepOutput(tuple(b"a"), fidelity=fidelity, transfer=transfer)
    return [first, StepOutput(tuple(b"b"), finish_reason="length", fidelity=fidelity)]


@asynccontextmanager
async def answering(fidelity: Fidelity, transfer: TransferReport | None = None) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(ScriptedEngine(outputs(fidelity, transfer))) as http:
        yield http


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("fidelity", "transfer", "said"),
    [
        (Fidelity.EXACT, None, ("exact", None)),
        (
            Fidelity.QUANTIZED,
            FETCHED,
            ("quantized", "outcome=fetched; tokens=1888; bytes=43515904; seconds=0.041000; sources=1"),
        ),
        (
            Fidelity.EXACT,
            FAILED,
            ("exact", "outcome=failed; reason=deadline; tokens=16; bytes=1024; seconds=0.250000; sources=1"),
        ),
    ],
)
async def test_an_answers_headers_say_what_it_came_from(
    body: dict[str, Any], fidelity: Fidelity, transfer: TransferReport | None, said: tuple[str, str | None]
) -> None:
    async with answering(fidelity, transfer) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", **body})
    assert answer.status_code == 200
    assert (answer.headers["x-ropeway-fidelity"], answer.headers.get("x-ropeway-transfer")) == said


class Takes(ScriptedEngine):
    """Gives each generation a script of its own."""

    def __init__(self, scripts: Sequence[Sequence[StepOutput]]) -> None:
        super().__init__([])
        self._scripts = list(scripts)

    async def generate(self, generation: Any) -> AsyncIterator[StepOutput]:
        self.seen.append(generation)
        for item in self._scripts[len(self.seen) - 1]:
            yield item


async def test_of_several_choices_the_one_that_pulled_speaks() -> None:
    engine = Takes([outputs(Fidelity.EXACT, HELD), outputs(Fidelity.QUANTIZED, FETCHED)])
    async with serving(engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "n": 2})
    assert answer.headers["x-ropeway-fidelity"] == "quantized"
    assert answer.headers["x-ropeway-transfer"] == FETCHED.header()


@pytest.mark.parametrize(
    ("headers", "accepted"),
    [
        ({}, Fidelity.EXACT),
        ({"x-ropeway-fidelity": "exact"}, Fidelity.EXACT),
        ({"x-ropeway-fidelity": "quantized"}, Fidelity.QUANTIZED),
        ({"x-ropeway-fidelity": "rotated"}, Fidelity.ROTATED),
        ({"x-ropeway-fidelity": "fused"}, Fidelity.FUSED),
    ],
)
async def test_a_request_says_the_worst_it_accepts(headers: dict[str, str], accepted: Fidelity) -> None:
    engine = ScriptedEngine(outputs(Fidelity.EXACT, None))
    async with serving(engine) as http:
        await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}, headers=headers)
    assert [generation.fidelity for generation in engine.seen] == [accepted, accepted]


async def test_a_fidelity_that_is_none() -> None:
    async with answering(Fidelity.EXACT) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x"}, headers={"x-ropeway-fidelity": "good"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-ropeway-fidelity"


async def test_server_info_tells_what_a_worker_can_move() -> None:
    engine = ScriptedEngine([])
    async with serving(engine) as http:
        assert "transfer" not in (await http.get("/server_info")).json()
        info = TransferInfo("w/a%3A1/7/0", ("tcp://127.0.0.1:1",), "ab" * 16, ("raw", "i8"), 46_080)
        engine.info = replace(engine.info, transfer=info)
        told = (await http.get("/server_info")).json()["transfer"]
    assert told == {
        "holder": "w/a%3A1/7/0",
        "addresses": ["tcp://127.0.0.1:1"],
        "compatibility": "ab" * 16,
        "codecs": ["raw", "i8"],
        "bytes_per_token": 46_080,
        "shifted": False,
        "pools": [],
    }


async def test_metrics_of_an_engine_that_moves_kv() -> None:
    engine = ScriptedEngine([])
    async with serving(engine) as http:
        assert "ropeway_worker_transfer" not in (await http.get("/metrics")).text
        engine.metrics.transfer = TransferMetrics(
            loading=1,
            pulls=Counter({("fetched", ""): 3, ("failed", "deadline"): 1}),
            pulled_tokens=48,
            pulled_bytes=1000,
            pull_seconds=0.5,
            served=2,
            served_bytes=900,
            refused=Counter({"stale": 4}),
        )
        text = (await http.get("/metrics")).text
    lines = {line for line in text.splitlines() if line.startswith("ropeway_worker_transfer")}
    own = 'engine="0",model_name="scripted"'
    assert lines == {
        f"ropeway_worker_transfer_loading{{{own}}} 1.0",
        f'ropeway_worker_transfer_pulls_total{{{own},outcome="fetched",reason=""}} 3.0',
        f'ropeway_worker_transfer_pulls_total{{{own},outcome="failed",reason="deadline"}} 1.0',
        f"ropeway_worker_transfer_pulled_tokens_total{{{own}}} 48.0",
        f"ropeway_worker_transfer_pulled_bytes_total{{{own}}} 1000.0",
        f"ropeway_worker_transfer_pull_seconds_total{{{own}}} 0.5",
        f"ropeway_worker_transfer_served_total{{{own}}} 2.0",
        f"ropeway_worker_transfer_served_bytes_total{{{own}}} 900.0",
        f'ropeway_worker_transfer_refused_total{{{own},reason="stale"}} 4.0',
    }

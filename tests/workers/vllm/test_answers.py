"""What became of plans, in answers: the middleware over an app as vLLM's is, asking a real sidecar."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cachecore.scope import Fidelity
from gateway.transfers import REPORT_HEADER, read_report
from policies.transfer import PullReport
from tests.workers.vllm.engine import FakeVllm, fake_vllm
from tests.workers.vllm.support import PROMPT, SALT, FakeRequest, params, plan_of, signed
from workers.engine import TransferOutcome, TransferReport
from workers.openai.server import WorkerServer
from workers.vllm.answers import TransferHeaders, sidecars_of
from workers.vllm.reports import ReportKey, Reports, key_of
from workers.vllm.requests import Scheduled

HEADER = REPORT_HEADER.decode()


class Api:
    """An API server like vLLM's: its streams' heads are out before their first tokens."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        routes = [Route("/v1/completions", self._complete, methods=["POST"])]
        app = Starlette(routes=routes)
        app.state.vllm_config = configuration(extra)
        app.add_middleware(TransferHeaders)
        self.server = WorkerServer(app)
        self.first_token = asyncio.Event()
        self.first_token.set()

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        if body.get("model") == "missing":
            return JSONResponse({"error": "there is no such model"}, status_code=404)
        if body.get("stream"):
            return StreamingResponse(self._tokens(), media_type="text/event-stream")
        await self.first_token.wait()
        return JSONResponse({"choices": [{"text": "so"}]})

    async def _tokens(self) -> AsyncIterator[str]:
        await self.first_token.wait()
        yield "data: so\n\n"
        yield "data: [DONE]\n\n"


def configuration(extra: Mapping[str, Any], ranks: int = 1) -> Any:
    """As much of a `VllmConfig` as is looked at."""
    transfer = SimpleNamespace(kv_connector_extra_config=dict(extra), kv_load_failure_policy="recompute")
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(data_parallel_size=ranks))


@pytest.fixture
def extra(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "keyring.json").write_text("{}")
    return {"keyring": str(tmp_path / "keyring.json")}


@pytest.fixture
async def target(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[FakeVllm]:
    caplog.set_level("INFO", "ropeway.transfer")
    async with fake_vllm(tmp_path) as target:
        yield target


@pytest.fixture
async def api(target: FakeVllm, extra: dict[str, Any], caplog: pytest.LogCaptureFixture) -> AsyncIterator[Api]:
    (url,) = [line.split()[3].removesuffix("/server_info") for line in caplog.messages if "gateways ask" in line]
    api = Api({**extra, "sidecar_port": int(url.rpartition(":")[2])})
    await api.server.start()
    try:
        yield api
    finally:
        await api.server.stop()


def body(*documents: object, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "kv_transfer_params": params(*documents), **fields}


async def asked(api: Api, body: Mapping[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
        return await http.post(f"{api.server.url}/v1/completions", json=body)


def reported(answer: httpx.Response) -> PullReport | None:
    """As a gateway reads it."""
    stated = answer.headers.get(HEADER)
    return None if stated is None else read_report(stated.encode())


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_says_what_came(tmp_path: Path, api: Api, target: FakeVllm, streams: bool) -> None:
    async with fake_vllm(tmp_path) as source:
        source.compute(PROMPT)
        plan = source.plan(PROMPT)
        document = signed(plan, target=target.info.holder)
        api.first_token.clear()
        asking = asyncio.create_task(asked(api, body(document, stream=streams)))
        request_id, _ = target.begin(PROMPT, document)
        assert await target.ended(request_id)
        api.first_token.set()
        answer = await asking
    assert answer.text == ("data: so\n\ndata: [DONE]\n\n" if streams else '{"choices":[{"text":"so"}]}')
    report = reported(answer)
    assert report is not None
    assert (report.outcome, report.reason, report.tokens) == ("fetched", "", 40)
    assert report.size_bytes == 40 * target.info.destination.shape.layers * 2 * 2 * 8 * 4
    assert report.seconds > 0
    assert answer.headers["x-ropeway-fidelity"] == "exact"


async def test_an_answer_says_what_did_not_come(api: Api, target: FakeVllm) -> None:
    """Nobody listens at the plan's address."""
    document = signed(plan_of(), target=target.info.holder)
    request_id, _ = target.begin(PROMPT, document)
    assert not await target.ended(request_id)
    report = reported(await asked(api, body(document)))
    assert report is not None
    assert (report.outcome, report.reason, report.tokens) == ("failed", "unreachable", 0)
    assert reported(await asked(api, body(document))) is None  # it has been told


@pytest.mark.parametrize(("codec", "outcome", "reason"), [("raw", "held", ""), ("i8", "refused", "incompatible")])
async def test_an_answer_without_a_load_says_why(
    api: Api, target: FakeVllm, codec: str, outcome: str, reason: str
) -> None:
    document = signed(plan_of(codec=codec), target=target.info.holder)
    target.requests.add(FakeRequest("one", kv_transfer_params=params(document)))
    table = target.take(11)
    target.requests.allocated("one", table, 0)
    target.step(Scheduled("one", table, True, 40))
    report = reported(await asked(api, body(document)))
    assert report == PullReport(outcome, reason)
    expected = {} if outcome == "held" else {(outcome, reason): 1}
    assert target.mover.metrics.pulls == expected


async def test_who_waited_for_a_load_that_failed_says_so(api: Api, target: FakeVllm) -> None:
    first, second = (signed(plan_of(deadline_seconds=seconds), target=target.info.holder) for seconds in (5.0, 6.0))
    for name, document in (("first", first), ("second", second)):
        target.requests.add(FakeRequest(name, kv_transfer_params=params(document)))
    table = target.take(11)
    target.requests.allocated("first", table, target.requests.match("first", 0) or 0)
    assert target.requests.match("second", 0) is None
    target.step()
    assert not await target.ended("first")
    target.step(Scheduled("second", target.take(11), True, 0))
    report = reported(await asked(api, body(second)))
    assert report == PullReport("failed")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"kv_transfer_params": {"ropeway": []}},
        {"kv_transfer_params": {"ropeway": "text"}},
        {"kv_transfer_params": {"ropeway": [{"capability": 5}]}},
        {"kv_transfer_params": {"ropeway": [{"capability": "\ud800"}]}},
        {"kv_transfer_params": ["ropeway"], "n": 2**70},
        {"model": "missing", "kv_transfer_params": {"ropeway": [{"capability": "x"}]}},
    ],
)
async def test_other_answers_pass_as_they_are(api: Api, given: dict[str, Any]) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        sent = json.dumps({"model": "tiny", **given})
        answer = await http.post(f"{api.server.url}/v1/completions", content=sent)
    assert answer.status_code == (404 if given.get("model") else 200)
    assert HEADER not in answer.headers


async def test_an_answer_goes_out_though_nobody_says_what_became_of_it(extra: dict[str, Any]) -> None:
    api = Api({**extra, "sidecar_port": 9})
    await api.server.start()
    try:
        answer = await asked(api, body({"capability": "x"}, stream=True))
    finally:
        await api.server.stop()
    assert answer.text == "data: so\n\ndata: [DONE]\n\n"
    assert HEADER not in answer.headers


# ---- where reports lie -----------------------------------------------------------------------------------------------


def test_sidecars_are_those_of_all_ranks(extra: dict[str, Any]) -> None:
    urls = sidecars_of(configuration({**extra, "sidecar_host": "0.0.0.0"}, ranks=2))
    assert urls == ["http://127.0.0.1:7200", "http://127.0.0.1:7201"]
    assert sidecars_of(configuration({**extra, "sidecar_port": 0})) == []
    assert sidecars_of(SimpleNamespace(kv_transfer_config=None)) == []


def test_equal_requests_are_told_one_each_and_first_what_was_fetched() -> None:
    reports = Reports()
    held, fetched = TransferReport(TransferOutcome.HELD), TransferReport(TransferOutcome.FETCHED, tokens=4)
    for report in (held, fetched, held):
        reports.add(ReportKey("one"), Fidelity.QUANTIZED, report)
    told = [reports.take("one") for _ in range(4)]
    assert told[3] is None
    assert [headers[HEADER].partition(";")[0] for headers in told if headers] == [
        "outcome=fetched",
        "outcome=held",
        "outcome=held",
    ]
    assert {headers["x-ropeway-fidelity"] for headers in told if headers} == {"quantized"}


def test_reports_that_nobody_asks_for_are_bounded() -> None:
    reports = Reports(keys_max=2)
    for key in ("one", "two", "three"):
        reports.add(ReportKey(key), Fidelity.EXACT, TransferReport(TransferOutcome.HELD))
    reports.add(None, Fidelity.EXACT, TransferReport(TransferOutcome.HELD))
    assert [reports.take(key) is None for key in ("one", "two", "three")] == [True, False, False]


def test_a_request_is_called_by_its_first_plan() -> None:
    documents = [signed(plan_of(0, 4)), signed(plan_of(4, 10))]
    assert key_of(params(*documents)) == key_of(params(documents[0])) != key_of(params(documents[1]))
    assert key_of(FakeRequest(cache_salt=SALT).kv_transfer_params) is None

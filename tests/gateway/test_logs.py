"""What a gateway writes of itself and of requests."""

import asyncio
import json
import logging
import sys
from random import Random

import pytest

from gateway.edge.contract import Ending
from gateway.edge.http1 import RequestHead
from gateway.errors import ModelNotFound
from gateway.logs import LINES_MAX, RequestLog, _Formatter
from policies import create
from policies.contract import Query, Receipt, Snapshot, WorkerView, candidate_fields
from policies.estimates import PrefillModel
from policies.state.inflight import InflightAccounting

HEAD = RequestHead(b"POST", b"/v1/completions", [(b"authorization", b"Bearer secret")], 1, True, False, False, {})


def receipt() -> Receipt:
    view = WorkerView("worker 1", 0, InflightAccounting().account("worker 1"), PrefillModel(), matched_tokens=32)
    query = Query(100, session="a-session")
    decision = create("kv-aware").decide(query, Snapshot(0.0, [view]), Random(1))
    made = Receipt("req-1", "m", "kv-aware", query, 16, decision, 0, candidate_fields([view]), 1.0, 10.0, tenant="acme")
    made.seen_ttft_ms = 12.34567
    return made


async def lines(form: str, errors_only: bool = False) -> list[str]:
    written: list[str] = []
    log = RequestLog(form, errors_only, written.append)  # type: ignore[arg-type]
    log.ended(receipt(), Ending.COMPLETE, 200, 0.25, 512, 7)
    log.ended(receipt(), Ending.UPSTREAM_BROKE, 200, 0.25, 100, 0)
    log.ended(receipt(), Ending.REFUSED, 503, 0.25, 0, 0)
    log.refused(HEAD, "/v1/completions", ModelNotFound('a "secret" model'), "10.0.0.1")
    log.served("GET", "/status", 200, 0.001)
    assert written == []
    log.flush()
    (text,) = written
    return text.splitlines()


async def test_a_json_line_has_names_numbers_and_ids() -> None:
    complete, broken, refused, served = [json.loads(line) for line in await lines("json")]
    assert complete.pop("time").endswith("Z")
    assert complete == {
        "level": "info",
        "logger": "ropeway.requests",
        "request_id": "req-1",
        "tenant": "acme",
        "model": "m",
        "status": 200,
        "ending": "complete",
        "worker": "worker 1",
        "policy": "kv-aware",
        "prompt_tokens": 100,
        "matched_tokens": 32,
        "cached_tokens": None,
        "output_tokens": 7,
        "ttft_ms": 12.346,
        "duration_ms": 250.0,
        "bytes": 512,
    }
    assert (broken["level"], broken["ending"], broken["output_tokens"]) == ("warning", "upstream_broke", None)
    assert (refused["status"], refused["code"], refused["path"]) == (404, "model_not_found", "/v1/completions")
    assert (refused["method"], refused["client"]) == ("POST", "10.0.0.1")
    assert (served["level"], served["path"], served["status"]) == ("info", "/status", 200)


@pytest.mark.parametrize("form", ["json", "logfmt", "text"])
async def test_nothing_that_is_secret_is_in_a_line(form: str) -> None:
    for line in await lines(form):
        assert "secret" not in line
        assert "a-session" not in line


async def test_logfmt_quotes_what_has_to_be() -> None:
    complete, *_ = await lines("logfmt")
    assert ' worker="worker 1" policy=kv-aware prompt_tokens=100 matched_tokens=32 output_tokens=7 ' in complete
    assert "cached_tokens" not in complete


async def test_errors_alone_where_that_is_wanted() -> None:
    said = [json.loads(line) for line in await lines("json", errors_only=True)]
    assert [line.get("ending") or line["code"] for line in said] == ["upstream_broke", "model_not_found"]


async def test_lines_are_written_soon_and_not_one_by_one() -> None:
    written: list[str] = []
    log = RequestLog("json", False, written.append)
    for _ in range(LINES_MAX + 1):
        log.served("GET", "/healthz", 200, 0.0)
    assert [text.count("\n") for text in written] == [LINES_MAX]
    async with asyncio.timeout(5):
        while len(written) < 2:
            await asyncio.sleep(0.01)
    assert written[1].count("\n") == 1


def test_other_records_have_the_same_form() -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        record = logging.LogRecord("ropeway.edge", logging.ERROR, __file__, 1, "it %s", ("failed",), sys.exc_info())
    said = json.loads(_Formatter("json").format(record))
    assert (said["level"], said["logger"], said["message"]) == ("error", "ropeway.edge", "it failed")
    assert said["exception"].endswith("ValueError: broken\nin two")
    line = _Formatter("logfmt").format(record)
    assert "\n" not in line
    assert ' logger=ropeway.edge message="it failed" exception="Traceback ' in line

"""Receipts as people read them."""

from random import Random

import pytest

from gateway.views.metrics import GatewayMetrics
from gateway.views.receipts import OTHERS_SHOWN, Receipts, document, words
from policies import create
from policies.contract import Candidate, Evidence, Query, Receipt, Snapshot, WorkerView, candidate_fields
from policies.estimates import PrefillModel
from policies.state.inflight import WorkerAccount


def decided(workers: int = 2, request_id: str = "r") -> Receipt:
    """Of a prompt that worker-1 has most of."""
    names = [f"worker-{number}" for number in range(workers)]
    views = [WorkerView(name, 0, WorkerAccount(name, 0), PrefillModel()) for name in names]
    views[1].matched_tokens = views[1].confirmed_tokens = 1872
    views[1].tier_tokens, views[1].evidence = (1872, 1872, 1872), Evidence.EXACT
    query = Query(1904)
    decision = create("kv-aware").decide(query, Snapshot(0.0, views), Random(1))
    fields = candidate_fields(views)
    return Receipt(request_id, "m", "kv-aware", query, 16, decision, views.index(decision.worker), fields, 1e9, 30.0)


def test_it_says_in_words_what_was_done_and_what_came_of_it() -> None:
    receipt = decided()
    said = words(receipt)
    assert said.startswith("worker-1: 1,872 of 1,904 tokens cached, starts in ")
    assert "; next best worker-0: " in said
    assert "seen" not in said
    receipt.seen_ttft_ms = 36.4
    assert words(receipt) == f"{said}; seen after 36 ms"


def test_of_many_candidates_the_best_are_shown_and_all_are_counted() -> None:
    receipt = decided(workers=64)
    shown = document(receipt)
    assert shown["candidates_count"] == 64
    names = [candidate["worker"] for candidate in shown["candidates"]]
    assert names[0] == shown["worker"] == "worker-1"
    assert len(names) == len(set(names)) == 1 + OTHERS_SHOWN
    costs = [candidate["cost"] for candidate in shown["candidates"]]
    all_costs = sorted(candidate["cost"] for candidate in receipt.document()["candidates"])
    assert sorted(costs) == pytest.approx(all_costs[: 1 + OTHERS_SHOWN])


def test_without_costs_any_others_are_shown() -> None:
    receipt = decided(workers=4)
    receipt.decision.costs = ()
    assert [candidate["worker"] for candidate in receipt.document(1)["candidates"]] == ["worker-1", "worker-0"]
    assert len(receipt.document()["candidates"]) == len([*map(Candidate._make, receipt.candidate_fields)])


def test_the_newest_of_a_request_is_found_while_it_is_kept() -> None:
    receipts = Receipts(receipts_max=3)
    first, second = decided(request_id="a"), decided(request_id="a")
    for receipt in (first, second, decided(request_id="b")):
        receipts.add(receipt)
    assert receipts.find("a") is second
    for _ in range(2):
        receipts.add(decided(request_id="c"))
    assert receipts.find("a") is None


def test_tokens_are_counted_by_tier() -> None:
    metrics = GatewayMetrics()
    for _ in range(3):
        metrics.routed(decided())
    metrics.settle()
    metrics.settle()
    assert metrics.tier_tokens == [3 * 1872] * 3
    assert metrics.prompt_tokens == 3 * 1904

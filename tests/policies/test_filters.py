from policies.contract import Query
from policies.filters import in_time


def test_in_time_keeps_whose_queue_and_prefill_end_soon_enough_and_never_refuses(fleet) -> None:
    workers = fleet("abc")
    workers.busy("a", 1, prefill_seconds=5.0)
    workers.busy("b", 1, prefill_seconds=0.4)
    # `c` is idle, but computes what `b` has cached.
    workers.matched = {"b": 19_200}
    query = Query(prompt_tokens=20_000)
    views = workers.snapshot().workers
    prefill = {
        view.name: view.prefill.prefill_seconds(20_000 - view.matched_tokens, view.matched_tokens) for view in views
    }
    assert prefill["c"] > 0.4 + prefill["b"]

    def kept(seconds: float) -> list[str]:
        return [view.name for view in in_time(query, views, 0.0, seconds)]

    assert kept(0.4 + prefill["b"] + 0.01) == ["b"]
    assert kept(prefill["c"] + 0.01) == ["b", "c"]
    assert kept(100.0) == ["a", "b", "c"]
    assert kept(0.3) == ["a", "b", "c"]

import pytest

from policies.state.predictions import PredictedInsertions

A, B = ("a", 0), ("b", 0)


def test_a_sibling_sees_what_its_brother_will_store(store, chain):
    predicted = PredictedInsertions(store)
    predicted.predict("r1", A, chain("system"), 0.0)
    assert predicted.depths(chain("systematic"), 1.0) == {A: 6}
    assert predicted.depths(chain("other"), 1.0) == {}


def test_expiry_is_exact_and_in_order(store, chain):
    predicted = PredictedInsertions(store, ttl_seconds=30.0)
    predicted.predict("r1", A, chain("one"), 0.0)
    predicted.predict("r2", B, chain("one"), 10.0)
    assert predicted.depths(chain("one"), 29.999) == {A: 3, B: 3}
    assert predicted.depths(chain("one"), 30.0) == {B: 3}
    assert predicted.depths(chain("one"), 40.0) == {}
    assert (predicted.expired, len(predicted), store.counts) == (2, 0, {})


def test_overlapping_predictions_are_independent(store, chain):
    predicted = PredictedInsertions(store)
    predicted.predict("r1", A, chain("abc"), 0.0)
    predicted.predict("r2", A, chain("abcdef"), 0.0)
    predicted.cancel("r2")
    assert predicted.depths(chain("abcdef"), 1.0) == {A: 3}
    predicted.cancel("r1")
    assert store.counts == {}


def test_confirmed_or_cancelled_predictions_are_withdrawn_once(store, chain):
    predicted = PredictedInsertions(store)
    predicted.predict("r1", A, chain("abc"), 0.0)
    predicted.predict("r2", B, chain("abc"), 0.0)
    for _ in range(2):
        predicted.confirm("r1")
        predicted.cancel("r2")
    predicted.cancel("unknown")
    assert repr(predicted) == "PredictedInsertions(0 pending, 1 confirmed, 1 cancelled, 0 expired)"
    assert (store.counts, store.unknown_removals) == ({}, 0)


def test_a_retry_moves_the_prediction(store, chain):
    predicted = PredictedInsertions(store)
    predicted.predict("r", A, chain("abc"), 0.0)
    predicted.predict("r", B, chain("abc"), 1.0)
    assert predicted.depths(chain("abc"), 1.0) == {B: 3}
    assert predicted.depths(chain("abc"), 30.5) == {B: 3}


def test_a_worker_that_restarts_takes_its_predictions_with_it(store, chain):
    predicted = PredictedInsertions(store)
    predicted.predict("r1", A, chain("abc"), 0.0)
    predicted.predict("r2", B, chain("abc"), 0.0)
    predicted.forget(A)
    predicted.predict("r3", A, chain("ab"), 1.0)
    assert predicted.depths(chain("abc"), 1.0) == {A: 2, B: 3}
    predicted.expire(100.0)
    assert (store.counts, store.unknown_removals) == ({}, 0)


def test_bounded_oldest_first(store, chain):
    predicted = PredictedInsertions(store, predictions_max=2)
    for number, text in enumerate(["one", "two", "six"]):
        predicted.predict(f"r{number}", A, chain(text), 0.0)
    assert (len(predicted), predicted.expired) == (2, 1)
    assert predicted.depths(chain("one"), 0.0) == {}
    assert predicted.depths(chain("two"), 0.0) == {A: 3}


def test_a_prompt_without_a_full_block_predicts_nothing(store):
    predicted = PredictedInsertions(store)
    predicted.predict("r", A, b"", 0.0)
    assert len(predicted) == 0


@pytest.mark.parametrize("arguments", [{"ttl_seconds": 0.0}, {"predictions_max": 0}])
def test_refuses_nonsense(store, arguments):
    with pytest.raises(ValueError, match="must be positive"):
        PredictedInsertions(store, **arguments)


def test_the_predictions_of_one_sender_are_withdrawn_together(store, chain):
    predicted = PredictedInsertions(store)
    for request in ("one/r1", "one/r2", "other/r1", "r1"):
        predicted.predict(request, A, chain("abc"), 0.0)
    predicted.cancel_all("one/")
    assert (len(predicted), predicted.cancelled) == (2, 2)
    predicted.cancel_all("other/")
    predicted.cancel("r1")
    assert store.counts == {}

import pytest

from policies.contract import Evidence
from policies.state.beliefs import Basis, Beliefs, Inquiry, blocks_by_holder

BLOCK = 16
A, B, C = ("a", 0), ("b", 0), ("c", 0)


@pytest.fixture
def beliefs(store):
    return Beliefs(type(store))


def seen(snapshot):
    return {
        (view.name, view.rank): (view.matched_tokens, view.confirmed_tokens, view.evidence) for view in snapshot.workers
    }


def test_each_basis_counts_its_own_sources(beliefs, chain):
    """One prompt of four blocks: two confirmed everywhere, three predicted, one sent before."""
    prompt = chain("abcd")
    workers = [beliefs.worker([(basis.name, 0)]) for basis in Basis]
    for worker, basis in zip(workers, Basis, strict=True):
        worker.basis = basis
        beliefs.predictions.predict(basis.name, (basis.name, 0), chain("abc"), 0.0)
        beliefs.history.record((basis.name, 0), chain("a"))
    confirmed = {(basis.name, 0): [2, 2, 2] for basis in Basis}
    inquiry = Inquiry(prompt, 4 * BLOCK + 1, BLOCK)
    assert seen(beliefs.answer(inquiry, workers, confirmed, 0.0)) == {
        ("EVENTS", 0): (3 * BLOCK, 2 * BLOCK, Evidence.PREDICTED),
        ("GUESSES", 0): (2 * BLOCK, 0, Evidence.HISTORY),
        ("HISTORY", 0): (BLOCK, 0, Evidence.HISTORY),
        ("NOTHING", 0): (0, 0, Evidence.NONE),
    }
    alone = beliefs.answer(inquiry._replace(history_only=True), workers, confirmed, 0.0)
    assert {matched for name, (matched, _, _) in seen(alone).items() if name[0] != "NOTHING"} == {BLOCK}
    assert seen(alone)["NOTHING", 0] == (0, 0, Evidence.NONE)


def test_a_whole_hit_computes_its_last_block_again(beliefs, chain):
    worker = beliefs.worker([A])
    for tokens, matched in ((4 * BLOCK, 3), (4 * BLOCK + 1, 4), (1, 0), (0, 0)):
        snapshot = beliefs.answer(Inquiry(chain("abcd"), tokens, BLOCK), [worker], {A: [1, 4, 4]}, 0.0)
        assert snapshot.workers[0].tier_tokens == (min(1, matched) * BLOCK, matched * BLOCK, matched * BLOCK)
        assert snapshot.workers[0].matched_tokens == matched * BLOCK


def test_larger_units_are_hit_whole(beliefs, chain):
    """Blocks of 16 in prompts, of 64 at one engine; another gives up one token only."""
    coarse, single = beliefs.worker([A]), beliefs.worker([B])
    coarse.unit_tokens, single.unit_tokens = 64, 1
    confirmed = {A: [7, 7, 7], B: [8, 8, 8]}
    snapshot = beliefs.answer(
        Inquiry(chain("abcdefgh"), 8 * BLOCK, BLOCK, units_differ=True), [coarse, single], confirmed, 0.0
    )
    assert [view.confirmed_tokens for view in snapshot.workers] == [64, 127]
    assert [view.matched_tokens for view in snapshot.workers] == [64, 127]


def test_predictions_of_inexact_kv_count_for_who_accepts_it(beliefs, chain):
    worker = beliefs.worker([A])
    beliefs.predictions.predict("exact", A, chain("a"), 0.0)
    beliefs.inexact_predictions.predict("inexact", A, chain("abc"), 0.0)
    inquiry = Inquiry(chain("abcd"), 4 * BLOCK, BLOCK)
    assert beliefs.answer(inquiry, [worker], {}, 0.0).workers[0].matched_tokens == BLOCK
    assert beliefs.answer(inquiry._replace(exact=False), [worker], {}, 0.0).workers[0].matched_tokens == 3 * BLOCK
    beliefs.cancel_predictions("inexact")
    assert beliefs.answer(inquiry._replace(exact=False), [worker], {}, 0.0).workers[0].matched_tokens == BLOCK


def test_a_life_that_has_ended_is_another_holder(beliefs, chain):
    """Depths of an earlier life are of no use to the present one."""
    worker = beliefs.worker([A], [("a", "second life")])
    confirmed = {("a", "first life"): [4, 4, 4], ("a", "second life"): [1, 1, 1]}
    snapshot = beliefs.answer(Inquiry(chain("abcd"), 4 * BLOCK, BLOCK), [worker], confirmed, 0.0)
    assert snapshot.workers[0].confirmed_tokens == BLOCK
    beliefs.predictions.predict("r", A, chain("abc"), 0.0)
    beliefs.history.record(A, chain("ab"))
    beliefs.forget_cache(A)
    worker.basis = Basis.HISTORY
    assert beliefs.answer(Inquiry(chain("abcd"), 64, BLOCK), [worker], {}, 0.0).workers[0].matched_tokens == 0


def test_ranks_are_views_of_their_own(beliefs, chain):
    worker = beliefs.worker([("w", 0), ("w", 1)])
    beliefs.accounting.dispatch("r", "w", 1, 0.0, 100, 0.5)
    snapshot = beliefs.answer(Inquiry(chain("ab"), 40, BLOCK), [worker], {("w", 1): [2, 2, 2]}, 0.0)
    assert [view.confirmed_tokens for view in snapshot.workers] == [0, 32]
    assert [view.load.inflight for view in snapshot.workers] == [0, 1]


def test_rates_are_per_worker_and_a_moment_old_at_most(beliefs, chain):
    worker, inquiry = beliefs.worker([A]), Inquiry(chain("a"), 16, BLOCK)
    beliefs.accounting.dispatch("r0", "a", 0, 0.0, 100, 0.5)
    assert beliefs.answer(inquiry, [worker], {}, 0.0).rates.arrivals_in_window == pytest.approx(1.0)
    beliefs.accounting.dispatch("r1", "a", 0, 0.01, 100, 0.5)
    assert beliefs.answer(inquiry, [worker], {}, 0.01).rates.arrivals_in_window == pytest.approx(1.0)
    assert beliefs.answer(inquiry, [worker], {}, 0.03).rates.arrivals_in_window == pytest.approx(2.0, rel=0.01)
    assert beliefs.answer(inquiry, [worker], {}, 0.03, 4).rates.arrivals_in_window == pytest.approx(0.5, rel=0.01)


def test_an_index_answer_by_holder():
    depths = {("a", 0, 0): 3, ("a", 2, 0): 9, ("a", 1, 2): 5, ("b", 1, 0): 4, ("c", 0, 3): 7}
    assert blocks_by_holder(depths) == {"a": [3, 3, 9], "b": [0, 4, 4]}
    assert blocks_by_holder(depths, 2) == {"a": [3, 5, 9], "b": [0, 4, 4]}

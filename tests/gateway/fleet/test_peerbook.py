"""Accounts of several gateways, joined by their messages alone: no store, no clock but the test's."""

from itertools import pairwise
from random import Random

import msgspec
import pytest

from cachecore.holders import Epoch, Worker, WorkerName
from cachecore.index.chains import ChainMultiset
from gateway.fleet.noted import NotedAccounting, NotedHistory, NotedPredictions, Outbox
from gateway.fleet.notes import CHAIN_BYTES_MAX, Dispatched, Finished, Leaving, Note, Wanted, encode
from gateway.fleet.peerbook import PeerBook

BLOCK = 16


def chain_of(blocks: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(blocks * BLOCK)


class Side:
    """One gateway: its noted state, its book of others, and messages made as `Peers` makes them."""

    def __init__(self, name: str, run: str = "run", workers: dict[str, int] | None = None) -> None:
        self.name, self.run, self.sequence = name, run, 0
        self.epochs = workers or {"w": 7, "v": 8}
        self.outbox = Outbox(self.holders_of)
        self.accounting = NotedAccounting(self.outbox)
        self.predictions = NotedPredictions(ChainMultiset(), self.outbox)
        self.history = NotedHistory(ChainMultiset(), self.outbox)
        self.book = PeerBook(name, self.accounting, self.predictions, self.history, self.holders_of)

    def holders_of(self, name: str) -> list[Worker]:
        epoch = self.epochs.get(name)
        return [] if epoch is None else [Worker(WorkerName(name), Epoch(epoch), rank) for rank in range(2)]

    def message(self, *extra: Note) -> bytes:
        notes = [*self.outbox.take(10_000), *extra]
        data = encode(self.name, self.run, self.sequence, len(self.outbox.requests), notes)
        self.sequence += 1
        return data

    def dispatch(self, request_id: str, worker: str = "w", now: float = 0.0, **changes) -> None:
        arguments = {"prompt_tokens": 1000, "prefill_seconds": 0.25, "output_tokens_max": 64, "prior_seconds": 0.2}
        self.accounting.dispatch(request_id, worker, 0, now, **(arguments | changes))

    def load(self, worker: str = "w") -> tuple[int, int, float, int, int]:
        account = self.accounting.account(worker)
        return (
            account.inflight,
            account.waiting,
            account.outstanding_prefill_seconds,
            account.inflight_tokens,
            account.running_context_tokens,
        )


NOTHING = (0, 0, 0.0, 0, 0)


@pytest.fixture
def sides() -> tuple[Side, Side]:
    a, b = Side("a"), Side("b")
    b.book.receive(a.message(), 0.0)
    a.book.receive(b.message(), 0.0)
    return a, b


def test_a_request_is_counted_by_both_from_its_note_to_its_end(sides):
    a, b = sides
    a.dispatch("r1")
    b.book.receive(a.message(), 0.01)
    assert b.load() == a.load() == (1, 1, 0.25, 1000, 0)
    assert b.accounting.account("w").wait_seconds(0.01) == pytest.approx(0.25)
    a.accounting.first_token("r1", 0.3)
    b.book.receive(a.message(), 0.31)
    assert b.load() == a.load() == (1, 0, 0.0, 1000, 1032)
    a.accounting.finish("r1", 1.0, 50, True)
    b.book.receive(a.message(), 1.01)
    assert b.load() == a.load() == NOTHING
    assert (len(b.accounting), b.accounting.unknown, b.book.counts().unknown_requests) == (0, 0, 0)


def test_what_was_heard_is_not_told_again(sides):
    a, b = sides
    a.dispatch("r1")
    a.predictions.predict("r1", ("w", 0), chain_of(4), 0.0)
    a.history.record(("w", 0), chain_of(4))
    a.accounting.first_token("r1", 0.1)
    a.predictions.cancel("r1")
    a.accounting.finish("r1", 0.2)
    assert len(a.outbox.notes) == 6
    b.book.receive(a.message(), 0.2)
    assert list(b.outbox.notes) == []
    assert b.outbox.requests == {}


def test_a_retry_moves_the_request(sides):
    a, b = sides
    a.dispatch("r1", "w")
    a.dispatch("r1", "v", prefill_seconds=0.5)
    b.book.receive(a.message(), 0.0)
    assert b.load("w") == NOTHING
    assert b.load("v") == (1, 1, 0.5, 1000, 0)


def test_equal_ids_of_two_gateways_are_two_requests(sides):
    a, b = sides
    a.dispatch("r1")
    b.dispatch("r1")
    b.book.receive(a.message(), 0.0)
    assert b.load()[0] == 2
    b.accounting.finish("r1", 1.0)
    assert b.load()[0] == 1


def test_predictions_and_history_are_shared_and_withdrawn(sides):
    a, b = sides
    chain = chain_of(8)
    a.predictions.predict("r1", ("w", 0), chain, 0.0)
    a.history.record(("v", 1), chain)
    b.book.receive(a.message(), 0.0)
    assert b.predictions.depths(chain, 0.0) == {("w", 0): 8}
    assert b.history.depths(chain) == {("v", 1): 8}
    a.predictions.cancel("r1")
    b.book.receive(a.message(), 0.1)
    assert b.predictions.depths(chain, 0.1) == {}


def test_a_prediction_lives_as_long_as_ones_own(sides):
    a, b = sides
    a.predictions.predict("r1", ("w", 0), chain_of(8), 0.0)
    b.book.receive(a.message(), 100.0)
    assert b.predictions.depths(chain_of(8), 129.9) == {("w", 0): 8}
    assert b.predictions.depths(chain_of(8), 130.0) == {}


def test_of_a_long_chain_the_beginning_is_told(sides):
    a, b = sides
    chain = chain_of(3000)
    a.predictions.predict("r1", ("w", 0), chain, 0.0)
    message = a.message()
    assert CHAIN_BYTES_MAX < len(message) < CHAIN_BYTES_MAX + 100
    b.book.receive(message, 0.0)
    assert b.predictions.depths(chain, 0.0) == {("w", 0): 1024}
    assert a.predictions.depths(chain, 0.0) == {("w", 0): 3000}


def test_numbers_that_clients_and_workers_made_up_do_not_spoil_a_message(sides):
    a, b = sides
    a.dispatch("r1", output_tokens_max=10**30)
    a.dispatch("r2", output_tokens_max=-4)
    a.accounting.finish("r2", 0.5, 10**30, True)
    b.book.receive(a.message(), 0.0)
    assert b.book.counts().malformed == 0
    assert b.load()[0] == 1


# What is learned


def test_the_means_are_the_fleets_and_the_samples_are_the_owners(sides):
    a, b = sides
    for number in range(3):
        a.dispatch(f"r{number}", now=number, in_one_piece=True)
        b.book.receive(a.message(), number)
        sample = a.accounting.finish(f"r{number}", number + 0.5, 16, True)
        assert sample is not None
        assert sample.output_tokens == 16
        b.book.receive(a.message(), number + 0.5)
    assert b.accounting.output_tokens_mean == a.accounting.output_tokens_mean < 256
    assert b.accounting.slot_seconds_mean == a.accounting.slot_seconds_mean == 0.5
    assert b.accounting.account("w").slot_seconds == 0.5


def test_a_stretch_of_prefill_counts_everyones_and_teaches_whoever_saw_its_end(sides):
    a, b = sides
    a.dispatch("r1", prior_seconds=0.2)
    b.dispatch("r2", prior_seconds=0.1)
    b.book.receive(a.message(), 0.0)
    a.book.receive(b.message(), 0.0)
    assert a.accounting.first_token("r1", 0.4) is None
    b.book.receive(a.message(), 0.4)
    sample = b.accounting.first_token("r2", 0.6)
    assert sample is not None
    assert (sample.requests, sample.prior_seconds, sample.observed_seconds) == pytest.approx((2, 0.3, 0.6))


def test_a_listed_request_teaches_how_long_it_held_its_slot_and_nothing_else():
    a, b = Side("a"), Side("b")
    a.dispatch("r1", now=0.0, in_one_piece=True)
    a.message()
    b.book.receive(a.message(a.accounting.listed(4.0)), 104.0)
    a.accounting.finish("r1", 5.0, 16, True)
    b.book.receive(a.message(), 105.0)
    assert b.accounting.slot_seconds_mean == pytest.approx(5.0)
    assert b.load() == NOTHING


# Lives of workers


def test_notes_about_another_life_are_counted_and_set_aside(sides):
    a, b = sides
    a.epochs["w"] = 9
    a.dispatch("r1")
    a.predictions.predict("r1", ("w", 0), chain_of(4), 0.0)
    a.history.record(("w", 0), chain_of(4))
    a.dispatch("r2", "unheard-of")
    b.book.receive(a.message(), 0.0)
    assert b.book.counts().strange_lives == 4
    assert b.load() == NOTHING
    assert b.predictions.depths(chain_of(4), 0.0) == {}
    assert [(view.requests, view.set_aside, view.complete) for view in b.book.view(0.0)] == [(2, 2, True)]
    a.accounting.finish("r1", 1.0)
    a.accounting.finish("r2", 1.0)
    b.book.receive(a.message(), 1.0)
    assert (len(b.accounting), b.accounting.unknown, b.book.counts().unknown_requests) == (0, 0, 0)


def test_a_rank_that_the_worker_does_not_have_is_a_strange_life(sides):
    a, b = sides
    note = Dispatched("r1", "w", 7, 2, 10, 0.1, 0, None, False)
    b.book.receive(a.message(note), 0.0)
    assert b.book.counts().strange_lives == 1
    assert [account.rank for account in b.accounting.accounts()] == []


def test_what_was_set_aside_counts_once_its_life_begins_here(sides):
    a, b = sides
    a.epochs["w"] = 9
    a.dispatch("r1", prefill_seconds=4.0)
    a.dispatch("r2", prefill_seconds=4.0)
    a.accounting.first_token("r1", 0.5)
    b.book.receive(a.message(), 10.0)
    b.book.expire(10.2)
    assert b.load() == NOTHING
    b.epochs["w"] = 9
    b.book.expire(11.0)
    assert b.load()[:4] == (2, 1, 4.0, 2000)
    assert b.accounting.account("w").wait_seconds(11.0) == pytest.approx(3.0)
    for request in ("r1", "r2"):
        a.accounting.finish(request, 2.0, 5, True)
    b.book.receive(a.message(), 12.0)
    assert b.load() == NOTHING


def test_a_request_retried_on_a_life_unknown_here_leaves_the_worker_it_was_on(sides):
    a, b = sides
    a.dispatch("r1", "w")
    b.book.receive(a.message(), 0.0)
    a.dispatch("r1", "elsewhere")
    b.book.receive(a.message(), 0.1)
    assert b.load("w") == NOTHING
    assert b.book.view(0.1)[0].requests == 1


# Gateways that come, go and lose messages


def test_a_silent_gateway_has_nothing_under_way(sides):
    a, b = sides
    a.dispatch("r1")
    a.predictions.predict("r1", ("w", 0), chain_of(4), 0.0)
    b.dispatch("own")
    b.predictions.predict("own", ("v", 0), chain_of(4), 0.0)
    b.book.receive(a.message(), 1.0)
    b.book.expire(3.9)
    assert b.load()[0] == 2
    b.book.expire(4.0)
    assert b.load()[0] == 1
    assert b.predictions.depths(chain_of(4), 4.0) == {("v", 0): 4}
    assert (b.book.alive(), b.book.counts().silenced) == ([], 1)


def test_a_restarted_gateway_has_nothing_under_way(sides):
    a, b = sides
    a.dispatch("r1")
    b.book.receive(a.message(), 1.0)
    again = Side("a", run="another run")
    again.dispatch("r1", "v")
    b.book.receive(again.message(Wanted()), 1.1)
    assert (b.load("w"), b.load("v")[0]) == (NOTHING, 1)
    assert b.book.list_wanted


def test_a_gateway_that_leaves_is_forgotten_at_once(sides):
    a, b = sides
    a.dispatch("r1")
    b.book.receive(a.message(Leaving()), 1.0)
    assert (b.load(), b.book.alive()) == (NOTHING, [])


def test_a_lost_message_is_noticed_and_its_list_sets_all_right(sides):
    a, b = sides
    for number in range(4):
        a.dispatch(f"r{number}", now=0.0)
    b.book.receive(a.message(), 0.0)
    a.accounting.finish("r0", 0.1)
    a.accounting.first_token("r1", 0.1)
    a.dispatch("r2", "v", now=0.1)
    a.dispatch("r4", now=0.1)
    a.message()  # lost
    b.book.receive(a.message(), 0.2)
    assert (b.book.counts().gaps, b.book.incomplete) == (1, True)
    assert b.book.asks(0.2) == [Wanted("a")]
    assert b.book.asks(0.3) == []  # once a second
    a.book.receive(b.message(Wanted("a")), 0.3)
    assert a.book.list_wanted
    b.book.receive(a.message(a.accounting.listed(0.4)), 0.4)
    assert not b.book.incomplete
    assert (b.load("w"), b.load("v")) == (a.load("w"), a.load("v"))
    assert b.load("w")[0] == 3


def test_a_wrong_count_of_requests_is_noticed_without_a_gap(sides):
    a, b = sides
    a.dispatch("r1")
    a.outbox.notes.clear()
    b.book.receive(a.message(), 0.0)
    counts = b.book.counts()
    assert (counts.gaps, counts.differences, b.book.incomplete) == (0, 1, True)


def test_whoever_is_heard_in_the_middle_is_asked_for_its_list():
    a, b = Side("a"), Side("b")
    a.dispatch("r1")
    a.message()
    b.book.receive(a.message(), 0.0)
    assert b.book.asks(0.0) == [Wanted("a")]
    b.book.receive(a.message(a.accounting.listed(0.1)), 0.1)
    assert (b.book.incomplete, b.load()[0]) == (False, 1)
    assert b.book.asks(5.0) == []


def test_a_message_read_twice_counts_once(sides):
    a, b = sides
    a.dispatch("r1")
    message = a.message()
    for _ in range(2):
        b.book.receive(message, 0.0)
    assert (b.load()[0], b.book.counts().repeated) == (1, 1)


def test_a_list_asked_of_somebody_else_is_not_ours_to_send(sides):
    a, b = sides
    b.book.receive(a.message(Wanted("c")), 0.0)
    assert not b.book.list_wanted


def test_our_own_id_in_anothers_message_is_refused(sides):
    _, b = sides
    namesake = Side("b", run="another run")
    namesake.dispatch("r1")
    b.book.receive(namesake.message(), 0.0)
    assert (b.book.namesakes, b.load()) == (1, NOTHING)


# Hostile messages


def test_noise_is_counted_and_changes_nothing(sides):
    a, b = sides
    random = Random(3)
    a.dispatch("r1")
    sound = a.message()
    for _ in range(300):
        noise = bytearray(sound)
        noise[random.randrange(8)] ^= 1 << random.randrange(8)
        del noise[random.randrange(8, len(noise)) :]
        b.book.receive(bytes(noise), 0.0)
    assert b.book.counts().malformed == 300
    assert b.load() == NOTHING


def test_one_note_out_of_bounds_spoils_its_message_and_the_next_one_shows_it(sides):
    a, b = sides
    bad = msgspec.msgpack.encode(["a", "run", 1, 1, 0, [["d", "r", "w", 7, 0, -1, 0.1, 0, None, False]]])
    b.book.receive(bad, 0.0)
    a.dispatch("r1")
    a.message()
    b.book.receive(a.message(), 0.1)
    assert (b.book.counts().malformed, b.book.counts().gaps, b.book.incomplete) == (1, 1, True)


def test_gateways_and_requests_are_bounded(monkeypatch):
    monkeypatch.setattr("gateway.fleet.peerbook.PEERS_MAX", 3)
    monkeypatch.setattr("gateway.fleet.peerbook.PEER_REQUESTS_MAX", 5)
    book = Side("b").book
    for number in range(10):
        flood = Side(f"a{number}")
        for request in range(7):
            flood.dispatch(f"r{request}", "w" if request % 2 else "unknown")
        book.receive(flood.message(), 0.0)
    assert [view.requests for view in book.view(0.0)] == [5, 5, 5]
    assert book.counts().refused == 3 * 2 + 7


def test_notes_out_of_any_order_never_leave_anything_behind():
    """Whatever subset of messages arrives, accounts are exact after a list and empty after the end."""
    random = Random(11)
    a, b = Side("a"), Side("b")
    under_way: list[str] = []
    for step in range(3000):
        now = step * 0.01
        action = random.random()
        if action < 0.4:
            under_way.append(f"r{step}")
            a.dispatch(f"r{step}", random.choice("wv"), now, in_one_piece=random.random() < 0.3)
        elif action < 0.5 and under_way:
            a.dispatch(random.choice(under_way), random.choice(["w", "v", "unknown"]), now)
        elif action < 0.7 and under_way:
            a.accounting.first_token(random.choice(under_way), now)
        elif under_way:
            request = under_way.pop(random.randrange(len(under_way)))
            a.accounting.finish(request, now, random.choice([0, 9]), random.random() < 0.8)
        if random.random() < 0.3:
            message = a.message(*([a.accounting.listed(now)] if random.random() < 0.05 else []))
            if random.random() < 0.8:
                b.book.receive(message, now)
    b.book.receive(a.message(a.accounting.listed(30.0)), 30.0)
    for worker in "wv":
        assert b.load(worker)[0] == a.load(worker)[0]
        assert b.load(worker)[3] == a.load(worker)[3]
    for request in under_way:
        a.accounting.finish(request, 31.0)
    b.book.receive(a.message(), 31.0)
    assert [b.load(worker) for worker in "wv"] == [a.load(worker) for worker in "wv"] == [NOTHING, NOTHING]
    assert len(b.accounting) == len(a.accounting) == 0
    assert b.accounting.unknown == 0


# The outbox


def test_the_outbox_keeps_the_latest_and_says_when_it_is_full():
    outbox = Outbox(lambda name: (), notes_max=3)
    notes = [Finished(f"r{number}", 0, True) for number in range(5)]
    for note in notes[:2]:
        outbox.add(note)
    assert not outbox.full
    for note in notes[2:]:
        outbox.add(note)
    assert outbox.full
    assert (outbox.take(2), outbox.take(9)) == (notes[2:4], notes[4:])


def test_only_a_sleeping_sender_is_roused_and_once():
    roused: list[int] = []
    outbox = Outbox(lambda name: ())
    outbox.rouse = lambda: roused.append(len(outbox.notes))
    outbox.add(Finished("r1", 0, True))
    outbox.idle = True
    outbox.add(Finished("r2", 0, True))
    outbox.add(Finished("r3", 0, True))
    assert roused == [2]


def test_a_list_leaves_out_what_the_accounting_has_dropped():
    side = Side("a")
    side.accounting.requests_max = 2
    for number in range(3):
        side.dispatch(f"r{number}", now=float(number))
    listed = side.accounting.listed(10.0)
    assert [(note.request_id, note.age_seconds) for note in listed.requests] == [("r1", 9.0), ("r2", 8.0)]
    assert listed.complete
    assert list(side.outbox.requests) == ["r1", "r2"]
    assert [first < second for first, second in pairwise(note.request_id for note in listed.requests)] == [True]

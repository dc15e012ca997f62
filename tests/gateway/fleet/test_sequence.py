"""The order of event streams, by scripts."""

import pytest

from gateway.fleet.sequence import Apply, Replay, SequenceTracker, Void, VoidReason

GAP, RESTART = Void(VoidReason.GAP), Void(VoidReason.RESTART)


def batch(sequence, life=""):
    return Apply(sequence, f"{sequence}{life}".encode())


def started(first_live=0):
    """A tracker whose first replay brought nothing, and which has applied live batches below `first_live`."""
    tracker = SequenceTracker()
    assert tracker.start() == [Replay(0)]
    assert tracker.replay_ended(complete=True) == []
    for sequence in range(first_live):
        assert tracker.live(*batch(sequence)) == [batch(sequence)]
    return tracker


def test_live_batches_are_applied_as_they_come():
    assert started(5).expected == 5


def test_what_was_announced_before_we_came_is_replayed_first():
    tracker = SequenceTracker()
    tracker.start()
    assert tracker.live(*batch(3)) == []
    assert [tracker.replayed(*batch(sequence)) for sequence in range(5)] == [[batch(n)] for n in range(5)]
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(4)) == []
    assert tracker.live(*batch(5)) == [batch(5)]


def test_a_history_that_starts_in_the_middle_is_taken_as_it_comes():
    tracker = SequenceTracker()
    tracker.start()
    assert tracker.replayed(*batch(700)) == [batch(700)]
    assert tracker.replayed(*batch(701)) == [batch(701)]
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(702)) == [batch(702)]


@pytest.mark.parametrize("first", [0, 3])
def test_what_a_replay_leaves_out_is_asked_for_as_long_as_it_begins_with_what_was_asked_for(first):
    tracker = started(first) if first else SequenceTracker()
    tracker.live(*batch(19)) if first else tracker.start()
    assert tracker.replayed(*batch(first)) == [batch(first)]
    assert tracker.replayed(*batch(first + 4)) == [Replay(first + 1)]
    assert [tracker.replayed(*batch(first + n)) for n in (1, 2)] == [[batch(first + n)] for n in (1, 2)]
    assert tracker.replayed(*batch(first + 5)) == [Replay(first + 3)]
    assert tracker.replayed(*batch(first + 4)) == [GAP, batch(first + 4)]
    assert tracker.replayed(*batch(first + 6)) == [Replay(first + 5)]


def test_a_replay_that_breaks_off_before_what_an_earlier_one_has_shown_is_a_gap():
    tracker = SequenceTracker()
    tracker.start()
    tracker.replayed(*batch(0))
    assert tracker.replayed(*batch(5)) == [Replay(1)]
    assert tracker.replayed(*batch(1)) == [batch(1)]
    assert tracker.replay_ended(complete=True) == [GAP]
    assert tracker.live(*batch(5)) == [batch(5)]


def test_without_any_replay_the_stream_starts_where_we_came():
    tracker = SequenceTracker()
    tracker.start()
    assert tracker.replay_ended(complete=False) == []
    assert tracker.live(*batch(40)) == [Replay(0)]
    assert tracker.replay_ended(complete=False) == [batch(40)]
    assert tracker.live(*batch(41)) == [batch(41)]


def test_a_worker_that_comes_up_later_starts_at_zero():
    tracker = SequenceTracker()
    tracker.start()
    tracker.replay_ended(complete=False)
    assert tracker.live(*batch(0)) == [batch(0)]


def test_a_gap_is_filled_by_replay():
    """E7, the missing ones available."""
    tracker = started(3)
    assert tracker.live(*batch(5)) == [Replay(3)]
    assert tracker.live(*batch(6)) == []
    assert tracker.replayed(*batch(3)) == [batch(3)]
    assert tracker.replayed(*batch(4)) == [batch(4)]
    assert tracker.replayed(*batch(5)) == [batch(5)]
    assert tracker.replay_ended(complete=True) == [batch(6)]
    assert [tracker.live(*batch(n)) for n in range(7, 107)] == [[batch(n)] for n in range(7, 107)]


@pytest.mark.parametrize("complete", [True, False])
def test_a_gap_that_nobody_fills_voids_the_holder(complete):
    """E7, the missing ones lost."""
    tracker = started(3)
    assert tracker.live(*batch(5)) == [Replay(3)]
    assert tracker.live(*batch(6)) == []
    assert tracker.replay_ended(complete) == [GAP, batch(5), batch(6)]
    assert tracker.live(*batch(7)) == [batch(7)]


def test_a_replay_that_begins_too_late_voids_the_holder_once():
    tracker = started(3)
    tracker.live(*batch(9))
    assert tracker.replayed(*batch(6)) == [GAP, batch(6)]
    assert tracker.replayed(*batch(7)) == [batch(7)]
    assert tracker.replayed(*batch(8)) == [batch(8)]
    assert tracker.replay_ended(complete=True) == [batch(9)]


def test_a_replay_that_breaks_off_voids_the_holder():
    tracker = started(3)
    tracker.live(*batch(9))
    assert tracker.replayed(*batch(3)) == [batch(3)]
    assert tracker.replay_ended(complete=False) == [GAP, batch(9)]


def test_live_removals_wait_for_the_replayed_stores_before_them():
    """E9: live 10 removes what the delayed 5 stores."""
    tracker = started(5)
    order = tracker.live(*batch(10))
    for sequence in range(5, 10):
        order += tracker.replayed(*batch(sequence))
    order += tracker.replay_ended(complete=True)
    assert order == [Replay(5), *(batch(n) for n in range(5, 11))]


def test_a_second_gap_while_replaying_is_asked_for_next():
    tracker = started(1)
    tracker.live(*batch(3))
    tracker.live(*batch(6))
    tracker.live(*batch(7))
    for sequence in (1, 2, 3):
        tracker.replayed(*batch(sequence))
    assert tracker.replay_ended(complete=True) == [Replay(4)]
    assert tracker.replayed(*batch(4)) + tracker.replayed(*batch(5)) == [batch(4), batch(5)]
    assert tracker.replay_ended(complete=True) == [batch(6), batch(7)]


def test_waiting_is_bounded_and_what_was_dropped_is_asked_for():
    tracker = SequenceTracker(waiting_max=2)
    tracker.start()
    for sequence in range(5):
        tracker.live(*batch(sequence))
    assert tracker.replay_ended(complete=True) == [batch(0), batch(1)]
    assert tracker.live(*batch(5)) == [Replay(2)]


def test_a_restart_voids_the_holder_and_starts_over():
    """E8: 98, 99, 100, then 0, 1."""
    tracker = started(101)
    assert tracker.live(*batch(0, "b")) == [RESTART, batch(0, "b")]
    assert tracker.live(*batch(1, "b")) == [batch(1, "b")]


def test_a_restart_whose_beginning_was_missed_is_replayed():
    tracker = started(101)
    assert tracker.live(*batch(2, "b")) == [RESTART, Replay(0)]
    assert [tracker.replayed(*batch(n, "b")) for n in (0, 1, 2)] == [[batch(n, "b")] for n in (0, 1, 2)]
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(3, "b")) == [batch(3, "b")]


def test_a_restart_during_a_replay_forgets_what_waited():
    tracker = started(3)
    tracker.live(*batch(9))
    assert tracker.live(*batch(0, "b")) == [RESTART, batch(0, "b")]
    assert tracker.replayed(*batch(3)) == []
    assert tracker.replay_ended(complete=False) == []
    assert tracker.live(*batch(1, "b")) == [batch(1, "b")]


def test_a_restart_at_the_same_number_is_told_by_its_content():
    tracker = started(1)
    assert tracker.live(*batch(0)) == []
    assert tracker.live(*batch(0, "b")) == [RESTART, batch(0, "b")]


def test_a_batch_that_comes_twice_is_applied_once():
    """E8: redelivery of 100."""
    tracker = started(101)
    assert tracker.live(*batch(100)) == []
    assert tracker.live(*batch(101)) == [batch(101)]


def test_live_copies_of_what_a_replay_brought_are_no_restart():
    tracker = started(2)
    tracker.live(*batch(3))
    for sequence in range(2, 20):
        tracker.replayed(*batch(sequence))
    tracker.replay_ended(complete=True)
    assert [tracker.live(*batch(n)) for n in range(4, 20)] == [[]] * 16
    assert tracker.live(*batch(20)) == [batch(20)]


def test_numbers_pass_two_to_the_sixty_third():
    tracker, start = started(), 2**63 - 1
    assert tracker.live(*batch(start)) == [Replay(0)]
    tracker.replay_ended(complete=True)
    assert tracker.live(*batch(start + 1)) == [batch(start + 1)]


def test_answers_to_no_question_are_ignored():
    tracker = started(3)
    assert tracker.replayed(*batch(3)) == []
    assert tracker.replay_ended(complete=True) == []
    assert repr(tracker) == "SequenceTracker(expected=3, replaying=False, waiting=0)"


# ---- one after another -----------------------------------------------------------------------------------------------


def resumed(cursor):
    """A tracker that goes on after batch `cursor` and has asked for it and what came later."""
    tracker = SequenceTracker()
    assert tracker.resume(cursor) == [Replay(cursor)]
    return tracker


def test_whoever_goes_on_applies_what_came_after():
    tracker = resumed(7)
    assert tracker.replayed(*batch(7)) == []
    assert [tracker.replayed(*batch(n)) for n in (8, 9)] == [[batch(8)], [batch(9)]]
    assert tracker.live(*batch(9)) == []
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(10)) == [batch(10)]


def test_nothing_new_is_nothing_void():
    tracker = resumed(7)
    assert tracker.replayed(*batch(7)) == []
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(8)) == [batch(8)]


def test_the_last_batch_may_have_left_the_replay_buffer_if_the_next_has_not():
    tracker = resumed(7)
    assert tracker.replayed(*batch(8)) == [batch(8)]


def test_a_replay_that_does_not_reach_back_is_a_gap():
    tracker = resumed(7)
    assert tracker.replayed(*batch(9)) == [GAP, batch(9)]
    assert tracker.replayed(*batch(10)) == [batch(10)]
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(11)) == [batch(11)]


def test_live_batches_wait_for_what_came_before_them():
    tracker = resumed(7)
    assert tracker.live(*batch(10)) == []
    order = [action for n in (7, 8, 9, 10) for action in tracker.replayed(*batch(n))]
    assert order + tracker.replay_ended(complete=True) == [batch(8), batch(9), batch(10)]


def test_what_the_replay_missed_is_asked_for_again():
    tracker = resumed(7)
    tracker.live(*batch(10))
    assert tracker.replayed(*batch(7)) == []
    assert tracker.replay_ended(complete=True) == [Replay(8)]
    assert [tracker.replayed(*batch(n)) for n in (8, 9)] == [[batch(8)], [batch(9)]]
    assert tracker.replay_ended(complete=True) == [batch(10)]


def test_a_replay_that_fails_voids_nothing_until_a_gap_is_seen():
    tracker = resumed(7)
    assert tracker.replay_ended(complete=False) == []
    assert tracker.live(*batch(8)) == [batch(8)]
    tracker = resumed(7)
    tracker.replay_ended(complete=False)
    assert tracker.live(*batch(9)) == [Replay(8)]
    assert tracker.replay_ended(complete=False) == [GAP, batch(9)]


@pytest.mark.parametrize("first", [7, 3, 0])
@pytest.mark.parametrize("replayed_before", [True, False])
def test_a_live_number_that_was_applied_by_another_means_a_new_publisher(first, replayed_before):
    tracker = resumed(7)
    if replayed_before:
        tracker.replayed(*batch(7))
        tracker.replay_ended(complete=True)
    again = [batch(first, "b")] if first == 0 else [Replay(0)]
    assert tracker.live(*batch(first, "b")) == [RESTART, *again]


def test_a_publisher_that_cannot_show_the_last_batch_or_a_later_one_is_new():
    tracker = resumed(7)
    assert tracker.replay_ended(complete=True) == [RESTART, Replay(0)]
    assert tracker.replayed(*batch(0, "b")) == [batch(0, "b")]
    assert tracker.replay_ended(complete=True) == []
    assert tracker.live(*batch(1, "b")) == [batch(1, "b")]


def test_a_live_batch_is_as_good_as_a_replayed_one_to_show_who_publishes():
    tracker = resumed(7)
    assert tracker.live(*batch(8)) == []
    assert tracker.replay_ended(complete=True) == [batch(8)]


# ---- doubt -----------------------------------------------------------------------------------------------------------

DOUBTED = Void(VoidReason.DOUBT)


def test_what_is_doubted_is_read_again_from_the_beginning():
    tracker = SequenceTracker()
    for sequence in range(3):
        tracker.live(sequence, b"%d" % sequence)
    tracker.replay_ended(complete=True)
    assert tracker.doubt(reread=True) == [DOUBTED, Replay(0)]
    assert tracker.live(3, b"3") == []
    assert tracker.replayed(1, b"1") == [Apply(1, b"1")], "as far back as the publisher goes"
    assert tracker.replayed(2, b"2") == [Apply(2, b"2")]
    assert tracker.replay_ended(complete=True) == [Apply(3, b"3")]


def test_where_nobody_replays_a_doubted_stream_goes_on():
    tracker = SequenceTracker()
    tracker.live(4, b"4")
    tracker.replay_ended(complete=False)
    assert tracker.doubt(reread=True) == [DOUBTED, Replay(0)]
    assert tracker.replay_ended(complete=False) == []
    assert tracker.live(5, b"5") == [Replay(0)]
    assert tracker.replay_ended(complete=False) == [Apply(5, b"5")]


def test_what_is_doubted_may_be_forgotten_alone():
    tracker = SequenceTracker()
    tracker.start()
    tracker.replay_ended(complete=True)
    tracker.live(0, b"0")
    assert tracker.doubt(reread=False) == [DOUBTED]
    assert tracker.live(1, b"1") == [Apply(1, b"1")]

import pytest

from policies.state.leases import Leases

A, B, C = ("a", 0), ("b", 0), ("c", 0)


def test_two_compute_a_block_and_no_third():
    leases = Leases()
    assert leases.acquire(b"block", "r1", A, 2.0, 0.0)
    assert leases.acquire(b"block", "r2", B, 3.0, 1.0)
    assert not leases.acquire(b"block", "r3", C, 3.0, 1.0)
    assert leases.of(b"block", 1.0) == ((b"block", "r1", A, 2.0), (b"block", "r2", B, 3.0))
    assert leases.of(b"other", 1.0) == ()


def test_a_released_lease_is_free():
    leases = Leases(block_leases_max=1)
    leases.acquire(b"x", "r1", A, 1.0, 0.0)
    leases.release("r1")
    leases.release("r1")
    assert leases.acquire(b"x", "r2", B, 1.0, 0.5)
    leases.release("r2")
    assert (len(leases), leases.of(b"x", 0.5)) == (0, ())


def test_who_is_late_is_believed_for_a_while():
    leases = Leases(grace_seconds=2.0)
    leases.acquire(b"x", "r1", A, 1.0, 0.0)
    leases.acquire(b"x", "r2", B, 1.5, 0.0)
    assert len(leases.of(b"x", 2.9)) == 2
    assert [lease.key for lease in leases.of(b"x", 3.0)] == [B]
    assert leases.acquire(b"x", "r3", C, 4.0, 3.0)
    assert leases.of(b"x", 7.0) == ()
    assert len(leases) == 0


def test_one_lease_a_request():
    leases = Leases()
    leases.acquire(b"x", "r1", A, 1.0, 0.0)
    leases.acquire(b"y", "r1", B, 1.0, 0.0)
    assert leases.of(b"x", 0.0) == ()
    assert [lease.key for lease in leases.of(b"y", 0.0)] == [B]
    assert len(leases) == 1


def test_nobody_waits_for_a_worker_that_is_gone():
    leases = Leases()
    leases.acquire(b"x", "r1", A, 1.0, 0.0)
    leases.acquire(b"y", "r2", B, 1.0, 0.0)
    leases.forget(A)
    assert leases.of(b"x", 0.0) == ()
    assert [lease.request_id for lease in leases.of(b"y", 0.0)] == ["r2"]


def test_bounded_oldest_first():
    leases = Leases(leases_max=3)
    for number in range(5):
        leases.acquire(b"%d" % number, f"r{number}", A, 1.0, 0.0)
    assert [bool(leases.of(b"%d" % number, 0.0)) for number in range(5)] == [False, False, True, True, True]


@pytest.mark.parametrize("arguments", [{"grace_seconds": 0.0}, {"leases_max": 0}, {"block_leases_max": 0}])
def test_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="must be positive"):
        Leases(**arguments)

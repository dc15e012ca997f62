import pytest

from policies.state.leases import PrefillLeases

A, B = ("a", 0), ("b", 0)


def test_the_first_asker_computes_and_the_others_learn_whom_to_wait_for():
    leases = PrefillLeases(ttl_seconds=2.0)
    mine = leases.acquire(b"block", "r1", A, 0.0)
    assert mine == (b"block", "r1", A, 2.0)
    assert leases.acquire(b"block", "r2", B, 1.0) is mine
    assert leases.holder(b"other", 1.0) is None


def test_a_released_or_expired_lease_is_free():
    leases = PrefillLeases(ttl_seconds=2.0)
    leases.acquire(b"x", "r1", A, 0.0)
    leases.release("r1")
    leases.release("r1")
    assert leases.acquire(b"x", "r2", B, 0.5).request_id == "r2"
    assert leases.holder(b"x", 2.4).request_id == "r2"
    assert leases.holder(b"x", 2.5) is None
    leases.release("r2")
    assert len(leases) == 0


def test_one_lease_a_request():
    leases = PrefillLeases()
    leases.acquire(b"x", "r1", A, 0.0)
    leases.acquire(b"y", "r1", B, 0.0)
    assert leases.holder(b"x", 0.0) is None
    assert leases.holder(b"y", 0.0).key == B
    assert len(leases) == 1


def test_nobody_waits_for_a_worker_that_is_gone():
    leases = PrefillLeases()
    leases.acquire(b"x", "r1", A, 0.0)
    leases.acquire(b"y", "r2", B, 0.0)
    leases.forget(A)
    assert leases.holder(b"x", 0.0) is None
    assert leases.holder(b"y", 0.0).request_id == "r2"


def test_bounded_oldest_first():
    leases = PrefillLeases(leases_max=3)
    for number in range(5):
        leases.acquire(b"%d" % number, f"r{number}", A, 0.0)
    assert [leases.holder(b"%d" % number, 0.0) is not None for number in range(5)] == [False, False, True, True, True]


@pytest.mark.parametrize("arguments", [{"ttl_seconds": 0.0}, {"leases_max": 0}])
def test_refuses_nonsense(arguments):
    with pytest.raises(ValueError, match="must be positive"):
        PrefillLeases(**arguments)

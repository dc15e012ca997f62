"""Rate limits by tenant and by key, as headers and refusals."""

import pytest

from cachecore.scope import TenantId
from gateway.config import RateLimitsConfig, RatesConfig
from gateway.errors import TooManyRequests
from gateway.limits import RateLimits, shown_duration
from gateway.tenants import Tenant
from policies.state.limits import Rates

ACME, GLOBEX = Tenant(TenantId("acme")), Tenant(TenantId("globex"))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limits_of(clock: Clock, **config: object) -> RateLimits:
    return RateLimits(RateLimitsConfig(**config), clock)  # type: ignore[arg-type]


def test_requests_beyond_the_limit_wait_for_as_long_as_they_are_told(clock: Clock) -> None:
    limits = limits_of(clock, requests_per_minute=60, burst_seconds=2)
    limits.admit(ACME)
    limits.admit(ACME)
    with pytest.raises(TooManyRequests) as caught:
        limits.admit(ACME)
    assert dict(caught.value.headers()) == {
        b"content-type": b"application/json",
        b"retry-after": b"1",
        b"x-ratelimit-limit-requests": b"2",
        b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"2s",
    }
    assert (caught.value.status, caught.value.code, caught.value.type) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    limits.admit(GLOBEX)
    clock.now += 1.0
    limits.admit(ACME)
    assert limits.refused == {("acme", "requests"): 1}


def test_tokens_count_with_prompt_and_answer(clock: Clock) -> None:
    limits = limits_of(clock, tokens_per_minute=6000, burst_seconds=10)
    limits.charge(ACME, 400)
    assert limits.header_lines(ACME) == (
        b"x-ratelimit-limit-tokens: 1000\r\nx-ratelimit-remaining-tokens: 600\r\nx-ratelimit-reset-tokens: 4s\r\n"
    )
    limits.said(ACME, 1600)  # more than there was: a debt
    with pytest.raises(TooManyRequests) as caught:
        limits.charge(ACME, 100)
    assert caught.value.retry_after_seconds == 11
    assert caught.value.message == "The limit on tokens per minute is reached; try again in 11s."
    clock.now += 11.0
    limits.charge(ACME, 100)


def test_what_never_fits_is_told_so_and_not_to_come_back(clock: Clock) -> None:
    limits = limits_of(clock, tokens_per_minute=6000, burst_seconds=10)
    with pytest.raises(TooManyRequests, match="larger than the limit on tokens") as caught:
        limits.charge(ACME, 1001)
    assert b"retry-after" not in dict(caught.value.headers())


def test_tenants_have_limits_of_their_own(clock: Clock) -> None:
    own = {"acme": RatesConfig(requests_per_minute=120, burst_seconds=1), "globex": RatesConfig()}
    limits = limits_of(clock, requests_per_minute=60, burst_seconds=1, tenants=own)
    for _ in range(2):
        limits.admit(ACME)
    with pytest.raises(TooManyRequests):
        limits.admit(ACME)
    for _ in range(50):  # named, and without any
        limits.admit(GLOBEX)
    assert limits.header_lines(GLOBEX) == b""


def test_a_key_has_limits_beside_its_tenants(clock: Clock) -> None:
    limits = limits_of(clock, requests_per_minute=60, burst_seconds=3)
    narrow = Tenant(TenantId("acme"), "0123456789ab", Rates(60.0, None, 1.0))
    limits.apply_keys([narrow, ACME])
    limits.admit(narrow)
    with pytest.raises(TooManyRequests):
        limits.admit(narrow)
    # What its key refused was not taken from the tenant.
    limits.admit(ACME)
    limits.admit(ACME)
    with pytest.raises(TooManyRequests):
        limits.admit(ACME)


def test_limits_are_replaced_while_they_hold(clock: Clock) -> None:
    limits = limits_of(clock)
    assert not limits.active
    limits.admit(ACME)
    limits.apply(RateLimitsConfig(requests_per_minute=60, burst_seconds=1))
    assert limits.active
    limits.admit(ACME)
    with pytest.raises(TooManyRequests):
        limits.admit(ACME)
    limits.apply(RateLimitsConfig())
    assert not limits.active
    limits.admit(ACME)


def test_gateways_count_together(clock: Clock) -> None:
    here, there = (limits_of(clock, requests_per_minute=60, burst_seconds=10) for _ in range(2))
    there.admit(ACME)
    here.hear("there", "run", there.told())
    for _ in range(7):
        there.admit(ACME)
    here.hear("there", "run", there.told())
    for _ in range(3):
        here.admit(ACME)
    with pytest.raises(TooManyRequests):
        here.admit(ACME)
    assert here.told() == {"acme": (3.0, 0.0)}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0ms"),
        (0.0201, "21ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (6.5, "6.5s"),
        (59.9991, "1m0s"),
        (59.499, "59.499s"),
        (90, "1m30s"),
        (119.5, "2m0s"),
        (3599.9, "1h0m0s"),
        (7205, "2h0m5s"),
    ],
)
def test_durations_as_openai_writes_them(seconds: float, shown: str) -> None:
    assert shown_duration(seconds) == shown

"""Plans as anybody could send them: what counts is carried out, and nothing is raised."""

import copy
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachecore.holders import Epoch, Pool, Worker, WorkerName
from cachecore.scope import Fidelity, Keyring, Salt
from cachecore.transfer.errors import Reason
from cachecore.transfer.plan import PARAMETER, PLANS_MAX, Grant, sign
from tests.workers.vllm.support import (
    KEYRING,
    OURS,
    PROMPT,
    RIVAL,
    SALT,
    SIZE,
    TENANT,
    FakeRequest,
    desk,
    naming_of,
    params,
    plan_of,
    planned,
    scheduler,
    signed,
)
from workers.guarded import guarded
from workers.vllm.names import RequestNames

GOOD = signed(plan_of())


def read(given: Any, *, salt: str = SALT, accepted: Fidelity = Fidelity.EXACT) -> tuple[int, Mapping[str, int]]:
    """How many pulls there are in it, and why others are none."""
    request = FakeRequest(cache_salt=salt, kv_transfer_params=given)
    names = RequestNames(naming_of(salt), request.all_token_ids, len(PROMPT))
    planned = desk()(request, names, accepted)
    return len(planned.pulls), Counter(reason.value for reason in planned.refused)


def test_a_plan_of_the_gateways_counts() -> None:
    assert read(params(GOOD)) == (1, {})
    assert read(params(signed(plan_of(0, 4)), signed(plan_of(4, 10)))) == (2, {})


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (signed(plan_of(), target=Worker(OURS.name, Epoch(8))), Reason.OTHER_TARGET),
        (signed(plan_of(), target=Worker(WorkerName("else"), OURS.epoch)), Reason.OTHER_TARGET),
        (signed(plan_of(), key_id=RIVAL), Reason.OTHER_TENANT),
        (signed(plan_of(), seconds=-1.0), Reason.EXPIRED),
        (signed(plan_of(source=OURS)), Reason.OTHER_SOURCE),
        (signed(plan_of(source=Pool("cold", 1))), Reason.UNREACHABLE),
        (signed(plan_of(codec="i8")), Reason.UNEXPECTED),
        (signed(plan_of(codec="lm3h")), Reason.INCOMPATIBLE),
        (signed(plan_of(prompt=[*reversed(PROMPT)])), Reason.UNEXPECTED),
        (signed(plan_of(prompt=PROMPT * 2, end=20)), Reason.UNEXPECTED),
        (signed(plan_of(target_position=SIZE)), Reason.UNEXPECTED),
        (signed(plan_of(source_position=SIZE, target_position=SIZE)), Reason.UNEXPECTED),
        ({**GOOD, "deadline_seconds": 6.0}, Reason.FORGED),
        ({**GOOD, "addresses": ["tcp://10.0.0.1:7100"]}, Reason.FORGED),
        ({**GOOD, "blocks": 9}, Reason.FORGED),
        ({**GOOD, "capability": GOOD["capability"][:-4] + "AAAA"}, Reason.FORGED),
        ({**GOOD, "hashes": ["00" * 16] * 10}, Reason.MALFORMED),
        ({**GOOD, "blocks": 10**30}, Reason.MALFORMED),
        ({**GOOD, "blocks": True}, Reason.MALFORMED),
        ({**GOOD, "deadline_seconds": float("nan")}, Reason.MALFORMED),
        ({**GOOD, "deadline_seconds": float("inf")}, Reason.MALFORMED),
        ({**GOOD, "addresses": "tcp://127.0.0.1:9"}, Reason.MALFORMED),
        ({**GOOD, "source": "\ud800"}, Reason.MALFORMED),
    ],
)
def test_any_other_is_refused_with_its_reason(document: object, reason: Reason) -> None:
    assert read(params(document)) == (0, {reason.value: 1})
    assert read(params(document, GOOD)) == (1, {reason.value: 1})


def test_a_capability_under_another_secret_is_forged() -> None:
    other = Keyring({0: bytes(32)}, 0)
    document = sign(plan_of(), Grant(TENANT, OURS, Fidelity.EXACT, time.time() + 60), other)
    assert read(params(document)) == (0, {"forged": 1})


def test_lossy_kv_comes_only_under_a_salt_that_says_so() -> None:
    document = signed(plan_of(codec="i8"))
    worse = KEYRING.mint_salt(Salt(TENANT, Fidelity.QUANTIZED))
    assert read(params(document), salt=worse, accepted=Fidelity.QUANTIZED) == (1, {})
    requests = scheduler()
    for number, (salt, tokens) in enumerate(((SALT, 0), (worse, 40))):
        requests.add(FakeRequest(str(number), cache_salt=salt, kv_transfer_params=params(document)))
        assert requests.match(str(number), 0) == tokens


@pytest.mark.parametrize(
    "given",
    [
        {PARAMETER: "notadict"},
        {PARAMETER: GOOD},
        {PARAMETER: None},
        {"other": [GOOD]},
        "text",
        7,
        [GOOD],
        {PARAMETER: []},
    ],
)
def test_what_are_no_plans_is_nothing(given: object) -> None:
    assert read(given) == (0, {})


def test_a_million_of_them_are_read_as_far_as_plans_may_go() -> None:
    assert read({PARAMETER: ["00" * 16] * 1_000_000}) == (0, {"malformed": PLANS_MAX})
    assert read(params({**GOOD, "addresses": ["tcp://a:1"] * 1_000_000})) == (0, {"malformed": 1})


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_json, st.dictionaries(st.sampled_from(sorted(GOOD)), _json, max_size=3))
def test_whatever_comes_the_hooks_answer(anything: object, changes: dict[str, object]) -> None:
    requests = scheduler()
    damaged = {**copy.deepcopy(GOOD), **changes}
    for number, given_params in enumerate((anything, {PARAMETER: anything}, params(anything, damaged))):
        requests.add(FakeRequest(str(number), kv_transfer_params=given_params))
        assert requests.match(str(number), 0) in (0, 10 * SIZE)
        requests.finish(str(number), [])
    assert not requests.has_orders


def test_a_hook_that_fails_answers_what_it_would_without_a_connector(caplog: pytest.LogCaptureFixture) -> None:
    @guarded((0, False))
    def hook(number: int) -> tuple[int, bool]:
        return 1 // number, True

    assert hook(1) == (1, True)
    assert hook(number=0) == (0, False)
    assert "hook failed; the engine goes on without it" in caplog.text


def test_requests_with_the_same_id_end_one_by_one() -> None:
    requests = scheduler()
    requests.add(planned())
    requests.add(FakeRequest())
    assert requests.match("one", 0) == 0

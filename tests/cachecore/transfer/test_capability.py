"""Capabilities and the plans around them: what they say, and what nobody can make them say."""

import base64
import json
from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachecore.blocks import PrefixHash
from cachecore.holders import Epoch, Pool, Worker, WorkerName
from cachecore.scope import Fidelity, KeyId, TenantId
from cachecore.transfer.capability import (
    Capability,
    Run,
    check_proof,
    check_source,
    check_target,
    read_capability,
)
from cachecore.transfer.errors import CapabilityError, PlanError, Reason, TransferError
from cachecore.transfer.plan import Grant, Plan, read_plan, sign
from tests.cachecore.transfer.world import ACME, KEYRING, RIVAL, RUN, SOURCE, STRANGERS, TARGET, make_plan

NOW = 1_800_000_000.0
CAPABILITY = Capability(ACME, SOURCE, TARGET, RUN, "i8", Fidelity.QUANTIZED, NOW + 2.5, b"d" * 16)
PLAN = make_plan("tcp://10.0.0.7:7100", codec="i8")
GRANT = Grant(ACME, TARGET, Fidelity.QUANTIZED, NOW + 2.5)


def reason_of(error: pytest.ExceptionInfo[TransferError]) -> Reason:
    return error.value.reason


# ---- capabilities ----------------------------------------------------------------------------------------------------


def test_the_text_form() -> None:
    text = CAPABILITY.mint(KEYRING)
    assert text == (
        "rwc1.AQAAAADEWVwYowEAAHBwcHBwcHBwcHBwcHBwcHB0dHR0dHR0dHR0dHR0dHR0ZGRkZGRkZGRkZGRkZGRkZAIAAAADAAA"
        "AAQQAAgAOAA4AYWNtZWk4dy93b3JrZXItYS83LzB3L3dvcmtlci1iLzMvMPmw8_UH5HRd2JrLBkg--08"
    )
    assert read_capability(text, KEYRING, NOW) == CAPABILITY


@pytest.mark.parametrize("source", [SOURCE, Pool("cold store", 3), Worker(WorkerName("w/ä"), Epoch(2**60), 7)])
def test_every_holder_reads_back(source: Any) -> None:
    capability = replace(CAPABILITY, source=source)
    assert read_capability(capability.mint(KEYRING), KEYRING, NOW) == capability


def test_it_expires() -> None:
    text = CAPABILITY.mint(KEYRING)
    read_capability(text, KEYRING, NOW + 2.499)
    for now in (NOW + 2.5, NOW + 1e9):
        with pytest.raises(CapabilityError, match="expired") as error:
            read_capability(text, KEYRING, now)
        assert reason_of(error) is Reason.EXPIRED


def test_nobody_without_the_master_secret_mints_one() -> None:
    with pytest.raises(CapabilityError) as error:
        read_capability(CAPABILITY.mint(STRANGERS), KEYRING, NOW)
    assert reason_of(error) is Reason.FORGED
    other_epoch = replace(CAPABILITY, key_id=KeyId(ACME.tenant, 1)).mint(KEYRING)
    with pytest.raises(CapabilityError, match="no key") as error:
        read_capability(other_epoch, STRANGERS, NOW)
    assert reason_of(error) is Reason.FORGED


def test_every_bit_counts() -> None:
    text = CAPABILITY.mint(KEYRING)
    data = base64.urlsafe_b64decode(text[5:] + "=" * (-len(text[5:]) % 4))
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            forged = "rwc1." + base64.urlsafe_b64encode(changed).rstrip(b"=").decode()
            with pytest.raises(CapabilityError):
                read_capability(forged, KEYRING, NOW)


def test_there_is_one_way_to_write_it() -> None:
    """The last character has bits that mean nothing; they are zero."""
    text = CAPABILITY.mint(KEYRING)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    changed = text[:-1] + alphabet[alphabet.index(text[-1]) + 1]
    padding = "=" * (-len(text[5:]) % 4)
    assert base64.urlsafe_b64decode(changed[5:] + padding) == base64.urlsafe_b64decode(text[5:] + padding)
    with pytest.raises(CapabilityError, match="left over"):
        read_capability(changed, KEYRING, NOW)


def test_every_field_is_signed() -> None:
    """Two capabilities that differ in anything have different MACs, so none passes for another."""
    others = {
        "key_id": RIVAL,
        "source": TARGET,
        "target": SOURCE,
        "run": RUN._replace(blocks=4),
        "codec": "raw",
        "fidelity": Fidelity.FUSED,
        "expires_at": NOW + 3,
        "plan_digest": b"e" * 16,
    }
    assert set(others) == {field.name for field in fields(Capability)}
    texts = {CAPABILITY.mint(KEYRING)} | {
        replace(CAPABILITY, **{name: value}).mint(KEYRING) for name, value in others.items()
    }
    assert len({text[-21:] for text in texts}) == len(others) + 1


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused(noise: str) -> None:
    for text in (noise, f"rwc1.{noise}", CAPABILITY.mint(KEYRING) + noise + "A"):
        with pytest.raises(CapabilityError):
            read_capability(text, KEYRING, NOW)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_noise_in_base64_is_refused(noise: bytes) -> None:
    with pytest.raises(CapabilityError):
        read_capability("rwc1." + base64.urlsafe_b64encode(noise).rstrip(b"=").decode(), KEYRING, NOW)


@pytest.mark.parametrize(
    ("holder", "reason"),
    [
        (SOURCE._replace(epoch=Epoch(8)), Reason.OTHER_EPOCH),
        (SOURCE._replace(rank=1), Reason.OTHER_SOURCE),
        (SOURCE._replace(name=WorkerName("worker-c")), Reason.OTHER_SOURCE),
        (Pool("worker-a", 7), Reason.OTHER_SOURCE),
    ],
)
def test_it_means_one_source_in_one_life(holder: Any, reason: Reason) -> None:
    check_source(CAPABILITY, SOURCE)
    with pytest.raises(CapabilityError) as error:
        check_source(CAPABILITY, holder)
    assert reason_of(error) is reason


def test_it_means_one_generation_of_a_pool() -> None:
    with pytest.raises(CapabilityError) as error:
        check_source(replace(CAPABILITY, source=Pool("pool", 1)), Pool("pool", 2))
    assert reason_of(error) is Reason.OTHER_EPOCH


def test_it_means_one_target() -> None:
    check_target(CAPABILITY, TARGET)
    with pytest.raises(CapabilityError) as error:
        check_target(CAPABILITY, TARGET._replace(epoch=Epoch(4)))
    assert reason_of(error) is Reason.OTHER_TARGET


def test_a_proof_is_good_for_one_challenge_and_one_request() -> None:
    proof = CAPABILITY.prove(KEYRING, b"challenge", b"request")
    check_proof(CAPABILITY, KEYRING, b"challenge", b"request", proof)
    for challenge, request, made in (
        (b"challengf", b"request", proof),
        (b"challenge", b"requesu", proof),
        (b"challenger", b"equest", proof),
        (b"challenge", b"request", CAPABILITY.prove(STRANGERS, b"challenge", b"request")),
        (b"challenge", b"request", replace(CAPABILITY, key_id=RIVAL).prove(KEYRING, b"challenge", b"request")),
        (b"challenge", b"request", b""),
    ):
        with pytest.raises(CapabilityError):
            check_proof(CAPABILITY, KEYRING, challenge, request, made)


@pytest.mark.parametrize("changes", [{"expires_at": -1.0}, {"run": Run(PrefixHash(b"p" * 16), RUN.tail, -1, 1)}])
def test_what_cannot_be_written_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(CapabilityError):
        replace(CAPABILITY, **changes).mint(KEYRING)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_the_json_form() -> None:
    document = sign(PLAN, GRANT, KEYRING)
    capability = document.pop("capability")
    assert document == {
        "version": 1,
        "source": "w/worker-a/7/0",
        "addresses": ["tcp://10.0.0.7:7100"],
        "start_block": 2,
        "blocks": 3,
        "parent": "70" * 16,
        "tail": "74" * 16,
        "source_position": 8,
        "target_position": 8,
        "codec": "i8",
        "deadline_seconds": 5.0,
    }
    assert PLAN.digest().hex() == "0b9c1cec41bf97319833946178eac3dc"
    assert read_capability(capability, KEYRING, NOW) == replace(CAPABILITY, plan_digest=PLAN.digest())


@pytest.mark.parametrize("deadline", [1, 0.25, 600])
def test_a_plan_survives_json(deadline: float) -> None:
    plan = PLAN._replace(deadline_seconds=deadline, addresses=("tcp://[::1]:7", "nixl://host-3:9"), target_position=64)
    document = json.loads(json.dumps(sign(plan, GRANT, KEYRING)))
    pull = read_plan(document, KEYRING, TARGET, NOW)
    assert pull.plan == plan
    assert pull.plan.is_shifted
    assert pull.token == document["capability"]
    assert pull.capability.run == RUN


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source", "w/worker-c/7/0"),
        ("addresses", ["tcp://192.0.2.1:80"]),
        ("addresses", []),
        ("start_block", 1),
        ("blocks", 4),
        ("parent", "71" * 16),
        ("tail", "75" * 16),
        ("source_position", 9),
        ("target_position", 9),
        ("codec", "raw"),
        ("deadline_seconds", 600.0),
    ],
)
def test_a_plan_says_what_its_capability_signs(key: str, value: object) -> None:
    document = {**sign(PLAN, GRANT, KEYRING), key: value}
    with pytest.raises(PlanError) as error:
        read_plan(document, KEYRING, TARGET, NOW)
    assert reason_of(error) is Reason.FORGED


def test_every_part_of_a_plan_was_tried() -> None:
    tried = {"source", "addresses", "run", "source_position", "target_position", "codec", "deadline_seconds"}
    assert tried == set(Plan._fields)


def test_a_capability_of_another_plan_is_of_no_use() -> None:
    other = sign(PLAN._replace(target_position=64), GRANT, KEYRING)
    with pytest.raises(PlanError):
        read_plan({**sign(PLAN, GRANT, KEYRING), "capability": other["capability"]}, KEYRING, TARGET, NOW)


def test_a_plan_is_for_one_worker_and_for_a_time() -> None:
    document = sign(PLAN, GRANT, KEYRING)
    with pytest.raises(CapabilityError) as error:
        read_plan(document, KEYRING, TARGET._replace(rank=1), NOW)
    assert reason_of(error) is Reason.OTHER_TARGET
    with pytest.raises(CapabilityError) as error:
        read_plan(document, KEYRING, TARGET, NOW + 3)
    assert reason_of(error) is Reason.EXPIRED


NESTED: Any = []
for _ in range(2000):
    NESTED = [NESTED]
BAD_VALUES = {
    "version": [2, "1", None],
    "source": ["", "worker-a", "w/worker-a/x/0", "w/a/7/0" + "a" * 2000, 7, "\ud800"],
    "addresses": ["tcp://a:1", ["a:1"], ["tcp://a b:1"], ["tcp://a:1"] * 9, [7], ["TCP://a:1"], ["tcp://" + "a" * 999]],
    "start_block": [-1, 2**32, 1.5, "1", True, None],
    "blocks": [0, -1, 10**400, "59"],
    "parent": ["", "7" * 31, "7" * 33, "G" * 32, "AB" * 16, 7, ["74" * 16] * 1000],
    "tail": [None, "zz"],
    "source_position": [-1, 2**32, 0.5],
    "target_position": [-1, {}, NESTED],
    "codec": ["", "I8", "../raw", "a" * 33, None],
    "deadline_seconds": [0, -1.0, 601, float("inf"), float("nan"), "1"],
    "capability": ["", "rwc1.", "rwc1." + "A" * 5000, 7, None, "r\u0000"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD_VALUES.items() for value in values])
def test_what_is_no_plan_is_refused(key: str, value: object) -> None:
    with pytest.raises((PlanError, CapabilityError)) as error:
        read_plan({**sign(PLAN, GRANT, KEYRING), key: value}, KEYRING, TARGET, NOW)
    assert reason_of(error) is Reason.MALFORMED


def test_keys_are_as_they_should_be() -> None:
    document = sign(PLAN, GRANT, KEYRING)
    for changed in ({**document, "hashes": ["a"]}, *({**document, key: None} for key in document)):
        with pytest.raises((PlanError, CapabilityError)):
            read_plan(changed, KEYRING, TARGET, NOW)
    for key in document:
        with pytest.raises(PlanError):
            read_plan({name: value for name, value in document.items() if name != key}, KEYRING, TARGET, NOW)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(json_values, st.integers())
@settings(max_examples=300, deadline=None)
def test_whatever_comes_is_refused_cleanly(value: object, seed: int) -> None:
    document = sign(PLAN, GRANT, KEYRING)
    key = Random(seed).choice(list(document))
    for candidate in (value, {**document, key: value}):
        try:
            pull = read_plan(candidate, KEYRING, TARGET, NOW)
        except TransferError:
            continue
        assert pull.plan == PLAN


@pytest.mark.parametrize("changes", [{"deadline_seconds": 0.0}, {"codec": "X"}, {"addresses": ("nowhere",)}])
def test_a_plan_that_no_worker_would_take_is_not_signed(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        sign(PLAN._replace(**changes), GRANT, KEYRING)


def test_a_tenant_without_a_key_gets_no_plan() -> None:
    with pytest.raises(KeyError):
        sign(PLAN, GRANT._replace(key_id=KeyId(TenantId("acme"), 9)), KEYRING)

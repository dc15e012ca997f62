"""Each policy through the whole gateway, one request after another."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.end_to_end.conftest import Stack
from tests.gateway.end_to_end.processes import (
    Fleet,
    Gateway,
    cached_tokens,
    chat,
    eventually,
    full_hit,
    matched_tokens,
    token_count,
    worker_of,
)


@pytest.fixture(scope="module")
def open_to_all_policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three workers that publish no events; a request may choose its policy."""
    directory = tmp_path_factory.mktemp("policies")
    config = {"policy": "round-robin", "policy_header_allowed": True}
    with (
        Fleet(directory, "--speed", "50", "--no-events", count=3) as fleet,
        Gateway(directory, fleet.urls, config) as gateway,
    ):
        yield Stack(fleet, gateway)


def test_round_robin_takes_turns(open_to_all_policies: Stack) -> None:
    fleet, gateway = open_to_all_policies
    answers = [gateway.post(chat("the same prompt every time")) for _ in range(6)]
    workers = [worker_of(answer) for answer in answers]
    assert set(workers[:3]) == set(fleet.names)
    assert workers[:3] == workers[3:]
    assert {answer.headers["x-ropeway-policy"] for answer in answers} == {"round-robin"}


def test_a_session_stays_where_it_is(open_to_all_policies: Stack) -> None:
    fleet, gateway = open_to_all_policies
    homes: dict[str, str] = {}
    for turn in range(3):
        for number in range(40):
            headers = {"x-ropeway-policy": "session", "x-ropeway-session": f"session-{number}"}
            answer = gateway.post(chat(f"turn {turn} of {number}, which shares no prefix"), headers)
            assert answer.headers["x-ropeway-policy"] == "session"
            assert homes.setdefault(f"session-{number}", worker_of(answer)) == worker_of(answer)
    assert set(homes.values()) == set(fleet.names)


def test_the_body_can_name_the_session_and_the_header_wins(open_to_all_policies: Stack) -> None:
    _, gateway = open_to_all_policies
    policy = {"x-ropeway-policy": "session"}
    homes = {
        user: worker_of(gateway.post(chat("hi"), {**policy, "x-ropeway-session": user})) for user in map(str, range(9))
    }
    assert {user: worker_of(gateway.post(chat("hi", user=user), policy)) for user in homes} == homes
    for user, home in homes.items():
        answer = gateway.post(chat("hi", user="somebody else"), {**policy, "x-ropeway-session": user})
        assert worker_of(answer) == home


def test_prefix_aware_needs_no_events(open_to_all_policies: Stack) -> None:
    _, gateway = open_to_all_policies
    policy = {"x-ropeway-policy": "prefix-aware"}
    for number in range(6):
        body = chat(f"{number} is the number of a prompt with several blocks. " * 4)
        first = gateway.post(body, policy)
        assert gateway.explain(body, policy)["evidence"] == "history"
        second = gateway.post(body, policy)
        assert worker_of(second) == worker_of(first)
        # The worker hits; nothing has confirmed it to us, so nothing is claimed.
        assert cached_tokens(second) == full_hit(body)
        assert matched_tokens(second) == 0


def test_kv_aware_follows_its_own_history_where_there_are_no_events(open_to_all_policies: Stack) -> None:
    _, gateway = open_to_all_policies
    policy = {"x-ropeway-policy": "kv-aware"}
    body = chat("A long prompt to a fleet that says nothing of its caches. " * 20)
    first = gateway.post(body, policy)
    answers = [gateway.post(body, policy) for _ in range(4)]
    assert {worker_of(answer) for answer in answers} == {worker_of(first)}
    assert {cached_tokens(answer) for answer in answers} == {full_hit(body)}


def test_least_loaded_goes_round_an_idle_fleet(open_to_all_policies: Stack) -> None:
    fleet, gateway = open_to_all_policies
    policy = {"x-ropeway-policy": "least-loaded"}
    assert {worker_of(gateway.post(chat("hi"), policy)) for _ in range(40)} == set(fleet.names)


def test_an_unknown_policy_is_refused(open_to_all_policies: Stack) -> None:
    _, gateway = open_to_all_policies
    answer = gateway.post(chat("hi"), {"x-ropeway-policy": "random"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-ropeway-policy"
    assert "kv-aware" in answer.json()["error"]["message"]


def test_choosing_a_policy_is_refused_unless_allowed(stack: Stack) -> None:
    refused = stack.gateway.post(chat("hi"), {"x-ropeway-policy": "round-robin"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-ropeway-policy"
    # The policy that is in force anyway is no choice.
    assert stack.gateway.post(chat("hi"), {"x-ropeway-policy": "kv-aware"}).status_code == 200


# Parity


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("parity"), "--speed", "50") as fleet:
        yield fleet


@pytest.fixture
def pair(two_workers: Fleet) -> Iterator[Fleet]:
    """Two workers that behave until a test says otherwise."""
    yield two_workers
    for worker in two_workers.names:
        two_workers.simulate(worker, {})


def test_a_worker_that_tokenizes_otherwise_gets_no_affinity(tmp_path: Path, pair: Fleet) -> None:
    stranger, honest = pair.names
    pair.simulate(stranger, {"status": 200, "body": {"tokens": [1, 2, 3]}, "paths": ["/tokenize"]})
    with Gateway(tmp_path, pair.urls) as gateway:
        failed = gateway.worker(stranger)
        assert failed["parity"] == "failed"
        assert failed["parity_reason"] == "token 0 of a probe prompt is 60 here and 1 at the worker"
        assert gateway.worker(honest)["parity"] == "proven"
        assert f"worker {stranger} gets no affinity: token 0 of a probe prompt" in gateway.said()
        gateway.operator.delete(f"/admin/workers/{honest}").raise_for_status()
        body = chat("A prompt that only the stranger can serve, again and again. " * 3)
        answers = [gateway.post(body) for _ in range(3)]
        assert {worker_of(answer) for answer in answers} == {stranger}
        # It has the blocks, but what we would say of them is not about its tokens.
        assert cached_tokens(answers[-1]) == full_hit(body)
        assert [matched_tokens(answer) for answer in answers] == [0, 0, 0]
        (entry,) = gateway.explain(body)["candidates"]
        assert (entry["evidence"], entry["matched_tokens"], entry["confirmed_tokens"]) == ("none", 0, 0)


def test_a_proven_worker_that_counts_otherwise_later_loses_its_affinity(tmp_path: Path, pair: Fleet) -> None:
    changed, _ = pair.names
    with Gateway(tmp_path, pair.urls[:1]) as gateway:
        body = chat("A prompt of which the worker will say another length. " * 3)
        gateway.post(body)
        gateway.wait_confirmed(body, changed, full_hit(body))
        assert gateway.worker(changed)["parity"] == "proven"
        document = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}}
        pair.simulate(changed, {"status": 200, "body": document, "paths": ["/v1/chat"], "requests": 3})
        for _ in range(2):
            gateway.post(body)
        gateway.wait_idle()
        assert gateway.worker(changed)["parity"] == "proven"
        gateway.post(body)
        gateway.wait_idle()
        assert gateway.worker(changed)["parity"] == "failed"
        assert "3 of its last 64 prompts were counted differently" in gateway.worker(changed)["parity_reason"]
        assert f"worker {changed} gets no affinity: 3 of its last 64 prompts" in gateway.said()
        assert matched_tokens(gateway.post(body)) == 0


def test_a_worker_that_truncates_some_prompts_is_noticed_between_those_it_does_not(tmp_path: Path, pair: Fleet) -> None:
    changed, _ = pair.names
    truncated = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}}
    with Gateway(tmp_path, pair.urls[:1]) as gateway:
        for request in range(20):
            if request % 6 == 0:
                pair.simulate(changed, {"status": 200, "body": truncated, "paths": ["/v1/chat"], "requests": 1})
            gateway.post(chat(f"Prompt {request}, which is long or is not. " * 3))
        gateway.wait_idle()
        assert gateway.worker(changed)["parity"] == "failed"


def test_a_worker_that_renders_otherwise_and_as_long_is_noticed_within_twenty_requests(
    tmp_path: Path, pair: Fleet
) -> None:
    changed, _ = pair.names
    body = chat("A prompt that is going to be rendered with other words, as many as before. " * 2)
    count = token_count(body["messages"])
    with Gateway(tmp_path, pair.urls[:1]) as gateway:
        for _ in range(10):
            gateway.post(body)
        assert gateway.worker(changed)["parity"] == "proven"
        pair.simulate(changed, {"status": 200, "body": {"tokens": [9] * count}, "paths": ["/tokenize"]})
        for _ in range(20):
            gateway.post(body)
        eventually(lambda: gateway.worker(changed)["parity"] == "failed", "the difference is noticed")
        reason = f"token 0 of a prompt that it was sent is {ord('<')} here and 9 at the worker"
        assert gateway.worker(changed)["parity_reason"] == reason
        assert matched_tokens(gateway.post(body)) == 0
        # Nothing speaks for it but its counts: once those have been right for long, it is put to proof again.
        pair.simulate(changed, {})

        def proven_after_another() -> bool:
            gateway.post(body)
            return gateway.worker(changed)["parity"] == "proven"

        eventually(proven_after_another, "it is proven again")


def test_prompts_that_clients_have_truncated_say_nothing_of_the_worker(tmp_path: Path, pair: Fleet) -> None:
    worker, _ = pair.names
    truncated = {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9}}
    with Gateway(tmp_path, pair.urls[:1]) as gateway:
        pair.simulate(worker, {"status": 200, "body": truncated, "paths": ["/v1/chat"]})
        for _ in range(5):
            answer = gateway.post(chat("Much more than eight tokens. " * 4, truncate_prompt_tokens=8))
            assert matched_tokens(answer) == 0
        gateway.wait_idle()
        assert gateway.worker(worker)["parity"] == "proven"


def test_a_worker_that_cannot_tokenize_is_believed_until_it_contradicts(tmp_path: Path, pair: Fleet) -> None:
    quiet, _ = pair.names
    pair.simulate(quiet, {"status": 404, "paths": ["/tokenize"]})
    with Gateway(tmp_path, pair.urls[:1]) as gateway:
        assert gateway.worker(quiet)["parity"] == "unverified"
        body = chat("A prompt to a worker that has no way to tokenize. " * 3)
        gateway.post(body)
        gateway.wait_confirmed(body, quiet, full_hit(body))
        assert matched_tokens(gateway.post(body)) == full_hit(body)


def test_a_cache_that_its_worker_resets_is_forgotten(tmp_path: Path, pair: Fleet) -> None:
    worker, _ = pair.names
    with Gateway(tmp_path, pair.urls[:1]) as gateway:
        body = chat("A prompt whose blocks are thrown away while the worker goes on. " * 3)
        gateway.post(body)
        gateway.wait_confirmed(body, worker, full_hit(body))
        epoch = gateway.worker(worker)["epoch"]
        httpx.post(f"http://{worker}/reset_prefix_cache", trust_env=False).raise_for_status()
        gateway.wait_confirmed(body, worker, 0)
        assert cached_tokens(gateway.post(body)) == 0
        assert gateway.worker(worker)["epoch"] == epoch
        gateway.wait_confirmed(body, worker, full_hit(body))

"""The books see each thing that does not add up. Quick, and run among all tests."""

from typing import Any

import pytest

from tests.faults.accounts import End, Verdict
from tests.faults.asker import Asked
from tests.faults.books import Attempt, Books
from tests.faults.questions import question
from workers.simulated.access_log import Entry

QUESTION = question("q1", "acme", 0, "What is carried up, and what comes down? Tell me both.", False, 4)
SENT = "ropeway_worker_sent_requests_total"


def asked(end: End = End.COMPLETE, cached_tokens: int = 16, own_tokens: int = 16) -> Asked:
    return Asked(QUESTION, Verdict(end, "", cached_tokens, 200), 10.0, 1.0, own_tokens)


def attempt(
    at: float = 10.0, until: float | None = 11.0, worker: str = "worker-1", request_id: str = "q1-a1", **other: Any
) -> Attempt:
    salt, complete = other.pop("salt", "acme"), other.pop("complete", True)
    received = Entry("received", at, worker, 1, 1, "/", request_id, cache_salt=salt)
    ended = None
    if until is not None:
        ended = Entry("ended", until, worker, 1, 1, "/", request_id, status=200, complete=complete)
    return Attempt(worker, received, ended, other.get("lives", True), other.get("stood_still", False))


def books(*attempts: Attempt, asked: Asked = asked(), sent: int | None = None, **samples: int) -> Books:  # noqa: B008
    figures = {f'{SENT}{{worker="w"}}': float(len(attempts) if sent is None else sent)}
    figures |= {f'ropeway_{name}_total{{ending="{name}"}}': float(count) for name, count in samples.items()}
    return Books(attempts, lambda salt: salt or None, figures, [asked])


def test_what_adds_up() -> None:
    found = books(attempt())
    assert (found.wrong, found.violations) == ([], [])
    assert (found.sent, found.received, found.lost) == (1, 1, 0)


@pytest.mark.parametrize(
    "attempts",
    [
        pytest.param([attempt(until=10.5, complete=False), attempt(10.6)], id="a second attempt after the first"),
        pytest.param([attempt(until=None, lives=False), attempt(10.2)], id="after the first worker was killed"),
        pytest.param([attempt(until=19.0, stood_still=True), attempt(10.2)], id="while the first one stood still"),
        pytest.param([attempt(until=None, lives=False)], id="killed before it was written down"),
    ],
)
def test_faults_that_are_nobodys(attempts: list[Attempt]) -> None:
    assert books(*attempts).wrong == []


@pytest.mark.parametrize(
    ("attempts", "said"),
    [
        pytest.param([attempt(), attempt(request_id="q2-a1")], "q2: nobody has asked that", id="a phantom"),
        pytest.param([attempt(10.0 + n, 10.5 + n) for n in range(4)], "received 4 times", id="too many attempts"),
        pytest.param([attempt(until=14.0), attempt(10.5)], "at two workers at once for 3.5 s", id="two at once"),
        pytest.param([attempt(salt="globex")], "sent with a salt of globex", id="another's salt"),
        pytest.param([attempt(salt="")], "sent with a salt of None", id="no salt"),
        pytest.param([attempt(), attempt(11.5, None)], "still under way", id="work that nobody waits for"),
        pytest.param([attempt(complete=False)], "answered, and no worker has", id="an answer from nowhere"),
        pytest.param([], "answered, and no worker has", id="an answer without a request"),
    ],
)
def test_what_does_not_add_up(attempts: list[Attempt], said: str) -> None:
    assert any(said in wrong for wrong in books(*attempts).wrong)


def test_a_tenant_finds_its_own_texts_alone() -> None:
    foreign = asked(cached_tokens=32, own_tokens=16)
    assert books(attempt(), asked=foreign).wrong == ["q1: 32 tokens cached, 16 its tenant's own"]
    # The second attempt may find what the first one left.
    assert books(attempt(until=10.5, complete=False), attempt(10.6), asked=foreign).wrong == []


def test_what_was_sent_and_not_received_was_lost_with_a_failed_attempt() -> None:
    assert books(attempt(), sent=3, retries=2).wrong == []
    assert books(attempt(), sent=3, retries=1).wrong == ["3 sent, 1 received, 1 attempts failed"]
    assert books(attempt(), sent=0).wrong == ["0 sent, 1 received, 0 attempts failed"]


def test_a_violation_says_where_the_request_was() -> None:
    violated = Asked(QUESTION, Verdict(End.VIOLATION, "hung"), 9.5, 90.0, 0)
    (told,) = books(attempt(), asked=violated).violations
    assert told == "q1, sent at 9.50, received by worker-1 at 10.00: violation after 90.0 s: hung"

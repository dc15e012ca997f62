"""Siblings of one new prompt through the whole gateway: few workers compute it, the others pull it once it is there."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.gateway.end_to_end.processes import Fleet, Gateway, cached_tokens, chat, new_keyring, worker_of

WORKERS = ("--profile", "llama-3-70b-tp8", "--kv-link", "400")
SIBLINGS = 16
SHARED = "the cabin leaves the valley and rises to the ridge " * 800


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("bursts")
    keyring = str(new_keyring(directory))
    with (
        Fleet(directory, *WORKERS, "--keyring", keyring, count=4) as fleet,
        Gateway(directory, fleet.urls, {"keyring": keyring}) as gateway,
    ):
        yield gateway


def test_two_workers_compute_what_four_are_asked_for(gateway: Gateway) -> None:
    gateway.post(chat("warm the connections up"))

    def ask(number: int) -> Any:
        return gateway.post(chat(f"{SHARED} and sibling {number} asks why", max_tokens=2, stream=False))

    with ThreadPoolExecutor(SIBLINGS) as pool:
        answers = list(pool.map(ask, range(SIBLINGS)))
    assert [answer.status_code for answer in answers] == [200] * SIBLINGS
    scratch = {worker_of(answer) for answer in answers if cached_tokens(answer) == 0}
    assert 1 <= len(scratch) <= 2
    assert len([answer for answer in answers if cached_tokens(answer) == 0]) == len(scratch)
    gateway.wait_idle()
    status = gateway.status()
    assert status["requests"]["inflight"] == 0
    assert {worker["kv_tokens"] for worker in status["workers"]} == {2500 * 512}

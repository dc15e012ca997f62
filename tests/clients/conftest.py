"""A gateway before one worker that talks and calls tools, for the libraries that people use."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.clients.talking import TalkingWorker
from tests.gateway.end_to_end.logs import pytest_runtest_makereport as pytest_runtest_makereport
from tests.gateway.end_to_end.processes import Gateway


class Stand(NamedTuple):
    worker: TalkingWorker
    gateway: Gateway

    def bodies(self, path: str = "/v1/chat/completions") -> list[dict[str, object]]:
        """What the worker was asked, without the salt, which every chat has."""
        found = []
        for asked, _, body in self.worker.asked:
            if asked == path and body:
                assert body.pop("cache_salt", "rw1.").startswith("rw1.")
                found.append(body)
        return found


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    directory = tmp_path_factory.mktemp("clients")
    with TalkingWorker() as worker, Gateway(directory, [worker.url]) as gateway:
        yield Stand(worker, gateway)


@pytest.fixture
def stand(talking: Stand) -> Stand:
    talking.worker.asked.clear()
    talking.worker.broken_after = None
    return talking

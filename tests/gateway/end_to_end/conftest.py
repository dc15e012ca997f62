"""A gateway with two simulated workers that most of these tests share, and the logs of all processes on failure."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gateway.end_to_end.logs import pytest_runtest_makereport as pytest_runtest_makereport
from tests.gateway.end_to_end.processes import Fleet, Gateway, new_keyring

BODY_BYTES_MAX = 6_000_000


class Stack(NamedTuple):
    fleet: Fleet
    gateway: Gateway


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the shared stack: logs, configuration, keyring."""
    return tmp_path_factory.mktemp("stack")


@pytest.fixture(scope="session")
def stack(directory: Path) -> Iterator[Stack]:
    keyring = str(new_keyring(directory))
    config = {"keyring": keyring, "limits": {"body_bytes_max": BODY_BYTES_MAX}}
    with (
        Fleet(directory, "--speed", "50", "--keyring", keyring) as fleet,
        Gateway(directory, fleet.urls, config) as gateway,
    ):
        yield Stack(fleet, gateway)

"""The contract over Nixl, between two processes. `make test-transports` installs what it needs."""

from collections.abc import Iterator

import pytest

from cachecore.transfer.engines.wire import EngineWire
from cachecore.transfer.nixl import NixlEngine
from tests.cachecore.transfer.engine_suite import SETTINGS, EngineCarrier, EngineSuite, engine_carrier
from tests.cachecore.transfer.world import KEYRING

pytestmark = pytest.mark.transports


def make_wire() -> EngineWire:
    return EngineWire(NixlEngine(), KEYRING, SETTINGS)


@pytest.fixture(scope="module")
def between_processes() -> Iterator[EngineCarrier]:
    with engine_carrier(make_wire, NixlEngine()) as carrier:
        yield carrier


class TestNixl(EngineSuite):
    @pytest.fixture
    def carrier(self, between_processes: EngineCarrier) -> EngineCarrier:
        return between_processes

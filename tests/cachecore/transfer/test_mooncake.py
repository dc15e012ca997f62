"""The contract over Mooncake, between two processes. `make test-transports` installs what it needs."""

from collections.abc import Iterator

import pytest

from cachecore.transfer.engines.wire import EngineWire
from cachecore.transfer.mooncake import MooncakeEngine
from tests.cachecore.transfer.engine_suite import SETTINGS, EngineCarrier, EngineSuite, engine_carrier
from tests.cachecore.transfer.world import KEYRING

pytestmark = pytest.mark.transports


def make_wire() -> EngineWire:
    return EngineWire(MooncakeEngine(), KEYRING, SETTINGS)


@pytest.fixture(scope="module")
def between_processes() -> Iterator[EngineCarrier]:
    with engine_carrier(make_wire, MooncakeEngine()) as carrier:
        yield carrier


class TestMooncake(EngineSuite):
    @pytest.fixture
    def carrier(self, between_processes: EngineCarrier) -> EngineCarrier:
        return between_processes

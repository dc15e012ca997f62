"""The contract over an engine between two processes, with all frames travelling by it."""

from collections.abc import Iterator
from contextlib import contextmanager

from cachecore.transfer.engines.contract import Engine, Peer, Reading, Region
from cachecore.transfer.engines.wire import EngineSettings, EngineWire
from cachecore.transfer.transport import Fetched
from tests.cachecore.transfer.contract_suite import LONG, LONG_BYTES, SeparateSuite
from tests.cachecore.transfer.processes import MakeWire, SeparateCarrier, source_process
from tests.cachecore.transfer.world import KEYRING, LAYER_BYTES, LAYERS, Script

SETTINGS = EngineSettings(slot_bytes=1 << 20, slots=8, inline_bytes_max=LAYER_BYTES // 2)


class Watched:
    """An engine, and what was read by it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.scheme = engine.scheme
        self.register = engine.register
        self.describe = engine.describe
        self.meet = engine.meet
        self.progress = engine.progress
        self.close = engine.close
        self.bytes_read = 0

    def read(self, peer: Peer, address: int, region: Region, size: int) -> Reading:
        self.bytes_read += size
        return self._engine.read(peer, address, region, size)


class EngineCarrier(SeparateCarrier):
    engine: Watched


@contextmanager
def engine_carrier(make_wire: MakeWire, engine: Engine) -> Iterator[EngineCarrier]:
    watched = Watched(engine)
    wire = EngineWire(watched, KEYRING, SETTINGS)
    with source_process(make_wire) as source:
        carrier = EngineCarrier(source, make_wire, wire)
        carrier.engine = watched
        yield carrier
    wire.close()


class EngineSuite(SeparateSuite):
    async def test_frames_travel_by_the_engine(self, carrier: EngineCarrier) -> None:
        for script, layer_bytes in ((Script(), LAYER_BYTES), (LONG, LONG_BYTES)):
            before = carrier.engine.bytes_read
            async with carrier.serve(script) as served:
                assert isinstance(await self.pull(carrier, served.address), Fetched)
            assert carrier.engine.bytes_read - before > LAYERS * layer_bytes

"""What may carry KV besides plain TCP, by the name that configurations and addresses give it."""

from collections.abc import Callable, Mapping

from cachecore.scope import Keyring
from cachecore.transfer.engines.contract import Engine
from cachecore.transfer.engines.wire import EngineSettings, EngineWire
from cachecore.transfer.mooncake import MooncakeEngine
from cachecore.transfer.nixl import NixlEngine
from cachecore.transfer.tcp.tls import Tls

ENGINES: Mapping[str, Callable[[str], Engine]] = {"nixl": NixlEngine, "mooncake": MooncakeEngine}


def make_wire(
    name: str, keyring: Keyring, host: str, settings: EngineSettings | None = None, *, tls: Tls | None = None
) -> EngineWire:
    """A wire to serve and to pull over, of an engine that starts now. `host` is where others find this worker.

    Raises KeyError for a name that is not in `ENGINES`, EngineUnavailable with what would help.
    """
    return EngineWire(ENGINES[name](host), keyring, settings, tls=tls)

"""What is configured: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`, checked before anything starts.

    {"keyring": "/etc/ropeway/keyring.json", "host": "127.0.0.1", "port": 7100, "sidecar_host": "127.0.0.1",
     "sidecar_port": 7200, "name": "", "model": "", "tokenizer": "", "codecs": ["raw"], "stall_seconds": 0.5,
     "connect_seconds": 0.5}

Only the keyring has to be there. Ports are of the first data parallel rank; the others follow. 0 takes a free one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cachecore.kv.calibration import RAW
from cachecore.kv.codecs.registry import CODECS

POLICY = "recompute"

_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=600)]


class SettingsError(ValueError):
    """The connector cannot work like this. The message fits one line."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    keyring: str
    """File, as the gateway has it."""
    host: str = "127.0.0.1"
    port: _Port = 7100
    """Where peers pull."""
    sidecar_host: str = "127.0.0.1"
    sidecar_port: _Port = 7200
    """Where `/server_info` answers, for gateways."""
    name: str = ""
    """In plans; by default host and port."""
    model: str = ""
    """What the gateway calls it; by default the first served name."""
    tokenizer: str = ""
    """Directory with the tokenizer that the gateway has; by default vLLM's own. `none` where the gateway has none."""
    codecs: tuple[str, ...] = (RAW,)
    """What KV may travel in. What loses something is taken only by requests whose salt says so."""
    stall_seconds: _Seconds = 0.5
    """A source that sends nothing for so long is given up."""
    connect_seconds: _Seconds = 0.5

    def of_rank(self, rank: int) -> "Settings":
        """Those of a data parallel rank."""
        ports = {name: getattr(self, name) for name in ("port", "sidecar_port")}
        moved = {name: port + rank if port else 0 for name, port in ports.items()}
        return msgspec.structs.replace(self, **moved)


def read_settings(extra: Mapping[str, Any], policy: str) -> Settings:
    """`policy` is vLLM's `kv_load_failure_policy`. Raises SettingsError."""
    if policy != POLICY:
        raise SettingsError(
            f"kv_load_failure_policy is {policy!r}: a pull that fails would fail the request. "
            f'Set "kv_load_failure_policy": "{POLICY}" in --kv-transfer-config.'
        )
    try:
        settings = msgspec.convert(dict(extra), Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"kv_connector_extra_config: {error}") from error
    unknown = [codec for codec in settings.codecs if codec not in CODECS]
    if unknown:
        raise SettingsError(f"codec {unknown[0]!r} is not one of {', '.join(CODECS)}")
    if not Path(settings.keyring).is_file():
        raise SettingsError(f"there is no keyring {settings.keyring!r}: make one with `ropeway keys keyring`")
    return settings

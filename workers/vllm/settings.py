"""What is configured: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`, checked before anything starts.

    {"keyring": "/etc/ropeway/keyring.json", "host": "127.0.0.1", "port": 7100, "sidecar_host": "127.0.0.1",
     "sidecar_port": 7200, "name": "", "model": "", "tokenizer": "", "codecs": ["raw"], "stall_seconds": 0.5,
     "connect_seconds": 0.5, "fuser": false, "tls_cert": "", "tls_key": "", "tls_ca": "", "tls_name": ""}

Only the keyring has to be there. Ports are of the first data parallel rank; the others follow. 0 takes a free one. With
`tls_cert` KV is exchanged over TLS alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cachecore.kv.calibration import RAW
from cachecore.kv.codecs.registry import CODECS
from cachecore.transfer.tcp.tls import Tls, TlsError, TlsFiles, open_tls

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
    fuser: bool = False
    """Whether passages from other positions are repaired, for requests whose salt says that they accept it. Takes the
    memory of the weights once more."""
    stall_seconds: _Seconds = 0.5
    """A source that sends nothing for so long is given up."""
    connect_seconds: _Seconds = 0.5
    tls_cert: str = ""
    """File with the certificate that this worker shows to its peers, on either side."""
    tls_key: str = ""
    """By default in the certificate's file."""
    tls_ca: str = ""
    """Who certifies peers, which must then all have a certificate; by default those whom the system trusts."""
    tls_name: str = ""
    """What peers' certificates are made out to; by default the host that a plan names."""

    def of_rank(self, rank: int) -> "Settings":
        """Those of a data parallel rank."""
        ports = {name: getattr(self, name) for name in ("port", "sidecar_port")}
        moved = {name: port + rank if port else 0 for name, port in ports.items()}
        return msgspec.structs.replace(self, **moved)

    def open_tls(self) -> Tls | None:
        """None where KV goes in clear. Raises SettingsError."""
        if not self.tls_cert:
            if self.tls_key or self.tls_ca or self.tls_name:
                raise SettingsError("TLS for KV needs a certificate: set tls_cert")
            return None
        key, ca = (Path(path) if path else None for path in (self.tls_key, self.tls_ca))
        try:
            return open_tls(TlsFiles(Path(self.tls_cert), key, ca, self.tls_name), self.host)
        except TlsError as error:
            raise SettingsError(f"TLS for KV: {error}") from error


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
    settings.open_tls()
    return settings

"""What is configured: `--hicache-storage-backend-extra-config` of SGLang, checked before anything starts.

    {"backend_name": "ropeway", "module_path": "workers.sglang.hicache", "class_name": "RopewayHiCache",
     "interface_v1": 1, "pool": "shared=dir:/mnt/kv", "keyring": "/etc/ropeway/keyring.json",
     "weights": "HuggingFaceTB/SmolLM2-135M@93efa2f", "tenant": "default", "bytes_max": 10737418240,
     "idle_hours": 168, "stall_seconds": 2.0, "reads": 8, "writes": 4}

The pool, the keyring and the weights' name have to be there. What SGLang itself reads of that document is left alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cachecore.store.pools import PoolBounds
from workers.pools import BYTES_MAX, OpenPools, PoolSettings

_OF_SGLANG = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
"""Keys of the same document that are not ours."""

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=600)]
_Hours = Annotated[float, msgspec.Meta(gt=0)]
_Few = Annotated[int, msgspec.Meta(ge=1, le=64)]


class SettingsError(ValueError):
    """The storage cannot work like this. The message fits one line."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pool: _Text
    """`NAME=WHERE`, as workers have it after `--pool`."""
    keyring: _Text
    """File, as the gateway has it."""
    weights: _Text
    """What no other weights are called: a repository and its commit, say, and what was merged into them. Servers that
    say the same read each other's pages."""
    tenant: str = "default"
    """Under whose keys pages are named and sealed. (Prompts of several are kept apart by SGLang's own salts.)"""
    bytes_max: Annotated[int, msgspec.Meta(ge=1)] = BYTES_MAX
    """Of the whole pool; everyone who opens it should say the same."""
    idle_hours: _Hours = 168.0
    """Unread, then a page goes."""
    stall_seconds: _Seconds = 2.0
    """A pool that brings nothing for so long has missed."""
    reads: _Few = 8
    """Pages on their way at once."""
    writes: _Few = 4

    def open_pool(self) -> OpenPools:
        """Of one pool. Raises SettingsError."""
        bounds = PoolBounds(bytes_max=self.bytes_max, idle_seconds_max=self.idle_hours * 3600.0)
        try:
            return OpenPools([self.pool], PoolSettings(bounds))
        except ValueError as error:
            raise SettingsError(str(error)) from None


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Raises SettingsError."""
    try:
        settings = msgspec.convert({key: extra[key] for key in extra.keys() - _OF_SGLANG}, Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"--hicache-storage-backend-extra-config: {error}") from None
    if not Path(settings.keyring).is_file():
        raise SettingsError(f"there is no keyring {settings.keyring!r}: make one with `ropeway keys keyring`")
    return settings

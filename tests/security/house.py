"""A gateway with tenants before one simulated worker, so that whatever is shared at all would be shared."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gateway.api_keys import add_api_key
from tests.gateway.end_to_end.processes import Fleet, Gateway, new_keyring


class House(NamedTuple):
    directory: Path
    fleet: Fleet
    gateway: Gateway
    keys: dict[str, str]

    @property
    def keys_file(self) -> Path:
        return self.directory / "keys.jsonl"

    def headers(self, tenant: str, **further: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}", **further}


@contextmanager
def built(directory: Path, config: Mapping[str, Any] | None = None, **settings: Mapping[str, Any]) -> Iterator[House]:
    """`settings`: of the keys, by tenant."""
    tenants = settings or {"acme": {}, "globex": {}}
    keys = {name: add_api_key(directory / "keys.jsonl", name, **own) for name, own in tenants.items()}
    keyring = str(new_keyring(directory))
    whole = {"keyring": keyring, **(config or {})}
    whole["tenants"] = {"api_keys_file": str(directory / "keys.jsonl"), **whole.get("tenants", {})}
    with (
        Fleet(directory, "--speed", "50", "--keyring", keyring, count=1) as fleet,
        Gateway(directory, fleet.urls, whole) as gateway,
    ):
        yield House(directory, fleet, gateway, keys)

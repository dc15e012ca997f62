"""Routing policies by name, and the state they decide on."""

from collections.abc import Callable

from policies.contract import Policy
from policies.kv_aware import KvAware
from policies.least_loaded import LeastLoaded
from policies.prefix_aware import PrefixAware
from policies.round_robin import RoundRobin
from policies.session import Session

POLICIES: dict[str, Callable[[], Policy]] = {
    "kv-aware": KvAware,
    "prefix-aware": PrefixAware,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "session": Session,
}


def create(name: str) -> Policy:
    """A fresh policy. Raises ValueError for a name that is not in `POLICIES`."""
    factory = POLICIES.get(name)
    if factory is None:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    return factory()

"""Routers of others, written from their published formulas under the contract of ours: to be compared with in the
audit, and as shadows. No gateway serves with them.

Each gets what the gateway knows, exactly matched and counted, which is more than most have at home: what is compared is
what they make of it.
"""

from collections.abc import Callable

from policies.contract import Policy
from policies.peers.aibrix import PrefixCache
from policies.peers.dynamo import TUNED_SCALE, Dynamo
from policies.peers.greedy import GreedyTtft
from policies.peers.llm_d import StickyThenScored
from policies.peers.preble import Preble
from policies.peers.production_stack import LoadAware, PrefixOnly
from policies.peers.sglang import CacheAware
from policies.peers.smg import LeastTokens
from policies.state.chains import ChainStore

NewStore = Callable[[], ChainStore]
"""Makes an empty store of chains."""

PEERS: dict[str, Callable[[NewStore], Policy]] = {
    "sglang": lambda _: CacheAware(),
    "dynamo": lambda new_store: Dynamo(new_store()),
    "dynamo-tuned": lambda new_store: Dynamo(new_store(), TUNED_SCALE, "dynamo-tuned"),
    "llm-d": lambda _: StickyThenScored(),
    "production-stack": lambda _: LoadAware(),
    "production-stack-prefix": lambda _: PrefixOnly(),
    "preble": lambda _: Preble(),
    "aibrix": lambda _: PrefixCache(),
    "least-tokens": lambda _: LeastTokens(),
    "greedy-ttft": lambda _: GreedyTtft(),
}


def create_peer(name: str, new_store: NewStore) -> Policy:
    """A fresh one. Raises ValueError for a name that is not in `PEERS`."""
    factory = PEERS.get(name)
    if factory is None:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(PEERS)}")
    return factory(new_store)

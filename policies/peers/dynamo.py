"""Dynamo's KV router (ai-dynamo, `lib/kv-router/src/scheduling/selector/default.rs` and
`docs/components/router/router-concepts.md`, version 1.6.1):

    cost = prefill_load_scale * max(active prefill + incoming - overlap credit, 0) + active blocks

in blocks. Prefill load lasts from dispatch to the first token; active blocks are the distinct ones of all requests from
dispatch (not from admission) to their end, the incoming request's counted in. The default scale is 1; 32 is the best
that was found for the Mooncake conversation trace. Temperature 0: the least cost, equals at random. Overlap is what
events have confirmed: predicted overlap is off unless configured.
"""

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import NamedTuple

from policies.contract import Decision, Query, Snapshot, WorkerView
from policies.peers.contract import Asked
from policies.peers.picking import cheapest
from policies.state.chains import HASH_BYTES, ChainStore
from policies.state.inflight import WorkerKey
from policies.state.pins import PinnedChains

DEFAULT_SCALE = 1.0
TUNED_SCALE = 32.0
_NOTHING_ASKED = Asked(b"", 0, 1)


class _Active(NamedTuple):
    key: WorkerKey
    chain: bytes
    blocks: int
    """With the last one, where it is not full."""


class Dynamo:
    """Implements `policies.peers.contract.Observer`. `store` is for the chains of active requests."""

    def __init__(self, store: ChainStore, prefill_load_scale: float = DEFAULT_SCALE, name: str = "dynamo") -> None:
        self.name = name
        self._scale = prefill_load_scale
        self._pins = PinnedChains(store)
        self._requests: dict[str, _Active] = {}
        self._prefilling: dict[str, int] = {}
        self._blocks: Counter[WorkerKey] = Counter()
        self._prefill_tokens: Counter[WorkerKey] = Counter()
        self._asked = _NOTHING_ASKED
        self._shared: Mapping[WorkerKey, int] = {}

    def asked(self, asked: Asked) -> None:
        self._asked, self._shared = asked, self._pins.depths(asked.chain)

    def decide(self, query: Query, snapshot: Snapshot, random: Random) -> Decision:
        costs = [self._cost(query, view) for view in snapshot.workers]
        best = cheapest(costs, random)
        return Decision(snapshot.workers[best], f"{costs[best]:,.1f} blocks of load", costs=costs)

    def dispatched(self, request_id: str, asked: Asked, view: WorkerView, now: float) -> None:
        self.finished(request_id, now)
        key = (view.name, view.rank)
        active = _Active(key, asked.chain, _blocks(asked))
        tokens = max(asked.prompt_tokens - view.confirmed_tokens, 0)
        self._requests[request_id], self._prefilling[request_id] = active, tokens
        self._blocks[key] += active.blocks - self._pins.pin(key, asked.chain)
        self._prefill_tokens[key] += tokens

    def first_token(self, request_id: str, now: float) -> None:
        tokens = self._prefilling.pop(request_id, 0)
        if tokens:
            self._prefill_tokens[self._requests[request_id].key] -= tokens

    def finished(self, request_id: str, now: float) -> None:
        self.first_token(request_id, now)
        active = self._requests.pop(request_id, None)
        if active is not None:
            self._blocks[active.key] -= active.blocks - self._pins.unpin(active.key, active.chain)

    def _cost(self, query: Query, view: WorkerView) -> float:
        key, asked = (view.name, view.rank), self._asked
        tokens = self._prefill_tokens[key] + query.prompt_tokens - view.confirmed_tokens
        blocks = self._blocks[key] + _blocks(asked) - self._shared.get(key, 0)
        return self._scale * max(tokens, 0) / asked.block_size_tokens + blocks


def _blocks(asked: Asked) -> int:
    return max(-(-asked.prompt_tokens // asked.block_size_tokens), len(asked.chain) // HASH_BYTES)

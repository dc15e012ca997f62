"""A passage that one instance has at one position, answered from at another by its peer, where a salt accepts that."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from cachecore.scope import Fidelity, Keyring
from cachecore.transfer.plan import FRACTION_PARAMETER, PARAMETER
from tests.vllm.conftest import MOVING, Pair
from tests.vllm.movers import Answer, Movers, ask, info
from tests.vllm.peers import Peer
from tests.vllm.servers import BLOCK_TOKENS

pytestmark = [pytest.mark.vllm, MOVING]

WAS, IS, BLOCKS = 3, 2, 8
"""Blocks before the passage, where it was computed and where it is wanted, and its own."""
END = IS + BLOCKS


class Case:
    """One passage, and who has it."""

    def __init__(self, pair: Pair, peer: Peer, keyring: Keyring) -> None:
        self.movers, self.back = Movers(pair.a, pair.b, keyring), Movers(pair.b, pair.a, keyring)
        self.peer = peer
        passage = self.movers.prompt(BLOCKS * BLOCK_TOKENS)
        self.served = [*self.movers.prompt(WAS * BLOCK_TOKENS), *passage, *self.movers.prompt(5)]
        self.prompt = [*self.movers.prompt(IS * BLOCK_TOKENS), *passage, *self.movers.prompt(20)]
        self.salt = self.movers.salt(fidelity=Fidelity.FUSED)
        self.movers.cold(self.served)

    def pulled(self, fraction: float | None = None, **fields: Any) -> Answer:
        """The target's answer, which has the prompt's beginning already."""
        movers = self.movers
        ask(movers.target.http, movers.body(self.prompt[: IS * BLOCK_TOKENS + 1], cache_salt=self.salt))
        plan = movers.plan(self.served, first=WAS, end=WAS + BLOCKS, target_position=IS * BLOCK_TOKENS)
        params: dict[str, Any] = {PARAMETER: [movers.signed(plan, fidelity=Fidelity.FUSED)]}
        if fraction is not None:
            params[FRACTION_PARAMETER] = fraction
        how = {"cache_salt": self.salt, "kv_transfer_params": params, **fields}
        return ask(movers.target.http, movers.body(self.prompt, **how))

    def keys(self, movers: Movers, prompt: list[int], first: int, worst: Fidelity = Fidelity.EXACT) -> Tensor:
        """Of the passage's tokens, [layers, tokens, kv_heads, head_dim], as the source of `movers` has them."""
        came = self.peer.pull(movers.plan(prompt, first=first, end=first + BLOCKS), movers.naming(), worst)
        assert came.fetched, came.outcome
        return came.kv[0]


@pytest.fixture
def case(pair: Pair) -> Iterator[Case]:
    assert pair.a.keyring is not None
    keyring = Keyring.load(pair.a.keyring)
    with Peer(pair.a, keyring).running() as peer:
        yield Case(pair, peer, keyring)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_its_keys_are_turned_to_where_it_stands(case: Case) -> None:
    assert info(case.movers.target)["transfer"]["shifted"]
    pulled = case.pulled()
    assert pulled.cached_tokens == END * BLOCK_TOKENS
    assert pulled.report.startswith(f"outcome=fetched; tokens={BLOCKS * BLOCK_TOKENS};")
    case.movers.cold(case.prompt)
    computed = case.keys(case.movers, case.prompt, IS)
    turned = case.keys(case.back, case.prompt, IS, Fidelity.FUSED)
    as_it_was = case.keys(case.movers, case.served, WAS)
    # Of layer 0 they depend on a token and its position alone.
    assert apart(turned[0], computed[0]) < 1e-5
    assert apart(as_it_was[0], computed[0]) > 0.5
    assert apart(turned[-1], computed[-1]) < apart(as_it_was[-1], computed[-1])


def test_who_wants_it_exact_never_sees_it(case: Case) -> None:
    movers = case.movers
    taken = case.pulled()
    plan = case.back.plan(case.prompt, first=IS, end=END)
    assert not case.peer.pull(plan, movers.naming()).fetched
    assert not case.peer.pull(plan, movers.naming(), Fidelity.QUANTIZED).fetched
    refused = case.pulled(cache_salt=movers.salt())
    assert refused.cached_tokens == 0
    assert refused.report.startswith("outcome=refused; reason=unexpected;")
    worse = movers.body(case.prompt, cache_salt=movers.salt(fidelity=Fidelity.QUANTIZED))
    assert ask(movers.target.http, worse).cached_tokens == 0
    again = ask(movers.target.http, movers.body(case.prompt, cache_salt=case.salt))
    assert (again.cached_tokens, again.tokens) == (END * BLOCK_TOKENS, taken.tokens)


def test_recomputed_whole_it_is_answered_as_computed(case: Case) -> None:
    pulled = case.pulled(fraction=1.0)
    cold = case.movers.cold(case.prompt)
    assert (pulled.cached_tokens, cold.cached_tokens) == (END * BLOCK_TOKENS, 0)
    assert pulled.tokens == cold.tokens

"""What lies in an instance's memory after a pull, number for number, and what it answers from it."""

from collections.abc import Iterator

import pytest
import torch

from cachecore.scope import Fidelity, Keyring
from tests.vllm.conftest import MOVING_IN_EACH_DTYPE, Pair
from tests.vllm.movers import Movers, ask
from tests.vllm.peers import Peer
from tests.vllm.servers import BLOCK_TOKENS

pytestmark = [pytest.mark.vllm, MOVING_IN_EACH_DTYPE]

HELD = 5 * BLOCK_TOKENS
SHORT = HELD + 7
"""bfloat16 is computed slowly on CPUs."""


@pytest.fixture
def keyring(pair: Pair) -> Keyring:
    assert pair.a.keyring is not None
    return Keyring.load(pair.a.keyring)


@pytest.fixture
def movers(pair: Pair, keyring: Keyring) -> Movers:
    return Movers(pair.a, pair.b, keyring)


@pytest.fixture
def back(pair: Pair, keyring: Keyring) -> Movers:
    """The other way."""
    return Movers(pair.b, pair.a, keyring)


@pytest.fixture
def peer(pair: Pair, keyring: Keyring) -> Iterator[Peer]:
    with Peer(pair.a, keyring).running() as peer:
        yield peer


def test_every_layer_comes_bit_for_bit(pair: Pair, movers: Movers, back: Movers, peer: Peer) -> None:
    prompt = movers.prompt(SHORT)
    movers.cold(prompt)
    assert movers.pull(prompt, movers.plan(prompt)).cached_tokens == HELD
    naming = movers.naming()
    computed, pulled = peer.pull(movers.plan(prompt), naming), peer.pull(back.plan(prompt), naming)
    assert computed.fetched, computed.outcome
    assert pulled.fetched, pulled.outcome
    assert str(computed.kv.dtype) == f"torch.{pair.a.dtype}"
    assert computed.kv.shape[2] == HELD
    assert computed.kv.abs().amax(dim=(2, 3, 4)).min() > 0  # of each layer, keys and values
    assert torch.equal(computed.kv, pulled.kv)


def test_a_pulled_prefix_is_answered_as_ones_own(movers: Movers) -> None:
    for _ in range(2):
        prompt = movers.prompt(SHORT)
        movers.cold(prompt, output_tokens=1)
        own = movers.cold(prompt, output_tokens=16)
        pulled = movers.pull(prompt, movers.plan(prompt), output_tokens=16)
        assert (own.cached_tokens, pulled.cached_tokens) == (HELD, HELD)
        assert pulled.tokens == own.tokens


def test_what_lost_something_on_its_way_stays_under_a_salt_that_says_so(
    movers: Movers, back: Movers, peer: Peer
) -> None:
    worse = movers.salt(fidelity=Fidelity.QUANTIZED)
    prompt = movers.prompt(SHORT)
    movers.cold(prompt)
    plan = movers.plan(prompt, codec="i8")
    document = movers.signed(plan, fidelity=Fidelity.QUANTIZED)
    refused = ask(movers.target.http, movers.body(prompt[:-1], document))
    assert (refused.cached_tokens, refused.report.partition("; tokens")[0]) == (0, "outcome=refused; reason=unexpected")
    prompt = movers.prompt(SHORT)
    movers.cold(prompt)
    document = movers.signed(movers.plan(prompt, codec="i8"), fidelity=Fidelity.QUANTIZED)
    taken = ask(movers.target.http, movers.body(prompt, document, cache_salt=worse))
    assert taken.cached_tokens == HELD
    assert taken.report.startswith(f"outcome=fetched; tokens={HELD};")
    naming = movers.naming()
    exact = peer.pull(movers.plan(prompt), naming)
    lossy = peer.pull(back.plan(prompt), naming, Fidelity.QUANTIZED)
    assert exact.fetched
    assert lossy.fetched
    apart = (exact.kv.float() - lossy.kv.float()).abs().amax()
    assert 0 < apart < 0.05 * exact.kv.float().abs().amax()
    # Neither peers nor the instance itself have it for those who want it exact.
    assert not peer.pull(back.plan(prompt), naming).fetched
    assert ask(movers.target.http, movers.body(prompt)).cached_tokens == 0
    again = ask(movers.target.http, movers.body(prompt, cache_salt=worse))
    assert (again.cached_tokens, again.tokens) == (HELD, taken.tokens)

"""Workers that move KV by an engine as well: run by hand, as `make test-transports` has no torch."""

import pytest

from cachecore.scope import Fidelity
from tests.workers.transfer.world import HELD, PROMPT, answer, generation, pair, plan_of, signed, warm
from workers.engine import TransferOutcome


@pytest.mark.transports
@pytest.mark.parametrize("name", ["nixl", "mooncake"])
async def test_a_pull_by_an_engine(name: str) -> None:
    async with pair(transfer={"wires": [name]}) as (source, target):
        expected = await warm(source)
        assert source.info.transfer is not None
        addresses = source.info.transfer.addresses
        assert [address.partition("://")[0] for address in addresses] == [name, "tcp"]
        plan = signed(plan_of(source, codec="raw", addresses=addresses[:1]), target)
        tokens, first = await answer(target, generation(PROMPT, plan, fidelity=Fidelity.EXACT))
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.tokens) == (TransferOutcome.FETCHED, HELD)
        assert tokens == expected

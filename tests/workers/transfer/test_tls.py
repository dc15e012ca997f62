"""Two workers that exchange KV over TLS, and two that do not."""

from pathlib import Path

import pytest

from tests.cachecore.transfer.certificates import Authority
from tests.workers.transfer.world import HELD, PROMPT, answer, generation, pair, plan_of, signed, warm, worker


async def test_a_prompt_is_pulled_over_tls(tmp_path: Path) -> None:
    async with pair(transfer={"tls": Authority.make(tmp_path).member()}) as (source, target):
        said = await warm(source)
        assert source.info.transfer is not None
        assert [address.partition("://")[0] for address in source.info.transfer.addresses] == ["tcp+tls"]
        tokens, first = await answer(target, generation(PROMPT, signed(plan_of(source), target)))
        assert (tokens, first.cached_tokens) == (said, HELD)


@pytest.mark.parametrize("safe_source", [True, False])
async def test_a_worker_with_tls_and_one_without_compute_for_themselves(tmp_path: Path, safe_source: bool) -> None:
    safe = {"tls": Authority.make(tmp_path).member()}
    async with (
        worker(transfer=safe if safe_source else None) as source,
        worker(transfer=None if safe_source else safe) as target,
    ):
        said = await warm(source)
        tokens, first = await answer(target, generation(PROMPT, signed(plan_of(source), target)))
        assert (tokens, first.cached_tokens) == (said, 0)
        assert first.transfer is not None
        assert (first.transfer.outcome, first.transfer.reason) == ("refused", "unreachable")

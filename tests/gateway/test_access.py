"""Keys and limits as one gateway wires them: what is off is not there."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.access import Access
from gateway.api_keys import add_api_key
from gateway.config import GatewayConfig, RateLimitsConfig, TenantsConfig, UpstreamTlsConfig, WorkerConfig
from gateway.errors import ConfigError, TooManyRequests
from gateway.limits import RateLimits
from gateway.views.access import AccessCollector


class Limited:
    limits: RateLimits | None = None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def samples(access: Access) -> dict[str, float]:
    return {sample.name: sample.value for family in AccessCollector(access).collect() for sample in family.samples}


def test_nobody_is_told_of_limits_where_there_are_none() -> None:
    access, limited = Access(GatewayConfig()), Limited()
    refused: list[int] = []
    access.limit(limited, refused.append)
    assert limited.limits is None
    access.apply(RateLimitsConfig(requests_per_minute=1.0))
    assert limited.limits is access.limits
    tenant = access.tenants.authenticate(None)
    limited.limits.admit(tenant)
    with pytest.raises(TooManyRequests):
        limited.limits.admit(tenant)
    assert refused == [429]
    access.apply(RateLimitsConfig())
    assert limited.limits is None


async def test_a_key_with_limits_brings_them_and_takes_them_away(tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    file.write_text("")
    access, limited = Access(GatewayConfig(tenants=TenantsConfig(api_keys_file=file))), Limited()
    access.limit(limited, lambda status: None)
    await access.start()
    try:
        assert limited.limits is None
        add_api_key(file, "acme", requests_per_minute=1.0)
        await until(lambda: limited.limits is not None)
        assert samples(access) == {"ropeway_api_keys": 1.0, "ropeway_api_keys_unread": 0.0}
        file.write_text("{")
        await until(lambda: access.keys_problem.startswith(f"{file}: line 1: "))
        assert samples(access) == {"ropeway_api_keys": 1.0, "ropeway_api_keys_unread": 1.0}
        file.write_text("")
        await until(lambda: limited.limits is None)
        assert samples(access) == {"ropeway_api_keys": 0.0, "ropeway_api_keys_unread": 0.0}
    finally:
        await access.stop()


def test_a_store_of_keys_must_be_one() -> None:
    with pytest.raises(ValueError, match="a store's URL begins with"):
        TenantsConfig(api_keys_redis="http://127.0.0.1")


def test_tls_towards_workers_is_made_where_it_is_needed(tmp_path: Path) -> None:
    assert Access(GatewayConfig()).upstream_tls is None
    assert Access(GatewayConfig(workers=(WorkerConfig(url="http://a:1"),))).upstream_tls is None
    assert Access(GatewayConfig(workers=(WorkerConfig(url="https://a:1"),))).upstream_tls is not None
    # Workers may be registered later.
    assert Access(GatewayConfig(upstream_tls=UpstreamTlsConfig(verify=False))).upstream_tls is not None
    with pytest.raises(ConfigError, match="No such file"):
        Access(GatewayConfig(upstream_tls=UpstreamTlsConfig(ca=tmp_path / "none")))

"""Tenants' shares over several gateways: what is told, what is heard, and what happens without the server."""

import asyncio
from typing import Any

import pytest

from cachecore.store import StoreError
from gateway.standings import REPORT_BYTES_MAX, TENANTS_TOLD_MAX, VERSION, Report, SharedStandings, decode, encode
from tests.gateway.test_admission import World, settle


class Server:
    """Keys that expire on nobody's clock, as much of a store as is used."""

    def __init__(self) -> None:
        self.keys: dict[bytes, bytes] = {}
        self.expiries_ms: set[int] = set()
        self.down = False

    async def command(self, *parts: bytes | str | int, budget_seconds: float | None = None) -> Any:
        assert budget_seconds is not None
        if self.down:
            raise StoreError("down")
        if parts[0] == b"SET":
            _, key, value, _, expiry = parts
            self.keys[key] = value
            self.expiries_ms.add(expiry)
            return b"OK"
        assert parts[0] == b"MGET"
        return [self.keys.get(key) for key in parts[1:]]


def gateways(server: Server, *names: str) -> dict[str, tuple[World, SharedStandings]]:
    made = {}
    for name in names:
        world = World(quantum_tokens=10.0)
        others = [other for other in names if other != name]
        made[name] = world, SharedStandings(server, "p", name, lambda others=others: others, world.admission)
    return made


def begin(world: World, tenant: str, tokens: int) -> None:
    world.admission.gate(world.pool)
    world.admission.begun(world.request(tenant, output_tokens_max=1), world.pool, tokens - 1)


async def test_what_a_tenant_gets_elsewhere_holds_it_back_while_another_waits_there() -> None:
    server = Server()
    made = gateways(server, "g1", "g2")
    (here, telling_here), (there, telling_there) = made["g1"], made["g2"]
    begin(here, "greedy", 1000)
    begin(there, "modest", 10)
    for name in "ab":
        there.fill(name)
    waiting = there.wait(there.request("modest"))
    await settle()
    for telling in (telling_here, telling_there, telling_here):
        await telling.exchange()
        telling._settle()
    assert sorted(server.keys) == [b"p:{fleet}:admission:g1", b"p:{fleet}:admission:g2"]
    assert server.expiries_ms == {3000}
    assert here.admission.gate(here.pool).shares.held_back == {"greedy"}
    assert there.admission.gate(there.pool).shares.held_back == frozenset()
    there.admission.close()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_what_was_started_elsewhere_is_charged_to_who_waits_here() -> None:
    server = Server()
    made = gateways(server, "g1", "g2")
    (here, telling_here), (there, telling_there) = made["g1"], made["g2"]
    for name in "ab":
        here.fill(name)
    tasks = [here.wait(here.request(tenant)) for tenant in ("both", "here")]
    await settle()
    begin(there, "both", 5)
    await telling_there.exchange()
    await telling_here.exchange()
    begin(there, "both", 100)
    await telling_there.exchange()
    queue = here.admission.gate(here.pool).queue
    before = queue._lines["both"].deficit
    await telling_here.exchange()
    assert queue._lines["both"].deficit == before - 100.0
    assert queue._lines["here"].deficit == before
    here.admission.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_gateway_works_on_without_the_server_and_with_nonsense_on_it() -> None:
    server = Server()
    made = gateways(server, "g1", "g2")
    world, telling = made["g1"]
    begin(world, "t", 100)
    server.down = True
    with pytest.raises(StoreError):
        await telling.exchange()
    task = asyncio.create_task(telling.run())
    await settle()
    assert telling.failures == 1
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.admission.passes(world.request("t"), world.pool)

    server.down = False
    server.keys[b"p:{fleet}:admission:g2"] = b"nonsense"
    await telling.exchange()
    assert (telling.malformed, telling.reports) == (1, 0)


async def test_a_gateway_alone_tells_nobody() -> None:
    server = Server()
    (world, telling) = gateways(server, "g1")["g1"]
    begin(world, "t", 100)
    await telling.exchange()
    assert server.keys == {}


def test_reports_are_bounded_and_of_one_version() -> None:
    report = Report(VERSION, "run", {"m": {"t": (1.0, 2.0, 3.0)}})
    assert decode(encode(report)) == report
    crowd = {str(number): (1.0, 0.0, 0.0) for number in range(TENANTS_TOLD_MAX + 1)}
    for wrong in (
        Report(VERSION + 1, "run", {}),
        Report(VERSION, "", {}),
        Report(VERSION, "run", {"m": {"t": (-1.0, 0.0, 0.0)}}),
        Report(VERSION, "run", {"m": {"t": (float("nan"), 0.0, 0.0)}}),
        Report(VERSION, "run", {"m": {"t": (float("inf"), 0.0, 0.0)}}),
        Report(VERSION, "run", {"m": crowd}),
    ):
        assert decode(encode(wrong)) is None
    assert decode(b"") is None
    assert decode(b"\x00" * (REPORT_BYTES_MAX + 1)) is None

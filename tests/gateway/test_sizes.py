"""Whatever a gateway keeps is counted, and counted without walking over all of it."""

from collections import deque
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from gateway.config import GatewayConfig
from gateway.server import Gateway
from gateway.views.sizes import ITEMS_MAX, SizeCollector, sizes


class Inner:
    __module__ = "gateway.test"
    __slots__ = ("children", "names")

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.children: dict[str, Any] = {}


class Outer:
    __module__ = "gateway.test"

    def __init__(self, inner: list[Inner]) -> None:
        self.inner = inner
        self.queue: deque[int] = deque([1, 2, 3])
        self.again = self.queue
        self.first = inner[0]
        self.text = "not a collection"


def test_collections_are_counted_by_class_and_attribute() -> None:
    outer = Outer([Inner(["a"]), Inner(["b", "c"])])
    assert sizes(outer) == {"Outer.inner": 2, "Outer.queue": 3, "Inner.names": 3, "Inner.children": 0}


def test_what_is_shared_is_counted_once_and_cycles_end() -> None:
    outer = Outer([Inner([])])
    outer.first.children["back"] = outer
    assert sizes(outer)["Outer.queue"] == 3


def test_large_collections_are_not_looked_into() -> None:
    many = [Inner(["x"]) for _ in range(ITEMS_MAX + 1)]
    assert sizes(Outer(many)) == {"Outer.inner": ITEMS_MAX + 1, "Outer.queue": 3, "Inner.names": 1, "Inner.children": 0}


def test_trees_are_not_walked_over() -> None:
    root = Inner([])
    node = root
    for depth in range(100):
        node.children[str(depth)] = Inner(["x"])
        node = node.children[str(depth)]
    assert sizes(Outer([root]))["Inner.children"] == 1


async def test_a_gateways_own_are_found() -> None:
    gateway = Gateway(GatewayConfig())
    registry = CollectorRegistry()
    registry.register(SizeCollector(gateway))
    told = generate_latest(registry).decode()
    await gateway.fleet.stop()
    for name in ("InflightAccounting._requests", "MemoryIndex._runs", "Edge.connections", "Fleet.workers"):
        assert f'ropeway_entries{{of="{name}"}} 0.0' in told

"""How much every collection of the gateway holds, found by walking over it: whatever grows without a bound shows.

From the gateway on, through attributes and through what small collections hold, every list, map, set, queue and array
of an object of ours is counted under its class and attribute; those of one name are added up. Nobody has to remember to
count a new one. Labels are bounded by the code: names of classes and attributes, never data.
"""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

ITEMS_MAX = 256
"""Collections with more are counted, and what they hold is not looked at."""
OBJECTS_MAX = 10_000
"""After so many objects the walk ends."""

_OURS = ("gateway.", "cachecore.", "policies.")
_COLLECTIONS = (dict, list, set, deque, array, bytearray)


def sizes(root: object) -> dict[str, int]:
    """Entries of each collection that can be reached from `root`, by `Class.attribute`."""
    counts: Counter[str] = Counter()
    seen: set[int] = {id(root)}
    # An object, and whether it was found in a collection: then what its own collections hold is not looked at, or trees
    # would be walked over as a whole.
    waiting: deque[tuple[object, bool]] = deque([(root, False)])
    while waiting and len(seen) < OBJECTS_MAX:
        owner, held = waiting.popleft()
        for name, value in _attributes(owner):
            if id(value) in seen:
                continue
            if isinstance(value, _COLLECTIONS):
                seen.add(id(value))
                counts[f"{type(owner).__name__}.{name}"] += len(value)
                further = () if held or len(value) > ITEMS_MAX else _items(value)
                found: Iterable[tuple[object, bool]] = ((item, True) for item in further)
            else:
                found = ((value, held),)
            for item, inside in found:
                if id(item) not in seen and type(item).__module__.startswith(_OURS):
                    seen.add(id(item))
                    waiting.append((item, inside))
    return dict(counts)


def _attributes(owner: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(owner, "__dict__", {}).items()
    for kind in type(owner).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(owner, name) and not name.startswith("__"):
                yield name, getattr(owner, name)


def _items(collection: Collection[Any]) -> Iterable[Any]:
    return list(collection.values()) if isinstance(collection, Mapping) else list(collection)


class SizeCollector(Collector):
    def __init__(self, root: object) -> None:
        self._root = root

    def collect(self) -> Iterator[Metric]:
        text = "Entries of the gateway's own collections, by class and attribute as its code calls them."
        family = GaugeMetricFamily("ropeway_entries", text, labels=("of",))
        for name, count in sorted(sizes(self._root).items()):
            family.add_metric((name,), count)
        yield family

"""Hit rates without time: what a cache could reuse of a trace if requests came one after the other, in no hurry.

They bound what any policy can reach, and tell why it does not. Each counts the blocks at the start of a prompt that are
cached when it arrives, and caches all of its blocks at once:

* infinite: one cache that keeps everything. No policy can reuse more;
* pooled: one cache of a given size, least recently used block out first, for the whole fleet;
* oracle: the same size, but out goes what is used again last. No way of evicting reuses more;
* round robin, siloed: the requests dealt out to nodes in turn, each with a cache of its own (infinite; of a size).

A hit rate comes in three weights: blocks reused / blocks; tokens reused / tokens, where the last block of a prompt may
be partly filled; and the mean of each request's share of its own tokens.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import Any

from cachecore.blocks import HASH_BYTES
from loadtest.traces.contract import Trace

LRU_BLOCKS = (1_000, 10_000, 50_000)
ROUND_ROBIN_NODES = (2, 4, 8)
DIGITS = 4

Progress = Callable[[int, int], None]
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class HitRate:
    blocks: float
    tokens: float
    request_mean: float

    def row(self) -> dict[str, float]:
        """Rounded, for JSON."""
        return {
            "blocks": round(self.blocks, DIGITS),
            "tokens": round(self.tokens, DIGITS),
            "request_mean": round(self.request_mean, DIGITS),
        }


class Ceilings:
    """The bounds of one trace. Requests are taken in the trace's order, before any spreading of arrivals."""

    def __init__(self, trace: Trace) -> None:
        self._block_size_tokens = trace.block_size_tokens
        self._lengths = [request.input_tokens for request in trace.requests]
        numbers: dict[bytes, int] = {}
        # Blocks as small integers: they are looked up many times.
        self._paths = [
            [
                numbers.setdefault(chain[start : start + HASH_BYTES], len(numbers))
                for start in range(0, len(chain), HASH_BYTES)
            ]
            for chain in (request.chain for request in trace.requests)
        ]
        self.distinct_blocks = len(numbers)
        self.blocks = sum(map(len, self._paths))

    def infinite(self) -> HitRate:
        return self._round_robin(1, _Infinite)

    def round_robin(self, nodes: int) -> HitRate:
        """Nodes with a cache each that keeps everything."""
        return self._round_robin(nodes, _Infinite)

    def pooled(self, capacity_blocks: int) -> HitRate:
        """One cache of this size for all, by least recent use."""
        return self._round_robin(1, partial(_LeastRecentlyUsed, capacity_blocks))

    def siloed(self, nodes: int, capacity_blocks: int) -> HitRate:
        """Nodes with a cache of this size each. With host memory behind the engine's, the size is that of both."""
        return self._round_robin(nodes, partial(_LeastRecentlyUsed, capacity_blocks))

    def oracle(self, capacity_blocks: int) -> HitRate:
        """One cache of this size for all that knows what will come."""
        cache = _Clairvoyant(capacity_blocks, self._paths)
        return self._rate([cache.reuse(path, place) for place, path in enumerate(self._paths)])

    def longest_prefix(self, nodes: int) -> tuple[HitRate, list[int]]:
        """Each request to the node that holds most of it, among equals to the one that missed fewest blocks so far.

        Returns the requests of each node as well: where every prompt begins alike, one node gets all.
        """
        caches = [_Infinite() for _ in range(nodes)]
        missed, requests = [0] * nodes, [0] * nodes
        hits = []
        for path in self._paths:
            held = [cache.held(path) for cache in caches]
            node = max(range(nodes), key=lambda index: (held[index], -missed[index]))
            caches[node].reuse(path)
            missed[node] += len(path) - held[node]
            requests[node] += 1
            hits.append(held[node])
        return self._rate(hits), requests

    def _round_robin(self, nodes: int, cache: Callable[[], "_Infinite | _LeastRecentlyUsed"]) -> HitRate:
        caches = [cache() for _ in range(nodes)]
        return self._rate(caches[place % nodes].reuse(path) for place, path in enumerate(self._paths))

    def _rate(self, hits: Iterable[int]) -> HitRate:
        """From the blocks reused by each request."""
        blocks = tokens = 0
        shares = 0.0
        size = self._block_size_tokens
        for reused, length in zip(hits, self._lengths, strict=True):
            if reused:
                reused_tokens = min(reused * size, length)
                blocks += reused
                tokens += reused_tokens
                shares += reused_tokens / length
        return HitRate(
            blocks / max(self.blocks, 1), tokens / max(sum(self._lengths), 1), shares / max(len(self._paths), 1)
        )


class _Infinite:
    def __init__(self) -> None:
        self._kept: set[int] = set()

    def held(self, path: Sequence[int]) -> int:
        return _prefix(path, self._kept)

    def reuse(self, path: Sequence[int]) -> int:
        """How many blocks of a prompt are here; all of them are afterwards."""
        held = self.held(path)
        self._kept.update(path[held:])
        return held


class _LeastRecentlyUsed:
    """Blocks are used from the first to the last, and evicted one by one once a prompt's are all in."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = _checked(capacity_blocks)
        self._kept: dict[int, None] = {}
        """Least recently used first."""

    def reuse(self, path: Sequence[int]) -> int:
        kept = self._kept
        held = _prefix(path, kept)
        for block in path:
            kept.pop(block, None)
            kept[block] = None
        excess = len(kept) - self._capacity
        if excess > 0:
            for block in list(islice(kept, excess)):
                del kept[block]
        return held


class _Clairvoyant:
    """Keeps only what will be used again, and evicts what is used again last (Belady).

    A block is used no later than those behind it, so what is kept of a prompt is always its beginning, and of blocks
    that are used again by the same request the deepest goes first.
    """

    def __init__(self, capacity_blocks: int, paths: Sequence[Sequence[int]]) -> None:
        self._capacity = _checked(capacity_blocks)
        self._next_uses = _next_uses(paths)
        self._kept: set[int] = set()
        self._waiting: dict[int, list[tuple[int, int]]] = {}
        """Kept blocks, (depth, block), by the request that uses them next."""
        self._latest: list[int] = []
        """A heap of those requests, negated: the last on top."""

    def reuse(self, path: Sequence[int], place: int) -> int:
        """How many blocks of the prompt at this place are here."""
        kept = self._kept
        held = _prefix(path, kept)
        kept.difference_update(block for _, block in self._waiting.pop(place, ()))
        for depth, (block, following) in enumerate(zip(path, self._next_uses[place], strict=True)):
            if following != _NEVER:
                if following not in self._waiting:
                    self._waiting[following] = []
                    heappush(self._latest, -following)
                self._waiting[following].append((depth, block))
                kept.add(block)
        self._evict()
        return held

    def _evict(self) -> None:
        while len(self._kept) > self._capacity:
            last = -self._latest[0]
            blocks = self._waiting[last]
            blocks.sort()
            excess = len(self._kept) - self._capacity
            self._kept.difference_update(block for _, block in blocks[-excess:])
            del blocks[-excess:]
            if not blocks:
                heappop(self._latest)
                del self._waiting[last]


def _next_uses(paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each block of each request, the place of the next request that uses it."""
    coming: dict[int, int] = {}
    found: list[list[int]] = []
    for place in range(len(paths) - 1, -1, -1):
        path = paths[place]
        found.append([coming.get(block, _NEVER) for block in path])
        coming.update(dict.fromkeys(path, place))
    return found[::-1]


def _prefix(path: Sequence[int], kept: Container[int]) -> int:
    """How many blocks at the start of a prompt are kept."""
    for depth, block in enumerate(path):
        if block not in kept:
            return depth
    return len(path)


def _checked(capacity_blocks: int) -> int:
    if capacity_blocks < 1:
        raise ValueError(f"a cache has at least one block, not {capacity_blocks}")
    return capacity_blocks


def ceilings_row(
    trace: Trace,
    lru_blocks: Sequence[int] = LRU_BLOCKS,
    nodes: Sequence[int] = ROUND_ROBIN_NODES,
    node_blocks: int | None = None,
    host_blocks: int = 0,
    progress: Progress | None = None,
) -> Mapping[str, Any]:
    """All bounds of a trace as JSON keys, block-weighted and rounded; of the infinite cache, all three weights.

    `node_blocks`, the cache of each node, adds for each number of nodes the bounds at that size: `siloed`, `pooled`,
    `oracle`, and with `host_blocks` of host memory behind each, `siloed_host`.
    """
    ceilings = Ceilings(trace)
    steps: dict[str, Callable[[], HitRate]] = {}
    for capacity in lru_blocks:
        steps[f"hit_rate_lru_{capacity}"] = partial(ceilings.pooled, capacity)
    for count in nodes:
        steps[f"hit_rate_round_robin_{count}"] = partial(ceilings.round_robin, count)
        if node_blocks is not None:
            steps |= _sized(ceilings, count, node_blocks, host_blocks)
    infinite = ceilings.infinite().row()
    row: dict[str, Any] = {
        "hit_rate_infinite": infinite["blocks"],
        "hit_rate_infinite_tokens": infinite["tokens"],
        "hit_rate_infinite_request_mean": infinite["request_mean"],
    }
    for done, (key, step) in enumerate(steps.items(), start=1):
        row[key] = step().row()["blocks"]
        if progress is not None:
            progress(done, len(steps))
    return row


def _sized(ceilings: Ceilings, nodes: int, node_blocks: int, host_blocks: int) -> dict[str, Callable[[], HitRate]]:
    steps: dict[str, Callable[[], HitRate]] = {
        f"hit_rate_siloed_{nodes}": partial(ceilings.siloed, nodes, node_blocks),
        f"hit_rate_pooled_{nodes}": partial(ceilings.pooled, nodes * node_blocks),
        f"hit_rate_oracle_{nodes}": partial(ceilings.oracle, nodes * node_blocks),
    }
    if host_blocks:
        steps[f"hit_rate_siloed_host_{nodes}"] = partial(ceilings.siloed, nodes, node_blocks + host_blocks)
    return steps

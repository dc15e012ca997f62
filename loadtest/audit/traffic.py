"""What a trace's traffic is like: lengths, overlaps, what block size and cache size would make of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachecore.blocks import HASH_BYTES
from loadtest.audit.ceilings import Ceilings
from loadtest.audit.divergence import application
from loadtest.audit.report import Curve, Histogram
from loadtest.traces.contract import NO_PREDECESSOR, Trace, TraceRequest

QUANTILES = (0.1, 0.5, 0.9, 0.99, 1.0)
_BLOCK_FACTORS = (1, 2, 4, 8, 16, 32)
_CACHE_STEPS = 9
"""Cache sizes that are tried: all blocks, half of them, and so on."""
_SHORTEST = 256
_OVERLAP_BOUNDS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


class Point(NamedTuple):
    """A size and the token hit rate at it."""

    size: int
    hit_rate: float


class Turn(NamedTuple):
    """Two requests of one conversation, one after the other."""

    before: TraceRequest
    after: TraceRequest


@dataclass(frozen=True, slots=True)
class Traffic:
    """Figures of one trace; tokens."""

    trace: Trace
    reused_blocks: Sequence[int]
    """Of each request, that an earlier one left in a cache that keeps everything."""

    @property
    def prompt_tokens(self) -> int:
        return sum(request.input_tokens for request in self.trace.requests)

    @property
    def reused_tokens(self) -> list[int]:
        """By request that reuses anything."""
        size = self.trace.block_size_tokens
        pairs = zip(self.trace.requests, self.reused_blocks, strict=True)
        return [min(blocks * size, request.input_tokens) for request, blocks in pairs if blocks]

    @property
    def typical_reuse(self) -> int:
        """Half of all reused tokens lie in prefixes of so many or more: short ones that everybody has weigh little."""
        ordered = sorted(self.reused_tokens)
        half, passed = sum(ordered) / 2, 0
        for tokens in ordered:
            passed += tokens
            if passed >= half:
                return tokens
        return 0

    def block_sizes(self) -> list[Point]:
        """Hit rates with blocks of the trace's own size and larger ones. Of smaller ones a trace tells nothing."""
        total, own = max(self.prompt_tokens, 1), self.trace.block_size_tokens
        return [Point(own * factor, self._reused_in(factor) / total) for factor in _BLOCK_FACTORS]

    def _reused_in(self, factor: int) -> int:
        size = self.trace.block_size_tokens
        pairs = zip(self.trace.requests, self.reused_blocks, strict=True)
        return sum(min(blocks // factor * factor * size, request.input_tokens) for request, blocks in pairs)

    def histograms(self) -> list[Histogram]:
        requests = self.trace.requests
        return [
            by_length("Prompt lengths, tokens", [request.input_tokens for request in requests]),
            by_length("Answer lengths, tokens", [request.output_tokens for request in requests]),
            self._overlaps(),
        ]

    def _overlaps(self) -> Histogram:
        size = self.trace.block_size_tokens
        counts = [0] * (len(_OVERLAP_BOUNDS))
        for request, blocks in zip(self.trace.requests, self.reused_blocks, strict=True):
            share = min(blocks * size, request.input_tokens) / max(request.input_tokens, 1)
            counts[next(place for place, bound in enumerate(_OVERLAP_BOUNDS) if share <= bound)] += 1
        labels = ["none", *(f"to {bound:.0%}" for bound in _OVERLAP_BOUNDS[1:])]
        return Histogram("Share of a prompt that was there before", labels, counts)


def traffic_of(trace: Trace) -> Traffic:
    seen: set[bytes] = set()
    reused = []
    for request in trace.requests:
        names = [_name(request.chain, place) for place in range(request.blocks)]
        reused.append(next((place for place, name in enumerate(names) if name not in seen), len(names)))
        seen.update(names)
    return Traffic(trace, reused)


def cache_sizes(ceilings: Ceilings, block_size_tokens: int) -> list[Point]:
    """Token hit rates of one least-recently-used cache for all, of so many tokens; the largest keeps everything."""
    sizes = {max(ceilings.distinct_blocks >> step, 1) for step in range(_CACHE_STEPS)}
    return [Point(blocks * block_size_tokens, ceilings.pooled(blocks).tokens) for blocks in sorted(sizes)]


def cache_curve(points: Sequence[Point]) -> Curve:
    return Curve("Hit rate by cache size, one cache for all", "tokens", "share of tokens", points)


def turns_of(trace: Trace) -> list[Turn]:
    """Consecutive requests of each conversation: as the trace says who follows whom, or by session. A request that
    only waits for another application's answer continues no conversation."""
    last: dict[str, TraceRequest] = {}
    turns = []
    for request in trace.requests:
        before = last.get(request.session) if request.session else None
        if request.follows != NO_PREDECESSOR:
            before = trace.requests[request.follows]
        if before is not None and _is_one_application(before, request):
            turns.append(Turn(before, request))
        if request.session:
            last[request.session] = request
    return turns


def _is_one_application(before: TraceRequest, after: TraceRequest) -> bool:
    return before.body is None or after.body is None or application(before.body) == application(after.body)


def kept_shares(turns: Sequence[Turn], block_size_tokens: int) -> list[float]:
    """Of the earlier prompt's full blocks, that the later one begins with; by turn whose earlier prompt has any."""
    shares = []
    for before, after in turns:
        blocks = min(before.input_tokens // block_size_tokens, before.blocks)
        if blocks:
            kept = (n for n in range(blocks) if _name(before.chain, n) != _name(after.chain, n))
            shares.append(next(kept, blocks) / blocks)
    return shares


def quantiles(values: Sequence[int]) -> dict[str, int]:
    """p10, p50 and so on; empty of nothing."""
    ordered = sorted(values)
    return {
        f"p{share * 100:g}": ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in QUANTILES if ordered
    }


def by_length(title: str, lengths: Sequence[int]) -> Histogram:
    """In powers of two."""
    counts: dict[int, int] = {}
    for length in lengths:
        bound = _SHORTEST
        while length > bound:
            bound *= 2
        counts[bound] = counts.get(bound, 0) + 1
    bounds = [_SHORTEST << step for step in range((max(counts, default=_SHORTEST) // _SHORTEST).bit_length())]
    return Histogram(title, [f"to {_short(bound)}" for bound in bounds], [counts.get(bound, 0) for bound in bounds])


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _name(chain: bytes, place: int) -> bytes:
    return chain[place * HASH_BYTES : (place + 1) * HASH_BYTES]

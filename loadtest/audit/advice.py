"""What an operator can do about a trace: sentences, each with the figures that it rests on.

Says as readily that something is not worth doing. Every verdict is about the trace and the engine that were audited.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from loadtest.audit.divergence import Divergence, divergences
from loadtest.audit.report import Advice, Bound, Capacity, Row
from loadtest.audit.traffic import Point, Traffic, kept_shares, quantiles, turns_of
from loadtest.breakeven import Way, break_even_gbps, fetching
from loadtest.hardware import CODECS, TIERS, Link
from workers.timing import TimingProfile

CACHE_SHARE = 0.95
"""Of what a cache that keeps everything reuses: beyond it, memory buys little."""
BLOCK_SHARE = 0.99
"""Of the hits of the smallest blocks that larger ones may not fall below."""
POOL_GAIN_MIN = 0.01
"""Of all prompt tokens: a pool that saves less is not worth its upkeep."""
DIVERGENCE_SHARE = 0.02
"""Of pairs: rarer differences are not worth a line."""
_DIVERGENCES_MAX = 5
_SECONDS_PER_DAY = 86_400
_OURS = "kv-aware"


@dataclass(frozen=True, slots=True)
class Engine:
    """What was audited."""

    profile: TimingProfile
    gpus: int
    """Of each engine."""
    link: Link | None


class Memory(NamedTuple):
    """KV of all engines together."""

    tokens: float
    bytes_per_token: int


def on_traffic(traffic: Traffic, cache_points: Sequence[Point], memory: Memory) -> list[Advice]:
    """What follows from the trace alone."""
    turns = turns_of(traffic.trace)
    return [
        _lengths(traffic),
        _overlap(traffic, cache_points),
        *_turns(kept_shares(turns, traffic.trace.block_size_tokens)),
        *_fields(divergences(traffic.trace, [(turn.before, turn.after) for turn in turns])),
        _block_size(traffic.block_sizes()),
        *_cache_size(cache_points, memory),
    ]


def _lengths(traffic: Traffic) -> Advice:
    requests = traffic.trace.requests
    prompts = quantiles([request.input_tokens for request in requests])
    answers = quantiles([request.output_tokens for request in requests])
    if not prompts:
        return Advice("lengths", "the trace has no requests")
    text = (
        f"prompts of {prompts['p50']:,} tokens in the middle, {prompts['p90']:,} at p90, {prompts['p100']:,} at most; "
        f"answers of {answers['p50']:,}, {answers['p90']:,}, {answers['p100']:,}"
    )
    return Advice("lengths", text, {"prompt_tokens": prompts, "answer_tokens": answers})


def _overlap(traffic: Traffic, cache_points: Sequence[Point]) -> Advice:
    requests = max(len(traffic.trace.requests), 1)
    reusing = traffic.reused_tokens
    share = len(reusing) / requests
    typical = traffic.typical_reuse
    most = cache_points[-1].hit_rate if cache_points else 0.0
    text = (
        f"{share:.0%} of requests begin as an earlier one does; half of what could be reused lies in beginnings of "
        f"{typical:,} tokens or more"
    )
    if most < POOL_GAIN_MIN:
        text = "next to nothing is asked twice: route by load, no cache will help"
    return Advice(
        "overlap", text, {"requests_reusing": share, "reused_tokens_typical": typical, "hit_rate_infinite_tokens": most}
    )


def _turns(shares: Sequence[float]) -> Iterator[Advice]:
    if not shares:
        return
    whole = sum(share == 1.0 for share in shares) / len(shares)
    early = sum(share < 0.5 for share in shares) / len(shares)
    text = f"{whole:.0%} of {len(shares):,} follow-up turns begin with the whole of the turn before"
    if early >= DIVERGENCE_SHARE:
        text += f"; {early:.0%} part from it before its middle: something at the beginning changes"
    yield Advice("turns", text, {"turns": len(shares), "whole": whole, "parting_early": early})


def _fields(found: Sequence[Divergence]) -> Iterator[Advice]:
    pairs = sum(one.pairs for one in found)
    for one in found[:_DIVERGENCES_MAX]:
        if one.pairs < DIVERGENCE_SHARE * pairs:
            continue
        before, after = one.example
        text = (
            f"{one.path}: {one.kind}, {one.pairs:,} times, after {one.kept_tokens_median:,} tokens; the "
            f"{one.lost_tokens_median:,} behind it are computed again ({before!r}, then {after!r}). {_remedy(one)}"
        )
        yield Advice(
            "divergence",
            text,
            {
                "field": one.path,
                "kind": one.kind,
                "pairs": one.pairs,
                "kept_tokens_p50": one.kept_tokens_median,
                "lost_tokens_p50": one.lost_tokens_median,
                "example": list(one.example),
            },
        )


def _remedy(one: Divergence) -> str:
    if one.kind.startswith("tools"):
        return "Send the same tools in the same order"
    if one.kind.startswith("history"):
        return "Append to a conversation and leave what was said as it was"
    return "Move it behind what stays the same, to the last message for example"


def _block_size(points: Sequence[Point]) -> Advice:
    own = points[0]
    best = max(
        (point for point in points if point.hit_rate >= BLOCK_SHARE * own.hit_rate), key=lambda point: point.size
    )
    text = f"blocks of up to {best.size:,} tokens reuse within 1 % of what blocks of {own.size:,} do"
    if best.size == own.size:
        text = (
            f"keep blocks at {own.size:,} tokens or below: at {points[1].size:,} hits fall from {own.hit_rate:.3f} to "
        )
        text += f"{points[1].hit_rate:.3f}"
    return Advice("block size", text, {"block_size_tokens": best.size, "hit_rates": [list(point) for point in points]})


def _cache_size(points: Sequence[Point], memory: Memory) -> Iterator[Advice]:
    if not points or points[-1].hit_rate < POOL_GAIN_MIN:
        return
    most = points[-1].hit_rate
    enough = next(point for point in points if point.hit_rate >= CACHE_SHARE * most)
    size = f"{_short(enough.size)} tokens"
    if memory.bytes_per_token:
        size += f" ({_short(enough.size * memory.bytes_per_token)}B of KV)"
    verdict = "have that" if memory.tokens >= enough.size else f"have {_short(memory.tokens)} tokens"
    text = (
        f"one cache of {size} would reuse {enough.hit_rate:.3f} of {most:.3f} that are there to reuse; the engines "
        f"together {verdict}"
    )
    figures = {"cache_tokens": enough.size, "fleet_tokens": memory.tokens, "hit_rates": [list(one) for one in points]}
    yield Advice("cache size", text, figures)


def on_links(traffic: Traffic, engine: Engine) -> list[Advice]:
    """The link from which on moving KV pays for this model on these GPUs, and whether the one there is does."""
    profile = engine.profile
    if not profile.kv_bytes_per_token:
        return []
    least = break_even_gbps(profile)
    text = f"KV of {profile.name} is moved as fast as it is computed from {least:.0f} Gb/s on"
    figures: dict[str, float | str] = {"break_even_gbps": least}
    typical = traffic.typical_reuse
    if engine.link is not None and typical:
        computed, fetched = _typical_seconds(engine, engine.link, typical)
        verdict = "it pays" if fetched < computed else "no gain"
        text += (
            f"; at {engine.link.gbps:g} Gb/s a typical prefix of {typical:,} tokens comes in "
            f"{fetched * 1e3:,.0f} ms and is computed in {computed * 1e3:,.0f}: {verdict}"
        )
        figures |= {"fetch_ms": fetched * 1e3, "compute_ms": computed * 1e3, "verdict": verdict}
    return [Advice("link", text, figures)]


def _typical_seconds(engine: Engine, link: Link, tokens: int) -> tuple[float, float]:
    """Of a prefix alone: to compute it, to fetch it."""
    way = Way(TIERS["memory"], link, CODECS["raw"], engine.gpus)
    return engine.profile.prompt_seconds(tokens), fetching(engine.profile, way, tokens, 0).load_seconds


def on_pool(traffic: Traffic, engine: Engine, bounds: Sequence[Bound], rows: Sequence[Row]) -> list[Advice]:
    """Whether a pool that all nodes read would pay, beside the best that was replayed (or caches of their own)."""
    infinite = next((bound.hit_rate for bound in bounds if bound.name == "infinite"), None)
    base = _best_without_pool(bounds, rows)
    if infinite is None or base is None:
        return []
    name, reached = base
    gain = infinite - reached
    figures = {"hit_rate_now": reached, "hit_rate_pool": infinite, "gain": gain}
    start = f"a shared pool that keeps everything would raise reuse from {reached:.3f} ({name}) to {infinite:.3f}"
    if gain < POOL_GAIN_MIN:
        return [Advice("shared pool", f"{start}: not worth having", figures)]
    if engine.link is None or not engine.profile.kv_bytes_per_token:
        return [Advice("shared pool", f"{start}; whether it pays is up to the link, which --link names", figures)]
    computed, fetched = _typical_seconds(engine, engine.link, traffic.typical_reuse)
    verdict = "it pays" if fetched < computed else "but its link is slower than computing: it does not pay"
    return [Advice("shared pool", f"{start}, over {engine.link.gbps:g} Gb/s: {verdict}", figures)]


def _best_without_pool(bounds: Sequence[Bound], rows: Sequence[Row]) -> tuple[str, float] | None:
    replayed = [(str(row["policy"]), row["hit_rate"]) for row in rows if row.get("hit_rate") is not None]
    siloed = [("caches of their own", bound.hit_rate) for bound in bounds if bound.name == "siloed"]
    return max(replayed or siloed, key=lambda pair: pair[1], default=None)


def on_savings(
    rows: Sequence[Row], bounds: Sequence[Bound], span_seconds: float, dollars_per_gpu_hour: float | None
) -> list[Advice]:
    """Of the policy that saves most at the lowest load, for a day of it."""
    lowest = min((row["load"] for row in rows), default=0.0)
    best = max((row for row in rows if row["load"] == lowest), key=lambda row: row["gpu_hours_saved"], default=None)
    siloed = next((bound.gpu_hours_saved for bound in bounds if bound.name == "siloed"), 0.0)
    if best is None or not span_seconds:
        return []
    days = span_seconds / lowest / _SECONDS_PER_DAY
    saved, alone = best["gpu_hours_saved"] / days, siloed / days
    text = (
        f"a day at load {lowest:g} asks for {saved:,.0f} GPU hours of prefill less under {best['policy']} than without "
        f"caches; {alone:,.0f} less with caches of their own and requests in turn"
    )
    figures = {"policy": best["policy"], "gpu_hours_saved_per_day": saved, "gpu_hours_saved_per_day_siloed": alone}
    if dollars_per_gpu_hour is not None:
        dollars = (saved - alone) * dollars_per_gpu_hour
        text += f". The difference is {dollars:,.0f} dollars a day"
        figures["dollars_per_day"] = dollars
    return [Advice("savings", text, figures)]


def nodes_for(ours: Capacity, theirs: Capacity) -> int | None:
    """So many nodes under our policy should carry what theirs carry, if capacity grows with nodes; fewer may, where
    ours is only known to be above what was run. None where nothing is known."""
    load = ours.load or ours.floor
    if not load or not theirs.load:
        return None
    return ceil(theirs.nodes * theirs.load / load - 1e-9)


def compared_capacities(capacities: Sequence[Capacity]) -> Iterator[tuple[Capacity, Capacity]]:
    """Ours beside each other policy's, on the same fleet."""
    ours = {one[1:4]: one for one in capacities if one.policy == _OURS}
    for theirs in capacities:
        if theirs.policy != _OURS and theirs[1:4] in ours:
            yield ours[theirs[1:4]], theirs


def on_nodes(ours: str, theirs: str, load: float, nodes: int, fewer: int, goodput: float) -> Advice:
    """`goodput`: ours, of a replay at their capacity with so many nodes."""
    verb = "run" if fewer < nodes else "no fewer than"
    text = (
        f"at load {load:.2f}, where {nodes} nodes just keep the SLO under {theirs}, {verb} {fewer} under {ours} "
        f"(replayed: goodput {goodput:.3f})"
    )
    figures = {"policy": theirs, "load": load, "nodes": nodes, "nodes_ours": fewer, "goodput": goodput}
    return Advice("nodes", text, figures)


def _short(count: float) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g}{letter}"
    return f"{count:.0f}"

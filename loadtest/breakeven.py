"""Compute a prefix again, or fetch it: for how many tokens, over which link, out of which tier and in which codec.

    recompute    prefill of prefix and question
    fetch        load of the prefix, then prefill of the question behind it
    overlapped   the same layer by layer: each layer's question is computed while the next layer arrives

The arithmetic of a fetch is the gateway's own (`policies.transfer.arrival`), on the timing profile of one idle engine.
Without constants there is one number: a link pays if it is faster than `break_even_gbps`, the KV that computing makes
in a second, for prompts of any length. Latency then decides over short prefixes; a load that hides behind the computing
of the question is free however slow the link; and attention, which grows with the square of the length, favours
fetching long ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from loadtest.hardware import CODECS_SOURCE, GIGABIT, Codec, Link, Tier
from policies.transfer import Arrival, Need, Supply, arrival
from workers.timing import TimingProfile

SUFFIX_TOKENS = 512
"""The question behind the prefix, which is computed in any case."""
LENGTHS = (1_024, 4_096, 16_384, 65_536)
TOKENS_MAX = 131_072
"""Longer prefixes are not asked about: the context windows of most models end here."""


class Way(NamedTuple):
    """From where, over what, as what. Without a link the tier is the engine's own machine's."""

    tier: Tier
    link: Link | None
    codec: Codec
    gpus: int = 1
    """Of the engine: each loads its own share."""

    @property
    def link_name(self) -> str:
        return "local" if self.link is None else self.link.name

    @property
    def latency_seconds(self) -> float:
        return self.tier.latency_seconds + (0.0 if self.link is None else self.link.latency_seconds)

    @property
    def bytes_per_second(self) -> float:
        """Of coded bytes: the narrowest of tier, link and decoder."""
        link = float("inf") if self.link is None else self.link.bytes_per_second
        return min(self.tier.rate(self.gpus), link, self.codec.decode_bytes_per_second / self.codec.compression)

    def transfer_seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second

    def spread(self, size_bytes: int) -> float:
        return 0.0


class _Prefill(NamedTuple):
    """A timing profile as the gateway's estimates are asked."""

    profile: TimingProfile

    def prefill_seconds(self, new_tokens: int, context_tokens: int, decoding_tokens: int = 0) -> float:
        if new_tokens == 0:
            return self.profile.prefill_constant_seconds
        return self.profile.prompt_seconds(new_tokens, context_tokens)


class Cell(NamedTuple):
    """One length over one way."""

    tokens: int
    recompute_ms: float
    fetch_ms: float
    overlapped_ms: float

    @property
    def pays(self) -> bool:
        return self.overlapped_ms < self.recompute_ms


@dataclass(frozen=True, slots=True)
class Row:
    way: Way
    cells: Sequence[Cell]
    pays_from_tokens: int | None
    """From this prefix on, an overlapped fetch is always sooner; None where it is not at `TOKENS_MAX` either."""

    def documents(self) -> Iterator[dict[str, Any]]:
        way = self.way
        for cell in self.cells:
            yield {
                "tokens": cell.tokens,
                "tier": way.tier.name,
                "link": way.link_name,
                "codec": way.codec.name,
                "gbps": way.bytes_per_second / GIGABIT,
                "recompute_ms": cell.recompute_ms,
                "fetch_ms": cell.fetch_ms,
                "overlapped_ms": cell.overlapped_ms,
                "best": "overlapped" if cell.pays else "recompute",
                "pays_from_tokens": self.pays_from_tokens,
            }


@dataclass(frozen=True, slots=True)
class BreakEven:
    profile: TimingProfile
    suffix_tokens: int
    rows: Sequence[Row]

    def as_json(self) -> dict[str, Any]:
        ways = [row.way for row in self.rows]
        links = {way.link.name: way.link.source for way in ways if way.link is not None}
        return {
            "profile": self.profile.name,
            "kv_bytes_per_token": self.profile.kv_bytes_per_token,
            "prefill_tokens_per_second": 1 / self.profile.prefill_linear_seconds,
            "break_even_gbps": break_even_gbps(self.profile),
            "suffix_tokens": self.suffix_tokens,
            "rows": [document for row in self.rows for document in row.documents()],
            "sources": {self.profile.name: self.profile.source}
            | {way.tier.name: way.tier.source for way in ways}
            | links
            | {"codecs": CODECS_SOURCE},
        }


def break_even_gbps(profile: TimingProfile, compression: float = 1.0) -> float:
    """The link that carries KV as fast as it is computed, at any length: bytes a token times tokens a second."""
    return profile.kv_bytes_per_token / compression / profile.prefill_linear_seconds / GIGABIT


def break_even(
    profile: TimingProfile, ways: Sequence[Way], lengths: Sequence[int] = LENGTHS, suffix_tokens: int = SUFFIX_TOKENS
) -> BreakEven:
    """A row for each way, with a cell for each length."""
    rows = [
        Row(
            way,
            [_cell(profile, way, tokens, suffix_tokens) for tokens in sorted(set(lengths))],
            pays_from(profile, way, suffix_tokens),
        )
        for way in ways
    ]
    return BreakEven(profile, suffix_tokens, rows)


def ways_over(tiers: Sequence[Tier], links: Sequence[Link], codecs: Sequence[Codec], gpus: int = 1) -> list[Way]:
    """Every tier over every link, and what a machine has itself without one."""
    return [
        Way(tier, link, codec, gpus)
        for tier in tiers
        for link in ([None] if tier.has_local else []) + list(links)
        for codec in codecs
    ]


def _cell(profile: TimingProfile, way: Way, tokens: int, suffix_tokens: int) -> Cell:
    fetched = fetching(profile, way, tokens, suffix_tokens)
    return Cell(
        tokens=tokens,
        recompute_ms=1e3 * profile.prompt_seconds(tokens + suffix_tokens),
        fetch_ms=1e3 * (fetched.load_seconds + fetched.after_seconds),
        overlapped_ms=1e3 * fetched.first_token_seconds,
    )


def fetching(profile: TimingProfile, way: Way, tokens: int, suffix_tokens: int = SUFFIX_TOKENS) -> Arrival:
    """How the gateway expects the fetch of a prefix by an idle engine to go."""
    need = Need(tokens + suffix_tokens, 0, 0, 0.0, _Prefill(profile))
    supply = Supply(way.tier.name, tokens, 0, way.codec.name, profile.kv_bytes_per_token / way.codec.compression)
    return arrival(need, supply, way)


def pays_from(profile: TimingProfile, way: Way, suffix_tokens: int = SUFFIX_TOKENS) -> int | None:
    """See `Row`. Short loads hide behind the question, so it is looked for from above."""
    high = TOKENS_MAX
    if not _pays(profile, way, high, suffix_tokens):
        return None
    while high > 1 and _pays(profile, way, high // 2, suffix_tokens):
        high //= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _pays(profile, way, middle, suffix_tokens) else (middle, high)
    return high


def _pays(profile: TimingProfile, way: Way, tokens: int, suffix_tokens: int) -> bool:
    return _cell(profile, way, tokens, suffix_tokens).pays

"""What a load test came to, in the audit's terms: `loadtest.audit.runs` says what each figure means.

Failures count against goodput and are no latencies. Of times to first token and between tokens those of whole answers
are taken; their times are real ones, and TTFT is from when a request was due.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

from loadtest.client.answers import Answer
from loadtest.figures import Spread, max_over_mean, spread


@dataclass(frozen=True, slots=True)
class LoadResult:
    trace: str
    policy: str
    """As answers name it; empty where no gateway of ours did."""
    nodes: int
    """Workers that answered."""
    load: float
    requests: int
    answered: int
    failures: Mapping[str, int]
    """By kind."""
    hit_rate: float
    """Reported cached tokens / prompt tokens."""
    prompt_tokens: int
    output_tokens: int
    ttft_ms: Spread
    inter_token_ms: Spread
    e2e_ms: Spread
    goodput: float
    """Share of ALL requests with a whole answer and TTFT <= the SLO."""
    slo_ttft_seconds: float
    uncached_max_over_mean: float
    requests_max_over_mean: float
    late_ms: Spread
    """How late this client sent. Where that is not small, the figures are this machine's and not the server's."""
    seconds: float
    """From the first request due to the last end."""
    requests_per_second: float
    output_tokens_per_second: float

    @property
    def failed(self) -> int:
        return self.requests - self.answered

    def row(self) -> dict[str, Any]:
        """One row of the report's JSON, with the audit's keys."""
        plain = {name: value for name, value in asdict(self).items() if not isinstance(value, dict) and name != "trace"}
        spreads = {
            f"{name}_{statistic}": round(value, 6) if isfinite(value) else None
            for name in ("ttft_ms", "inter_token_ms", "e2e_ms", "late_ms")
            for statistic, value in asdict(getattr(self, name)).items()
        }
        return {**plain, "failed": self.failed, "failures": dict(self.failures), **spreads}


def measured(
    trace: str,
    answers: Sequence[Answer],
    *,
    load: float = 1.0,
    slo_ttft_seconds: float = 2.0,
) -> LoadResult:
    whole = [answer for answer in answers if not answer.failure]
    uncached, placed = Counter[str](), Counter[str]()
    for answer in whole:
        uncached[answer.worker] += answer.prompt_tokens - answer.cached_tokens
        placed[answer.worker] += 1
    prompt_tokens = sum(answer.prompt_tokens for answer in whole)
    output_tokens = sum(answer.output_tokens for answer in whole)
    within = sum(ttft <= slo_ttft_seconds for ttft in _ttfts(whole))
    began_at = min((answer.due_at for answer in answers), default=0.0)
    seconds = max((answer.ended_at for answer in answers), default=0.0) - began_at
    return LoadResult(
        trace,
        ", ".join(sorted({answer.policy for answer in answers if answer.policy})),
        len(placed),
        load,
        len(answers),
        len(whole),
        Counter(answer.kind_of_failure for answer in answers if answer.failure),
        sum(answer.cached_tokens for answer in whole) / prompt_tokens if prompt_tokens else 0.0,
        prompt_tokens,
        output_tokens,
        spread(_ttfts(whole)),
        spread(_gaps(whole)),
        spread(answer.seconds for answer in whole),
        within / len(answers) if answers else 0.0,
        slo_ttft_seconds,
        max_over_mean([*uncached.values()]),
        max_over_mean([*placed.values()]),
        spread(answer.late_seconds for answer in answers if answer.sent_at),
        seconds,
        len(whole) / seconds if seconds else 0.0,
        output_tokens / seconds if seconds else 0.0,
    )


def _ttfts(answers: Iterable[Answer]) -> list[float]:
    return [answer.ttft_seconds for answer in answers if answer.ttft_seconds is not None]


def _gaps(answers: Iterable[Answer]) -> list[float]:
    return [later - earlier for answer in answers for earlier, later in pairwise(answer.token_times)]

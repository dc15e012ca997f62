"""A load test's figures for people."""

from collections.abc import Sequence
from math import isfinite

from rich.console import Console
from rich.table import Table

from loadtest.client.answers import Answer
from loadtest.client.measures import LoadResult
from loadtest.figures import Spread
from loadtest.traces.contract import Trace

LATE_MS_MAX = 20.0
"""Beyond, this client was too busy for its latencies to be the server's."""
_FAILURES_SHOWN = 5


def show(trace: Trace, result: LoadResult, answers: Sequence[Answer], console: Console | None = None) -> None:
    console = console or Console()
    for note in trace.notes:
        console.print(note, style="dim", highlight=False)
    table = Table(title=f"{trace.name}: {result.requests} requests in {result.seconds:.1f} s", title_justify="left")
    for column in ("", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    _add(table, "time to first token, ms", result.ttft_ms)
    _add(table, "between tokens, ms", result.inter_token_ms)
    _add(table, "whole answer, ms", result.e2e_ms)
    _add(table, "sent late by, ms", result.late_ms)
    console.print(table)
    console.print(
        f"answered {result.answered}, failed {result.failed}; {result.requests_per_second:.2f} requests/s, "
        f"{result.output_tokens_per_second:.1f} tokens/s\n"
        f"hit rate {result.hit_rate:.4f} (cached / prompt tokens, as the server reports them)\n"
        f"goodput {result.goodput:.4f} (first token within {result.slo_ttft_seconds:g} s, of all requests)\n"
        f"{result.nodes} workers; computed tokens max/mean {result.uncached_max_over_mean:.3f}, "
        f"requests {result.requests_max_over_mean:.3f}",
        highlight=False,
    )
    if result.late_ms.p99 > LATE_MS_MAX:
        console.print(f"this client was late by {result.late_ms.p99:.0f} ms (p99): it needs a machine of its own")
    _show_failures(console, result, answers)


def _show_failures(console: Console, result: LoadResult, answers: Sequence[Answer]) -> None:
    for kind, count in sorted(result.failures.items(), key=lambda item: -item[1])[:_FAILURES_SHOWN]:
        example = next(answer.failure for answer in answers if answer.kind_of_failure == kind)
        console.print(f"{count} x {example}", highlight=False, markup=False)


def _add(table: Table, name: str, figures: Spread) -> None:
    values = (figures.mean, figures.p50, figures.p90, figures.p99)
    table.add_row(name, *(f"{value:,.1f}" if isfinite(value) else "-" for value in values))

"""The break-even table for people."""

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from loadtest.breakeven import BreakEven, Cell, Row, break_even_gbps


def print_break_even(result: BreakEven, console: Console) -> None:
    """One table: a row for each way, a column for each length."""
    profile = result.profile
    console.print(
        f"{profile.name}: {1 / profile.prefill_linear_seconds:,.0f} tokens/s, {profile.kv_bytes_per_token:,} bytes of "
        f"KV a token. A link pays at any length from {break_even_gbps(profile):.0f} Gb/s, less with a codec."
    )
    table = Table(
        title=f"ms to the first token of a prefix and a question of {result.suffix_tokens}: overlapped/plain fetch; "
        "an asterisk: overlapped is sooner than computing",
        title_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("out of, over, as", no_wrap=True)
    cells = result.rows[0].cells
    for cell in cells:
        table.add_column(f"{cell.tokens:,} ", justify="right", no_wrap=True)
    table.add_column("always from", justify="right", no_wrap=True)
    table.add_row("compute", *(f"{_times(cell.recompute_ms)} " for cell in cells), "", end_section=True)
    for row in result.rows:
        table.add_row(*_cells(row))
    console.print(table)


def _cells(row: Row) -> list[str]:
    way, least = row.way, row.pays_from_tokens
    end = "never" if least is None else f"{least:,}"
    return [f"{way.tier.name} {way.link_name} {way.codec.name}", *map(_cell, row.cells), end]


def _cell(cell: Cell) -> str:
    return f"{_times(cell.overlapped_ms, cell.fetch_ms)}{'*' if cell.pays else ' '}"


def _times(*milliseconds: float) -> str:
    """In ms, or in seconds from one on."""
    if min(milliseconds) < 999.5:
        return "/".join(f"{time:.0f}" for time in milliseconds)
    return "/".join(f"{time / 1e3:.1f}" for time in milliseconds) + "s"

"""`ropeway benchmark`'s figures for people."""

from rich.console import Console
from rich.table import Table

from workers.reference.benchmark import BenchmarkReport, CodecFigures


def print_tables(report: BenchmarkReport, console: Console) -> None:
    console.print(
        f"{report.megabytes:.0f} MB of bf16 KV, {report.threads} threads; a plain copy moves "
        f"{report.copy_gb_per_second:.2f} GB/s. An asterisk: beyond what is meant to be reached."
    )
    for table in (_errors(report), _rates(report), _codecs(report)):
        console.print(table)


def _errors(report: BenchmarkReport) -> Table:
    """A row for each variant, a column for each dtype and shift."""
    columns = dict.fromkeys((row.dtype, row.source, row.target) for row in report.rotation_errors)
    table = _table("moved keys beside what the engine would have stored, relative L2", "RoPE")
    for dtype, source, target in columns:
        table.add_column(f"{dtype}\n{source} → {target}", justify="right")
    for variant in dict.fromkeys(row.variant for row in report.rotation_errors):
        rows = [row for row in report.rotation_errors if row.variant == variant]
        table.add_row(variant, *(f"{row.relative_l2:.1e}{_mark(row.relative_l2 > row.bar)}" for row in rows))
    return table


def _rates(report: BenchmarkReport) -> Table:
    table = _table("rates", "what")
    for name in ("GB/s", "share"):
        table.add_column(name, justify="right")
    table.add_column("of")
    for row in report.rates:
        mark = _mark(row.bar is not None and row.share < row.bar)
        table.add_row(row.what, f"{row.gb_per_second:.2f}", f"{row.share:.0%}{mark}", row.beside)
    return table


def _codecs(report: BenchmarkReport) -> Table:
    table = _table("codecs" if report.model is None else f"codecs, on {report.model}", "codec")
    for name in ("size", "KL", "cosine", "encode GB/s", "of memcpy", "decode GB/s", "of memcpy"):
        table.add_column(name, justify="right")
    for row in report.codecs:
        table.add_row(*_codec_cells(row))
    return table


def _codec_cells(row: CodecFigures) -> list[str]:
    size_mark = _mark(row.size_bar is not None and row.size_ratio < row.size_bar)
    kl = "" if row.kl is None else f"{row.kl:.1e}{_mark(row.kl_bar is not None and row.kl > row.kl_bar)}"
    shares = [
        f"{share:.0%}{_mark(row.share_bar is not None and share < row.share_bar)}"
        for share in (row.encode_share, row.decode_share)
    ]
    rates = [f"{rate:.2f}" for rate in (row.encode_gb_per_second, row.decode_gb_per_second)]
    return [
        row.codec,
        f"{row.size_ratio:.2f}x{size_mark}",
        kl,
        f"{row.cosine:.5f}",
        rates[0],
        shares[0],
        rates[1],
        shares[1],
    ]


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    return table


def _mark(missed: bool) -> str:
    return "*" if missed else ""

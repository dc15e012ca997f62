"""Markdown, as the reference pages have it."""

import inspect
from collections.abc import Iterable, Sequence

HEADER = "Made from the code by `make reference`; a test holds it against the code."


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    """Bars end a cell, but for those that are escaped already."""
    return text.replace("\\|", "|").replace("|", "\\|").replace("\n", " ")


def plain(text: str) -> str:
    """A docstring as one paragraph."""
    return " ".join(inspect.cleandoc(text).split())


def first_paragraph(text: str) -> str:
    return plain(inspect.cleandoc(text).partition("\n\n")[0])

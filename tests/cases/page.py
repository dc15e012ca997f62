"""The table as a page: `python -m tests.cases.page` writes docs/cases.md."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.cases.case import Case
from tests.cases.table import CASES, SECTIONS

PAGE = Path(__file__).parents[2] / "docs" / "cases.md"
TITLE = """# Faults that others have met

Operators of gateways and KV caches have reported what goes wrong in them. Each report stands for a kind, and each kind
has a number; here are the kinds in our words, and the tests that hold them (files below `tests/`). Where a report
cannot apply to this gateway, or is answered otherwise than it expects, it is said why.

Written by `python -m tests.cases.page` from [a table](../tests/cases/table.py); a test compares the two.
"""


def page() -> str:
    return "\n".join((TITLE, *_sections()))


def _sections() -> Iterator[str]:
    for start, end in pairwise([*SECTIONS, max(CASES) + 1]):
        yield f"## {SECTIONS[start]}\n"
        yield from (_entry(number, CASES[number]) for number in sorted(CASES) if start <= number < end)
        yield ""


def _entry(number: int, case: Case) -> str:
    lines = [f"- **{number}** {case.kind}", *(f"  - {case.remark}" for _ in [0] if case.remark)]
    return "\n".join([*lines, *(f"  - `{test}`" for test in case.tests)])


if __name__ == "__main__":
    PAGE.write_text(page())

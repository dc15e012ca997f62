"""The table of cases names tests that exist, every case there is, and what its page says."""

import re
from functools import lru_cache
from pathlib import Path

import pytest

from tests.cases.page import PAGE, page
from tests.cases.table import CASES, SECTIONS
from tests.shared import shared

TESTS = Path(__file__).parents[1]


@lru_cache
def names_of_tests(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"^ *(?:async )?def (test_\w+)", (TESTS / path).read_text(), re.M))


@pytest.mark.parametrize("number", CASES)
def test_a_case_is_held_or_is_said_not_to_apply(number: int) -> None:
    case = CASES[number]
    assert case.kind
    assert case.tests or case.remark
    assert len(set(case.tests)) == len(case.tests)
    for name in case.tests:
        path, _, test = name.partition("::")
        assert test in names_of_tests(path), f"case {number}: there is no {name}"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.cases.page"
    assert [int(number) for number in re.findall(r"^- \*\*(\d+)\*\*", page(), re.M)] == sorted(CASES)
    assert all(start in CASES for start in SECTIONS)


def test_no_case_is_missing() -> None:
    reported = shared("cases", "cases.md")
    numbers = {int(number) for number in re.findall(r"^\| *(\d+) *\|", reported.read_text(), re.M)}
    assert numbers == set(CASES)

"""The newcomer's path stands in README as `make newcomer` goes it."""

from pathlib import Path

import pytest

from tests.newcomer import DEMO, LOCUST, WRITTEN, Newcomer, Step, StepError, Whereabouts, missing, table
from tests.reference.pages import REPOSITORY


def test_readme_says_all_that_is_done() -> None:
    assert missing((REPOSITORY / "README.md").read_text()) == []


@pytest.mark.parametrize("words", WRITTEN)
def test_what_readme_does_not_say_is_found(words: str) -> None:
    assert missing("\n".join(one for one in WRITTEN if one != words)) == [words]


def test_another_port_is_all_that_may_differ(tmp_path: Path) -> None:
    assert Whereabouts(REPOSITORY, tmp_path, 8000).here(LOCUST) == LOCUST
    elsewhere = Whereabouts(REPOSITORY, tmp_path, 9000)
    assert elsewhere.here(DEMO) == "make demo PORT=9000"
    assert elsewhere.here(LOCUST) == LOCUST.replace(":8000", ":9000")


def test_a_step_that_fails_ends_the_path_and_says_why(tmp_path: Path) -> None:
    newcomer = Newcomer(Whereabouts(tmp_path / "nothing", tmp_path, 8000))
    with pytest.raises(StepError, match="clone: git clone ended with 128"):
        newcomer.walk()
    assert [step.name for step in newcomer.steps] == ["clone"]
    assert "FAILED" in table(newcomer.steps)


def test_times_are_added_up() -> None:
    assert table([Step("demo", "make demo", 1.25), Step("top", "ropeway top", 2.5)]).splitlines()[-1].split() == [
        "all",
        "3.8",
        "s",
    ]

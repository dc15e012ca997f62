"""The table of failures: complete, consistent with the errors, and the one that the page shows."""

from pathlib import Path

import pytest

from gateway import errors
from gateway.reliability import failures
from gateway.reliability.failures import FAILURES, Answer, Blame, Failure, Retry, of_error, of_status, page

PAGE = Path(__file__).parents[3] / "docs" / "reliability.md"


def test_the_page_shows_the_table() -> None:
    assert page() in PAGE.read_text(), "write what `page()` says into docs/reliability.md"


def test_every_row_is_in_the_table_under_a_name_of_its_own() -> None:
    rows = [value for value in vars(failures).values() if isinstance(value, Failure)]
    assert set(rows) == set(FAILURES)
    assert len({row.name for row in FAILURES}) == len(FAILURES)


@pytest.mark.parametrize("row", FAILURES, ids=lambda row: row.name)
def test_what_follows_from_a_row_can_be_done(row: Failure) -> None:
    if row.answer in (Answer.ERROR, Answer.BROKEN):
        assert row.kind is not None
        assert row.code
    if row.answer is not Answer.ERROR:
        assert row.status is None
    if row.retry is not Retry.NO:
        # Nothing has been said to the client, and there is something to say if nobody can do better.
        assert row.answer in (Answer.ERROR, Answer.THEIRS)
        assert row.message or row.answer is Answer.THEIRS
    if row.answer is Answer.BROKEN:
        assert row.message


@pytest.mark.parametrize("row", [row for row in FAILURES if row.message and row.answer is Answer.ERROR])
def test_its_error_is_what_the_table_says(row: Failure) -> None:
    error = row.error()
    assert (error.status, error.code, error.message) == (row.status, row.code, row.message)


def test_only_what_a_worker_did_is_held_against_it() -> None:
    innocent = {row.name for row in FAILURES if row.blame is Blame.NONE}
    assert {"client_gone", "deadline_exceeded", "deadline_exceeded_midway", "worker_refusal", "worker_busy"} <= innocent
    assert {"no_worker", "overloaded", "shed", "rate_limited", "shutting_down", "gateway_fault"} <= innocent
    assert "connection_stale" in innocent


@pytest.mark.parametrize("status", range(200, 400))
def test_what_is_no_failure_has_no_row(status: int) -> None:
    assert of_status(status) is None


@pytest.mark.parametrize("status", range(400, 500))
def test_no_4xx_is_ever_held_against_a_worker(status: int) -> None:
    row = of_status(status)
    assert row is not None
    assert (row.blame, row.answer) == (Blame.NONE, Answer.THEIRS)
    assert (row.retry is Retry.ELSEWHERE) is (status == 429)


@pytest.mark.parametrize("status", range(500, 600))
def test_5xx_are_but_for_what_it_was_never_made_to_do(status: int) -> None:
    row = of_status(status)
    assert row is not None
    assert (row.blame is Blame.COUNTED) is (status != 501)
    assert (row.retry is Retry.ELSEWHERE) is (status in (502, 503, 504))


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (errors.NoWorker("x"), "no_worker"),
        (errors.Overloaded("x"), "overloaded"),
        (errors.TooManyRequests("x", code="queue_full"), "shed"),
        (errors.TooManyRequests("x", code="over_share"), "shed"),
        (errors.TooManyRequests("x"), "rate_limited"),
        (errors.ShuttingDown("x"), "shutting_down"),
        (errors.DeadlineExceeded("x"), "deadline_exceeded"),
        (RuntimeError("x"), "gateway_fault"),
        (errors.BadRequest("x"), None),
        (errors.Unauthorized("x"), None),
        (errors.ModelNotFound("x"), None),
    ],
)
def test_refusals_of_our_own(error: Exception, name: str | None) -> None:
    row = of_error(error)
    assert (row.name if row is not None else None) == name

"""A hook for conftests whose tests start processes: import it there."""

from collections.abc import Generator

import pytest

from tests.gateway.end_to_end.processes import LIVE


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the ends of the logs of all processes that live."""
    report = yield
    if report.failed:
        report.sections += [(f"end of {process.name}'s log", process.tail()) for process in LIVE]
    return report

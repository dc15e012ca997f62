"""Real processes: the logs of all of them are shown where a test fails."""

from tests.gateway.end_to_end.logs import pytest_runtest_makereport as pytest_runtest_makereport

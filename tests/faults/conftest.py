"""These take minutes and measure: they run with `pytest -m faults tests/faults`, and not among the other tests."""

from tests.gateway.end_to_end.logs import pytest_runtest_makereport as pytest_runtest_makereport

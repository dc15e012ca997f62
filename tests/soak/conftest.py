"""Half an hour of everything at once: `make soak`."""

from tests.gateway.end_to_end.logs import pytest_runtest_makereport as pytest_runtest_makereport

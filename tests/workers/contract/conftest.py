import pytest

pytest.register_assert_rewrite("tests.workers.contract.suite", "tests.workers.contract.lab", "tests.workers.following")

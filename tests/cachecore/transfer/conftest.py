import pytest

pytest.register_assert_rewrite(
    "tests.cachecore.transfer.contract_suite",
    "tests.cachecore.transfer.engine_suite",
    "tests.cachecore.transfer.processes",
    "tests.cachecore.transfer.serving",
    "tests.cachecore.transfer.world",
)

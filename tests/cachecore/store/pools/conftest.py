from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytest.register_assert_rewrite(
    "tests.cachecore.store.pools.contract_suite", "tests.cachecore.store.pools.runs", "tests.cachecore.transfer.world"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these run by `make test-pools`."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.pools)

import pytest

pytest.register_assert_rewrite("tests.cachecore.index.behaviour", "tests.cachecore.index.histories")

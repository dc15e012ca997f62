import pytest

from cachecore.index.contract import PrefixIndex
from cachecore.index.naive import NaiveIndex
from tests.cachecore.index.behaviour import PrefixIndexBehaviour


class TestNaiveIndex(PrefixIndexBehaviour):
    @pytest.fixture
    def index(self) -> PrefixIndex:
        return NaiveIndex()

"""What is configured wrongly is said in a line, before the server starts."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.workers.sglang.conftest import configuration
from workers.sglang.settings import SettingsError, read_settings

OF_SGLANG = {"backend_name": "ropeway", "module_path": "m", "class_name": "C", "interface_v1": 1, "tp_lcm_size": 8}


@pytest.fixture
def stated(tmp_path: Path, keyring: Path) -> dict[str, Any]:
    return {**OF_SGLANG, "pool": f"shared=dir:{tmp_path}", "keyring": str(keyring), "weights": "a@1"}


def test_three_things_are_enough(stated: dict[str, Any]) -> None:
    settings = read_settings(stated)
    assert (settings.tenant, settings.bytes_max, settings.stall_seconds) == ("default", 10 << 30, 2.0)
    assert settings.open_pool().pools.keys() == {"shared"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": None}, "Expected `str`"),
        ({"weights": ""}, "length >= 1"),
        ({"pool": "nowhere"}, "a pool is written"),
        ({"pool": "shared=dir:/no/such/place"}, "is no directory"),
        ({"keyring": "/no/such/keyring"}, "make one with `ropeway keys keyring`"),
        ({"stall_seconds": 0}, "> 0"),
        ({"reads": 0}, ">= 1"),
        ({"pools": "shared=dir:/tmp"}, "unknown field `pools`"),
        ({"tenant": "a b"}, "tenant id"),
        ({"bytes_max": 0}, ">= 1"),
    ],
)
def test_what_is_wrong_is_said(
    adapter: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    stated: dict[str, Any],
    change: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(adapter, "_started_with", dict)
    with pytest.raises(SettingsError, match=said) as error:
        adapter.RopewayHiCache(configuration(adapter, {**stated, **change}), {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["pool", "keyring", "weights"])
def test_what_is_missing_is_said(stated: dict[str, Any], missing: str) -> None:
    del stated[missing]
    with pytest.raises(SettingsError, match=f"missing required field `{missing}`"):
        read_settings(stated)


def test_a_keyring_that_is_none_is_said(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any], tmp_path: Path
) -> None:
    monkeypatch.setattr(adapter, "_started_with", dict)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(SettingsError, match="keyring"):
        adapter.RopewayHiCache(configuration(adapter, {**stated, "keyring": str(tmp_path / "broken.json")}))


def test_a_server_that_does_not_say_how_it_was_started_is_refused(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch, stated: dict[str, Any]
) -> None:
    def unpublished() -> None:
        raise ValueError("config namespace 'model' not published")

    monkeypatch.setattr(adapter, "get_model", unpublished)
    with pytest.raises(SettingsError, match="does not say what it was started with"):
        adapter.RopewayHiCache(configuration(adapter, stated))

from pathlib import Path

import pytest

from cachecore.store import Refused, Script, Unavailable
from cachecore.store.errors import Endpoint, Moved, error_of
from cachecore.store.slots import key_slot


def test_a_script_is_known_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "one.lua"
    path.write_text("return 1")
    script = Script.load(path)
    assert (script.name, script.text) == ("one", "return 1")
    assert script.sha1 == "e0e1f9fabfc9d4800c877a703b823ac0578ff8db"
    assert script == Script("one", "return 1")


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        (b"123456789", 0x31C3),  # the check value that the specification gives
        (b"foo", 12182),
        (b"{user1000}.following", key_slot(b"user1000")),
        (b"foo{}{bar}", key_slot(b"foo{}{bar}")),
        (b"foo{{bar}}zap", key_slot(b"{bar")),
        (b"foo{bar}{zap}", key_slot(b"bar")),
        (b"", 0),
    ],
)
def test_slots(key: bytes, slot: int) -> None:
    assert key_slot(key) == slot


def test_an_empty_tag_is_none() -> None:
    assert key_slot(b"foo{}{bar}") != key_slot(b"bar")


@pytest.mark.parametrize(
    "message",
    [
        "LOADING Redis is loading the dataset in memory",
        "CLUSTERDOWN Hash slot not served",
        "MASTERDOWN Link with MASTER is down",
        "READONLY You can't write against a read only replica.",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "BUSY Redis is busy running a script",
        "MOVED nonsense",
    ],
)
def test_errors_that_pass_are_unavailability(message: str) -> None:
    error = error_of(message)
    assert type(error) is Unavailable
    assert message in str(error)


@pytest.mark.parametrize("code", ["OOM", "NOPERM", "WRONGTYPE", "CROSSSLOT", "ERR", "NOSCRIPT", "MISCONF"])
def test_other_errors_are_refusals_with_their_code(code: str) -> None:
    error = error_of(f"{code} for a reason")
    assert isinstance(error, Refused)
    assert (error.code, str(error)) == (code, f"{code} for a reason")


def test_redirections_say_where_to() -> None:
    moved, ask = error_of("MOVED 3999 127.0.0.1:6381"), error_of("ASK 7 ::1:6382")
    assert isinstance(moved, Moved)
    assert isinstance(ask, Moved)
    assert (moved.slot, moved.endpoint, moved.asking) == (3999, Endpoint("127.0.0.1", 6381), False)
    assert (ask.slot, ask.endpoint, ask.asking) == (7, Endpoint("::1", 6382), True)

import math

import msgspec
import pytest

from gateway.fleet.notes import (
    CHAIN_BYTES_MAX,
    DirectoryChanged,
    Dispatched,
    Finished,
    FirstToken,
    Leaving,
    Listed,
    Message,
    NoteError,
    Predicted,
    Recorded,
    Wanted,
    Withdrawn,
    decode,
    encode,
    signature,
)

DISPATCHED = Dispatched("req-1", "w", 17, 0, 4000, 0.14, 256, 0.12, False)
NOTES = [
    DISPATCHED,
    Dispatched("req-2", "w", 17, 3, 1, 0.0, 0, None, True, 2.5, True),
    FirstToken("req-1"),
    Finished("req-1", 33, True),
    Predicted("req-1", "w", 17, 0, bytes(range(16)) * 3),
    Withdrawn("req-1"),
    Recorded("w", 17, 0, bytes(CHAIN_BYTES_MAX)),
    Listed(True, [DISPATCHED]),
    Wanted("gw-2"),
    Wanted(),
    DirectoryChanged(),
    Leaving(),
]


def raw(*notes: object, version: object = 1, gateway: object = "gw-1", inflight: object = 0) -> bytes:
    return msgspec.msgpack.encode([version, gateway, "run", 0, inflight, list(notes)])


def dispatched(**changes: object) -> list[object]:
    fields = {"tag": "d", "id": "r", "worker": "w", "epoch": 1, "rank": 0, "tokens": 5, "prefill": 0.1, "output": 0}
    return list((fields | {"prior": None, "whole": False} | changes).values())


def test_every_note_comes_back_as_it_was():
    assert decode(encode("gw-1", "run", 9, 2, NOTES)) == Message("gw-1", "run", 9, 2, NOTES)
    assert decode(encode("gw-1", "run", 9, None, [])) == Message("gw-1", "run", 9, None, [])


def test_a_run_recognises_its_own_messages():
    own = signature("gw-1", "run")
    assert encode("gw-1", "run", 0, 0, []).startswith(own)
    assert encode("gw-1", "run", 2**40, None, NOTES).startswith(own)
    for gateway, run in (("gw-1", "rum"), ("gw-2", "run"), ("gw-11", "run")):
        assert not encode(gateway, run, 0, 0, []).startswith(own)


def test_the_helper_of_these_tests_makes_a_sound_message():
    assert decode(raw(dispatched())).notes == [Dispatched("r", "w", 1, 0, 5, 0.1, 0, None, False)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x96\x01",
        b"x" * 100,
        raw(version=2),
        raw(version="1"),
        raw(gateway=""),
        raw(gateway="a/b"),
        raw(gateway="g" * 129),
        raw(inflight=-1),
        raw(["?", "r"]),
        raw(["t"]),
        raw(["t", 5]),
        raw(["t", ""]),
        raw(["t", "r" * 513]),
        raw(dispatched(epoch=-1)),
        raw(dispatched(rank=4096)),
        raw(dispatched(tokens=-5)),
        raw(dispatched(tokens=2**63)),
        raw(dispatched(prefill=math.nan)),
        raw(dispatched(prefill=math.inf)),
        raw(dispatched(prefill=-0.1)),
        raw(dispatched(prior=math.nan)),
        raw(["f", "r", -1, True]),
        raw(["p", "r", "w", 1, 0, b""]),
        raw(["p", "r", "w", 1, 0, bytes(17)]),
        raw(["r", "w", 1, 0, bytes(CHAIN_BYTES_MAX + 16)]),
        raw(["l", True, [["t", "r"]]]),
        raw(["l", True, [dispatched()] * 16_385]),
        encode("gw-1", "run", 0, 0, NOTES)[:-1],
        encode("gw-1", "run", 0, 0, NOTES) + b"\x00",
        bytes(9 * 1024 * 1024),
    ],
)
def test_what_is_not_wholly_well_formed_is_an_error(data):
    with pytest.raises(NoteError):
        decode(data)


def test_no_cut_of_a_message_is_another_message():
    data = encode("gw-1", "run", 0, 0, NOTES[:8])
    for end in range(0, len(data), 7):
        with pytest.raises(NoteError):
            decode(data[:end])

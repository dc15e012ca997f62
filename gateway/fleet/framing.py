"""The frames that carry an engine's events over ZeroMQ, live and replayed.

Live, from a PUB socket:       [topic, sequence (u64 BE), payload]
Replay, asked of a ROUTER:     [b"", first sequence (u64 BE)]
answered message by message:   [b"", topic, sequence, payload]   vLLM since 0.26
                               [b"", sequence, payload]          older vLLM, SGLang
and ended by the sequence -1, all bits set.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

MESSAGE_BYTES_MAX: Final = 64 * 2**20

_SEQUENCE_BYTES: Final = 8
_END_OF_REPLAY: Final = 2**64 - 1


class Message(NamedTuple):
    sequence: int
    payload: bytes
    topic: bytes = b""
    """Empty for a replay in the older framing, which leaves it out."""

    @property
    def ends_replay(self) -> bool:
        return self.sequence == _END_OF_REPLAY

    def live(self) -> list[bytes]:
        return [self.topic, _packed(self.sequence), self.payload]

    def replayed(self) -> list[bytes]:
        return [b"", self.topic, _packed(self.sequence), self.payload]


END_OF_REPLAY: Final = Message(_END_OF_REPLAY, b"")


def live_message(frames: Sequence[bytes]) -> Message | None:
    """None when these are not the frames of an event stream."""
    if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES:
        return None
    return Message(int.from_bytes(frames[1], "big"), frames[2], frames[0])


def replayed_message(frames: Sequence[bytes]) -> Message | None:
    """What a replay has answered, in either framing; None when it is neither."""
    if len(frames) not in (3, 4) or len(frames[-2]) != _SEQUENCE_BYTES:
        return None
    return Message(int.from_bytes(frames[-2], "big"), frames[-1], frames[1] if len(frames) == 4 else b"")


def replay_request(start: int) -> list[bytes]:
    """Asks for every message from `start` on."""
    return [b"", _packed(start)]


def requested_start(frames: Sequence[bytes]) -> int | None:
    """What a request, without its sender's identity, asks for; None when it is none."""
    if not frames or len(frames[-1]) != _SEQUENCE_BYTES:
        return None
    return int.from_bytes(frames[-1], "big")


def _packed(sequence: int) -> bytes:
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")

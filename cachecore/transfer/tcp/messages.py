"""What travels on a connection, apart from frames. No I/O here.

Every message begins with "RW" | kind (u8) | code (u8) | length of what follows (u32 LE):

    source -> puller   GREETING  a challenge, 16 random bytes                                 once
    puller -> source   REQUEST   what is wanted, with a capability and a proof                as often as it likes,
    source -> puller   FRAME     one sealed frame                                             one answer at a time
                       END       that was all
                       REFUSED   the code says why; also in the middle, when it cannot go on

The proof covers the challenge and the number of the request on its connection: it is good once.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from cachecore.transfer.capability import CAPABILITY_CHARACTERS_MAX, PROOF_BYTES
from cachecore.transfer.errors import REASONS, Reason, WireError
from cachecore.transfer.header import Span
from cachecore.transfer.transport import Wanted

CHALLENGE_BYTES = 16
MESSAGE_HEAD = struct.Struct("<2sBBI")

_MAGIC = b"RW"
_REQUEST = struct.Struct("<16s3HH3HBH")
_WITH_TOKENS = 1
_REQUEST_BYTES_MAX = _REQUEST.size + CAPABILITY_CHARACTERS_MAX + PROOF_BYTES


class Kind(IntEnum):
    GREETING = 1
    REQUEST = 2
    FRAME = 3
    END = 4
    REFUSED = 5


_KINDS = {int(kind): kind for kind in Kind}
_LENGTHS = {
    Kind.GREETING: (CHALLENGE_BYTES, CHALLENGE_BYTES),
    Kind.REQUEST: (_REQUEST.size + PROOF_BYTES, _REQUEST_BYTES_MAX),
    Kind.FRAME: (1, 2**32 - 1),
    Kind.END: (0, 0),
    Kind.REFUSED: (0, 0),
}


class MessageHead(NamedTuple):
    kind: Kind
    length: int
    reason: Reason | None = None
    """Of a refusal, and of nothing else."""

    def encode(self) -> bytes:
        code = 0 if self.reason is None else 1 + REASONS.index(self.reason)
        return MESSAGE_HEAD.pack(_MAGIC, self.kind, code, self.length)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, *expected: Kind) -> "MessageHead":
        """Raises WireError for anything but a message of one of the `expected` kinds."""
        magic, kind, code, length = MESSAGE_HEAD.unpack(data)
        known = _KINDS.get(kind)
        if magic != _MAGIC or known not in expected:
            raise WireError(f"{bytes(data).hex()} is no message of {expected}", Reason.MALFORMED)
        (least, most), (first, last) = _LENGTHS[known], (1, len(REASONS)) if known is Kind.REFUSED else (0, 0)
        if not (least <= length <= most and first <= code <= last):
            raise WireError(f"a message of kind {kind}, code {code}, {length} bytes", Reason.MALFORMED)
        return cls(known, length, REASONS[code - 1] if code else None)


class RequestBody(NamedTuple):
    wanted: Wanted
    token: str
    """The capability's text."""
    proof: bytes

    def signed(self) -> bytes:
        """What the proof covers."""
        layers, stride, heads = self.wanted.layers, self.wanted.stride, self.wanted.kv_heads
        flags = _WITH_TOKENS if self.wanted.with_tokens else 0
        token = self.token.encode()
        return _REQUEST.pack(self.wanted.compatibility, *layers, stride, *heads, flags, len(token)) + token

    def encode(self) -> bytes:
        return self.signed() + self.proof

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> "RequestBody":
        """Raises WireError."""
        if len(data) < _REQUEST.size + PROOF_BYTES:
            raise WireError(f"a request of {len(data)} bytes", Reason.MALFORMED)
        compatibility, *numbers, stride, first, size, total, flags, length = _REQUEST.unpack_from(data)
        layers, heads = Span(*numbers), Span(first, size, total)
        sane = all(span.first < span.end <= span.total for span in (layers, heads))
        if len(data) != _REQUEST.size + length + PROOF_BYTES or not sane or not stride or flags not in (0, 1):
            raise WireError(f"a request that does not parse: {bytes(data[:64]).hex()}", Reason.MALFORMED)
        text = bytes(data[_REQUEST.size : -PROOF_BYTES])
        if not text.isascii():
            raise WireError("a request whose capability is no text", Reason.MALFORMED)
        wanted = Wanted(compatibility, layers, stride, heads, flags == _WITH_TOKENS)
        return cls(wanted, text.decode(), bytes(data[-PROOF_BYTES:]))


def challenge_of(challenge: bytes, number: int) -> bytes:
    """What the `number`-th request on a connection proves itself against."""
    return challenge + number.to_bytes(8, "little")

"""The authentication of frames, at the speed of memory. Figures and reasons: docs/decisions/frames.md.

Every frame has secrets of its own, which nothing but the tenant's key and its head (header and a random nonce) decide:

    keyed BLAKE2b-384(frame key, head) = payload key (32) | head tag (16)

The head tag authenticates the head before a byte of memory is set aside for the payload. The payload's tag is Poly1305
(RFC 8439) under a key that no other frame has, so that Poly1305's condition, never to use a key twice, holds by
construction; a forgery for 256 MiB succeeds with a chance of 2**-79. A payload belongs to its head: under another one
its tag is another.
"""

import hashlib
import hmac
from typing import NamedTuple

from cryptography.hazmat.primitives.poly1305 import Poly1305

PayloadMac = Poly1305
"""Of a payload key. Takes the payload piece by piece (`update`), then gives the tag (`finalize`). Pieces that are still
in a core's cache cost half of those that are not."""

TAG_BYTES = 16
NONCE_BYTES = 16

_PAYLOAD_KEY_BYTES = 32
_PERSON = b"ropeway.frame.v1"


class FrameSecrets(NamedTuple):
    """Of one frame."""

    payload_key: bytes
    head_tag: bytes

    @classmethod
    def derive(cls, frame_key: bytes, head: bytes) -> "FrameSecrets":
        size = _PAYLOAD_KEY_BYTES + TAG_BYTES
        secret = hashlib.blake2b(head, digest_size=size, key=frame_key, person=_PERSON).digest()
        return cls(secret[:_PAYLOAD_KEY_BYTES], secret[_PAYLOAD_KEY_BYTES:])


equal = hmac.compare_digest
"""In a time that says nothing about where two tags differ."""

"""Means to store: a frame sealed under a keyring, whose bytes follow from a seed."""

import random

from cachecore.blocks import HASH_BYTES, PrefixHash
from cachecore.scope import KeyId, Keyring, TenantId
from cachecore.store.pools import Extent, SealedFrame
from cachecore.store.pools.means import Contexts, MeanShape, Text
from cachecore.transfer.frames import FrameWriter

KEYRING = Keyring({7: bytes(range(32))}, 7)
NAME = PrefixHash(b"n" * HASH_BYTES)
TOKENS, LEAD = 21, 3
TEXT = Text(NAME, TOKENS, LEAD)
SHAPE = MeanShape(b"c" * 16, b"s" * 16, KeyId(TenantId("ann"), 7), 4, 2, 8, 8, "float32", "raw")


def context(number: int) -> PrefixHash:
    return PrefixHash(random.Random(f"context {number}").randbytes(HASH_BYTES))


def contexts(count: int) -> Contexts:
    found = Contexts.of(context(0))
    for number in range(1, count):
        found = found.joined(Contexts.of(context(number)))
    return found


def sealed(of: Contexts, shape: MeanShape = SHAPE, keyring: Keyring = KEYRING) -> SealedFrame:
    rng = random.Random(of.number)
    kv, tokens = rng.randbytes(shape.layers * TOKENS * 2 * 2 * 8 * 4), rng.randbytes(4 * TOKENS)
    header = shape.header(TEXT, of, len(kv))
    return SealedFrame(Extent(0, shape.layers), [b"".join(FrameWriter(keyring.frame_key).seal(header, [kv, tokens]))])

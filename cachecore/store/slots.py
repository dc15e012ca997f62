"""Which of a cluster's 16,384 slots a key lies in."""

import binascii

SLOTS = 16384


def key_slot(key: bytes) -> int:
    """CRC16 (XMODEM) of the first hash tag `{...}` that is not empty, else of the key (Redis Cluster specification)."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS

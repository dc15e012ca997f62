"""Rolling fingerprints: where a text that is held somewhere occurs in a prompt, at whatever offset.

A block's ContentHash finds its text where blocks begin at the same tokens; a passage that has moved by three tokens has
no ContentHash in common with what it was. So every held block also has a fingerprint, and a prompt is asked at each of
its offsets. With w the tokens of a window, B a block's size and p = 2^61 - 1,

    fingerprint = r^B + sum of w[i] r^(B-1-i)   mod p

where r is drawn by the scope's hash key: without it nobody can look for a text or make two that collide, and scopes
have nothing in common. Two different windows collide with a probability of at most B / p (a polynomial's roots), so n
offsets asked of m held texts bring n m B / p false finds: 1.4e-8 for 2,000 offsets, a million texts and blocks of 16.
Callers confirm a find by the window's ContentHash, and a puller compares the tokens themselves.

Sums of windows are doubled (2k tokens from twice k), so a block of 16 costs four multiplications per offset.
"""

from operator import mul

import numpy as np
from numpy.typing import NDArray

from cachecore.scope import Naming

_BITS = 61
_P = 2**_BITS - 1
_PRIME = np.uint64(_P)
_LOW = np.uint64(2**31 - 1)
_MIDDLE = np.uint64(2**30 - 1)
_LABEL = b"ropeway.fingerprint.v1"

Values = NDArray[np.uint64]


class Fingerprinter:
    """Fingerprints of one scope's blocks. Immutable once made."""

    __slots__ = ("_base", "_constant", "_powers", "block_size_tokens")

    def __init__(self, naming: Naming) -> None:
        self.block_size_tokens = naming.hasher.block_size_tokens
        # Keyed by the hasher, and no canonical scope begins as the label does.
        secret = naming.hasher.root(_LABEL, naming.root)
        self._base = int.from_bytes(secret, "little") % (_P - 2) + 2
        self._constant = self._power(self.block_size_tokens)
        self._powers = [self._power(exponent) for exponent in reversed(range(self.block_size_tokens))]

    def windows(self, tokens: bytes | bytearray | memoryview) -> Values:
        """The fingerprint of every window of one block's size in `tokens` (`pack_tokens`), by offset."""
        values = np.frombuffer(tokens, dtype="<u4").astype(np.uint64)
        count = len(values) - self.block_size_tokens + 1
        return self._sums(values)[:count] if count > 0 else np.empty(0, np.uint64)

    def blocks(self, tokens: bytes | bytearray | memoryview) -> list[int]:
        """The fingerprints of the full blocks of `tokens`: every `block_size_tokens`-th of its windows."""
        # One by one: what an engine stores at once is too little to be worth numpy's calls.
        size, powers, constant = self.block_size_tokens, self._powers, self._constant
        values: list[int] = np.frombuffer(tokens, dtype="<u4").tolist()
        return [
            (sum(map(mul, values[start : start + size], powers)) + constant) % _P
            for start in range(0, len(values) - size + 1, size)
        ]

    def _sums(self, values: Values) -> Values:
        """By the binary digits of the block's size, smallest first."""
        total, width = np.zeros(len(values) + 1, np.uint64), 0
        part, length, size = values, 1, self.block_size_tokens
        while True:
            if size & length:
                total = _joined(total, width, part, self._power(length))
                width += length
            if width == size:
                return _reduced(total + np.uint64(self._constant))
            part = _joined(part, length, part, self._power(length))
            length *= 2

    def _power(self, exponent: int) -> int:
        power: int = pow(self._base, exponent, _P)
        return power


def _joined(first: Values, width: int, second: Values, power: int) -> Values:
    """Sums of longer windows: `width` tokens of `first`, then those of `second` (which `power` makes room for)."""
    count = len(second) - width
    return _reduced(_times(first[:count], power) + second[width:])


def _times(values: Values, factor: int) -> Values:
    """values * factor, below 2^64 and congruent modulo p. 61 times 61 bits in halves, as 2^61 is 1."""
    high, low = np.uint64(factor >> 31), np.uint64(factor & int(_LOW))
    upper, lower = values >> np.uint64(31), values & _LOW
    middle = upper * low + lower * high
    product = upper * high * np.uint64(2) + (middle >> np.uint64(30))
    product += ((middle & _MIDDLE) << np.uint64(31)) + lower * low
    return _folded(product)


def _folded(values: Values) -> Values:
    return (values & _PRIME) + (values >> np.uint64(_BITS))


def _reduced(values: Values) -> Values:
    """The one value below p."""
    values = _folded(values)
    return np.where(values >= _PRIME, values - _PRIME, values)

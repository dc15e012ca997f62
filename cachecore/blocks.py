"""Identity of KV blocks: what a run of tokens is called, alone and after a prefix.

A block is `block_size_tokens` consecutive tokens of a prompt; only full blocks have names. Every block has two:

* its `PrefixHash` names the block AND everything before it. It is chained: equal hashes at depth n mean equal tokens
  at every depth up to n. Much of the index rests on that (one comparison confirms a whole run);
* its `ContentHash` names the tokens alone, wherever they stand.

Both are BLAKE2b-128, keyed per tenant: without the key a hash says nothing about the text, and two tenants' hashes of
one text have nothing in common. The message of a prefix hash, in this order, is

    count (u32 LE) | parent PrefixHash (16 bytes) | tokens (u32 LE each) | canonical extras (may be empty)

and of a content hash the same without the parent. `count` comes first so that the message parses one way only, and so
that key and count of a full block can be absorbed once and the state copied for each block. The two kinds and the
chain's root carry different BLAKE2b `person` strings, so no name of one kind can be mistaken for another.

A chain of n names is handled packed, as `16 * n` bytes: slicing, comparing and sending it cost one memory copy.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NewType

from cachecore.native import native

PrefixHash = NewType("PrefixHash", bytes)
ContentHash = NewType("ContentHash", bytes)
Chain = NewType("Chain", bytes)
"""PrefixHashes of consecutive blocks from some position on, packed."""

HASH_BYTES = 16
TOKEN_BYTES = 4
HASH_KEY_BYTES = 32

_PERSON_ROOT = b"ropeway.root.v1"
_PERSON_PREFIX = b"ropeway.prefx.v1"
_PERSON_CONTENT = b"ropeway.contn.v1"

EMPTY_CHAIN = Chain(b"")


class Extra(NamedTuple):
    """Something besides tokens that a block's KV depends on: a multimodal item, a prompt embedding."""

    offset_tokens: int
    """Where in the block it starts; negative where it began in an earlier block."""
    identifier: bytes


def canonical_extras(extras: Iterable[Extra]) -> bytes:
    """Byte form of a block's extras: sorted, each as offset (i32 LE), length (u32 LE), identifier. Empty for none."""
    return b"".join(
        offset.to_bytes(4, "little", signed=True) + len(identifier).to_bytes(4, "little") + identifier
        for offset, identifier in sorted(extras)
    )


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian. Raises OverflowError for an id outside [0, 2**32)."""
    if native is not None and isinstance(token_ids, list | tuple):
        return native.pack_tokens(token_ids)  # type: ignore[no-any-return]
    packed = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    if sys.byteorder == "big":
        packed = array("I", packed)
        packed.byteswap()
    return packed.tobytes()


def split_chain(chain: Chain) -> Iterator[PrefixHash]:
    """The names in a packed chain, one by one."""
    for start in range(0, len(chain), HASH_BYTES):
        yield PrefixHash(chain[start : start + HASH_BYTES])


class PythonNamer:
    """Names blocks of tokens under one key: hashes of `start`, the parent if there is one, tokens and extras."""

    __slots__ = ("_block_bytes", "_start")

    def __init__(self, key: bytes, person: bytes, start: bytes, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._start = hashlib.blake2b(start, digest_size=HASH_BYTES, key=key, person=person)

    def chain(self, parent: bytes, tokens: bytes | bytearray | memoryview, extras: Sequence[bytes] | None, /) -> bytes:
        """Names of the full blocks, packed, each after the one before it."""
        data = bytes(tokens)
        copy, step = self._start.copy, self._block_bytes
        names: list[bytes] = []
        name = parent
        for start in range(0, len(data) - step + 1, step):
            state = copy()
            state.update(name + data[start : start + step])
            if extras is not None:
                state.update(extras[start // step])
            name = state.digest()
            names.append(name)
        return b"".join(names)

    def each(self, tokens: bytes | bytearray | memoryview, extras: Sequence[bytes] | None, /) -> bytes:
        """Names of the full blocks, packed, each by itself."""
        data = bytes(tokens)
        copy, step = self._start.copy, self._block_bytes
        names: list[bytes] = []
        for start in range(0, len(data) - step + 1, step):
            state = copy()
            state.update(data[start : start + step])
            if extras is not None:
                state.update(extras[start // step])
            names.append(state.digest())
        return b"".join(names)


Namer = PythonNamer if native is None else native.Namer


class BlockHasher:
    """Names blocks under one key. Immutable once made, so it may be shared between threads.

    `key` is a tenant's hash key (`Keyring.hash_key`), HASH_KEY_BYTES long.
    """

    __slots__ = ("_content", "_key", "_prefix", "block_bytes", "block_size_tokens")

    def __init__(self, key: bytes, block_size_tokens: int) -> None:
        if len(key) != HASH_KEY_BYTES:
            raise ValueError(f"a hash key has {HASH_KEY_BYTES} bytes, not {len(key)}")
        if not 1 <= block_size_tokens <= 65_536:
            raise ValueError(f"block size must lie in 1..65536 tokens, not {block_size_tokens}")
        self._key = key
        self.block_size_tokens = block_size_tokens
        self.block_bytes = block_size_tokens * TOKEN_BYTES
        count = block_size_tokens.to_bytes(4, "little")
        self._prefix = Namer(key, _PERSON_PREFIX, count, self.block_bytes)
        self._content = Namer(key, _PERSON_CONTENT, count, self.block_bytes)

    def root(self, scope: bytes, parent: bytes = b"") -> PrefixHash:
        """The parent of a chain's first block.

        `scope` is `IdentityScope.canonical()`. `parent` re-roots a chain: where a public prefix ends and a tenant's
        private text begins, it is the last public PrefixHash.
        """
        message = len(scope).to_bytes(4, "little") + scope + parent
        digest = hashlib.blake2b(message, digest_size=HASH_BYTES, key=self._key, person=_PERSON_ROOT)
        return PrefixHash(digest.digest())

    def chain(
        self, parent: PrefixHash, tokens: bytes | bytearray | memoryview, extras: Sequence[bytes] | None = None
    ) -> Chain:
        """PrefixHashes of the full blocks of `tokens`, which continue the prefix named `parent`.

        `tokens` is `pack_tokens(...)`; a last partial block is left out. `extras`, when given, holds
        `canonical_extras` for each full block (or more).
        """
        return Chain(self._prefix.chain(parent, tokens, extras))

    def contents(
        self, tokens: bytes | bytearray | memoryview, extras: Sequence[bytes] | None = None
    ) -> list[ContentHash]:
        """ContentHashes of the full blocks of `tokens`; arguments as for `chain`."""
        packed = self._content.each(tokens, extras)
        return [ContentHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)]

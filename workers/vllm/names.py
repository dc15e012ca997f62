"""What a request's blocks are called: by its own tokens, under the tenant that its salt names, and by nothing else.

Hashes that somebody sends along are never looked at, and the engine's own are not used.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from cachecore.blocks import HASH_BYTES, Chain, PrefixHash, pack_tokens
from cachecore.scope import DEFAULT_TENANT, Fidelity, IdentityScope, Keyring, Naming, Salt, SaltError

_NAMINGS_MAX = 4096


class Lineage(NamedTuple):
    """What a salt says."""

    naming: Naming
    fidelity: Fidelity
    """The worst KV that may be under it: the engine keeps what has another salt apart."""


class Namings:
    """Lineages by salt, for one model."""

    def __init__(self, keyring: Keyring, model: str, tokenizer: str, block_size_tokens: int) -> None:
        """`tokenizer` is its fingerprint, empty where the gateway has none."""
        self._keyring = keyring
        self._facts = model, tokenizer, block_size_tokens
        self.of = lru_cache(_NAMINGS_MAX)(self._derive)
        """By the salt of a request; None for one that claims to be ours and is not."""

    def _derive(self, cache_salt: str | None) -> Lineage | None:
        model, tokenizer, size = self._facts
        try:
            salt = self._keyring.read_salt(cache_salt or "") or self._foreign(cache_salt or "")
            scope = IdentityScope(model, salt.key_id, size, tokenizer=tokenizer, client_salt=salt.client_salt)
            return Lineage(Naming.of(scope, self._keyring), salt.fidelity)
        except (SaltError, KeyError):
            return None

    def _foreign(self, cache_salt: str) -> Salt:
        """A salt that is none of ours is a client's own under the default tenant, as gateways take it in events."""
        key_id = self._keyring.key_id(DEFAULT_TENANT)
        return Salt(key_id, client_salt=self._keyring.client_salt_digest(key_id, cache_salt))


class Tokens(Protocol):
    """An engine's list of a request's token ids, which grows."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> Sequence[int]: ...


class RequestNames:
    """The names of one request's blocks, as far as its tokens go. `workers.transfer.plans.ReadableTokens`."""

    def __init__(self, naming: Naming, token_ids: Tokens, prompt_count: int) -> None:
        self.naming = naming
        self.prompt_count = prompt_count
        self._token_ids = token_ids
        self._chain = Chain(b"")

    @property
    def token_ids(self) -> Sequence[int]:
        """Of the prompt."""
        return list(self._token_ids[: self.prompt_count])

    @property
    def block_size_tokens(self) -> int:
        return self.naming.scope.block_size_tokens

    def named(self, blocks: int) -> Chain:
        """The names of the first `blocks` full blocks."""
        self._extend(blocks)
        return Chain(self._chain[: blocks * HASH_BYTES])

    def name(self, block: int) -> PrefixHash:
        self._extend(block + 1)
        return PrefixHash(self._chain[block * HASH_BYTES : (block + 1) * HASH_BYTES])

    def parent_of(self, block: int) -> PrefixHash | None:
        """The name before a block; None at the beginning."""
        return self.name(block - 1) if block else None

    def tokens(self, first_block: int, end_block: int) -> Sequence[int]:
        size = self.block_size_tokens
        return list(self._token_ids[first_block * size : end_block * size])

    def _extend(self, blocks: int) -> None:
        known = len(self._chain) // HASH_BYTES
        if known < blocks:
            tokens = pack_tokens(self.tokens(known, blocks))
            self._chain = Chain(self._chain + self.naming.hasher.chain(self._after(known), tokens))

    def _after(self, known: int) -> PrefixHash:
        return PrefixHash(self._chain[-HASH_BYTES:]) if known else self.naming.root

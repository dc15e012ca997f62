"""What gateways must have in common before they may share an index: the layout of its keys, and a keyring.

The first one writes down what it has, and every other compares. With another keyring a gateway would name every block
differently; with another layout it would read what was never written. Keyrings are told apart by marks of their epochs,
so that one that is being rotated still agrees with those that are not yet.
"""

import hashlib
from typing import Protocol

from cachecore.index.schema import SHARDS, Schema
from cachecore.scope import PUBLIC, KeyId, Keyring
from gateway.errors import ConfigError

LAYOUT = f"2/{SHARDS}"
"""Version of the keys' layout, and how many shards there are. Whoever changes what `schema.py` describes counts up."""
_BUDGET_SECONDS = 1.0
_MARK_BYTES = 6


class Disagreement(ConfigError):
    """This gateway and those that share the index cannot be of one fleet. The message says in what they differ."""


class AgreementStore(Protocol):
    """What is used of `cachecore.store.RedisStore`."""

    async def command(self, *parts: bytes | str | int, budget_seconds: float | None = None) -> bytes | None: ...


async def agree(store: AgreementStore, schema: Schema, keyring: Keyring) -> None:
    """Compare, or be the first. Raises Disagreement, or StoreError when the server cannot say."""
    key, ours = schema.fleet("agreement"), keyring_marks(keyring)
    text = f"{LAYOUT} {' '.join(sorted(ours))}"
    found = await store.command(b"SET", key, text, b"NX", b"GET", budget_seconds=_BUDGET_SECONDS)
    if found is None:
        return
    layout, *theirs = found.decode(errors="replace").split(" ")
    if layout != LAYOUT:
        raise Disagreement(
            f"redis: the index there is laid out as {layout}, by another version of Ropeway; this one writes {LAYOUT}. "
            "Choose another sharing.prefix until all gateways are of one version"
        )
    if not ours & set(theirs):
        raise Disagreement(
            "keyring: the gateways that share this index have another keyring; give all of them the same file, or "
            "choose another sharing.prefix"
        )
    if ours != set(theirs):
        await store.command(b"SET", key, text, budget_seconds=_BUDGET_SECONDS)


def keyring_marks(keyring: Keyring) -> set[str]:
    """A mark for each epoch, which says nothing of its secret."""
    marks = set()
    for epoch in keyring.secrets_by_epoch:
        key = keyring.hash_key(KeyId(PUBLIC, epoch))
        marks.add(f"{epoch}:{hashlib.blake2b(key, digest_size=_MARK_BYTES, person=b'ropeway.agree.v1').hexdigest()}")
    return marks

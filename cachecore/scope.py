"""Who may share KV with whom: scopes, tenant keys, and the salts that carry both through an engine.

A scope is everything that must be equal before two prompts can share a block and that the gateway knows before it has
picked a worker. It is hashed into the root of every chain, under the tenant's own key:

    hash key(tenant, epoch)       = HMAC-SHA256(master secret, "hash" | epoch | tenant)
    frame key(tenant, epoch)      = HMAC-SHA256(master secret, "frame" | epoch | tenant)
    capability key(tenant, epoch) = HMAC-SHA256(master secret, "capability" | epoch | tenant)
    salt key                      = HMAC-SHA256(master secret, "salt")

The salt is what survives the engine. Engines hash `cache_salt` into their first block and repeat it, in clear, in their
KV events; so it describes itself (key id, fidelity, digest of the client's own salt) and is authenticated under a key
other than the hash key. Whoever reads events learns which tenant a block belongs to and nothing that would let them
compute a block's name or mint a salt for another tenant.

    rw1.<tenant>.<key epoch>.<fidelity>.<client salt digest or '-'>.<mac>       (base64url without padding where binary)
"""

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import NewType

from cachecore.blocks import BlockHasher, PrefixHash

TenantId = NewType("TenantId", str)

PUBLIC = TenantId("public")
"""KV that every tenant may share. Never chosen by default."""
DEFAULT_TENANT = TenantId("default")
"""The one tenant of a gateway that has no API keys configured."""

_TENANT_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SALT_PREFIX = "rw1."
_SALT_FIELDS = 6
_SALT_MAC_BYTES = 12
_CLIENT_SALT_DIGEST_BYTES = 16
CLIENT_SALT_BYTES_MAX = 1024


class Fidelity(IntEnum):
    """How far a holding may be from the bytes an engine of its class computed; larger is worse.

    `EXACT` means unmodified bytes. A block is as good as the worst of its chain.
    """

    EXACT = 0
    QUANTIZED = 1
    ROTATED = 2
    FUSED = 3

    __hash__ = int.__hash__  # as for Tier: Enum's own is a Python function


_FIDELITY_BY_TEXT: Mapping[str, Fidelity] = {str(int(fidelity)): fidelity for fidelity in Fidelity}


class SaltError(ValueError):
    """A salt that says it is ours and is not: malformed, or its MAC does not match."""


@dataclass(frozen=True, slots=True)
class KeyId:
    """Which key a name was made under. Travels in salts, capabilities, frames and the index; never the key itself."""

    tenant: TenantId
    epoch: int

    def __post_init__(self) -> None:
        if not _TENANT_PATTERN.fullmatch(self.tenant):
            raise ValueError(f"tenant id {self.tenant!r} must match {_TENANT_PATTERN.pattern}")
        if not 0 <= self.epoch < 2**32:
            raise ValueError(f"key epoch {self.epoch} is not a u32")


@dataclass(frozen=True, slots=True)
class Salt:
    """What a minted `cache_salt` says."""

    key_id: KeyId
    fidelity: Fidelity = Fidelity.EXACT
    client_salt: bytes = b""
    """Digest of the client's own salt (`Keyring.client_salt_digest`), or empty."""


@dataclass(frozen=True, slots=True)
class IdentityScope:
    """What must be equal before two prompts can share anything. See the module's opening."""

    model: str
    key_id: KeyId
    block_size_tokens: int
    revision: str = ""
    tokenizer: str = ""
    adapter: str = ""
    adapter_revision: str = ""
    client_salt: bytes = b""

    def canonical(self) -> bytes:
        """Injective byte form: every field tagged by place and preceded by its length (u32 LE)."""
        parts = (
            self.model.encode(),
            self.revision.encode(),
            self.tokenizer.encode(),
            self.adapter.encode(),
            self.adapter_revision.encode(),
            self.key_id.tenant.encode(),
            self.key_id.epoch.to_bytes(4, "little"),
            self.client_salt,
            self.block_size_tokens.to_bytes(4, "little"),
        )
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


@dataclass(frozen=True, slots=True)
class Keyring:
    """The master secrets of a deployment, by epoch, and everything derived from them.

    Every process that names blocks by itself (gateway, reference worker, connector) reads the same keyring file; keys
    never travel in a request. Rotation adds an epoch: new salts name it, old names stay readable until the epoch is
    dropped from the file.
    """

    secrets_by_epoch: Mapping[int, bytes]
    current_epoch: int
    _hash_keys: dict[KeyId, bytes] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.current_epoch not in self.secrets_by_epoch:
            raise ValueError(f"current key epoch {self.current_epoch} has no secret")
        for epoch, secret in self.secrets_by_epoch.items():
            if len(secret) < 32:
                raise ValueError(f"master secret of epoch {epoch} is shorter than 32 bytes")

    def __repr__(self) -> str:
        return f"Keyring(epochs={sorted(self.secrets_by_epoch)}, current={self.current_epoch})"

    @classmethod
    def generate(cls) -> "Keyring":
        return cls({0: secrets.token_bytes(32)}, 0)

    @classmethod
    def load(cls, path: Path) -> "Keyring":
        """Read `{"current": epoch, "secrets": {"epoch": "hex"}}`. Raises ValueError with the reason."""
        try:
            document = json.loads(path.read_text())
            epochs = {int(epoch): bytes.fromhex(secret) for epoch, secret in document["secrets"].items()}
            return cls(epochs, int(document["current"]))
        except (OSError, KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"keyring {path}: {error}") from error

    def save(self, path: Path) -> None:
        """Write the file readable by its owner alone; a file that is there is replaced whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "current": self.current_epoch,
            "secrets": {str(epoch): secret.hex() for epoch, secret in self.secrets_by_epoch.items()},
        }
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(document, file)
        draft.replace(path)

    def rotate(self) -> "Keyring":
        """A keyring with one more epoch, which becomes the current one."""
        epoch = max(self.secrets_by_epoch) + 1
        return Keyring({**self.secrets_by_epoch, epoch: secrets.token_bytes(32)}, epoch)

    def key_id(self, tenant: TenantId) -> KeyId:
        return KeyId(tenant, self.current_epoch)

    def hash_key(self, key_id: KeyId) -> bytes:
        """The tenant's hash key. Raises KeyError when the keyring does not have (or no longer has) its epoch."""
        key = self._hash_keys.get(key_id)
        if key is None:
            key = self._hash_keys[key_id] = self._derive(b"hash", key_id)
        return key

    def frame_key(self, key_id: KeyId) -> bytes:
        """What the tenant's frames are authenticated under, on the wire and on disk. Raises KeyError as `hash_key`."""
        return self._derive(b"frame", key_id)

    def capability_key(self, key_id: KeyId) -> bytes:
        """What capabilities to pull the tenant's KV are signed with. Raises KeyError as `hash_key`."""
        return self._derive(b"capability", key_id)

    def _derive(self, purpose: bytes, key_id: KeyId) -> bytes:
        message = purpose + key_id.epoch.to_bytes(4, "little") + key_id.tenant.encode()
        return hmac.digest(self.secrets_by_epoch[key_id.epoch], message, "sha256")

    def client_salt_digest(self, key_id: KeyId, client_salt: str) -> bytes:
        """What stands for a client's own `cache_salt` in salts and scopes, since salts travel in clear."""
        if not client_salt:
            return b""
        key = self.hash_key(key_id)
        digest = hashlib.blake2b(
            client_salt.encode(), digest_size=_CLIENT_SALT_DIGEST_BYTES, key=key, person=b"ropeway.csalt.v1"
        )
        return digest.digest()

    def mint_salt(self, salt: Salt) -> str:
        """The `cache_salt` to send upstream. Equal salts mint to equal strings, so engines can share KV."""
        client = _base64(salt.client_salt) if salt.client_salt else "-"
        body = f"{_SALT_PREFIX}{salt.key_id.tenant}.{salt.key_id.epoch}.{int(salt.fidelity)}.{client}"
        return f"{body}.{_base64(self._salt_mac(salt.key_id.epoch, body))}"

    def read_salt(self, text: str) -> Salt | None:
        """What a `cache_salt` from an event or a request says; None when it is not one of ours.

        Raises SaltError for one that claims to be ours and does not authenticate.
        """
        if not text.startswith(_SALT_PREFIX):
            return None
        body, _, mac = text.rpartition(".")
        try:
            tenant, epoch_text, fidelity_text, client_text = body.removeprefix(_SALT_PREFIX).split(".")
            key_id = KeyId(TenantId(tenant), int(epoch_text))
            fidelity = Fidelity(int(fidelity_text))
            client = b"" if client_text == "-" else _from_base64(client_text)
            expected = self._salt_mac(key_id.epoch, body)
            if not hmac.compare_digest(expected, _from_base64(mac)):
                raise SaltError("the MAC of a cache salt does not match")
        except (ValueError, KeyError) as error:
            raise error if isinstance(error, SaltError) else SaltError(f"malformed cache salt: {error}") from error
        return Salt(key_id, fidelity, client)

    def _salt_mac(self, epoch: int, body: str) -> bytes:
        salt_key = hmac.digest(self.secrets_by_epoch[epoch], b"salt", "sha256")
        return hmac.digest(salt_key, body.encode(), "sha256")[:_SALT_MAC_BYTES]


def stated_fidelity(salt: str | None) -> Fidelity:
    """How good a salt says that KV is; EXACT when it is none of ours.

    The MAC is not looked at: whoever names blocks by a chain's first salt has authenticated that one (`read_salt`), and
    on a later block a forged salt can only call KV worse than it is.
    """
    if salt is None or not salt.startswith(_SALT_PREFIX):
        return Fidelity.EXACT
    fields = salt.split(".")
    return _FIDELITY_BY_TEXT.get(fields[3], Fidelity.EXACT) if len(fields) == _SALT_FIELDS else Fidelity.EXACT


@dataclass(frozen=True, slots=True)
class Naming:
    """A scope made ready to name blocks: its hasher and the root of its chains."""

    scope: IdentityScope
    hasher: BlockHasher
    root: PrefixHash

    @classmethod
    def of(cls, scope: IdentityScope, keyring: Keyring) -> "Naming":
        hasher = BlockHasher(keyring.hash_key(scope.key_id), scope.block_size_tokens)
        return cls(scope, hasher, hasher.root(scope.canonical()))


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)

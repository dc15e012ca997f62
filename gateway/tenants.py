"""Who is calling: API keys, and the key that opens the surfaces for operators.

A key is 32 random bytes, so its plain SHA-256 cannot be searched: slow hashes protect what people make up, and would
cost every request what a hundred others cost. The file keeps the hash alone, one JSON object per line; lines that begin
with `#` are comments:

    {"tenant": "acme", "key_sha256": "9f86d0...", "created": "2026-01-31"}

A presented key is hashed and its digest is looked up: what the timing of a lookup tells is about the digest, which the
caller cannot steer towards a stored one. The digest found is compared once more, in constant time.
"""

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import msgspec

from cachecore.scope import DEFAULT_TENANT, PUBLIC, KeyId, TenantId
from gateway.errors import ConfigError, Unauthorized

API_KEY_PREFIX = "rwk_"
_API_KEY_RANDOM_BYTES = 32
_BEARER = b"bearer "


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is: whose key names its blocks."""

    id: TenantId


class ApiKeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the API key file."""

    tenant: str
    key_sha256: str
    """Hexadecimal."""
    created: str = ""


class Tenants:
    """The tenants that have keys; with none configured, everyone is the one tenant `default`.

    Nobody becomes `public` by a key: what all tenants share is declared request by request.
    """

    def __init__(self, tenants_by_digest: Mapping[bytes, Tenant] | None) -> None:
        """`tenants_by_digest` is keyed by SHA-256 of the API key; None is open to everyone."""
        self._default = Tenant(DEFAULT_TENANT) if tenants_by_digest is None else None
        self._by_digest = {digest: (digest, tenant) for digest, tenant in (tenants_by_digest or {}).items()}

    def __repr__(self) -> str:
        return "Tenants(open)" if self.open else f"Tenants(keys={len(self._by_digest)})"

    @classmethod
    def load(cls, path: Path | None) -> "Tenants":
        """Read an API key file. Raises ConfigError with the line at fault."""
        return cls(None if path is None else _read_keys(path))

    @property
    def open(self) -> bool:
        return self._default is not None

    def authenticate(self, authorization: bytes | None) -> Tenant:
        """The tenant of an `Authorization` header. Raises Unauthorized."""
        if self._default is not None:
            return self._default
        digest = sha256(_bearer_token(authorization)).digest()
        stored = self._by_digest.get(digest)
        if stored is None or not hmac.compare_digest(stored[0], digest):
            raise Unauthorized("the API key is not known here")
        return stored[1]


class OperatorKey:
    """The key of a surface for operators; None leaves the surface open."""

    def __init__(self, key: bytes | None) -> None:
        self._digest = None if key is None else sha256(key).digest()

    @classmethod
    def load(cls, path: Path | None) -> "OperatorKey":
        """Read a file that holds nothing but the key. Raises ConfigError."""
        if path is None:
            return cls(None)
        key = _read_text(path).strip()
        if len(key) < 16:
            raise ConfigError(f"{path}: a key of at least 16 characters is expected")
        return cls(key.encode())

    @property
    def open(self) -> bool:
        return self._digest is None

    def check(self, authorization: bytes | None) -> None:
        """Raises Unauthorized unless the header carries the key."""
        if self._digest is None:
            return
        if not hmac.compare_digest(self._digest, sha256(_bearer_token(authorization)).digest()):
            raise Unauthorized("the operator key is not the right one")


def new_api_key() -> str:
    return API_KEY_PREFIX + secrets.token_urlsafe(_API_KEY_RANDOM_BYTES)


def add_api_key(path: Path, tenant: str) -> str:
    """Make a key for a tenant and append its hash to the file. Returns the key, which is kept nowhere."""
    tenant_id = _tenant_id(tenant, str(path))
    if path.exists():
        _read_keys(path)
    key = new_api_key()
    record = ApiKeyRecord(tenant_id, sha256(key.encode()).hexdigest(), datetime.now(UTC).date().isoformat())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "ab+") as file:
            file.write(_missing_newline(file.fileno()) + msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return key


def _missing_newline(descriptor: int) -> bytes:
    """A file written by hand may not end its last line; a record appended to it would be lost."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def _read_keys(path: Path) -> dict[bytes, Tenant]:
    tenants: dict[bytes, Tenant] = {}
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        digest, tenant = _read_record(line, f"{path}: line {number}")
        if digest in tenants:
            raise ConfigError(f"{path}: line {number}: this key is given twice")
        tenants[digest] = tenant
    return tenants


def _read_record(line: str, place: str) -> tuple[bytes, Tenant]:
    try:
        record = msgspec.json.decode(line, type=ApiKeyRecord)
        digest = bytes.fromhex(record.key_sha256)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from error
    if len(digest) != sha256().digest_size:
        raise ConfigError(f"{place}: key_sha256 has {len(digest)} bytes, not {sha256().digest_size}")
    return digest, Tenant(_tenant_id(record.tenant, place))


def _tenant_id(name: str, place: str) -> TenantId:
    if name == PUBLIC:
        raise ConfigError(f"{place}: {PUBLIC!r} is what all tenants share, not a tenant")
    try:
        return KeyId(TenantId(name), 0).tenant
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _bearer_token(authorization: bytes | None) -> bytes:
    if not authorization:
        raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY'")
    if authorization[: len(_BEARER)].lower() != _BEARER:
        raise Unauthorized("the Authorization header must read 'Bearer KEY'")
    return authorization[len(_BEARER) :].strip()

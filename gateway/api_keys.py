"""Where API keys are kept: a file, a hash in Redis or Valkey, or both.

A key is 32 random bytes, so its plain SHA-256 cannot be searched: slow hashes protect what people make up, and would
cost every request what a hundred others cost. What is kept is the hash alone, in a JSON object; a file has one per
line, and lines that begin with `#` are comments:

    {"tenant": "acme", "key_sha256": "9f86d0...", "created": "2026-01-31", "expires": "2027-01-31"}

In a server the objects are the values of one hash, and a number beside it grows with each change:

    <prefix>:{fleet}:api-keys            hash    key_sha256 -> record
    <prefix>:{fleet}:api-keys:revision   string  how often the hash was changed

A server without that number has lost its data: what was read before stays.
"""

import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from cachecore.scope import PUBLIC, KeyId, TenantId
from cachecore.store import RedisStore, StoreError, parse_address
from gateway.errors import ConfigError, StartupError

API_KEY_PREFIX = "rwk_"
ID_CHARACTERS = 12
_API_KEY_RANDOM_BYTES = 32
_BUDGET_SECONDS = 2.0
"""Nobody waits for a read, so a slow server is given more time than a lookup is."""

KEYS_MAX = 100_000
"""In a file, or a server."""
Answer = TypeVar("Answer")
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class ApiKeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is kept of one key. A tenant may have several."""

    tenant: str
    key_sha256: str
    """Hexadecimal; its first 12 digits are how `ropeway keys` names the key."""
    created: str = ""
    expires: str = ""
    """A date (the key is good through its end, UTC) or a time with its offset; empty for never."""
    note: str = ""
    requests_per_minute: _Rate | None = None
    """This key's own limits, beside its tenant's."""
    tokens_per_minute: _Rate | None = None
    public: bool = False
    """Whether its requests may ask to share KV with all tenants (`x-ropeway-namespace: public`)."""

    @property
    def id(self) -> str:
        return self.key_sha256[:ID_CHARACTERS].lower()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A record that has been checked."""

    digest: bytes
    tenant: TenantId
    expires_at: float | None
    """Unix time."""
    record: ApiKeyRecord


Keys = Mapping[bytes, ApiKey]
"""By digest."""


def read_key(record: ApiKeyRecord, place: str) -> ApiKey:
    """Raises ConfigError."""
    try:
        digest = bytes.fromhex(record.key_sha256)
        expires_at = _expiry(record.expires)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error
    if len(digest) != sha256().digest_size:
        raise ConfigError(f"{place}: key_sha256 has {len(digest)} bytes, not {sha256().digest_size}")
    return ApiKey(digest, tenant_id(record.tenant, place), expires_at, record)


def tenant_id(name: str, place: str) -> TenantId:
    """Raises ConfigError for what is no tenant."""
    if name == PUBLIC:
        raise ConfigError(f"{place}: {PUBLIC!r} is what all tenants share, not a tenant")
    try:
        return KeyId(TenantId(name), 0).tenant
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


def _expiry(text: str) -> float | None:
    """Raises ValueError."""
    if not text:
        return None
    if len(text) == len("2027-01-31"):
        return datetime.combine(date.fromisoformat(text) + timedelta(days=1), time(), UTC).timestamp()
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"expires: {text!r} needs its offset from UTC, as in 2027-01-31T12:00:00+00:00")
    return moment.timestamp()


def new_api_key() -> str:
    return API_KEY_PREFIX + secrets.token_urlsafe(_API_KEY_RANDOM_BYTES)


def new_record(key: str, tenant: str, place: str, **settings: Any) -> ApiKeyRecord:
    """Of a key made now. Raises ConfigError where the settings make no sense."""
    digest, today = sha256(key.encode()).hexdigest(), datetime.now(UTC).date().isoformat()
    record = ApiKeyRecord(tenant, digest, today, **settings)
    read_key(record, place)
    return record


def add_api_key(path: Path, tenant: str, **settings: Any) -> str:
    """Make a key for a tenant and append its record to the file. Returns the key, which is kept nowhere."""
    key = new_api_key()
    add_to_file(path, new_record(key, tenant, str(path), **settings))
    return key


# ---- a file ----------------------------------------------------------------------------------------------------------


def read_key_file(path: Path) -> dict[bytes, ApiKey]:
    """Raises ConfigError with the line at fault."""
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        place = f"{path}: line {number}"
        key = read_key(_decoded(line, place), place)
        if key.digest in keys:
            raise ConfigError(f"{place}: this key is given twice")
        if len(keys) >= KEYS_MAX:
            raise ConfigError(f"{place}: there are more than {KEYS_MAX} keys")
        keys[key.digest] = key
    return keys


def add_to_file(path: Path, record: ApiKeyRecord) -> None:
    """Append a record to a file that is sound. Raises ConfigError."""
    if path.exists():
        read_key_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "ab+") as file:
            file.write(_missing_newline(file.fileno()) + msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def remove_from_file(path: Path, is_meant: Callable[[ApiKeyRecord], bool]) -> list[ApiKeyRecord]:
    """Take out the keys that are meant, leaving every other line as it is. Returns their records.

    The file is replaced whole or not at all. Raises ConfigError.
    """
    read_key_file(path)
    kept: list[str] = []
    removed: list[ApiKeyRecord] = []
    for line in read_text(path).splitlines():
        record = None if not line.strip() or line.lstrip().startswith("#") else _decoded(line, str(path))
        if record is not None and is_meant(record):
            removed.append(record)
        else:
            kept.append(line)
    if removed:
        _replace(path, "".join(f"{line}\n" for line in kept))
    return removed


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _decoded(text: str | bytes, place: str) -> ApiKeyRecord:
    try:
        return msgspec.json.decode(text, type=ApiKeyRecord)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from error


def _missing_newline(descriptor: int) -> bytes:
    """A file written by hand may not end its last line; a record appended to it would be lost."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def read_text(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


# ---- a server --------------------------------------------------------------------------------------------------------


class Store(Protocol):
    """What is used of `cachecore.store.RedisStore`."""

    async def command(self, *parts: bytes | str | int, budget_seconds: float | None = None) -> Any: ...


class KeyShelf:
    """Keys in a server that several gateways read."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._hash = f"{prefix}:{{fleet}}:api-keys".encode()
        self._number = self._hash + b":revision"

    async def revision(self) -> int | None:
        """None for a server that has never had keys, or has lost them. Raises StoreError."""
        number = await self._ask(b"GET", self._number)
        return None if number is None else int(number)

    async def read(self) -> dict[bytes, ApiKey]:
        """Raises StoreError, and ConfigError with the entry at fault."""
        if (count := await self._ask(b"HLEN", self._hash)) > KEYS_MAX:
            raise ConfigError(f"there are {count} keys, more than {KEYS_MAX}")
        answer = await self._ask(b"HGETALL", self._hash)
        pairs = answer.items() if isinstance(answer, dict) else zip(answer[::2], answer[1::2], strict=True)
        keys: dict[bytes, ApiKey] = {}
        for name, value in pairs:
            place = f"API key {bytes(name).decode(errors='replace')[:ID_CHARACTERS]}"
            key = read_key(_decoded(value, place), place)
            if key.digest.hex().encode() != name:
                raise ConfigError(f"{place}: it is kept under another name than its key_sha256")
            keys[key.digest] = key
        return keys

    async def add(self, record: ApiKeyRecord) -> None:
        """Raises StoreError."""
        await self._ask(b"HSET", self._hash, record.key_sha256, msgspec.json.encode(record))
        await self._ask(b"INCR", self._number)

    async def remove(self, is_meant: Callable[[ApiKeyRecord], bool]) -> list[ApiKeyRecord]:
        """As `remove_from_file`. Raises StoreError, ConfigError."""
        records = [key.record for key in (await self.read()).values()]
        removed = [record for record in records if is_meant(record)]
        for record in removed:
            await self._ask(b"HDEL", self._hash, record.key_sha256)
        if removed:
            await self._ask(b"INCR", self._number)
        return removed

    async def _ask(self, *parts: bytes | str | int) -> Any:
        return await self._store.command(*parts, budget_seconds=_BUDGET_SECONDS)


async def with_shelf(url: str, prefix: str, ask: Callable[[KeyShelf], Awaitable[Answer]]) -> Answer:
    """What is asked of the shelf at a server, for commands. Raises StartupError."""
    try:
        store = RedisStore(parse_address(url), budget_seconds=_BUDGET_SECONDS)
    except ValueError as error:
        raise StartupError(str(error)) from None
    try:
        await store.start()
        return await ask(KeyShelf(store, prefix))
    except StoreError as error:
        raise StartupError(f"{store.address}: {error}") from None
    finally:
        await store.close()

"""Who is calling: API keys, and the key that opens the surfaces for operators.

A presented key is hashed and its digest is looked up: what the timing of a lookup tells is about the digest, which the
caller cannot steer towards a stored one. The digest found is compared once more, in constant time.

Keys come and go while the gateway runs (`KeyWatch`). All that are good at one time are one `Roster`, which is replaced
and never changed: whoever was admitted by it is looked at again when another one has taken its place, on connections
that are open as well.
"""

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cachecore.scope import DEFAULT_TENANT, TenantId
from cachecore.store import StoreError
from gateway.api_keys import ApiKey, Keys, KeyShelf, read_key_file, read_text
from gateway.errors import ConfigError, Unauthorized, Unavailable
from policies.state.limits import Rates

logger = logging.getLogger("ropeway.tenants")

LOOK_SECONDS = 0.5
"""Between two looks whether keys have changed."""
READ_SECONDS = 60.0
"""Keys in a server are read again after this long, whatever their revision says."""
OPERATOR_KEY_CHARACTERS_MIN = 16
_BEARER = b"bearer "


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is: whose key names its blocks, and what it may do."""

    id: TenantId
    key_id: str = ""
    """Of the API key; empty where there is none."""
    key_rates: Rates | None = None
    """The key's own limits."""
    public: bool = False
    """Whether it may ask to share KV with all tenants."""


class Roster:
    """The keys that are good at one time."""

    __slots__ = ("_by_digest", "_ids", "complete")

    def __init__(self, tenants_by_digest: Mapping[bytes, Tenant], complete: bool = True) -> None:
        """Keyed by SHA-256 of the API key. `complete`: no further keys are kept where they could not be read yet."""
        self._by_digest = {digest: (digest, tenant) for digest, tenant in tenants_by_digest.items()}
        self._ids = {tenant.id for tenant in tenants_by_digest.values()}
        self.complete = complete

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, digest: bytes) -> Tenant | None:
        stored = self._by_digest.get(digest)
        return stored[1] if stored is not None and hmac.compare_digest(stored[0], digest) else None

    def has(self, tenant: TenantId) -> bool:
        """Whether any key is the tenant's."""
        return tenant in self._ids

    def tenants(self) -> list[Tenant]:
        return [tenant for _, tenant in self._by_digest.values()]


class Tenants:
    """The tenants that have keys; with none configured, everyone is the one tenant `default`.

    Nobody becomes `public` by a key: what all tenants share is declared request by request.
    """

    def __init__(self, roster: Roster | None, public: bool = False) -> None:
        """None is open to everyone. `public`: everybody may ask to share KV with all tenants."""
        self._default = Tenant(DEFAULT_TENANT, public=public) if roster is None else None
        self.public = public
        self.roster = roster or Roster({})
        """What somebody was admitted by holds as long as this is the same object."""

    def __repr__(self) -> str:
        return "Tenants(open)" if self.open else f"Tenants(keys={len(self.roster)})"

    @property
    def open(self) -> bool:
        return self._default is not None

    def absent(self, tenant_id: TenantId) -> Tenant:
        """A tenant for whom something is done while it is not there. Raises Unauthorized where it has no key any
        longer; Unavailable while keys cannot be read."""
        if self._default is None and not self.roster.has(tenant_id):
            if not self.roster.complete:
                raise Unavailable("API keys cannot be checked at this moment")
            raise Unauthorized("the tenant has no API key any longer")
        return Tenant(tenant_id)

    def authenticate(self, authorization: bytes | None) -> Tenant:
        """The tenant of an `Authorization` header. Raises Unauthorized; Unavailable while keys cannot be read."""
        if self._default is not None:
            return self._default
        tenant = self.roster.find(sha256(_bearer_token(authorization)).digest())
        if tenant is None:
            if not self.roster.complete:
                raise Unavailable("API keys cannot be checked at this moment")
            raise Unauthorized("the API key is not known here")
        return tenant


def roster_of(keys: Keys, now: float, public: bool, complete: bool = True) -> Roster:
    """Those of the keys that have not expired."""
    good = (key for key in keys.values() if key.expires_at is None or key.expires_at > now)
    return Roster({key.digest: _tenant(key, public) for key in good}, complete)


def _tenant(key: ApiKey, public: bool) -> Tenant:
    record = key.record
    limited = record.requests_per_minute is not None or record.tokens_per_minute is not None
    rates = Rates(record.requests_per_minute, record.tokens_per_minute) if limited else None
    return Tenant(key.tenant, record.id, rates, public or record.public)


class KeyWatch:
    """Keeps the roster as the file and the server say. `run` has to run for changes to be seen.

    What cannot be read changes nothing: the last keys that were sound stay.
    """

    def __init__(
        self,
        tenants: Tenants,
        file: Path | None,
        shelf: KeyShelf | None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError where the file is not sound."""
        self.changes = 0
        """Rosters that took the place of another one."""
        self.problem = ""
        """Why keys could not be read the last time; empty where they could."""
        self._tenants = tenants
        self._file = file
        self._shelf = shelf
        self._on_change = on_change
        self._clock = clock
        self._stamp = _stamp(file)
        self._in_file: Keys = {} if file is None else read_key_file(file)
        self._file_problem = ""
        self._in_server: Keys = {}
        self._revision: int | None = None
        self._read_at: float | None = None
        self._valid_until: float | None = None
        self._replace()

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("looking for changed API keys failed; trying again")
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Once."""
        self._look_at_file()
        problems = [self._file_problem, await self._look_at_server()]
        if self._valid_until is not None and self._clock() >= self._valid_until:
            self._replace()
        problem = "; ".join(filter(None, problems))
        if problem and problem != self.problem:
            logger.error("%s; the %d API keys that were read before stay", problem, len(self._tenants.roster))
        self.problem = problem

    def _look_at_file(self) -> None:
        stamp = _stamp(self._file)
        if self._file is None or stamp == self._stamp:
            return
        self._stamp, self._file_problem = stamp, ""
        try:
            self._in_file = read_key_file(self._file)
        except ConfigError as error:
            self._file_problem = str(error)
        else:
            self._replace()

    async def _look_at_server(self) -> str:
        """What is wrong with it."""
        if self._shelf is None:
            return ""
        now = self._clock()
        try:
            revision = await self._shelf.revision()
            fresh = self._read_at is not None and 0 <= now - self._read_at < READ_SECONDS
            if fresh and revision == self._revision:
                return ""
            if revision is None and self._revision is not None:
                return "the server with the API keys has lost them"
            keys = await self._shelf.read()
        except (StoreError, ConfigError) as error:
            return f"API keys in the server: {error}"
        changed = keys != self._in_server or self._read_at is None
        self._in_server, self._revision, self._read_at = keys, revision, now
        if changed:
            self._replace()
        return ""

    def _replace(self) -> None:
        keys = {**self._in_server, **self._in_file}
        now = self._clock()
        complete = self._shelf is None or self._read_at is not None
        self._tenants.roster = roster_of(keys, now, self._tenants.public, complete)
        self._valid_until = min((at for key in keys.values() if (at := key.expires_at) and at > now), default=None)
        self.changes += 1
        logger.info("%d API keys are known", len(self._tenants.roster))
        self._on_change()


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None where there is none."""
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found is not None else None


class OperatorKey:
    """The key of a surface for operators; None leaves the surface open."""

    def __init__(self, key: bytes | None) -> None:
        self._digest = None if key is None else sha256(key).digest()

    @classmethod
    def load(cls, path: Path | None) -> "OperatorKey":
        """Read a file that holds nothing but the key. Raises ConfigError."""
        if path is None:
            return cls(None)
        key = read_text(path).strip()
        if len(key) < OPERATOR_KEY_CHARACTERS_MIN:
            raise ConfigError(f"{path}: a key of at least {OPERATOR_KEY_CHARACTERS_MIN} characters is expected")
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


def _bearer_token(authorization: bytes | None) -> bytes:
    if not authorization:
        raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY'")
    if authorization[: len(_BEARER)].lower() != _BEARER:
        raise Unauthorized("the Authorization header must read 'Bearer KEY'")
    return authorization[len(_BEARER) :].strip()

"""Where a shared store lives and who asks: one URL.

    redis://[user:password@]host[:port][/database]                       one server
    rediss://...?ca=/path&cert=/path&key=/path                           the same over TLS
    unix://[user:password@]/path/to/socket                               one server of this machine
    redis+cluster://[user:password@]host:port,host:port                  a cluster, any of its nodes
    redis+sentinel://[user:password@]host:port,host:port/service[/database]
    rediss+cluster://..., rediss+sentinel://...                          the same over TLS

A URL says where, never how patiently: timeouts, retries and the like are the program's, so their keys are errors. With
`ca` the server's certificate must come from that authority, else from one that the system trusts; its name is always
checked. `cert` and `key` are the client's own. Sentinels are asked without credentials, and with those of the URL when
they insist.
"""

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from cachecore.store.errors import Endpoint

Kind = Literal["single", "cluster", "sentinel"]

PORTS: dict[Kind, int] = {"single": 6379, "cluster": 6379, "sentinel": 26379}
TLS_KEYS = ("ca", "cert", "key")


@dataclass(frozen=True)
class Address:
    kind: Kind
    endpoints: tuple[Endpoint, ...] = ()
    """To start from: the server, some nodes of the cluster, or the sentinels."""
    path: str | None = None
    """Of a unix socket, in place of an endpoint."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    service: str | None = None
    """What the sentinels call the master."""
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        """For logs and status pages: everything but the password."""
        scheme = (
            "unix"
            if self.path
            else ("rediss" if self.tls else "redis") + ("" if self.kind == "single" else f"+{self.kind}")
        )
        credentials = f"{self.username or ''}:***@" if self.password else ""
        where = self.path or ",".join(str(endpoint) for endpoint in self.endpoints)
        suffix = (f"/{self.service}" if self.service else "") + (f"/{self.database}" if self.database else "")
        return f"{scheme}://{credentials}{where}{suffix}"

    def tls_context(self) -> ssl.SSLContext | None:
        """Raises ValueError when a file of `ca`, `cert` or `key` cannot be used."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"{self}: its certificates cannot be used: {error}") from None
        return context


def parse_address(url: str) -> Address:
    """Raises ValueError, whose message never repeats the password."""
    # The library takes a list of hosts for one, and what is bracketed within it for a mistake.
    beginning, _, rest = url.partition("://")
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    parts = urlsplit(f"{beginning}://{rest[len(netloc) :]}")
    scheme, _, kind_name = parts.scheme.partition("+")
    kind: Kind = {"": "single", "cluster": "cluster", "sentinel": "sentinel"}.get(kind_name, "")  # type: ignore[assignment]
    if scheme not in ("redis", "rediss", "unix") or not kind or (scheme == "unix" and kind_name):
        raise ValueError(
            f"a store's URL begins with redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://, not {parts.scheme}://"
        )
    if parts.fragment:
        raise ValueError("a store's URL has no fragment: write # in a password as %23")
    username, password, hosts = _credentials(netloc)
    options = _options(parts, tls=scheme == "rediss")
    if scheme == "unix":
        if hosts or not parts.path.strip("/"):
            raise ValueError("a unix:// URL names a socket by its absolute path: unix:///run/redis.sock")
        return Address("single", (), unquote(parts.path), username, password)
    endpoints = tuple(_endpoint(host, PORTS[kind]) for host in hosts.split(","))
    if kind == "single" and len(endpoints) > 1:
        raise ValueError("several hosts are a redis+cluster:// or a redis+sentinel:// URL")
    service, database = _path(parts.path, kind)
    return Address(kind, endpoints, None, username, password, database, service, scheme == "rediss", *options)


def _credentials(netloc: str) -> tuple[str | None, str | None, str]:
    userinfo, _, hosts = netloc.rpartition("@")
    username, colon, password = userinfo.partition(":")
    if username and not colon:
        raise ValueError("a user without a password: write user:password@")
    return unquote(username) or None, unquote(password) or None, hosts


def _endpoint(text: str, port: int) -> Endpoint:
    try:
        parts = urlsplit(f"//{text}")
        if not parts.hostname:
            raise ValueError
        return Endpoint(parts.hostname, parts.port or port)
    except ValueError:
        raise ValueError(f"no host and port: {text!r}") from None


def _path(path: str, kind: Kind) -> tuple[str | None, int]:
    segments = [unquote(segment) for segment in path.split("/") if segment]
    service = None
    if kind == "sentinel":
        if not segments:
            raise ValueError(
                "a redis+sentinel:// URL ends with the name of the master: redis+sentinel://host:26379/service"
            )
        service = segments.pop(0)
    if len(segments) > 1 or (segments and not segments[0].isdecimal()):
        raise ValueError("what follows the host is the number of a database")
    if segments and kind == "cluster" and int(segments[0]):
        raise ValueError("a cluster has no databases but 0")
    return service, int(segments[0]) if segments else 0


def _options(parts: SplitResult, tls: bool) -> tuple[str | None, str | None, str | None]:
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in given:
        if name not in TLS_KEYS:
            raise ValueError(
                f"{name!r} in a store's URL: it takes ca, cert and key; timeouts and retries are the program's own"
            )
    if given and not tls:
        raise ValueError(f"{next(iter(given))!r} belongs to TLS: begin the URL with rediss")
    for name, path in given.items():
        if not Path(path).is_file():
            raise ValueError(f"{name}: there is no file {path!r}")
    if ("cert" in given) != ("key" in given):
        raise ValueError("a client's certificate needs both cert and key")
    return given.get("ca"), given.get("cert"), given.get("key")

"""TLS between workers: what a listener shows to those who pull, and whom a puller believes.

Peers are equals: the certificate that a worker's listener shows is also the one that it shows where it pulls. With an
authority, each side insists on a certificate of its making; without one, pullers trust what the system trusts, and
listeners serve whoever holds a capability. TLS keeps KV from being read on its way; who may have it, and whether it is
what it says, capabilities and frames see to with or without.

An address says that its source speaks TLS (`tcp+tls://`), and a plan's addresses are signed. A puller with TLS takes no
other addresses and one without takes none of these, so nothing falls back to clear text.
"""

import ssl
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

SUFFIX = "+tls"
"""Of a scheme."""
_WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 - recognized, not bound to


class TlsError(ValueError):
    """These files cannot be used. The message fits one line."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """All in PEM."""

    certificate: Path
    """With the intermediate ones, if any."""
    key: Path | None = None
    """By default it is in the certificate's file."""
    authority: Path | None = None
    """The certificates of those who may certify peers; by default the system's, and pullers need none."""
    peer_name: str = ""
    """What peers' certificates are made out to; by default the host that a plan names."""


@dataclass(frozen=True, slots=True, eq=False)
class Tls:
    """Both sides of one worker."""

    serving: ssl.SSLContext
    pulling: ssl.SSLContext
    peer_name: str = ""

    def expected_name(self, host: str) -> str:
        """What the certificate of a source at `host` must be made out to."""
        return self.peer_name or host


def open_tls(files: TlsFiles, host: str = "") -> Tls:
    """Read the files, and try whether peers that have the same would believe this worker's listener at `host`.

    Raises TlsError.
    """
    for path in filter(None, (files.certificate, files.key, files.authority)):
        _check_readable(path)
    tls = Tls(_serving(files), _pulling(files), files.peer_name)
    _try_out(tls, "" if host in _WILDCARDS else host, files.certificate)
    return tls


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise TlsError(f"cannot read {path}: {error.strerror or error}") from None


def _serving(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files)
    if files.authority is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _pulling(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificates and names
    if files.authority is None:
        context.load_default_certs()
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if files.authority is not None:
        try:
            context.load_verify_locations(files.authority)
        except ssl.SSLError:
            raise TlsError(f"there is no certificate in {files.authority}") from None
    try:
        # The empty password keeps OpenSSL from asking for one at the terminal.
        context.load_cert_chain(files.certificate, files.key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"{_said_of(files)}: {_problem(error)}") from None


def _said_of(files: TlsFiles) -> str:
    return f"{files.certificate}" if files.key is None else f"{files.certificate} and {files.key}"


def _problem(error: ssl.SSLError | ValueError) -> str:
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    if reason in ("NO_START_LINE", "PEM_LIB", None) or "PEM" in str(error):
        return "not a certificate and its key in PEM, or the key is encrypted"
    return str(reason).lower().replace("_", " ")


def _try_out(tls: Tls, host: str, certificate: Path) -> None:
    """A handshake with oneself, in memory. Raises TlsError."""
    name = tls.expected_name(host)
    client = tls.pulling
    checks_name, client.check_hostname = client.check_hostname, bool(name)
    try:
        _shake_hands(tls.serving, client, name)
    except ssl.SSLCertVerificationError as error:
        raise TlsError(f"peers would not believe {certificate}: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise TlsError(f"no handshake with {certificate}: {_problem(error)}") from None
    finally:
        client.check_hostname = checks_name


def _shake_hands(serving: ssl.SSLContext, pulling: ssl.SSLContext, name: str) -> None:
    """Raises SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = pulling.wrap_bio(back, there, server_hostname=name or None)
    server = serving.wrap_bio(there, back, server_side=True)
    # Client's greeting; server's answer; client's certificate; then the server has seen it.
    for side in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()


def is_address(host: str) -> bool:
    """Whether it is an IP address and no name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True

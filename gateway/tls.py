"""TLS of the gateway's listeners, and towards workers whose URLs begin with https.

A listener has one context for as long as it listens. What its files say is in another one, which each handshake is
handed over to as it begins (`sni_callback`): so a renewed certificate, key or authority holds from the next connection
on, and one that cannot be used changes nothing. Open connections go on as they were made.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from gateway.config import TlsConfig, UpstreamTlsConfig
from gateway.errors import ConfigError

logger = logging.getLogger("ropeway.tls")

LOOK_SECONDS = 2.0
"""Between two looks whether files have changed."""


class ListenerTls:
    """The TLS of one listener: give `context` to whoever listens."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError, which names the file."""
        assert config.cert is not None  # noqa: S101
        self._config = config
        self._files = [path for path in (config.cert, config.key, config.ca) if path is not None]
        self._stamps = _stamps(self._files)
        self._current = _serving(config)
        self.context = _serving(config)
        self.context.sni_callback = self._hand_over

    def look(self) -> None:
        """Read the files again if they have changed."""
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._current = _serving(self._config)
        except ConfigError as error:
            logger.error("%s; what was read before stays", error)
        else:
            logger.info("%s is read again", self._config.cert)

    def _hand_over(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current


def listener_tls(config: TlsConfig) -> ListenerTls | None:
    """None where plain HTTP is spoken. Raises ConfigError."""
    return ListenerTls(config) if config.cert is not None else None


async def follow(listeners: Sequence[ListenerTls]) -> None:
    """Look after changed files until cancelled."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        for listener in listeners:
            listener.look()


def _serving(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    assert config.cert is not None  # noqa: S101
    _load_certificate(context, config.cert, config.key)
    if config.ca is not None:
        _load_authority(context, config.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # Who resumes a session is not asked for a certificate again, whatever has become of its authority.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def upstream_context(config: UpstreamTlsConfig) -> ssl.SSLContext:
    """For connections to workers. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificates and names
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.ca is not None:
        _load_authority(context, config.ca)
    else:
        context.load_default_certs()
    if config.cert is not None:
        _load_certificate(context, config.cert, config.key)
    if not config.verify:
        logger.warning("upstream_tls.verify is false: whoever answers for a worker is believed")
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    for path in filter(None, (certificate, key)):
        _check_readable(path)
    try:
        # The empty password keeps OpenSSL from asking for one at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        named = f"{certificate}" if key is None else f"{certificate} and {key}"
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        reason = "the key is not the certificate's" if mismatch else "not a certificate and its plain key, in PEM"
        raise ConfigError(f"{named}: {reason}") from None


def _load_authority(context: ssl.SSLContext, path: Path) -> None:
    _check_readable(path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ConfigError(f"{path}: there is no certificate in it") from None


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None


def _stamps(paths: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    """What changes when a file is written or replaced."""
    stamps: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            found = os.stat(path)
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append(None)
    return stamps

"""Which TCP ports are free."""

import errno
import socket

from gateway.errors import PortInUseError, StartupError

PORTS_TRIED_MAX = 2000


def require_free_port(host: str, port: int) -> None:
    """Raises PortInUseError when something listens there, StartupError when it cannot be bound for another reason."""
    try:
        _bind(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(host, port) from None
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def free_port_range(host: str, count: int, start: int) -> range:
    """`count` consecutive ports, free a moment ago, from `start` on or soon after. Raises StartupError."""
    for first in range(start, min(start + PORTS_TRIED_MAX, 65_536 - count)):
        ports = range(first, first + count)
        if all(_is_free(host, port) for port in ports):
            return ports
    raise StartupError(f"no {count} consecutive free ports from {start} on; choose another place with --port")


def _is_free(host: str, port: int) -> bool:
    try:
        _bind(host, port).close()
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # As a server does: a port whose last connections still linger in TIME_WAIT counts as free.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock

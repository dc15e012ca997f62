"""Which TCP ports are free, listening on them, and who can reach them."""

import errno
import ipaddress
import socket
from typing import Any

from gateway.errors import PortInUseError, StartupError

PORTS_TRIED_MAX = 2000
UNSENT_BYTES_MAX = 128 * 1024
"""Of each connection, in the kernel: beyond what is on its way."""

_Address = tuple[int, int, int, str, Any]


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


def listeners(host: str, port: int, reuse_port: bool = False) -> list[socket.socket]:
    """Sockets bound to every address of `host`, not listening yet; port 0 takes a free one for each. `reuse_port`
    shares the addresses with others that do. Raises PortInUseError or StartupError."""
    found: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in _addresses(host, port):
            found.append(_listener(family, kind, protocol, address, reuse_port))
    except OSError as error:
        for listener in found:
            listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(host, port) from None
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return found


def _addresses(host: str, port: int) -> "dict[_Address, None]":
    # In order and once each: resolvers repeat themselves.
    return dict.fromkeys(socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))


def _listener(family: int, kind: int, protocol: int, address: Any, reuse_port: bool) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            # Connections inherit it. Without, the kernel would take megabytes of an answer that its client does not
            # read, and the worker would hear of that so much later.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        sock.bind(address)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


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


def is_loopback(host: str) -> bool:
    """Whether nobody else's machine reaches what listens there. False for names, which may mean any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

import socket

import pytest

from gateway.errors import PortInUseError, StartupError
from gateway.ports import UNSENT_BYTES_MAX, free_port_range, listeners, require_free_port


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_port_in_use_is_named(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
        require_free_port("127.0.0.1", port)


def test_a_free_port_stays_free(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1 port 8000"):
        require_free_port("192.0.2.1", 8000)


def test_a_range_steps_over_what_is_taken(listener: socket.socket) -> None:
    taken = listener.getsockname()[1]
    ports = free_port_range("127.0.0.1", 3, taken - 1)
    assert len(ports) == 3
    assert taken not in ports
    assert ports[0] > taken


def test_an_address_is_not_shared_by_accident(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    for reuse_port in (False, True):
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            listeners("127.0.0.1", port, reuse_port)


def test_an_address_is_shared_by_those_who_both_want_it() -> None:
    (first,) = listeners("127.0.0.1", 0, reuse_port=True)
    with first:
        port = first.getsockname()[1]
        first.listen()
        with pytest.raises(PortInUseError):
            listeners("127.0.0.1", port)
        (second,) = listeners("127.0.0.1", port, reuse_port=True)
        with second:
            second.listen()
            assert second.getsockname() == first.getsockname()


def test_a_name_may_have_several_addresses() -> None:
    found = listeners("localhost", 0)
    try:
        addresses = [sock.getsockname()[0] for sock in found]
        assert "127.0.0.1" in addresses
        assert len(set(addresses)) == len(addresses)
        assert all(not sock.getblocking() for sock in found)
    finally:
        for sock in found:
            sock.close()


def test_no_such_host_and_no_such_address() -> None:
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(StartupError, match=f"cannot listen on {host} port 8000: "):
            listeners(host, 8000)


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="Linux")
def test_connections_inherit_how_little_is_kept_for_them() -> None:
    (server,) = listeners("127.0.0.1", 0)
    with server:
        server.listen()
        server.setblocking(True)
        with socket.create_connection(server.getsockname()), server.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES_MAX

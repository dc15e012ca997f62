import socket

import pytest

from gateway.errors import PortInUseError, StartupError
from gateway.ports import free_port_range, require_free_port


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

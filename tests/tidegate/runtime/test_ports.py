"""Ports: taken where somebody listens, free where connections of an earlier run linger or another address listens."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from tidegate.runtime.ports import is_free, try_listen


@pytest.fixture
def listening() -> Iterator[int]:
    """A port on which a server listens, on 127.0.0.1 alone."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "", "localhost"])
def test_a_port_on_which_a_server_listens_is_taken(listening: int, host: str) -> None:
    assert not is_free(host, listening)
    with pytest.raises(OSError) as raised:
        try_listen(host, listening)
    assert raised.value.errno == errno.EADDRINUSE


def test_a_server_that_shares_its_port_is_found_too() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not is_free("127.0.0.1", server.getsockname()[1])


def test_the_port_of_another_address_is_free(listening: int) -> None:
    assert is_free("127.0.0.2", listening)


def test_a_port_is_free_again_although_a_connection_lingers() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            accepted.close()  # the side that closes first keeps TIME_WAIT
    assert is_free("127.0.0.1", port)


def test_a_free_port_stays_free_after_the_trial(listening: int) -> None:
    assert is_free("127.0.0.2", listening) and is_free("127.0.0.2", listening)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_or_of_none_is_an_error(host: str) -> None:
    with pytest.raises(OSError) as raised:
        try_listen(host, 0)
    assert raised.value.errno != errno.EADDRINUSE


def test_a_port_beyond_the_last_one_is_an_error() -> None:
    with pytest.raises(OverflowError):
        try_listen("127.0.0.1", 70_000)

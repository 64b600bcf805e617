"""Addresses as text, and whether a port is free."""

from __future__ import annotations

import socket

import pytest

from tidegate.runtime.ports import is_free
from tidegate.runtime.process import StartError
from tidegate.servers.address import check_free, format_address


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:80"), ("localhost", "localhost:80"), ("::1", "[::1]:80"), ("fd00::1", "[fd00::1]:80")],
)
def test_only_an_ipv6_host_gets_brackets(host: str, address: str) -> None:
    assert format_address(host, 80) == address


def test_a_taken_port_is_not_free_and_the_error_names_the_port_and_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(
            StartError, match=f"cannot listen on 127.0.0.1:{port} \\(key 'http.port'\\): port {port} is taken"
        ):
            check_free("127.0.0.1", port, "http.port")
    assert is_free("127.0.0.1", port)
    check_free("127.0.0.1", port, "http.port")


def test_a_host_that_cannot_be_resolved_is_not_free() -> None:
    assert not is_free("no-such-host.invalid", 80)

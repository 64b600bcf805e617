"""Host and port as text, whether a server could listen there, and the error to report if it could not.

Every part of Tidegate that joins a host and a port, or checks whether a port is free, calls these functions.
"""

from __future__ import annotations

import errno
import ipaddress
import os
from urllib.parse import urlsplit

from tidegate.runtime.ports import try_listen
from tidegate.runtime.process import StartError


def format_address(host: str, port: int) -> str:
    """The address as "HOST:PORT", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_of(address: str) -> int:
    """The port of an address such as "http://127.0.0.1:8003"."""
    port = urlsplit(address).port
    assert port is not None, address
    return port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on this host. Of names, only `localhost` counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_free(host: str, port: int, key: str) -> None:
    """Report a taken port before gRPC does, which logs it several times and gives no reason.

    Raises:
        StartError: no server can listen there; names the port and the configuration key.
    """
    try:
        try_listen(host, port)
    except OSError as error:
        raise cannot_listen(host, port, key, error) from error


def cannot_listen(host: str, port: int, key: str, error: OSError) -> StartError:
    """The error to raise if binding the address failed with `error`; names the port and the configuration key."""
    where = f"cannot listen on {format_address(host, port)} (key {key!r})"
    if error.errno == errno.EADDRINUSE:
        return StartError(f"{where}: port {port} is taken; free it or set {key!r} to another")
    return StartError(f"{where}: {os.strerror(error.errno) if error.errno and error.errno > 0 else error}")

"""Host and port as people write them, and what to say when nobody can listen there."""

from __future__ import annotations

import errno
import ipaddress
import os

from tidegate.runtime.ports import try_listen
from tidegate.runtime.process import StartError


def format_address(host: str, port: int) -> str:
    """ "HOST:PORT", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there. A name counts only if it is `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_free(host: str, port: int, key: str) -> None:
    """Find out that a port is taken before gRPC does, who logs it several times over and names no reason.

    Raises:
        StartError: nobody can listen there; names the port and the configuration key.
    """
    try:
        try_listen(host, port)
    except OSError as error:
        raise cannot_listen(host, port, key, error) from error


def cannot_listen(host: str, port: int, key: str, error: OSError) -> StartError:
    where = f"cannot listen on {format_address(host, port)} (key {key!r})"
    if error.errno == errno.EADDRINUSE:
        return StartError(f"{where}: port {port} is taken; free it or set {key!r} to another")
    return StartError(f"{where}: {os.strerror(error.errno) if error.errno and error.errno > 0 else error}")

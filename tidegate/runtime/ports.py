"""`try_listen` finds out whether a server could listen on a port, before anything heavy starts.

A port is tried by listening on it for an instant. SO_REUSEADDR is set, as servers set it, so that connections of an
earlier run that linger in TIME_WAIT do not count; SO_REUSEPORT, gRPC's default, is not, so that a gRPC server which
listens there is found. The result may be outdated a moment later; then the server itself reports the error.
"""

from __future__ import annotations

import errno
import socket
from typing import Any


def try_listen(host: str, port: int) -> None:
    """Listen for an instant on every address of `host`, as a server does; "" stands for all of this machine's.

    Raises:
        OSError: an address is in use, or none can be had, or `host` has no address.
        OverflowError, UnicodeError: no such port, or no such name, can exist.
    """
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    errors = [error for family, _, _, _, address in found if (error := _listen_error(family, address, port))]
    in_use = [error for error in errors if error.errno == errno.EADDRINUSE]
    # `localhost` also has an IPv6 address on machines without IPv6; a server does with the others.
    if in_use or len(errors) == len(found):
        raise (in_use or errors)[0]


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    try:
        try_listen(host, port)
    except OSError:
        return False
    return True


def _listen_error(family: int, address: tuple[Any, ...], port: int) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address[0], port, *address[2:]))
            trial.listen(1)
    except OSError as error:
        return error
    return None

"""A socket to an MQTT broker, connected and, for `mqtts://`, encrypted, before paho is handed it.

paho would block on DNS, TCP and the TLS handshake; here the loop does all three. A broker whose certificate is one of
ours must be a broker's: any device of the fleet holds a certificate that the same CA has signed, and some stand at the
address where a broker might be looked for.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from tidegate.pki.identity import NotAllowed, alternative_names, check_role

_USER_TIMEOUT_MS: Final = 20_000


async def connected_socket(host: str, port: int, context: ssl.SSLContext | None) -> socket.socket:
    """A connected, non-blocking socket to the first of the host's addresses that answers.

    Args:
        context: for TLS; None for plain text.

    Raises:
        OSError: nobody answers, or whoever answers is not the broker.
    """
    loop = asyncio.get_running_loop()
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            _tune(sock)
            await loop.sock_connect(sock, address)
            return sock if context is None else await _encrypted(sock, context, host)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def has_more(sock: socket.socket) -> bool:
    """Whether decrypted bytes wait in this process, of which the kernel, and so the loop, knows nothing."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


async def _encrypted(sock: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    secure = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    try:
        await _shake_hands(secure)
        cert = secure.getpeercert()
        check_role(alternative_names(cert), {"broker"}, ours_only=False)
    except ssl.SSLCertVerificationError as error:
        secure.close()
        raise OSError(f"the broker's certificate is not trusted: {error.verify_message}") from error
    except NotAllowed as error:
        secure.close()
        raise OSError(f"whoever answers is not the broker: {error}") from error
    except BaseException:
        secure.close()
        raise
    return secure


async def _shake_hands(secure: ssl.SSLSocket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        turn: asyncio.Future[None] = loop.create_future()
        try:
            secure.do_handshake()
            return
        except ssl.SSLWantReadError:
            loop.add_reader(secure, _settle, turn)
            unwatch = loop.remove_reader
        except ssl.SSLWantWriteError:
            loop.add_writer(secure, _settle, turn)
            unwatch = loop.remove_writer
        try:
            await turn
        finally:
            unwatch(secure)


def _settle(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)

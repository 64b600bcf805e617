"""A socket to an MQTT broker, connected and, for `mqtts://`, encrypted, before it is handed to paho.

paho would block on DNS, TCP and the TLS handshake; here the loop does all three. A broker whose certificate is one of
ours must be a broker's: any device of the fleet holds a certificate that the same CA has signed, and some stand at the
address where a broker might be looked for.

paho reads a packet's first bytes one by one, and one packet a call. Of a heartbeat that was much of the work: so it
reads from what is here already (`ReadAhead`), which is filled by one system call for as many packets as have come.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Final

from tidegate.security.certificate_identity import NotAllowed, alternative_names, check_role

_USER_TIMEOUT_MS: Final = 20_000
_READ_BYTES: Final = 65536


class ReadAhead:
    """A connected, non-blocking socket as paho uses one, which reads ahead and keeps the bytes."""

    __slots__ = ("_at", "_held", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held = b""
        self._at = 0  # of what is held, so much was given away

    @property
    def has_more(self) -> bool:
        """Whether bytes wait in this process, of which the kernel, and so the loop, knows nothing."""
        return self._at < len(self._held) or (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0)

    def recv(self, size: int) -> bytes:
        """At most `size` bytes, none at the end. Raises what a socket does: OSError, SSLWantReadError."""
        if self._at >= len(self._held):
            self._held, self._at = self.sock.recv(_READ_BYTES), 0
        piece = self._held[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def send(self, piece: bytes) -> int:
        return self.sock.send(piece)

    def fileno(self) -> int:
        return self.sock.fileno()

    def setblocking(self, flag: bool) -> None:
        self.sock.setblocking(flag)

    def close(self) -> None:
        self.sock.close()

    def __repr__(self) -> str:
        return f"<ReadAhead {len(self._held) - self._at} bytes of {self.sock!r}>"


async def connected_socket(
    host: str, port: int, context: ssl.SSLContext | None, connect_timeout_s: float
) -> socket.socket:
    """A connected, non-blocking socket to the first of the host's addresses that answers.

    Args:
        context: for TLS; None for plain text.
        connect_timeout_s: for each address to take the connection. A handshake takes as long as the caller waits.

    Raises:
        OSError: no answer, or the peer is not the broker.
    """
    loop = asyncio.get_running_loop()
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            _tune(sock)
            await _connect(sock, address, connect_timeout_s)
            return sock if context is None else await _encrypted(sock, context, host)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def _connect(sock: socket.socket, address: Any, within_s: float) -> None:
    try:
        async with asyncio.timeout(within_s):
            await asyncio.get_running_loop().sock_connect(sock, address)
    except TimeoutError:
        raise OSError(f"{address[0]} takes no connection within {within_s:g} s") from None


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

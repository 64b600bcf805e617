"""A channel carries messages between the parent and one process of a gateway, over a pair of connected sockets.

    length (4 bytes, big-endian) | message (MessagePack)

Sending never waits: messages are small and few, and a process that does not read them is not waited for. Beyond
`MOST_WAITING_BYTES` what would wait is dropped, since each kind of message is sent again or superseded. The end of the
channel is the end of the process at its other side.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import msgspec
import structlog

from gateway.workers.messages import MOST_BYTES

MOST_WAITING_BYTES: Final = 64 * 2**20
_LENGTH: Final = 4
log = structlog.get_logger(__name__)
ReceivedT = TypeVar("ReceivedT")


class ProcessChannel(Generic[ReceivedT]):
    """One end; made by `open` on the loop.

    Args:
        received: the union of the messages that come.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[ReceivedT] = msgspec.msgpack.Decoder(received)
        self._encoder = msgspec.msgpack.Encoder()
        self._dropped = 0

    @classmethod
    async def open(cls, end: socket.socket, received: Any) -> ProcessChannel[ReceivedT]:
        """The channel over one of two connected sockets, which it owns from now on."""
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end), received)

    def send(self, message: msgspec.Struct) -> None:
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MOST_WAITING_BYTES:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("a process of this gateway reads nothing: messages to it are dropped")
            return
        encoded = self._encoder.encode(message)
        if len(encoded) > MOST_BYTES:
            log.error("a message to a process of this gateway is too long", kind=type(message).__name__)
            return
        self._writer.write(len(encoded).to_bytes(_LENGTH, "big") + encoded)

    @property
    def dropped(self) -> int:
        """Messages that were not sent since too much waited."""
        return self._dropped

    def cut(self) -> None:
        """End it at once, with what waits."""
        self._writer.transport.abort()

    async def flush(self) -> None:
        """Return when what was sent is written, or the other side gone."""
        with suppress(OSError):
            await self._writer.drain()

    async def messages(self) -> AsyncIterator[ReceivedT]:
        """The messages as they come, until the other side is gone."""
        while True:
            try:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
                if length > MOST_BYTES:
                    log.error("a process of this gateway sends what is no message: it is heard no more", length=length)
                    return
                encoded = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError):
                return
            try:
                message = self._decoder.decode(encoded)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # of another version, while one replaces it
                log.warning("a message of a process of this gateway is not known", reason=str(error))
                continue
            yield message

    async def aclose(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    def __repr__(self) -> str:
        return f"<ProcessChannel{' closed' if self._writer.is_closing() else ''}>"

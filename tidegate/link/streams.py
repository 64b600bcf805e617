"""The gRPC method of the link, with the `MessageStream` of the end that dialled and of the end that serves.

Messages pass through gRPC as bytes: the session reads and writes Envelopes itself (`frames.py`). Every way in which
gRPC reports a lost stream becomes a `LinkLost` here, with the status and its details in words.
"""

from __future__ import annotations

import asyncio
from typing import Final, Self

import grpc

from tidegate.link.session import LinkLost
from tidegate.oip.grpc.stream_headers import send_headers

SERVICE: Final = "tidegate.link.v1.Link"
METHOD: Final = "Exchange"
HELP_METHOD: Final = "Help"
MODELS_METHOD: Final = "Models"
PATH: Final = f"/{SERVICE}/{METHOD}"
NEIGHBOUR_SERVICE: Final = "tidegate.link.v1.Neighbour"  # of a device, with the same two methods, for other devices
ASKER_KEY: Final = "asking-device"  # metadata of a device that asks for help: "edge/NAME"
MAX_ENVELOPE_BYTES: Final = 8 * 1024 * 1024

# The session's own heartbeat finds a silent link first; these options find one that has only its transport left, and
# keep a dialler from waiting out gRPC's default backoff of up to two minutes after the far side is back.
DIAL_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 250),
    # Despite its name, the time of one attempt, with the handshakes of TCP, TLS and HTTP/2: at 250 ms no link of more
    # than 125 ms round trip (a satellite, a busy cell) ever came up.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, never a share in a half-open one
    ("grpc.enable_retries", 0),  # the request machine decides about second attempts
    ("grpc.max_send_message_length", MAX_ENVELOPE_BYTES),
    ("grpc.max_receive_message_length", MAX_ENVELOPE_BYTES),
]


class DialledStream:
    """The stream as the end that dialled sees it."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = (), path: str = PATH) -> None:
        dial = channel.stream_stream(path, None, None)
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = dial(None, metadata=metadata or None)

    async def read(self) -> bytes | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as exc:
            raise LinkLost(_words(exc)) from exc
        if isinstance(message, bytes):
            return message
        await self._raise_status()
        return None

    async def write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as exc:
            raise LinkLost(_words(exc)) from exc
        except asyncio.InvalidStateError:
            await self._raise_status()
            raise LinkLost("the other side closed the stream") from None

    def close(self) -> None:
        """Cancel the stream for good.

        The call is deleted as well: it keeps its connection for as long as it exists, and this object, part of a
        session's reference cycle, exists until the garbage collector runs.
        """
        self._call.cancel()
        del self._call

    async def _raise_status(self) -> None:
        code, details = await self._call.code(), await self._call.details()
        if code is not grpc.StatusCode.OK:
            raise LinkLost(f"{code.name}: {details}")


class ServedStream:
    """The stream as the end that was dialled sees it; made by `open`."""

    def __init__(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        self._context = context

    @classmethod
    async def open(cls, context: grpc.aio.ServicerContext[bytes, bytes]) -> Self:
        await send_headers(context)
        return cls(context)

    async def read(self) -> bytes | None:
        try:
            message = await self._context.read()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError) as exc:
            raise LinkLost(f"{type(exc).__name__}: {exc}") from exc
        return message if isinstance(message, bytes) else None

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError) as exc:
            raise LinkLost(f"{type(exc).__name__}: {exc}") from exc


def _words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"

"""What does not make sense on the channel between a gateway's processes ends nothing but itself."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing

import msgspec
from structlog.testing import capture_logs

from gateway.workers.channel import ProcessChannel
from gateway.workers.messages import MOST_BYTES, CannotStart, FromProcess


async def test_a_message_that_is_not_known_is_passed_by_and_one_that_is_endless_ends_the_channel() -> None:
    ours, theirs = socket.socketpair()
    channel = await ProcessChannel.open(ours, FromProcess)
    encoded = [
        msgspec.msgpack.encode({"type": "OfAnotherVersion"}),
        b"\xc1",
        msgspec.msgpack.encode(CannotStart("no port")),
    ]
    with capture_logs() as logs:
        theirs.sendall(b"".join(len(one).to_bytes(4, "big") + one for one in encoded))
        theirs.sendall((MOST_BYTES + 1).to_bytes(4, "big"))
        async with aclosing(channel.messages()) as messages, asyncio.timeout(10.0):
            assert [one async for one in messages] == [CannotStart("no port")]
    assert [one["log_level"] for one in logs] == ["warning", "warning", "error"]
    theirs.close()
    await channel.aclose()


async def test_a_message_that_is_too_long_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    channel = await ProcessChannel.open(ours, FromProcess)
    with capture_logs() as logs:
        channel.send(CannotStart("x" * MOST_BYTES))
        channel.send(CannotStart("short"))
    await channel.flush()
    await channel.aclose()
    assert msgspec.msgpack.decode(theirs.recv(65536)[4:], type=FromProcess) == CannotStart("short")
    assert [one["event"] for one in logs] == ["a message to a process of this gateway is too long"]
    theirs.close()

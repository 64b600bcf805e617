"""Sockets that a parent has bound outlive those that accept on them, and what waits in them is not lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tidegate.servers.handed_sockets import HandedSockets, bind_sets, connections_on, stop_listening


@contextmanager
def bound(count: int, host: str = "127.0.0.1") -> Iterator[tuple[list[list[socket.socket]], int]]:
    sets, port = bind_sets(host, 0, count)
    try:
        yield sets, port
    finally:
        for one in (one for held in sets for one in held):
            one.close()


def fds(sets: list[list[socket.socket]]) -> list[list[int]]:
    return [[one.fileno() for one in held] for held in sets]


async def serve(handed: HandedSockets, word: bytes) -> None:
    async def visit(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(word)
        await writer.drain()
        writer.close()

    async def accept_on(one: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(visit, sock=one)

    handed.begin(accept_on)


async def asked(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await asyncio.wait_for(reader.read(), 20.0)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_connections_that_wait_are_taken_by_whoever_accepts_next() -> None:
    with bound(1) as (sets, port):
        first, second = HandedSockets(fds(sets)), HandedSockets(fds(sets))
        await serve(first, b"first")
        await serve(second, b"second")
        await first.accept(0)
        assert await asked(port) == b"first"
        first.release(0)
        waiting = asyncio.create_task(asked(port))
        await asyncio.sleep(0.05)  # noqa: TID251 - the kernel's queue, and no clock of ours
        assert not waiting.done()
        await second.accept(0)
        assert await waiting == b"second"
        assert (first.accepting, second.accepting) == (frozenset(), frozenset({0}))
        second.close()
        await second.accept(0)
        assert second.accepting == frozenset()


@pytest.mark.slow
async def test_each_set_is_spread_to_and_no_connection_comes_before_something_accepts() -> None:
    with bound(2) as (sets, port):
        with pytest.raises(ConnectionRefusedError):
            await asked(port)
        one, other = HandedSockets(fds(sets)), HandedSockets(fds(sets))
        await serve(one, b"1")
        await serve(other, b"2")
        await one.accept(0)
        await other.accept(1)
        answers = await asyncio.gather(*(asked(port) for _ in range(200)))
        one.close()
        other.close()
    share = answers.count(b"1") / 200
    assert 0.3 <= share <= 0.7  # six standard deviations


async def test_an_unknown_set_and_one_without_a_server_are_left_alone() -> None:
    with bound(1) as (sets, _):
        handed = HandedSockets(fds(sets))
        await handed.accept(0)
        assert handed.accepting == frozenset()
        await serve(handed, b"x")
        await handed.accept(7)
        handed.release(7)
        assert repr(handed) == "<HandedSockets [] of 1>"


def test_a_taken_port_is_an_error_and_leaves_nothing_open() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        with pytest.raises(OSError):
            bind_sets("127.0.0.1", taken.getsockname()[1], 2)


async def test_a_library_that_will_not_stop_listening_is_made_to() -> None:
    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    gone = asyncio.Event()
    server = await asyncio.start_server(visit, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.readexactly(4) == b"here"
    assert connections_on(port) == 1  # the client's own end has another local port
    assert stop_listening(port) == 1
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert connections_on(port) == 1
    writer.close()
    await writer.wait_closed()
    await gone.wait()
    server.close()
    assert connections_on(port) == 0

"""The HTTP port as strangers find it: bytes that are no HTTP are refused, and kept out of the log."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress

import aiohttp
import pytest
from aiohttp import web

from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.oip.http.body import read_body
from tidegate.outcome import InvalidRequest
from tidegate.servers.handed_sockets import HandedSockets, bind_sets
from tidegate.servers.http_server import connection_table, open_http_server
from tidegate.servers.limits import ServerLimits

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

NO_HTTP = {
    "a length in words": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a chunk of no size": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def _breaks(_: web.Request) -> web.Response:
    raise RuntimeError("a defect")


async def exchange(address: str, sent: bytes) -> bytes:
    host, _, port = address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        async with asyncio.timeout(30.0):
            return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


async def all_of(address: str, sent: bytes) -> bytes:
    """All that comes until the server closes."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        async with asyncio.timeout(30.0):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("kind", NO_HTTP)
async def test_what_is_no_http_is_refused_without_a_word_in_the_log(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    door = open_http_server([web.post("/", _echo)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1)
    async with door as address:
        assert b" 400 " in await exchange(address, NO_HTTP[kind])

    assert caplog.records == []


async def test_a_defect_is_still_logged(caplog: pytest.LogCaptureFixture) -> None:
    door = open_http_server([web.get("/", _breaks)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1)
    async with door as address:
        assert b" 500 " in await exchange(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]


HELLO = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(("sent", "status", "words"), [
    (NO_HTTP["another protocol"], 400, "this is no HTTP request"),
    (b"nonsense\r\n\r\n", 400, "this is no HTTP request: Invalid method encountered"),
    (HELLO + b"A b: c\r\n\r\n", 400, "this is no HTTP request: Invalid header token"),
    (HELLO + b"X: " + b"x" * 9000 + b"\r\n\r\n", 431, "a header or the request line has more than 8190 bytes"),
    (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 431, "a header or the request line has more than 8190 bytes"),
    (HELLO + b"X: y\r\n" * 200 + b"\r\n", 431, "too many headers"),
    (HELLO + b"Connection: close\r\nExpect: soup\r\n\r\n", 417, "the header Expect may only be 100-continue"),
    (HELLO + b"Connection: close\r\nExpect: \xff\r\n\r\n", 417, "the header Expect may only be 100-continue"),
    (HELLO + b"Connection: close\r\n\r\n", 500, "internal error"),
])  # fmt: skip
async def test_what_no_route_answers_is_refused_in_the_form_of_all_errors(sent: bytes, status: int, words: str) -> None:
    door = open_http_server([web.get("/", _breaks)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1)
    async with door as address:
        head, _, body = (await all_of(address, sent)).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert b"Content-Type: application/json\r\n" in head + b"\r\n"
    said = json.loads(body)
    assert said["code"] == ("internal" if status == 500 else "invalid_request")
    assert said["error"].startswith(words) and "\n" not in said["error"]


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
NEXT = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def _says_its_headers(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(text=f"{request.method} by {request.headers.get('Authorization', 'nobody')};")


def door_that_says_its_headers() -> AbstractAsyncContextManager[str]:
    routes = [web.post("/", _says_its_headers), web.get("/", _says_its_headers)]
    return open_http_server(routes, "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1)


@pytest.mark.parametrize("end", [b"0\r\nAuthorization: me\r\n\r\n", b"0\r\nX: 0\r\nAuthorization: me\r\n\r\n"])
@pytest.mark.parametrize("sent", ["together", "in turn", "by byte"])
async def test_a_trailer_is_no_header_of_the_next_request(end: bytes, sent: str) -> None:
    first = CHUNKED + b"3\r\nabc\r\n" + end
    parts = {"together": [first + NEXT], "in turn": [first, NEXT], "by byte": [bytes([one]) for one in first]}[sent]
    async with door_that_says_its_headers() as address, connection(address) as (reader, writer):
        for part in parts:
            writer.write(part)
            await clock.sleep(0.001)
        async with asyncio.timeout(10.0):
            answers = await reader.read()

    assert answers.count(b"HTTP/1.1 200") == 1
    assert b"POST by nobody;" in answers
    assert b"Connection: close" in answers


@pytest.mark.parametrize("body", [b"3\r\nabc\r\n0\r\n\r\n", b"0\r\n\r\n"])
@pytest.mark.parametrize("split_at", [1, 4, 9])
async def test_a_chunked_request_without_trailers_leaves_its_connection_open(body: bytes, split_at: int) -> None:
    async with door_that_says_its_headers() as address, connection(address) as (reader, writer):
        for part in (CHUNKED + body[:split_at], body[split_at:]):
            writer.write(part)
            await clock.sleep(0.01)
        async with asyncio.timeout(10.0):
            assert b"Connection: close" not in await reader.readuntil(b"POST by nobody;")
            writer.write(NEXT)
            await reader.readuntil(b"GET by nobody;")


async def test_a_handler_that_times_out_by_itself_is_answered_as_late() -> None:
    async def late(_: web.Request) -> web.Response:
        raise TimeoutError

    door = open_http_server([web.get("/", late)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1)
    async with door as address, aiohttp.ClientSession() as session, session.get(address) as answer:
        assert (answer.status, (await answer.json())["code"]) == (504, "deadline_exceeded")


async def _inflated(request: web.Request) -> web.Response:
    try:
        return web.Response(body=await read_body(request, 10_000))
    except InvalidRequest as error:
        return web.Response(status=400, text=str(error))


async def test_bodies_come_as_they_were_sent_and_are_inflated_once() -> None:
    door = open_http_server(
        [web.post("/", _inflated)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1
    )
    whole, headers = gzip.compress(b"a text " * 100), {"Content-Encoding": "gzip"}
    async with door as address, aiohttp.ClientSession() as session:
        async with session.post(address, data=whole, headers=headers) as answer:
            assert (answer.status, await answer.read()) == (200, b"a text " * 100)
        async with session.post(address, data=whole[:-8], headers=headers) as answer:
            assert answer.status == 400


# strangers that take their time, or come in numbers

WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SLOW = ServerLimits(header_timeout_s=0.1, idle_timeout_s=0.3, max_connections=50, max_connections_per_client=3)


async def _ok(_: web.Request) -> web.Response:
    return web.Response(text="ok")


def slow_door(limits: ServerLimits = SLOW, handler: Handler = _ok) -> AbstractAsyncContextManager[str]:
    return open_http_server(
        [web.get("/", handler)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1, limits=limits
    )


@asynccontextmanager
async def connection(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def ends(reader: asyncio.StreamReader) -> float:
    """How long until the other side closes."""
    began_at = clock.now()
    async with asyncio.timeout(30.0):
        with suppress(ConnectionError):
            await reader.read()
    return clock.now() - began_at


@on_virtual_time
async def test_headers_that_do_not_come_whole_end_the_connection() -> None:
    async with slow_door() as address, connection(address) as (reader, writer):
        writer.write(WHOLE[:-2])
        assert 0.05 < await ends(reader) < 0.29


@on_virtual_time
async def test_headers_that_come_in_pieces_but_in_time_are_answered() -> None:
    async with slow_door() as address, connection(address) as (reader, writer):
        writer.write(WHOLE[:10])
        await writer.drain()
        await clock.sleep(0.02)
        writer.write(WHOLE[10:])
        assert b" 200 " in await reader.readline()
        assert await ends(reader) > 0.15  # by then it is idle, and no slow asker any more


@on_virtual_time
async def test_a_connection_that_says_nothing_is_closed_after_its_time() -> None:
    async with slow_door() as address, connection(address) as (reader, _):
        assert 0.2 < await ends(reader) < 2.0


@pytest.mark.parametrize(("size_bytes", "status"), [(8190, b" 200 "), (8300, b" 431 ")])
async def test_a_header_may_be_as_long_as_the_limit(size_bytes: int, status: bytes) -> None:
    sent = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: " + b"x" * (size_bytes - 3) + b"\r\n\r\n"
    async with slow_door(ServerLimits(max_header_bytes=8190)) as address:
        assert status in await exchange(address, sent)


@pytest.mark.parametrize(("count", "status"), [(8, b" 200 "), (20, b" 431 ")])
async def test_there_may_be_as_many_headers_as_the_limit(count: int, status: bytes) -> None:
    headers = b"".join(b"X-%d: y\r\n" % number for number in range(count - 2))
    sent = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n"
    async with slow_door(ServerLimits(max_headers=8)) as address:
        assert status in await exchange(address, sent)


async def test_a_client_over_its_limit_loses_the_connection_that_never_asked() -> None:
    limits = ServerLimits(max_connections_per_client=3)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(slow_door(limits))
        asked, silent, other = [await stack.enter_async_context(connection(address)) for _ in range(3)]
        asked[1].write(WHOLE)
        assert b" 200 " in await asked[0].readline()

        newcomer = await stack.enter_async_context(connection(address))
        newcomer[1].write(WHOLE)

        assert b" 200 " in await newcomer[0].readline()
        await ends(silent[0])
        other[1].write(WHOLE)
        assert b" 200 " in await other[0].readline()


async def test_a_newcomer_takes_no_place_of_a_busy_connection() -> None:
    held, busy = asyncio.Event(), asyncio.Event()

    async def waits(_: web.Request) -> web.Response:
        busy.set()
        await held.wait()
        return web.Response(text="ok")

    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(slow_door(ServerLimits(max_connections_per_client=1), waits))
        first = await stack.enter_async_context(connection(address))
        first[1].write(WHOLE)
        await busy.wait()

        turned_away = await stack.enter_async_context(connection(address))
        await ends(turned_away[0])

        held.set()
        assert b" 200 " in await first[0].readline()


async def turns_until(is_so: Callable[[], bool]) -> int:
    """How many turns of the event loop it takes."""
    count, over = 0, asyncio.Event()

    def turn() -> None:
        nonlocal count
        count += 1
        if is_so():
            over.set()
        else:
            asyncio.get_running_loop().call_soon(turn)

    turn()
    await over.wait()
    return count


@pytest.mark.parametrize("handed", [False, True])
def test_those_who_connect_together_are_taken_in_within_a_few_turns_of_the_loop(handed: bool) -> None:
    """A turn is long where many are busy, and a caller's budget begins when it is seen."""
    uvloop = pytest.importorskip("uvloop")

    async def turns_to_take_all_in() -> int:
        connections = connection_table(ServerLimits())
        async with AsyncExitStack() as stack:
            sockets = HandedSockets([[one.fileno() for one in bound]]) if handed else None
            serve = open_http_server(
                [web.post("/", _echo)], "127.0.0.1", port, key="http_port", max_body_bytes=100, grace_s=0.1,
                connections=connections, handed=sockets,
            )  # fmt: skip
            address = await stack.enter_async_context(serve)
            if sockets is not None:
                await sockets.accept(0)
            at = int(address.rpartition(":")[2]) or port
            for _ in range(32):
                stack.enter_context(socket.create_connection(("127.0.0.1", at)))
            return await turns_until(lambda: len(connections) == 32)

    (bound,), port = bind_sets("127.0.0.1", 0, 1) if handed else (((),), 0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(turns_to_take_all_in()) < 16
    for one in bound:
        one.close()

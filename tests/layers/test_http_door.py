"""The HTTP port as strangers find it: bytes that are no HTTP are refused to their sender and kept from the log."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from tidegate.doors.http_door import http_door

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
        async with asyncio.timeout(5.0):
            return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("kind", NO_HTTP)
async def test_what_is_no_http_is_refused_without_a_word_in_the_log(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    door = http_door([web.post("/", _echo)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1)
    async with door as address:
        assert b" 400 " in await exchange(address, NO_HTTP[kind])

    assert caplog.records == []


async def test_a_defect_is_still_logged(caplog: pytest.LogCaptureFixture) -> None:
    door = http_door([web.get("/", _breaks)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1)
    async with door as address:
        assert b" 500 " in await exchange(address, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]

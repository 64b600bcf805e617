"""One connection of an HTTP server: aiohttp's, counted in the connection table and with a limit on slow headers.

aiohttp closes a connection that is idle for long enough, but starts that clock at its opening and after each answer:
headers that come a byte at a time keep it until then. Here a request that has begun has `header_timeout_s` to say
what it wants. The clock starts only where a first packet does not hold the whole head, so that ordinary requests pay
for one comparison. Bodies have clocks of their own (`tidegate/oip/http/body.py`).

A chunked body may end with trailer fields, of which nothing is read here. aiohttp's parser holds the last of them back
and takes it for the first header of the next request, which behind a proxy is another caller's: its `Authorization`
would then be the first caller's choice. So a connection ends after a chunked request, unless the bytes that came last
are those by which a body without trailers ends.

What is refused before any route sees it (bytes that are no HTTP, headers that are too large, an `Expect` that is not
known) is answered as other errors are, in JSON.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from tidegate.oip.http.responses import error_body, json_response
from tidegate.oip.status import error_headers, http_status
from tidegate.outcome import DeadlineExceeded, InternalError, InvalidRequest, ServeError
from tidegate.servers.connection_limits import ConnectionTable, client_key

_BAD_EXPECT: Final = int(HTTPStatus.EXPECTATION_FAILED)  # every answer is compared with it, and a class is slower
_BODY_END: Final = b"\r\n0\r\n\r\n"  # of a chunked body without trailers; no trailer field can end so
_END_BYTES: Final = len(_BODY_END)
_WRONG_EXPECT: Final = "the header Expect may only be 100-continue"
_TOO_MANY: Final = "Too many headers received"  # as aiohttp's parsers say it, without a class of its own


class HttpConnection(web.RequestHandler):
    """A `ClientConnection` of a `ConnectionTable`."""

    def __init__(
        self,
        server: web.Server,
        *,
        connections: ConnectionTable[HttpConnection],
        header_timeout_s: float,
        loop: Any,
        **settings: Any,
    ) -> None:
        # `tidegate/oip/http/body.py` inflates bodies, and refuses what ends early.
        super().__init__(server, loop=loop, auto_decompress=False, **settings)
        self.client = ""
        self._connections = connections
        self._header_timeout_s = header_timeout_s
        self._head: asyncio.TimerHandle | None = None
        self._endless = False
        self._leaving = False
        self._last_bytes = b""

    @property
    def under_way(self) -> bool:
        """Whether a request is in progress that has an end of its own."""
        return not self.idle and not self._endless and self.transport is not None

    def mark_endless(self) -> None:
        """The request in progress is answered by a stream that a drain need not wait for."""
        self._endless = True

    def leave(self) -> None:
        """Announce the connection's end with the next answer, so that its client opens another one elsewhere."""
        self._leaving = True

    @property
    def idle(self) -> bool:
        if self._messages:
            return False
        return self._request_count == 0 or (self._waiter is not None and not self._waiter.done())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self.client = client_key(str(peer[0])) if isinstance(peer, tuple) else "local"
        welcome, leaver = self._connections.enter(self)
        if leaver is not None:
            leaver.force_close()
        if not welcome:
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.leave(self)
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._last_bytes = data[-_END_BYTES:] if len(data) >= _END_BYTES else (self._last_bytes + data)[-_END_BYTES:]
        super().data_received(data)
        if self._messages:
            self._stop_clock()
            self._connections.record_request(self)
        elif self._head is None and self.idle:
            self._head = self._loop.call_later(self._header_timeout_s, self._too_slow)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        self._endless = False
        if resp.status == _BAD_EXPECT:  # aiohttp's own, which no middleware sees
            resp = _refusal(InvalidRequest(_WRONG_EXPECT), resp.status)
        if self._leaving or ("Transfer-Encoding" in request.headers and self._may_have_trailers(request)):
            resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, UnicodeEncodeError) and not request.headers.get("Expect", "").isascii():
            answer = _refusal(InvalidRequest(_WRONG_EXPECT), _BAD_EXPECT)  # aiohttp fails at quoting it
        else:
            super().handle_error(request, status, exc, message)  # logs it, and raises where an answer has begun
            answer = _refused(status, exc, message)
        answer.force_close()
        return answer

    def _may_have_trailers(self, request: web.BaseRequest) -> bool:
        """Whether the parser may hold a trailer of this chunked request, or has given it to one that waits."""
        return bool(self._messages) or self._last_bytes != _BODY_END or not request.content.is_eof()

    def _stop_clock(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _too_slow(self) -> None:
        self._head = None
        if self.idle:
            self.force_close()

    def __repr__(self) -> str:
        return f"<HttpConnection {self.client or 'unconnected'}{' idle' if self.idle else ''}>"


def mark_endless(request: web.BaseRequest) -> None:
    """The answer to `request` is a stream without an end of its own: a drain does not wait for it."""
    if isinstance(request.protocol, HttpConnection):
        request.protocol.mark_endless()


def _refused(status: int, exc: BaseException | None, message: str | None) -> web.Response:
    """The answer to what is no request, or to a handler that failed."""
    if isinstance(exc, LineTooLong):
        words = f"a header or the request line has more than {exc.args[1]} bytes"
        return _refusal(InvalidRequest(words), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    if message == _TOO_MANY:
        return _refusal(InvalidRequest("too many headers"), HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    if status == HTTPStatus.GATEWAY_TIMEOUT:
        return _refusal(DeadlineExceeded("the request took too long"))
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _refusal(InternalError("internal error"))
    what, _, _ = (message or "it cannot be read").partition("\n")  # an excerpt follows, with a mark under it
    return _refusal(InvalidRequest(f"this is no HTTP request: {what.rstrip(':')}"), status)


def _refusal(error: ServeError, status: int | None = None) -> web.Response:
    return json_response(error_body(error), status=status or http_status(error), headers=error_headers(error))

"""JSON answers and errors in OIP's form.

Errors are `{"error": "…", "code": "…"}` with a Content-Type of exactly `application/json`: with a charset behind it
kserve loses the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import structlog
from aiohttp import web

from tidegate.oip.status import error_code, error_headers, http_status, message_of
from tidegate.outcome import Deferred, ServeError

JSON_TYPE: Final = "application/json"

RefusalObserver = Callable[[str, str, ServeError], None]

_log = structlog.get_logger(__name__)


def error_response(error: Exception) -> web.Response:
    """The answer to an error."""
    return json_response(error_body(error), status=http_status(error), headers=error_headers(error))


def error_body(error: Exception) -> dict[str, str]:
    """What it says; an error that is no ServeError is our defect and logged in full."""
    if not isinstance(error, ServeError):
        _log.exception("a request failed by a defect", exc_info=error)
    body = {"error": message_of(error), "code": error_code(error)}
    if isinstance(error, Deferred):
        body |= {"ticket": error.ticket, "state": "waiting"}
    return body


def failure_response(request: web.BaseRequest, error: Exception) -> web.Response:
    return close_if_broken(request, error_response(error))


def close_if_broken(request: web.BaseRequest, response: web.Response) -> web.Response:
    """Announce the connection's end after a body that could not be read: its parser is stuck in the middle of it."""
    if request.content.exception() is not None:
        response.force_close()
        # Else aiohttp reads on for the rest, meets the same exception and logs it as a defect of its own.
        request.content.feed_eof()
    return response


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """JSON under a Content-Type of nothing but `application/json`, which aiohttp's own would follow with a charset."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers={**(headers or {}), "Content-Type": JSON_TYPE}
    )

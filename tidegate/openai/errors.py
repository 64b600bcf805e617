"""Errors in OpenAI's form, with what its SDK reads: `x-should-retry`, `retry-after-ms`, and the wrong parameter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
from aiohttp import web

from tidegate.generate.text.text_side import PromptTooLong
from tidegate.oip.http.responses import close_if_broken, json_response
from tidegate.oip.status import error_code, error_headers, http_status, message_of
from tidegate.openai.request_id import with_request_id
from tidegate.openai.wrong_parameter import WrongParameter
from tidegate.outcome import CallerError, ModelNotFound, Overloaded, ServeError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = structlog.get_logger(__name__)


def in_openais_form(handler: Handler) -> Handler:
    """The handler with every error in OpenAI's form."""

    async def formed(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as error:
            return close_if_broken(request, error_response(error))

    return formed


def error_response(error: Exception) -> web.Response:
    """The answer to an error; one that is no ServeError is our defect and logged in full."""
    return json_response(error_body(error), status=http_status(error), headers=with_request_id(error_headers(error)))


def error_json(
    status: int, message: str, kind: str, parameter: str | None, code: str, headers: Mapping[str, str]
) -> web.Response:
    return json_response(_body(message, kind, parameter, code), status=status, headers=headers)


def error_body(error: Exception) -> dict[str, Any]:
    """The body of such an answer, or of an event in a stream that has begun."""
    if not isinstance(error, ServeError):
        _log.exception("a request failed by a defect", exc_info=error)
    return _body(message_of(error), _type(error), _parameter(error), _code(error))


def _body(message: str, kind: str, parameter: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


def _type(error: Exception) -> str:
    if isinstance(error, CallerError):
        return "invalid_request_error"
    return "rate_limit_error" if isinstance(error, Overloaded) else "server_error"


def _parameter(error: Exception) -> str | None:
    if isinstance(error, WrongParameter):
        return error.parameter
    return "model" if isinstance(error, ModelNotFound) else None


def _code(error: Exception) -> str:
    return "context_length_exceeded" if isinstance(error, PromptTooLong) else error_code(error)

"""Reads the credentials that a caller presents over HTTP."""

from __future__ import annotations

from aiohttp import web

from tidegate.oip.guard import KEY_HEADER, PresentedCredentials, shown_as_one


def credentials_over_http(request: web.BaseRequest, protocol: str) -> PresentedCredentials:
    headers = request.headers
    return PresentedCredentials(
        shown_as_one(headers.getall("Authorization", ())),
        shown_as_one(headers.getall(KEY_HEADER, ())),
        lambda: _certificate(request),
        protocol,
        request.remote or "",
    )


def _certificate(request: web.BaseRequest) -> bytes | None:
    transport = request.transport
    # `peercert` has contents only where the certificate was verified; `ssl_object` gives it as it came.
    if transport is None or not transport.get_extra_info("peercert"):
        return None
    found: bytes | None = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return found

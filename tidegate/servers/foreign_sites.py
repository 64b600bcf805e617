"""The site policy refuses what a browser sends on behalf of a foreign web site.

A browser sends requests of any page to any port that it can reach, loopback and the local network too; the page cannot
read the answer, but the work is done. Such a request names its site in `Origin`, or says `Sec-Fetch-Site: cross-site`.
On a loopback address a page can also come under a name of its own that resolves to 127.0.0.1 the second time (DNS
rebinding), and then its `Origin` is that name: so a request with these headers must call a loopback port by address or
as localhost. Programs send none of them, and pay for two look-ups.

Behind a proxy that changes `Host`, every page is foreign: `allowed_origins` names the sites that are not. A browser
lets a page of one of them ask and read only where the port says so (CORS): its preflights are answered here, and its
answers name it. Credentials of the browser's own (cookies, certificates) are never asked for: keys are in headers.

Source: WHATWG, Fetch, "HTTP extensions" (CORS).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, Final
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import AfterValidator

from tidegate.servers.address import is_loopback

Entrance = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_SHOWN: Final = 200
_PREFLIGHT: Final = {
    "Access-Control-Allow-Methods": "*",
    "Access-Control-Allow-Headers": "*, Authorization",  # which the star does not mean
    "Access-Control-Max-Age": "600",
}
_SCHEMES: Final = ("http", "https")


def _checked_origin(origin: str) -> str:
    parts = urlsplit(origin)
    if origin != "*" and (
        parts.scheme not in _SCHEMES or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"
    ):
        raise ValueError(f"{origin!r} is no origin: write it as browsers do, https://HOST or https://HOST:PORT, or '*'")
    return origin


Origin = Annotated[str, AfterValidator(_checked_origin)]


class SitePolicy:
    """Which web sites' pages may call a port that listens on `host`.

    Args:
        allowed: origins besides the port's own; "*" is any.
    """

    def __init__(self, host: str, allowed: Collection[str] = ()) -> None:
        self._is_local = is_loopback(host)
        self._allowed = frozenset(allowed)

    def refusal(self, host: str, origin: str | None, fetch_site: str | None) -> str:
        """Why a browser's request is refused; "" if it is not.

        Args:
            host: the request's `Host`; `origin` and `fetch_site` are its `Origin` and `Sec-Fetch-Site`.
        """
        if origin is None and fetch_site is None:  # a program
            return ""
        if "*" in self._allowed or (origin is not None and origin in self._allowed):
            return ""
        if origin is not None and _host_of(origin) != host:
            return f"this port answers no other site, and {origin[:_SHOWN]!r} is one (allowed_origins)"
        if origin is None and fetch_site == "cross-site":
            return "this port answers no other site, and the browser says that the request is one's (allowed_origins)"
        if self._is_local and not is_address(host):
            return f"pages call this port by address or as localhost, not as {host[:_SHOWN]!r} (allowed_origins)"
        return ""

    def shared_with(self, origin: str | None) -> dict[str, str]:
        """The headers by which a browser lets a page of `origin` read an answer; none for a site that is not named."""
        if origin is None or not self._allowed:
            return {}
        named = "*" if "*" in self._allowed else origin if origin in self._allowed else ""
        if not named:
            return {}
        return {"Access-Control-Allow-Origin": named, "Access-Control-Expose-Headers": "*", "Vary": "Origin"}

    async def share(self, request: web.BaseRequest, answer: web.StreamResponse) -> None:
        """Add them to an answer that is about to be sent."""
        answer.headers.update(self.shared_with(request.headers.get("Origin")))

    def ahead_of(self, entrance: Entrance) -> Entrance:
        """The entrance of a server, with this check before it."""

        async def judged(request: web.BaseRequest) -> web.StreamResponse:
            headers = request.headers
            why = self.refusal(request.host, headers.get("Origin"), headers.get("Sec-Fetch-Site"))
            if why:
                return web.json_response({"error": why}, status=403)
            is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in headers
            if is_preflight and (shared := self.shared_with(headers.get("Origin"))):
                return web.Response(status=204, headers=shared | _PREFLIGHT)
            answer = await entrance(request)
            if not answer.prepared:
                await self.share(request, answer)
            return answer

        def checked(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
            headers = request.headers
            is_from_page = "Origin" in headers or "Sec-Fetch-Site" in headers
            return judged(request) if is_from_page else entrance(request)

        return checked

    def __repr__(self) -> str:
        return f"<SitePolicy {'loopback' if self._is_local else 'network'}, {len(self._allowed)} foreign sites>"


def _host_of(origin: str) -> str:
    """The host and port of an `Origin`; "" of one that has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # `http://[`
        return ""


def is_address(host: str) -> bool:
    """Whether a `Host` is an address or localhost, which no foreign name can turn into."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False

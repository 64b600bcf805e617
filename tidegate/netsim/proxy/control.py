"""A link's control over HTTP, for clients in any language.

    GET    /state                     the whole state: layers, partition, connections, bytes, violations
    GET    /events?after=N            events, oldest first; `next` is the N of the next call
    GET    /scenarios                 the names there are
    PUT    /scenario                  {"name": "lte_driving"}, or a whole scenario: {"summary": …, "link": {…}, …}
    DELETE /scenario                  remove the scenario, its toxics and the partition
    PUT    /link                      {"delay_ms": 40, …}: what it is like; toxics stay
    PUT    /toxics/NAME               {"direction": "to", "delay_ms": 300}
    DELETE /toxics/NAME
    PUT    /partition                 {"kind": "blackhole", "direction": "both", "for_s": 3}
    DELETE /partition                 heal it (also: POST /heal)

Every change has happened for every live connection when the answer is there. PUT may be POST. A wrong value is answered
with 400 and a message that names the key.

A caller that reaches this port can break the link and nothing else: named scenarios only, and no file of the machine is
read for a caller. Requests from browsers are refused, so that no web page can reach a loopback port through its
visitor.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from tidegate.netsim.links.stream import Direction, StreamProfile
from tidegate.netsim.proxy.link import Kind, LinkError, LinkProxy
from tidegate.netsim.proxy.scenario import Toxic, convert, load, names, of
from tidegate.netsim.proxy.timeline import LinkTimeline
from tidegate.runtime.suggestion import did_you_mean

BODY_MAX_BYTES: Final = 256 * 1024
EVENTS_MAX: Final = 1000


class PartitionOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Kind = "blackhole"
    direction: Direction = "both"
    for_s: float | None = None

    def __post_init__(self) -> None:
        if self.for_s is not None and not 0.0 <= self.for_s < 1e9:
            raise ValueError(f"for_s must not be below 0, and is {self.for_s}")


def control_app(timeline: LinkTimeline) -> web.Application:
    """The HTTP application that controls this timeline's link, on the link's own loop."""
    orders = _Orders(timeline)
    app = web.Application(middlewares=[_in_words], client_max_size=BODY_MAX_BYTES)
    app.router.add_get("/state", orders.state)
    app.router.add_get("/events", orders.events)
    app.router.add_get("/scenarios", orders.scenarios)
    for path, order in (
        ("/scenario", orders.scenario),
        ("/link", orders.base),
        ("/toxics/{name}", orders.toxic),
        ("/partition", orders.partition),
    ):
        app.router.add_put(path, order)
        app.router.add_post(path, order)
    app.router.add_delete("/scenario", orders.clear)
    app.router.add_delete("/toxics/{name}", orders.remove)
    app.router.add_delete("/partition", orders.heal)
    app.router.add_post("/heal", orders.heal)
    return app


class _Orders:
    def __init__(self, timeline: LinkTimeline) -> None:
        self._timeline = timeline
        self._link: LinkProxy = timeline.link

    async def state(self, request: web.Request) -> web.Response:
        return self._answer()

    async def events(self, request: web.Request) -> web.Response:
        words = request.query.get("after", "0")
        if not (words.isascii() and words.isdecimal() and len(words) <= 18):
            raise LinkError(f"after must be a number of events, not {words[:50]!r}")
        log = self._link.log
        kept = log.events()
        first = log.total - len(kept)
        begin = max(0, int(words) - first)
        shown = kept[begin : begin + EVENTS_MAX]
        return _json({"events": [event.plain() for event in shown], "next": first + begin + len(shown)})

    async def scenarios(self, request: web.Request) -> web.Response:
        return _json({name: load(name).scenario.summary for name in names()})

    async def scenario(self, request: web.Request) -> web.Response:
        body = await _body(request)
        if set(body) == {"name"}:
            if body["name"] not in names():
                name, known = str(body["name"])[:100], f"(there are: {', '.join(names())})"
                raise LinkError(f"there is no scenario {name!r} {known}.{did_you_mean(name, names())}")
            self._timeline.play(load(body["name"]))
        else:
            loaded = of(body, "scenario", Path())
            layers = [loaded.scenario.link, *loaded.scenario.toxics.values()]
            for layer in [*layers, *(step.toxic for step in loaded.scenario.timeline if step.toxic is not None)]:
                _no_files(layer)
            self._timeline.play(loaded)
        return self._answer()

    async def clear(self, request: web.Request) -> web.Response:
        self._timeline.stop()
        self._link.clear()
        return self._answer()

    async def base(self, request: web.Request) -> web.Response:
        self._link.apply(_no_files(convert(await _body(request), StreamProfile, "link")))
        return self._answer()

    async def toxic(self, request: web.Request) -> web.Response:
        toxic = convert(await _body(request), Toxic, "toxic")
        self._link.put(request.match_info["name"], _no_files(toxic), toxic.direction)
        return self._answer()

    async def remove(self, request: web.Request) -> web.Response:
        self._link.remove(request.match_info["name"])
        return self._answer()

    async def partition(self, request: web.Request) -> web.Response:
        order = convert(await _body(request), PartitionOrder, "partition")
        self._link.partition(order.kind, order.direction, for_s=order.for_s)
        return self._answer()

    async def heal(self, request: web.Request) -> web.Response:
        self._link.heal()
        return self._answer()

    def _answer(self) -> web.Response:
        playing = self._timeline.playing
        return _json({**self._link.state(), "scenario": playing.name if playing else None})


@web.middleware
async def _in_words(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if "Origin" in request.headers:
        return _json({"error": "browsers are not served"}, status=403)
    try:
        return await handler(request)
    except LinkError as error:
        return _json({"error": str(error)}, status=400)
    except web.HTTPException as error:
        return _json({"error": f"{error.reason}: {request.method} {request.path}"}, status=error.status)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise LinkError(f"the body must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise LinkError(f"the body must be an object, this is {type(body).__name__}")
    return body


def _no_files(profile: StreamProfile) -> StreamProfile:
    if profile.recording is not None or (profile.jitter is not None and profile.jitter.file is not None):
        raise LinkError("recording and jitter.file: no file is read over HTTP; start the link with a scenario of yours")
    return profile


def _json(plain: Any, status: int = 200) -> web.Response:
    return web.json_response(plain, status=status, dumps=lambda one: json.dumps(one, default=str) + "\n")

"""Pages of foreign web sites are refused at every HTTP port; programs are never asked."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from tidegate.servers.foreign_sites import Origin, SitePolicy
from tidegate.servers.http_server import open_http_server

LAN = "192.168.1.5"


@pytest.mark.parametrize(
    ("bound", "host", "origin", "fetch_site"),
    [
        ("0.0.0.0", "shop.example:8000", "http://shop.example:8000", "same-origin"),  # a page of its own
        ("0.0.0.0", "gateway.svc:8000", None, None),  # a program, by any name
        ("127.0.0.1", "proxied.example", None, None),
        ("127.0.0.1", "127.0.0.1:8000", "http://127.0.0.1:8000", "same-origin"),
        ("127.0.0.1", "localhost:8000", None, "none"),  # typed into the address bar
        ("0.0.0.0", "inside:8000", "https://app.example", "cross-site"),  # allowed by name
    ],
)
def test_programs_and_the_sites_own_pages_are_let_in(
    bound: str, host: str, origin: str | None, fetch_site: str | None
) -> None:
    assert SitePolicy(bound, ["https://app.example"]).refusal(host, origin, fetch_site) == ""


@pytest.mark.parametrize(
    ("bound", "host", "origin", "fetch_site"),
    [
        ("0.0.0.0", LAN, "https://evil.example", "cross-site"),
        ("0.0.0.0", LAN, "null", None),  # a sandboxed frame, or a file
        ("0.0.0.0", LAN, "http://[", None),  # no address of any site
        ("0.0.0.0", f"{LAN}:8000", f"http://{LAN}:9000", "same-site"),
        ("0.0.0.0", LAN, None, "cross-site"),  # an image or a form, which names no origin
        ("127.0.0.1", "evil.example:8000", "http://evil.example:8000", "same-origin"),  # DNS rebinding
    ],
)
def test_foreign_pages_are_refused_with_the_key_that_lets_them_in(
    bound: str, host: str, origin: str | None, fetch_site: str | None
) -> None:
    assert "allowed_origins" in SitePolicy(bound).refusal(host, origin, fetch_site)
    assert SitePolicy(bound, ["*"]).refusal(host, origin, fetch_site) == ""


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "ftp://app.example", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="is no origin"):
        TypeAdapter(Origin).validate_python(origin)


async def _ok(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def test_a_real_port_refuses_a_foreign_page_before_its_handler_runs() -> None:
    door = open_http_server([web.post("/", _ok)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1)
    async with door as address, aiohttp.ClientSession() as session:
        async with session.post(address, data=b"x", headers={"Origin": "https://evil.example"}) as answer:
            assert answer.status == 403
            assert "'https://evil.example' is one" in (await answer.json())["error"]
        async with session.post(address, data=b"x", headers={"Origin": address}) as answer:
            assert answer.status == 200
        async with session.post(address, data=b"x") as answer:
            assert answer.status == 200


async def _streams(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b"ok")
    return answer


APP = "https://app.example"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,tidegate-budget-ms"}


@pytest.mark.parametrize(("allowed", "named"), [([APP, "https://other.example"], APP), (["*"], "*")])
async def test_a_page_of_a_named_site_may_ask_and_read_what_it_is_answered(allowed: list[str], named: str) -> None:
    routes = [web.post("/", _ok), web.get("/stream", _streams)]
    door = open_http_server(
        routes, "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1, allowed_origins=allowed
    )
    async with door as address, aiohttp.ClientSession(headers={"Origin": APP}) as session:
        async with session.options(address, headers=ASKS) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == named
            assert answer.headers["Access-Control-Allow-Headers"] == "*, Authorization"
            assert answer.headers["Access-Control-Allow-Methods"] == "*"
        for verb, path, status in (("POST", "/", 200), ("GET", "/stream", 200), ("GET", "/nothing", 404)):
            async with session.request(verb, address + path) as answer:
                assert answer.status == status
                assert answer.headers.getall("Access-Control-Allow-Origin") == [named]
                assert answer.headers["Vary"] == "Origin"


async def test_neither_the_ports_own_pages_nor_others_nor_programs_are_told_of_sharing() -> None:
    door = open_http_server(
        [web.post("/", _ok)], "127.0.0.1", 0, key="http_port", max_body_bytes=100, grace_s=0.1, allowed_origins=[APP]
    )
    async with door as address, aiohttp.ClientSession() as session:
        for origin, status in ({"Origin": address}, 200), ({"Origin": "https://evil.example"}, 403), ({}, 200):
            async with session.post(address, headers=origin) as answer:
                assert answer.status == status
                assert "Access-Control-Allow-Origin" not in answer.headers
        async with session.options(address, headers={"Origin": "https://evil.example", **ASKS}) as answer:
            assert answer.status == 403
            assert "Access-Control-Allow-Origin" not in answer.headers

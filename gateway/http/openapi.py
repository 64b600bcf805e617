"""The OpenAPI 3.1 document of the inference port, served at `GET /openapi.json` without a credential.

The document is written by hand (`openapi.yaml`), because no annotation holds what it must say: the refusals of each
operation and their headers. Tests keep it true: one compares its paths with the routes, and schemathesis compares its
schemas with the gateway's answers. It names no model and no caller, so it needs no credential.

The YAML is read once, when the routes are made, and served as the same bytes each time. Its sets of answers (`x-…`)
exist for YAML's merging only and are left out.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec
import yaml
from aiohttp import web

from tidegate import __version__
from tidegate.oip.http.responses import JSON_TYPE


def document() -> dict[str, Any]:
    """Return the document with this version's number and all YAML merges resolved."""
    text = resources.files("gateway.http").joinpath("openapi.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found["info"]["version"] = __version__
    return {key: value for key, value in found.items() if not key.startswith("x-")}


def openapi_routes() -> list[web.RouteDef]:
    body = _encoded()

    async def openapi(_request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Type": JSON_TYPE})

    return [web.get("/openapi.json", openapi)]


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())

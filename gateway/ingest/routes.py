"""The ingest routes give an operator's program the stored records of devices, over the admin port.

    GET /v1/ingested?after=N&limit=M   records after number N, oldest first; `last` is the N of the next request

Numbers only grow and are never reused, so a program that keeps the last number it has processed misses no record and
processes none twice, over its own restarts and this gateway's. When the journal is full the oldest records are deleted.
"""

from __future__ import annotations

import base64
import sqlite3
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from aiohttp import web

from gateway.ingest.receiver import Ingest
from tidegate.oip.grpc.codec import response_from_bytes
from tidegate.oip.http.codec import BinaryOutputs, encode_response
from tidegate.outcome import ServeError
from tidegate.storage.database import DatabaseUnavailable

MOST: Final = 1000


def ingest_routes(ingest: Ingest) -> list[web.RouteDef]:
    async def ingested(request: web.Request) -> web.Response:
        after, limit = _number(request, "after", 0), min(MOST, max(1, _number(request, "limit", 100)))
        try:
            rows = await ingest.records(after, limit)
        except DatabaseUnavailable as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from error
        records = [_record(row) for row in rows]
        last = records[-1]["seq"] if records else after
        return web.json_response({"records": records, "last": last, "state": await ingest.state()})

    return [web.get("/v1/ingested", ingested)]


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isdecimal() and len(text) <= 18):
        raise web.HTTPBadRequest(text=f"{name} must be a whole number, got {text[:40]!r}")
    return int(text)


def _record(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "seq": row["seq"],
        "device": row["device"],
        "id": row["id"],
        "kind": row["kind"],
        "historical": True,
        "happened": _utc(row["happened_s"]),
        "taken": _utc(row["taken_s"]),
        **({"model": row["model"], "version": row["version"], "variant": row["variant"]} if row["model"] else {}),
        **({"code": row["code"]} if row["code"] else {}),
        **_body(row["kind"], row["body"]),
    }


def _body(kind: str, body: bytes) -> dict[str, Any]:
    """Return the body as JSON if it is valid, else as base64: a device may have sent anything."""
    if not body:
        return {}
    try:
        if kind == "event":
            return {"event": msgspec.json.decode(body)}
        encoded = encode_response(response_from_bytes(body), BinaryOutputs())
        return {"response": msgspec.json.decode(encoded.body)}
    except (ServeError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {"body_base64": base64.b64encode(body).decode()}


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")

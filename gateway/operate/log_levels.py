"""The log-level routes read and change how much a running gateway logs.

    GET /v1/log-level                                          {"level": "info", "modules": {}}
    PUT /v1/log-level {"level": "debug"}                       for all
    PUT /v1/log-level {"level": "debug", "module": "gateway"}  for the modules under one name
    PUT /v1/log-level {"level": null, "module": "gateway"}     back to the general level

Each change writes a log line at level error, so that the log itself explains why lines begin or stop.
"""

from __future__ import annotations

from typing import Any

import msgspec
import structlog
from aiohttp import web

from tidegate.runtime.logs import LEVELS, Level, Levels

log = structlog.get_logger(__name__)
_MOST_BYTES = 4096


class LogLevelChange(msgspec.Struct, forbid_unknown_fields=True):
    level: Level | None
    module: str = ""


def log_level_routes(levels: Levels = LEVELS) -> list[web.RouteDef]:
    async def read(_request: web.Request) -> web.Response:
        return web.json_response(_levels_json(levels))

    async def change(request: web.Request) -> web.Response:
        body = await request.read()
        try:
            if len(body) > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES} bytes")
            asked = msgspec.json.decode(body, type=LogLevelChange)
            _apply(asked, levels)
        except (msgspec.MsgspecError, ValueError) as error:
            return web.json_response({"error": str(error)}, status=400)
        log.error("log level changed", level=asked.level or levels.level, module=asked.module or "all")
        return web.json_response(_levels_json(levels))

    return [web.get("/v1/log-level", read), web.put("/v1/log-level", change)]


def _apply(asked: LogLevelChange, levels: Levels) -> None:
    if asked.module and not all(part.isidentifier() for part in asked.module.split(".")):
        raise ValueError(f"{asked.module[:100]!r} is no module's name, such as gateway.targets.directory")
    if asked.level is not None:
        levels.set(asked.level, asked.module)
    elif asked.module:
        levels.clear(asked.module)
    else:
        raise ValueError(
            "`default` (null) is for a module with a level of its own: for all, debug, info, warning or error"
        )


def _levels_json(levels: Levels) -> dict[str, Any]:
    return {"level": levels.level, "modules": levels.modules}

"""`tidegate ray-scale` between a gateway's need, which a test sets, and Ray Serve."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from types import TracebackType
from typing import Any, Final

from aiohttp import web

from tests.support.ray.serve_rest import DASHBOARD

_PORT: Final = 18262


class Scaler:
    """Inside `with`, the need `replicas` is handed to Serve every second.

    Attributes:
        replicas: as a gateway's `/scaling` says it, which the gateway itself would know after a minute of traffic.
        code, events: of `ray-scale`, once it has ended.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.code: int | None = None
        self.events: list[dict[str, Any]] = []

    async def __aenter__(self) -> Scaler:
        app = web.Application()
        app.router.add_get("/scaling", self._tell)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", _PORT).start()
        words = ["-m", "tidegate", "ray-scale", "--every", "1s", "--gateway", f"http://127.0.0.1:{_PORT}"]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *words, "--serve", f"http://127.0.0.1:{DASHBOARD}", stdout=asyncio.subprocess.PIPE
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        said, _ = await self._process.communicate()
        self.code, self.events = self._process.returncode, [json.loads(line) for line in said.splitlines()]
        await self._runner.cleanup()

    async def _tell(self, _: web.Request) -> web.Response:
        return web.json_response({"pool_replicas_needed": self.replicas, "known": True})

    def __repr__(self) -> str:
        return f"<Scaler to {self.replicas}>"

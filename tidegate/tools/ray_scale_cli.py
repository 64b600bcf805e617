"""`tidegate ray-scale` gives Ray Serve the number of pool replicas that a gateway's `/scaling` asks for.

Serve calls it an external scaler: it starts and ends replicas, and somebody else says how many. The gateway's signal has
held back already (`scaling.scale_down_s`), so it is handed on as it is, whenever it changes, and once a minute besides,
since Serve forgets it with an application that is deployed again. A gateway that does not know the need yet, and one
that does not answer, change nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

import click

from tidegate import clock
from tidegate.runtime.duration import Duration
from tidegate.runtime.events import emit

_WITHIN_S: Final = 5.0
_AGAIN_S: Final = 60.0
_MOST_BYTES: Final = 1 << 16


class NoAnswer(click.ClickException):
    """One of the two sides did not answer, or not with what is expected."""


@dataclass(frozen=True, slots=True)
class ScaleState:
    """What Serve was told last, and when; nothing yet."""

    replicas: int = 0
    at: float = float("-inf")

    def due(self, needed: int | None, now: float) -> bool:
        """Whether Serve is to hear the need: it is known, and another one, or was told long ago."""
        return needed is not None and (needed != self.replicas or now - self.at >= _AGAIN_S)


def needed_of(told: Any) -> int | None:
    """The need in what `/scaling` says; None while it is not known. Raises NoAnswer for anything else."""
    if not isinstance(told, dict) or not isinstance(told.get("pool_replicas_needed"), int):
        raise NoAnswer(f"what the gateway tells is no need for replicas: {json.dumps(told)[:200]}")
    return int(told["pool_replicas_needed"]) if told.get("known", True) else None


@click.command(name="ray-scale", epilog="""\b
Examples:
  tidegate ray-scale
  tidegate ray-scale --gateway http://gw-0:8002 --serve http://ray-head:8265 --application pool
  tidegate ray-scale --once
""")  # fmt: skip
@click.option("--gateway", default="http://127.0.0.1:8002", show_default=True, envvar="TIDEGATE_METRICS",
              help="A gateway's metrics port, where /scaling is.")  # fmt: skip
@click.option("--serve", default="http://127.0.0.1:8265", show_default=True, help="Ray's dashboard port.")
@click.option("--application", default="pool", show_default=True, help="The application of Serve.")
@click.option("--deployment", default="pool", show_default=True, help="Its deployment.")
@click.option("--every", "every_s", type=Duration(bare="s", min_s=1.0, max_s=3600.0), default="5s", show_default=True,
              help="How long to wait between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Set it once and end: exit code 1 where that cannot be done.")
def ray_scale(gateway: str, serve: str, application: str, deployment: str, every_s: float, once: bool) -> None:
    """Have Ray Serve run as many pool replicas as the gateway needs.

    The application has to have `external_scaler_enabled: true` (docs/ray.md). Runs until Ctrl-C; of several at once
    each says the same. Events go to stdout, one JSON object a line.
    """
    scaled = f"/api/v1/applications/{quote(application, safe='')}/deployments/{quote(deployment, safe='')}/scale"
    try:
        asyncio.run(_follow(gateway.rstrip("/") + "/scaling", serve.rstrip("/") + scaled, every_s, once))
    except KeyboardInterrupt:
        sys.exit(130)


async def _follow(scaling: str, scaled: str, every_s: float, once: bool) -> None:
    state, trouble = ScaleState(), ""
    while True:
        try:
            needed = needed_of(await asyncio.to_thread(_ask, scaling))
            if once and needed is None:
                raise NoAnswer(f"{scaling}: the need is not known yet; a gateway knows it a minute after its start")
            if needed is not None and state.due(needed, clock.now()):
                await asyncio.to_thread(_ask, scaled, {"target_num_replicas": needed})
                if needed != state.replicas:
                    emit("scaled", replicas=needed)
                state = ScaleState(needed, clock.now())
            if trouble:
                emit("back")
            trouble = ""
        except NoAnswer as error:
            if once:
                raise
            if error.message != trouble:  # once, and not every few seconds
                emit("trouble", reason=error.message)
            trouble = error.message
        if once:
            return
        await clock.sleep(every_s)


def _ask(url: str, body: dict[str, int] | None = None) -> Any:
    """GET, or POST of a body; the JSON that came, also with 503. Raises NoAnswer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    try:
        request = Request(url, data, headers, method="GET" if body is None else "POST")
        try:
            with urlopen(request, timeout=_WITHIN_S) as answer:
                raw = answer.read(_MOST_BYTES)
        except HTTPError as error:
            with error:
                raw = error.read(_MOST_BYTES)
            if error.code != 503 or body is not None:
                said = raw.decode(errors="replace").strip()[:300]
                raise NoAnswer(f"{url}: HTTP {error.code}: {said}{_way_out(error.code, body)}") from error
        return json.loads(raw)
    except (URLError, OSError, HTTPException, ValueError) as error:
        raise NoAnswer(f"{url}: {error.reason if isinstance(error, URLError) else error}") from error


def _way_out(status: int, body: dict[str, int] | None) -> str:
    if body is None:
        return "; --gateway names the metrics port of a gateway"
    if status == 404:
        return "; --application and --deployment name what `serve status` lists"
    return "; the application needs `external_scaler_enabled: true`"

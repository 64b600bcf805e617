"""`tidegate ray-scale` gives Ray Serve the number of pool replicas that a gateway's `/scaling` asks for.

Serve calls it an external scaler: it starts and ends replicas, and somebody else says how many. The gateway's signal
has held back already (`scaling.scale_down_s`), so it is handed on as it is, wherever Serve aims at another number: also
after an application was deployed again, with which Serve forgets what it was told. A gateway that does not know the
need yet, and one that does not answer, change nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
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
_MOST_BYTES: Final = 1 << 24  # Serve lists all that it has


class ScaleError(click.ClickException):
    """One of the two sides did not answer, or not with what is expected."""


def needed_of(told: Any) -> int | None:
    """The need in what `/scaling` says; None while it is not known. Raises ScaleError for anything else."""
    if not isinstance(told, dict) or not isinstance(told.get("pool_replicas_needed"), int):
        raise ScaleError(f"what the gateway tells is no need for replicas: {json.dumps(told)[:200]}")
    return int(told["pool_replicas_needed"]) if told.get("known", True) else None


def target_of(told: Any, application: str, deployment: str) -> int:
    """How many replicas Serve aims at, in what it lists. Raises ScaleError where that is not among it."""
    try:
        return int(told["applications"][application]["deployments"][deployment]["target_num_replicas"])
    except (KeyError, TypeError, ValueError) as error:
        raise ScaleError(
            f"Serve has no deployment {deployment!r} in an application {application!r}; --application and --deployment "
            "name what `serve status` lists"
        ) from error


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
    there = _ServeDeployment(serve.rstrip("/"), application, deployment)
    try:
        asyncio.run(_follow(gateway.rstrip("/") + "/scaling", there, every_s, once))
    except KeyboardInterrupt:
        sys.exit(130)


class _ServeDeployment:
    """One deployment, by Ray's REST interface. Blocks."""

    def __init__(self, address: str, application: str, deployment: str) -> None:
        self._listed = f"{address}/api/serve/applications/"
        names = f"applications/{quote(application, safe='')}/deployments/{quote(deployment, safe='')}"
        self._scaled = f"{address}/api/v1/{names}/scale"
        self._application, self._deployment = application, deployment

    def aim_at(self, replicas: int) -> bool:
        """Have so many; False where Serve does already. Raises ScaleError."""
        if target_of(_ask(self._listed), self._application, self._deployment) == replicas:
            return False
        _ask(self._scaled, {"target_num_replicas": replicas})
        return True

    def __repr__(self) -> str:
        return f"<_ServeDeployment {self._scaled}>"


async def _follow(scaling: str, there: _ServeDeployment, every_s: float, once: bool) -> None:
    trouble = ""
    while True:
        try:
            needed = needed_of(await asyncio.to_thread(_ask, scaling))
            if needed is not None and await asyncio.to_thread(there.aim_at, needed):
                emit("scaled", replicas=needed)
            if once and needed is None:
                raise ScaleError(f"{scaling}: the need is not known yet; a gateway knows it a minute after its start")
            if trouble:
                emit("back")
            trouble = ""
        except ScaleError as error:
            if once:
                raise
            if error.message != trouble:  # once, and not every few seconds
                emit("trouble", reason=error.message)
            trouble = error.message
        if once:
            return
        await clock.sleep(every_s)


def _ask(url: str, body: dict[str, int] | None = None) -> Any:
    """GET, or POST of a body; the JSON that came, also with 503. Raises ScaleError."""
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
                way_out = "" if body is None else "; the application needs `external_scaler_enabled: true`"
                raise ScaleError(f"{url}: HTTP {error.code}: {said}{way_out}") from error
        return json.loads(raw)
    except (URLError, OSError, HTTPException, ValueError) as error:
        raise ScaleError(f"{url}: {error.reason if isinstance(error, URLError) else error}") from error

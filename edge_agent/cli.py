"""`tidegate edge`: run one edge agent until a signal."""

from __future__ import annotations

from pathlib import Path

import click

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from tidegate import events
from tidegate.process import process_options, run


@click.command(
    epilog="""\b
Examples:
  tidegate edge --config deploy/config/device.yaml
  TIDEGATE_EDGE_MQTT=mqtt://broker.lan:1883 tidegate edge --config edge.yaml
  TIDEGATE_EDGE_MODEL_REPOSITORY=models tidegate edge
"""
)
@process_options("edge")
def edge(path: Path | None, parent_pid: int | None) -> None:
    """Answer small requests on this device: int8 models behind OIP gRPC and HTTP, and behind a gateway's link stream.

    Events go to stdout, one JSON object a line ("ready" once it serves); logs go to stderr. Ctrl-C or SIGTERM answers
    what is under way and ends.
    """
    run("edge", EdgeConfig, serve, path=path, parent_pid=parent_pid)


async def serve(config: EdgeConfig) -> None:
    """Serve until cancelled."""
    async with EdgeApp(config, on_progress=lambda what: events.emit("progress", what=what)) as app:
        events.emit("ready", **app.ready_event())
        await app.failed()

"""`tidegate edge`: run one edge agent until a signal."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from edge_agent.runner import StartError
from tidegate import config as configuration
from tidegate import events
from tidegate.lifeline import die_with_parent
from tidegate.models.repository import RepositoryError
from tidegate.telemetry import configure_logging


@click.command(
    epilog="""\b
Examples:
  tidegate edge --config deploy/config/device.yaml
  TIDEGATE_EDGE_MQTT=mqtt://broker.lan:1883 tidegate edge --config edge.yaml
  TIDEGATE_EDGE_MODEL_REPOSITORY=models tidegate edge
"""
)
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file; `tidegate config schema edge` lists its keys.",
)
@click.option("--die-with-parent", "parent_pid", type=int, hidden=True, help="End when the process of this id ends.")
def edge(path: Path | None, parent_pid: int | None) -> None:
    """Answer small requests on this device: int8 models behind OIP gRPC and HTTP, and behind a gateway's link stream.

    Events go to stdout, one JSON object a line ("ready" once it serves); logs go to stderr. Ctrl-C or SIGTERM answers
    what is under way and ends.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    try:
        config = configuration.load(EdgeConfig, path)
        configure_logging(f"edge/{config.name}", level=config.log_level)
        asyncio.run(serve(config))
    except (configuration.ConfigError, RepositoryError, StartError) as error:
        events.emit("failed", role="edge", reason=str(error))
        click.echo(f"the edge cannot start: {error}", err=True)
        sys.exit(1)


async def serve(config: EdgeConfig) -> None:
    """Serve until SIGINT or SIGTERM; a signal during a long start ends it too."""
    main = asyncio.current_task()
    assert main is not None
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:  # a second signal must not cut the drain that the first began
            stopped = True
            main.cancel()

    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, stop)
    try:
        async with EdgeApp(config, on_progress=lambda what: events.emit("progress", what=what)) as app:
            events.emit("ready", **app.ready_event())
            await app.failed()
    except asyncio.CancelledError:
        if not stopped:
            raise

"""`tidegate edge` runs one edge agent until a signal; its subcommands inspect a device from its own shell."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import uvloop

from edge_agent.app import EdgeApp
from edge_agent.commands.doctor_cli import doctor
from edge_agent.commands.join_cli import join
from edge_agent.commands.store import store
from edge_agent.config import EdgeConfig
from edge_agent.configuration.boot import boot_configuration
from tidegate.runtime import events
from tidegate.runtime.logs import LEVELS
from tidegate.runtime.process import process_options, run
from tidegate.runtime.settled_imports import settle_collector
from tidegate.runtime.suggestion import SuggestingGroup


@click.group(
    cls=SuggestingGroup,
    invoke_without_command=True,
    epilog="""\b
Examples:
  tidegate edge --config deploy/config/device.yaml
  TIDEGATE_EDGE_MQTT=mqtt://broker.lan:1883 tidegate edge --config edge.yaml
  TIDEGATE_EDGE_MODEL_REPOSITORY=models tidegate edge
  tidegate edge --config edge.yaml store list
  tidegate edge --config edge.yaml doctor
  tidegate edge join kiosk-7.tar
""",
)
@process_options("edge")
@click.pass_context
def edge(ctx: click.Context, path: Path | None, parent_pid: int | None) -> None:
    """Answer small requests on this device: int8 models behind OIP gRPC and HTTP, and behind a gateway's link stream.

    Events go to stdout, one JSON object a line ("ready" once it serves); logs go to stderr. Ctrl-C or SIGTERM answers
    what is under way and ends.
    """
    ctx.obj = path
    if ctx.invoked_subcommand is None:
        run("edge", EdgeConfig, serve, path=path, parent_pid=parent_pid, loop_factory=uvloop.new_event_loop)


edge.add_command(store)
edge.add_command(doctor)
edge.add_command(join)


async def serve(config: EdgeConfig) -> None:
    """Serve until cancelled."""
    boot = await asyncio.to_thread(boot_configuration, config)
    if boot is not None:
        LEVELS.set(boot.config.log_level)
    async with EdgeApp(config, on_progress=lambda what: events.emit("progress", what=what), boot=boot) as app:
        settle_collector()
        events.emit("ready", **app.ready_event())
        await app.failed()

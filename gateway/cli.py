"""`tidegate gateway`: run one gateway until it is told to stop."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import uvloop

from gateway.app import StartError, serve
from gateway.config import GatewayConfig
from tidegate import events
from tidegate.config import ConfigError, load
from tidegate.lifeline import die_with_parent
from tidegate.models.repository import RepositoryError
from tidegate.telemetry import configure_logging

_EXAMPLES = """
\b
Examples:
  tidegate gateway --config gateway.yaml
  TIDEGATE_GATEWAY_HTTP_PORT=9000 tidegate gateway --config gateway.yaml
  tidegate config schema gateway        every key, with its default and what it buys
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path, dir_okay=False), help="YAML file; none: defaults."
)
@click.option("--die-with-parent", type=int, metavar="PID", hidden=True, help="End when the process PID ends.")
def gateway(config_path: Path | None, die_with_parent: int | None) -> None:
    """Run one gateway: the endpoint that answers each request from the cheapest place that makes its deadline.

    OIP and OpenAI over HTTP, OIP over gRPC, metrics and state on ports of their own. Events go to stdout as JSON, logs
    to stderr. SIGINT or SIGTERM answer what is under way and stop.
    """
    if die_with_parent is not None:
        _tie_to(die_with_parent)
    try:
        config = load(GatewayConfig, config_path)
        configure_logging(f"gateway/{config.name}", level=config.log_level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    except (ConfigError, RepositoryError, StartError) as error:
        events.emit("failed", reason=str(error))
        click.echo(f"the gateway cannot start: {error}", err=True)
        sys.exit(1)


def _tie_to(parent_pid: int) -> None:
    die_with_parent(parent_pid)

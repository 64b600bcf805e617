"""`tidegate pool`: run one pool until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import click
import structlog

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from cloud_pool.supervisor import StartError
from tidegate import config as configuration
from tidegate import events
from tidegate.lifeline import die_with_parent
from tidegate.models.repository import RepositoryError
from tidegate.outcome import ModelNotFound


@click.command(
    epilog="""\b
Examples:
  tidegate pool --config deploy/config/cloud.yaml
  TIDEGATE_POOL_DEVICE=cuda:1 TIDEGATE_POOL_GRPC_PORT=8102 tidegate pool --config cloud.yaml
  TIDEGATE_POOL_MODEL_REPOSITORY=models tidegate pool
"""
)
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file; `tidegate config schema pool` lists its keys.",
)
@click.option("--die-with-parent", "parent_pid", type=int, hidden=True, help="End when the process of this id ends.")
def pool(path: Path | None, parent_pid: int | None) -> None:
    """Answer on this machine's GPU or cores: torch models in length-aware batches, over OIP gRPC and a gateway's link.

    Events go to stdout, one JSON object a line ("ready" once it serves); logs go to stderr. Ctrl-C or SIGTERM answers
    what is under way and ends.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    _log_to_stderr()
    try:
        config = configuration.load(PoolConfig, path)
        asyncio.run(serve(config))
    except (configuration.ConfigError, RepositoryError, ModelNotFound, StartError) as error:
        events.emit("failed", role="pool", reason=str(error))
        sys.exit(1)


async def serve(config: PoolConfig) -> None:
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
        async with PoolApp(config, on_progress=lambda what: events.emit("progress", what=what)) as app:
            events.emit("ready", **app.ready_event())
            await app.failed()
    except asyncio.CancelledError:
        if not stopped:
            raise


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"], sort_keys=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )

"""`tidegate pool`: run one pool until a signal."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import click
import uvloop

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from cloud_pool.servers import handed_config, serve_several
from tidegate import clock
from tidegate.runtime import events
from tidegate.runtime.owned_task import OwnedTask
from tidegate.runtime.process import process_options, run
from tidegate.runtime.process_silence import SPEAKS_EVERY_S
from tidegate.runtime.settled_imports import settle_collector


@click.command(
    epilog="""\b
Examples:
  tidegate pool --config deploy/config/cloud.yaml
  TIDEGATE_POOL_DEVICE=cuda:1 TIDEGATE_POOL_GRPC_PORT=8102 tidegate pool --config cloud.yaml
  TIDEGATE_POOL_MODEL_REPOSITORY=models tidegate pool
"""
)
@process_options("pool")
@click.option("--one-of-servers", is_flag=True, hidden=True, help="Be one of several servers, configured on stdin.")
def pool(path: Path | None, parent_pid: int | None, one_of_servers: bool) -> None:
    """Answer on this machine's GPU or cores: torch models in length-aware batches, over OIP gRPC and a gateway's link.

    Events go to stdout, one JSON object a line ("ready" once it serves); logs go to stderr, and once it serves, what is
    served there and how to call it. Ctrl-C or SIGTERM answers
    what is under way and ends.
    """
    run(
        "pool",
        PoolConfig,
        partial(serve, alone=parent_pid is None, one_of_servers=one_of_servers),
        path=path,
        parent_pid=parent_pid,
        loop_factory=uvloop.new_event_loop,
        read=handed_config if one_of_servers else None,
    )


async def serve(config: PoolConfig, *, alone: bool = False, one_of_servers: bool = False) -> None:
    """Serve until cancelled.

    Args:
        alone: no parent reads the events, so a banner on stderr shows how to call the pool.
        one_of_servers: this is one of the configuration's `servers`, and not the only one or their parent.
    """
    if config.servers > 1 and not one_of_servers:
        await serve_several(config, alone=alone)
        return
    async with PoolApp(
        config, on_progress=lambda what: events.emit("progress", what=what), sharing=config.servers
    ) as app:
        settle_collector()
        events.emit("ready", **app.ready_event())
        if alone:
            click.echo("\n".join(app.words()), err=True)
        async with OwnedTask(_speak, name="word to the parent") if one_of_servers else nullcontext():
            await app.failed()


async def _speak() -> None:
    """Have the parent of several servers know that this one's event loop turns."""
    while True:
        events.emit("alive")
        await clock.sleep(SPEAKS_EVERY_S)

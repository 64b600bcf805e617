"""`tidegate pool`: run one pool until a signal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import uvloop

from cloud_pool.app import PoolApp
from cloud_pool.config import PoolConfig
from cloud_pool.servers import serve_several, server_config
from tidegate.runtime import events
from tidegate.runtime.process import process_options, run


@click.command(
    epilog="""\b
Examples:
  tidegate pool --config deploy/config/cloud.yaml
  TIDEGATE_POOL_DEVICE=cuda:1 TIDEGATE_POOL_GRPC_PORT=8102 tidegate pool --config cloud.yaml
  TIDEGATE_POOL_MODEL_REPOSITORY=models tidegate pool
"""
)
@process_options("pool")
@click.option("--server", type=int, hidden=True, help="Be this one of several servers.")
def pool(path: Path | None, parent_pid: int | None, server: int | None) -> None:
    """Answer on this machine's GPU or cores: torch models in length-aware batches, over OIP gRPC and a gateway's link.

    Events go to stdout, one JSON object a line ("ready" once it serves); logs go to stderr, and once it serves, what is
    served there and how to call it. Ctrl-C or SIGTERM answers
    what is under way and ends.
    """
    run(
        "pool",
        PoolConfig,
        partial(serve, path=path, alone=parent_pid is None, server=server),
        path=path,
        parent_pid=parent_pid,
        loop_factory=uvloop.new_event_loop,
        part=None if server is None else partial(server_config, number=server),
    )


async def serve(
    config: PoolConfig, *, path: Path | None = None, alone: bool = False, server: int | None = None
) -> None:
    """Serve until cancelled.

    Args:
        path: of the configuration, for further servers.
        alone: no parent reads the events, so a banner on stderr shows how to call the pool.
        server: the number of this one among several; None: it is the only one, or their parent.
    """
    if config.servers > 1 and server is None:
        await serve_several(config, path, alone=alone)
        return
    sharing = 1 if server is None else config.servers
    async with PoolApp(config, on_progress=lambda what: events.emit("progress", what=what), sharing=sharing) as app:
        events.emit("ready", **app.ready_event())
        if alone:
            click.echo("\n".join(app.words()), err=True)
        await app.failed()

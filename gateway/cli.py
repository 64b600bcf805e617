"""`tidegate gateway`: run one gateway until it is stopped."""

from __future__ import annotations

from pathlib import Path

import click
import uvloop

from gateway.app import serve, serve_part
from gateway.config.gateway import GatewayConfig
from gateway.workers.supervisor import supervise
from tidegate.runtime.process import process_options, run

_EXAMPLES = """
\b
Examples:
  tidegate gateway --config gateway.yaml
  TIDEGATE_GATEWAY_WORKERS=4 tidegate gateway --config gateway.yaml
  TIDEGATE_GATEWAY_HTTP_PORT=9000 tidegate gateway --config gateway.yaml
  tidegate config schema gateway        every key, with its default and what it buys
"""


@click.command(epilog=_EXAMPLES)
@click.option("--part", "parent_fd", type=int, hidden=True, help="Serve as the process that this socket's end tells.")
@process_options("gateway")
def gateway(path: Path | None, parent_pid: int | None, parent_fd: int | None) -> None:
    """Run one gateway: the endpoint that answers each request from the cheapest place that makes its deadline.

    OIP and OpenAI over HTTP, OIP over gRPC, metrics and state on ports of their own. Events go to stdout as JSON, logs
    to stderr. SIGINT or SIGTERM answer what is under way and stop. With `workers` in the configuration several
    processes serve the same ports, and SIGHUP restarts them in turn, with the configuration as it is then.
    """

    async def serve_all(config: GatewayConfig) -> None:
        if parent_fd is not None:
            await serve_part(config, parent_fd)
        elif config.workers > 1:
            await supervise(config, path)
        else:
            await serve(config)

    run("gateway", GatewayConfig, serve_all, path=path, parent_pid=parent_pid, loop_factory=uvloop.new_event_loop)

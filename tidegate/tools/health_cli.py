"""`tidegate health` asks a process on this machine whether it is ready, as its own configuration says where it listens.

Supervisors of containers run a command to learn whether a process is ready, in images that hold neither a shell nor
curl. The command reads the same file and environment as the process, dials its gRPC port, and asks gRPC's standard
health service, which every process answers there. Over TLS it shows the process's own certificate and demands the same
one of the other side: pools and edges let their own role ask for their health, and for nothing else.

A pool with several servers is ready when each is: every port is asked.

Invariants: exit code 0 means ready; 1 means that the process answered "not ready" or did not answer, and says which; 2
means that the command was called wrongly. The command never waits longer than `--timeout`, unless `--wait` says so.

A gateway with `client_ca` and `require_client_cert` trusts callers' certificates only, and its own is none of them:
the command then says that the handshake failed. Ask such a gateway over HTTPS, with a caller's certificate.

Each call starts an interpreter. Where a supervisor speaks HTTP or gRPC itself (Kubernetes does, without TLS), its own
probe costs a hundredth.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidegate import clock
from tidegate.config import ConfigError, load
from tidegate.runtime.duration import Duration
from tidegate.runtime.process import StartError
from tidegate.security.certificate_identity import CertificateIdentity
from tidegate.security.tls import Dialler, PlainDialler, Tls, explain_dial_error
from tidegate.servers.address import format_address
from tidegate.tools.config_cli import config_model

ASK_AGAIN_S: Final = 0.5
# Where a process that listens everywhere is asked.
_LOOPBACK: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
_MOST_WORDS: Final = 300


class NotReady(click.ClickException):
    """The process answers "not ready", or nothing; exit code 1."""


@click.command()
@click.argument("role", type=click.Choice(["gateway", "edge", "pool"]))
@click.option("--config", "path", type=click.Path(path_type=Path, dir_okay=False), help="The process's own file.")
@click.option("--timeout", "timeout_s", type=Duration(bare="s", min_s=0.1, max_s=60.0), default="3s",
              show_default=True, help="How long one question may take.")  # fmt: skip
@click.option("--wait", "wait_s", type=Duration(bare="s", max_s=3600.0), default="0s",
              help="Ask again for so long until it is ready.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON; the exit code is the same.")
def health(role: str, path: Path | None, timeout_s: float, wait_s: float, as_json: bool) -> None:
    """Ask a process of this machine whether it is ready: exit code 0 if it is, 1 if not.

    It takes the same configuration file and environment as the process, and needs no other program.

    \b
    Examples:
      tidegate health gateway --config /etc/tidegate/site.yaml
      tidegate health pool --config /etc/tidegate/cloud.yaml --wait 120
    """
    config: Any = load(config_model(role), path)
    if not config.grpc_port:
        raise ConfigError("key 'grpc_port' = 0 takes any free port, which nothing can find again: give it a number")
    host = _LOOPBACK.get(config.host, config.host)
    addresses = [format_address(host, config.grpc_port + number) for number in range(getattr(config, "servers", 1))]
    try:
        dialler = _dialler(role, config)
    except StartError as error:
        raise click.ClickException(str(error)) from error
    address, trouble = asyncio.run(_first_trouble(dialler, addresses, timeout_s, wait_s))
    if as_json:
        click.echo(json.dumps({"role": role, "address": address, "ready": trouble is None, "trouble": trouble}))
        sys.exit(0 if trouble is None else 1)
    if trouble is not None:
        raise NotReady(f"the {role} at {address} {trouble}")
    click.echo("\n".join(f"the {role} at {one} is ready" for one in addresses))


def _dialler(role: str, config: Any) -> Dialler:
    if config.tls is None:
        return PlainDialler()
    try:
        itself = CertificateIdentity(role, config.name)  # type: ignore[arg-type]  # one of the three
    except ValueError as error:
        raise StartError(f"key 'name': {error} (as the key 'tls' is set)") from error
    return Tls(config.tls).dialler(itself)


async def _first_trouble(
    dialler: Dialler, addresses: Sequence[str], timeout_s: float, wait_s: float
) -> tuple[str, str | None]:
    """Ask each of several servers at once: the address of the first that is not ready, and why; else the first."""
    asked = (_until_ready(dialler, one, timeout_s, wait_s) for one in addresses)
    troubles = dict(zip(addresses, await asyncio.gather(*asked), strict=True))
    return next((item for item in troubles.items() if item[1] is not None), (addresses[0], None))


async def _until_ready(dialler: Dialler, address: str, timeout_s: float, wait_s: float) -> str | None:
    """Ask once, and again until `wait_s` have passed; None once it is ready, else what the last answer was."""
    gives_up_at = clock.now() + wait_s
    while (trouble := await _trouble(dialler, address, timeout_s)) is not None and clock.now() < gives_up_at:
        await clock.sleep(ASK_AGAIN_S)
    return trouble


async def _trouble(dialler: Dialler, address: str, timeout_s: float) -> str | None:
    """What the process answers instead of "ready"; None if it is."""
    # An HTTP proxy of the environment is for other machines.
    channel = dialler.open(address, [("grpc.enable_http_proxy", 0)])
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        words = explain_dial_error(error.details() or error.code().name)
        return f"does not answer: {words[:_MOST_WORDS]}"
    finally:
        await channel.close(None)
    return None if answer.status == health_pb2.HealthCheckResponse.SERVING else "is not ready"

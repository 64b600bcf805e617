"""A pool of several servers (`servers`): a parent starts whole pools side by side and keeps them running.

    parent ──starts, one after the other──▶ NAME-0 at grpc_port, NAME-1 at grpc_port + 1, …

Each server is a pool of its own, with its workers, and a target of its own to gateways: one Python core a server. What
they share is divided among them: memory, cores, and what strangers may make them hold. They start in turn, so that each
measures its models while the others rest. One that ends is started again after a growing pause; the others serve on.
A signal to the parent drains all, and a parent that is killed takes its servers with it.

Why whole pools, and not several servers before one batcher: docs/adr/0014-whole-pools-as-servers.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import click
import structlog

from cloud_pool.config import PoolConfig
from tidegate import clock
from tidegate.runtime import events
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.ports import try_listen
from tidegate.runtime.process import StartError
from tidegate.servers.address import format_address

KILL_AFTER_S: Final = 5.0  # beyond its drain
STEADY_S: Final = 60.0  # one that served so long begins with short pauses again
MOST_LINE_BYTES: Final = 2**20  # of one event
log = structlog.get_logger(__name__)


def server_config(config: PoolConfig, number: int) -> PoolConfig:
    """The configuration of one of the servers: a name and ports of its own, and its part of what all share.

    The memory limit is divided where it is known (`MemoryLimit.sharing`). `threads` that were configured are those of a
    worker, as with one server.
    """
    servers, workers = config.servers, config.workers * max(1, len(config.devices))
    own: dict[str, Any] = {"name": f"{config.name}-{number}", "grpc_port": config.grpc_port + number}
    if config.metrics_port:
        own["metrics_port"] = config.metrics_port + number
    if config.advertise is not None:
        host, _, port = config.advertise.rpartition(":")
        own["advertise"] = f"{host}:{int(port) + number}"
    if config.threads == 0:
        own["threads"] = max(1, len(os.sched_getaffinity(0)) // (servers * workers))
    for key in ("generation_cache_bytes", "resident_bytes"):
        if (whole := getattr(config, key)) is not None:
            own[key] = max(1 << 20, whole // servers)
    own["vllm"] = config.vllm.model_copy(update={"gpu_memory_ratio": config.vllm.gpu_memory_ratio / servers})
    held_bytes = max(2**16, config.limits.max_held_bytes // servers)
    own["limits"] = config.limits.model_copy(update={"max_held_bytes": held_bytes})
    if config.state_dir is not None:
        own["state_dir"] = config.state_dir / f"{config.name}-{number}"
    return config.model_copy(update=own)


class PoolServer:
    """One place among the servers: `start` its process, then `keep` it filled."""

    def __init__(self, config: PoolConfig, number: int, path: Path | None) -> None:
        self.name = f"{config.name}-{number}"
        self.ready: dict[str, Any] = {}
        self._config = config
        self._number = number
        self._path = path
        self._backoff = Backoff(random.random, base_s=0.5, cap_s=30.0)
        self._process: asyncio.subprocess.Process | None = None
        self._began_at = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Return when it serves. Raises StartError: it ended before."""
        command = [sys.executable, "-P", "-m", "cloud_pool", "--server", str(self._number)]
        if self._path is not None:
            command += ["--config", str(self._path)]
        self.ready, self._began_at = {}, clock.now()
        self._process = await asyncio.create_subprocess_exec(
            *command,
            "--die-with-parent",
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=MOST_LINE_BYTES,
            start_new_session=True,  # a Ctrl-C in a terminal reaches the parent, which ends all in order
        )
        reason = ""
        while not self.ready:
            event = await self._event(self._process)
            if event is None:
                await self._process.wait()
                raise StartError(f"{self.name}: {reason or self._how(self._process)}")
            match event.get("event"):
                case "ready":
                    self.ready = event
                case "failed":
                    reason = str(event.get("reason", ""))
                case "progress":
                    events.emit("progress", what=f"{self.name}: {event.get('what', '')}")

    async def keep(self) -> None:
        """Start it again whenever it has ended, for ever."""
        while True:
            process = self._process
            assert process is not None, "start it first"
            while await self._event(process) is not None:
                pass
            await process.wait()
            how = self._how(process)
            if clock.now() - self._began_at > STEADY_S:
                self._backoff.reset()
            delay_s = self._backoff.next_delay_s()
            log.error("a server of this pool ended", server=self.name, how=how, again_in_s=round(delay_s, 2))
            events.emit("server_ended", name=self.name, how=how)
            await clock.sleep(delay_s)
            try:
                await self.start()
            except StartError as error:
                log.error("a server of this pool does not start", server=self.name, reason=str(error))
                continue
            events.emit("server_ready", name=self.name, pid=self.pid)

    async def aclose(self) -> None:
        """Drain and end it; after `drain_s` and a moment it is killed."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._config.drain_s + KILL_AFTER_S):
                await process.wait()
        except TimeoutError:
            log.error("a server of this pool does not end, and is killed", server=self.name, pid=process.pid)
            process.kill()
            await process.wait()

    @staticmethod
    async def _event(process: asyncio.subprocess.Process) -> dict[str, Any] | None:
        """Its next event; None at its end."""
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            return None
        try:
            event = json.loads(line)
        except ValueError:
            return {}
        return event if isinstance(event, dict) else {}

    @staticmethod
    def _how(process: asyncio.subprocess.Process) -> str:
        code = process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def __repr__(self) -> str:
        return f"<PoolServer {self.name} {self.pid}>"


def check_ports(config: PoolConfig) -> None:
    """Raise StartError where a port of one of the servers is taken, before any of them starts."""
    for key, first in (("grpc_port", config.grpc_port), ("metrics_port", config.metrics_port)):
        for number in range(config.servers if first else 0):
            assert first is not None
            try:
                try_listen(config.host, first + number)
            except OSError as error:
                where = format_address(config.host, first + number)
                raise StartError(
                    f"key {key!r}: {config.name}-{number} cannot listen on {where} ({error.strerror or error}); "
                    f"{config.servers} free ports from it on are needed"
                ) from error


def check_servers(config: PoolConfig) -> None:
    """Raise StartError where the keys do not go with several servers."""
    last = max(config.grpc_port, config.metrics_port or 0) + config.servers - 1
    if config.grpc_port == 0 or config.metrics_port == 0:
        raise StartError("key 'servers': each has a port of its own; set grpc_port and metrics_port to the first")
    if last > 65535:
        raise StartError(f"key 'servers': {config.servers} servers would need port {last}; set a lower first one")
    if config.metrics_port and abs(config.metrics_port - config.grpc_port) < config.servers:
        raise StartError("key 'metrics_port': within the servers' gRPC ports; set it apart from grpc_port")
    if config.tls is not None or config.attestation is not None:
        raise StartError("key 'servers': with tls each pool needs a certificate of its name; start several pools")
    if config.cpu_affinity:
        raise StartError("key 'cpu_affinity': workers of several servers would be pinned to the same cores")


async def serve_several(config: PoolConfig, path: Path | None, *, alone: bool = False) -> None:
    """Run all servers until cancelled; ready when each serves.

    Args:
        alone: no parent reads the events: a line on stderr for each server says where it is.

    Raises:
        StartError: one of them cannot start.
    """
    check_servers(config)
    check_ports(config)
    servers = [PoolServer(config, number, path) for number in range(config.servers)]
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_end_all, servers)
        for server in servers:
            await server.start()
        addresses = {"grpc": format_address(config.host, config.grpc_port)}
        told = {one.name: {"pid": one.pid, "addresses": one.ready["addresses"]} for one in servers}
        models = servers[0].ready["models"]
        events.emit("ready", role="pool", name=config.name, addresses=addresses, models=models, servers=told)
        if alone:
            click.echo("\n".join(_words(config, told, models)), err=True)
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(server.keep(), name=f"keeps {server.name}")


def _words(config: PoolConfig, servers: dict[str, dict[str, Any]], models: list[dict[str, Any]]) -> list[str]:
    names = ", ".join([str(one.get("name", "")) for one in models]) or "no models"
    return [
        f"{config.name}: {len(servers)} servers, each a target of its own to a gateway, serve {names}",
        *[f"  {name}  {one['addresses']['grpc']}" for name, one in servers.items()],
        f"  in a gateway's targets: {{name: {config.name}, address: HOST:{config.grpc_port}, servers: {len(servers)}}}",
    ]


async def _end_all(servers: list[PoolServer]) -> None:
    await asyncio.gather(*(one.aclose() for one in servers))

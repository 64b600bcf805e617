"""A pool of several servers (`servers`): a parent starts whole pools side by side and keeps them running.

    parent ──starts, one after the other──▶ NAME-0 at grpc_port, NAME-1 at grpc_port + 1, …

Each server is a pool of its own, with its workers, and a target of its own to gateways: one Python core a server. What
they share is divided among them: memory, cores, and what strangers may make them hold. They start in turn, so that each
measures its models while the others rest. One that ends, or that the system would not start, is started again after a
growing pause; the others serve on. Each says every second that its event loop turns: one that has gone silent hangs,
and is killed.

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
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import click
import structlog

from cloud_pool.config import PoolConfig
from tidegate import clock
from tidegate.config import ConfigError, load
from tidegate.runtime import events
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.ports import try_listen
from tidegate.runtime.process import StartError
from tidegate.runtime.process_silence import LOOK_S, ProcessSilence
from tidegate.runtime.spawned_process import PipedProcess, spawn_piped
from tidegate.servers.address import format_address
from tidegate.workers.exit_status import describe_exit

KILL_AFTER_S: Final = 5.0  # beyond its drain
STEADY_S: Final = 60.0  # one that served so long begins with short pauses again
MOST_LINE_BYTES: Final = 2**20  # of one event
log = structlog.get_logger(__name__)


def server_config(config: PoolConfig, number: int) -> PoolConfig:
    """The configuration of one of the servers: a name and ports of its own, and its part of what all share.

    The memory limit is divided where it is known (`MemoryLimit.sharing`). `threads` is of one computation, of which
    each worker has one at a time: a number holds for each, and what is not given is divided. vLLM's server of each is
    given its part of a GPU, which has to be free when it starts.
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
    held_bytes = max(2**16, config.limits.max_held_bytes // servers)
    own["limits"] = config.limits.model_copy(update={"max_held_bytes": held_bytes})
    own["vllm"] = config.vllm.model_copy(update={"gpu_memory_ratio": config.vllm.gpu_memory_ratio / servers})
    if config.state_dir is not None:
        own["state_dir"] = config.state_dir / f"{config.name}-{number}"
    return config.model_copy(update=own)


def handed_config() -> PoolConfig:
    """The configuration that the parent of several servers hands one of them on stdin: file and environment may have
    changed since the parent began, and a server that is started again must be as the others.

    Raises:
        ConfigError: it does not fit, or nothing was handed.
    """
    try:
        keys: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    except ValueError as error:
        raise ConfigError("one of several servers is started by their parent only: use `servers`") from error
    return load(PoolConfig, **keys)


class PoolServer:
    """One place among the servers: `start` its process, then `keep` it filled."""

    def __init__(self, config: PoolConfig) -> None:
        """Args: config: this server's own."""
        self.name = config.name
        self.ready: dict[str, Any] = {}
        self._config = config
        self._backoff = Backoff(random.random, base_s=0.5, cap_s=30.0)
        self._process: PipedProcess | None = None
        self._began_at = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Return when it serves. Raises StartError: it could not be started, or ended before."""
        self.ready, self._process, self._began_at = {}, None, clock.now()
        try:
            self._process = await self._spawn()
        except OSError as error:
            raise StartError(f"{self.name}: could not be started: {error}") from error
        await self._hand(self._process)
        try:
            await self._serves(self._process)
        except StartError:
            self._process.kill()  # where it runs still: whether it serves would never be known
            await self._ended()
            raise

    async def keep(self) -> None:
        """Start it again whenever it has ended, for ever."""
        while True:
            how = await self._ended()
            delay_s = self._backoff.next_delay_after_s(clock.now() - self._began_at, STEADY_S)
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
        process.close()

    async def _spawn(self) -> PipedProcess:
        command = [sys.executable, "-P", "-m", "cloud_pool", "--one-of-servers"]
        return await spawn_piped(
            [*command, "--die-with-parent", str(os.getpid())],
            line_bytes=MOST_LINE_BYTES,
            new_session=True,  # a Ctrl-C in a terminal reaches the parent, which ends all in order
        )

    async def _serves(self, process: PipedProcess) -> None:
        reason = ""
        while not self.ready:
            event = await self._event(process)
            if event is None:
                await process.wait()
                raise StartError(f"{self.name}: {reason or self._how(process)}")
            match event.get("event"):
                case "ready":
                    self.ready = event
                case "failed":
                    reason = str(event.get("reason", ""))
                case "progress":
                    events.emit("progress", what=f"{self.name}: {event.get('what', '')}")

    async def _ended(self) -> str:
        """Wait for the end of its process, and say how it ended."""
        process = self._process
        if process is None:
            return "could not be started"
        silence = ProcessSilence(process.pid)
        with suppress(OSError):
            while await self._speaks(process, silence):
                pass
        await process.wait()
        process.close()
        return self._how(process) + silence.ended_for

    async def _speaks(self, process: PipedProcess, silence: ProcessSilence) -> bool:
        """Read what it says, for a look's time: that it says something is all that matters of it. False at its end."""
        try:
            async with asyncio.timeout(LOOK_S):
                said = await process.stdout.read(MOST_LINE_BYTES)
        except TimeoutError:
            if silence.is_hung():
                by = silence.end_by()
                log.error("a server of this pool hangs, and is killed", server=self.name, pid=process.pid, by=by.name)
                process.send_signal(by)
            return True
        silence.spoken()
        return bool(said)

    async def _hand(self, process: PipedProcess) -> None:
        with suppress(OSError):  # it has ended, which the reader of its events tells
            await process.write(json.dumps(self._config.model_dump(mode="json", exclude_unset=True)).encode())
        process.write_eof()

    async def _event(self, process: PipedProcess) -> dict[str, Any] | None:
        """Its next event; None at its end. Raises StartError: what it says cannot be read, and "ready" may be in it."""
        try:
            line = await process.stdout.readline()
        except (OSError, ValueError) as error:  # ValueError: a line over MOST_LINE_BYTES
            raise StartError(f"{self.name}: what it says on stdout cannot be read: {error}") from error
        if not line:
            return None
        try:
            event = json.loads(line)
        except ValueError:
            return {}
        return event if isinstance(event, dict) else {}

    @staticmethod
    def _how(process: PipedProcess) -> str:
        if process.returncode is None:
            return "runs"
        return describe_exit(process.returncode, exited="ended with exit code", killed="was ended by")

    def __repr__(self) -> str:
        return f"<PoolServer {self.name} {self.pid}>"


def check_servers(config: PoolConfig) -> None:
    """Raise StartError where the keys do not go with several servers."""
    if problems := config.conflicts():
        raise StartError("\n".join(problems))


def check_ports(config: PoolConfig) -> None:
    """Raise StartError where a port of one of the servers cannot be listened on, before any of them starts."""
    for key, first in (("grpc_port", config.grpc_port), ("metrics_port", config.metrics_port)):
        for number in range(config.servers if first else 0):
            assert first is not None
            try:
                try_listen(config.host, first + number)
            except (OSError, UnicodeError) as error:
                reason = (error.strerror if isinstance(error, OSError) else None) or error
                raise StartError(
                    f"key {key!r} = {first}: {config.name}-{number} cannot listen on "
                    f"{format_address(config.host, first + number)} ({reason}); {config.servers} free ports from it on "
                    f"are needed: `ss -ltnp 'sport = :{first + number}'` shows who has this one"
                ) from error


async def serve_several(config: PoolConfig, *, alone: bool = False) -> None:
    """Run all servers until cancelled; ready when each serves.

    Args:
        alone: no parent reads the events, so words on stderr say which servers there are.

    Raises:
        StartError: one of them cannot start.
    """
    check_servers(config)
    check_ports(config)
    servers = [PoolServer(server_config(config, number)) for number in range(config.servers)]
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

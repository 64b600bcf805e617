"""The supervisor is the parent of a gateway in several processes, which it starts, restarts, and ends in order.

    start     ports are bound → keeper and workers, side by side → all serve → ready
    silence   one that hangs, serving or in its start, is killed
    death     another worker accepts what connects to the dead one's sockets, until its successor serves
    in turn   worker by worker: the successor serves → the predecessor leaves → the next; then the keeper
    end       workers drain, all at once → the keeper, by which they reach devices until then

It serves nothing itself, so nothing that callers send can end it. It holds the sockets (`handed_sockets.py`), and
gRPC's port by a socket that is bound and never listens: gRPC opens its own in each worker, since it takes none from
others. A worker's successor overlaps it; the keeper's cannot, because what it holds exists once, so operators and
dialled-in devices wait for its start while callers do not.

A process that ends by itself is started again after a wait with full jitter, from none up to RESTART_CAP_S, begun anew
once one has lived STEADY_S. One that the system would not start has ended at once. Before all have served for the first
time an end is the gateway's: what is wrong then, a restart will not mend. A successor that cannot start (a broken
configuration) ends the restarts: what served goes on.
"""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Self

import structlog

from gateway.config.gateway import GatewayConfig
from gateway.workers.gateway_process import KILL_AFTER_S, GatewayProcess
from gateway.workers.messages import (
    AcceptFor,
    AcceptNoMoreFor,
    FromProcess,
    Member,
    Members,
    PartAssignment,
    ProcessRole,
    RestartAll,
    Tell,
    Told,
)
from gateway.workers.process_part import member_name
from tidegate import clock
from tidegate.config import ConfigError, load
from tidegate.runtime import events
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.process import StartError
from tidegate.runtime.process_silence import LOOK_S
from tidegate.servers.address import cannot_listen, check_free
from tidegate.servers.handed_sockets import bind_sets
from tidegate.storage.scratch_folder import ScratchFolder

KEEPER: Final = 0
HELD: Final = ("workers", "host", "http_port", "grpc_port", "drain_s")  # keys of which the parent has its own copy
STARTS_WITHIN_S: Final = 120.0
LEAVES_WITHIN_S: Final = 25.0  # a worker with a successor waits so long for its connections to end with an answer
RESTART_BASE_S: Final = 0.25
RESTART_CAP_S: Final = 30.0
STEADY_S: Final = 60.0
log = structlog.get_logger(__name__)


class CannotReplace(Exception):
    """A successor did not serve; the message says why."""


class _ProcessSlot:
    """One of the gateway's processes through all its lives."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.current: GatewayProcess | None = None
        self.starting: GatewayProcess | None = None  # the successor of one that serves
        self.leaving: set[GatewayProcess] = set()
        self.ended = 0
        self.why = ""
        self.stand_in: GatewayProcess | None = None  # it accepts for this one
        self.backoff = Backoff(random.random, RESTART_BASE_S, RESTART_CAP_S)
        self.begun = False  # it has served

    @property
    def serves(self) -> bool:
        return self.current is not None and self.current.state == "ready"

    @property
    def processes(self) -> list[GatewayProcess]:
        return [one for one in (self.current, self.starting, *self.leaving) if one is not None]

    def member(self, now: float) -> Member:
        one = self.current
        if one is None:
            return Member(member_name(self.number), self.role, state="down", ended=self.ended, why=self.why)
        return Member(
            one.name,
            self.role,
            pid=one.pid,
            state=one.state,
            up_s=now - one.started_at,
            ended=self.ended,
            why=self.why,
        )

    @property
    def role(self) -> ProcessRole:
        return "worker" if self.number else "keeper"

    def __repr__(self) -> str:
        return f"<_ProcessSlot {self.number} {self.current!r}>"


class GatewaySupervisor:
    """`async with` starts all processes, and ends them; `run` keeps them until it is cancelled.

    Args:
        config_path: the processes read their configuration from it anew, each at its start.
    """

    def __init__(self, config: GatewayConfig, config_path: Path | None) -> None:
        self._config = config
        self._config_path = config_path
        self._places = [_ProcessSlot(number) for number in range(config.workers + 1)]
        self._folder = Path()
        self._sets: list[list[socket.socket]] = []
        self._grpc_held: list[list[socket.socket]] = []
        self._ports = (0, 0)
        self._generation = 0
        self._keepers_ports: dict[str, int] = {}
        self._counted: dict[str, int] = {}  # ends of each process that a keeper was told of
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._restarting = asyncio.Lock()
        self._restarts_wanted = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with self._stack:
            self._bind()
            scratch = ScratchFolder.make("tidegate-gw-")  # sockets lie there, whose paths may have some hundred bytes
            self._stack.callback(scratch.remove)
            self._folder = scratch.files
            self._stack.push_async_callback(self._kill_all)
            for place in self._places:
                self._spawn_task(self._keep(place), f"keeps {member_name(place.number)}")
            await self._all_serve()
            self._spawn_task(self._watch(), "watches its processes")
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._drain()
        finally:
            await self._stack.aclose()

    @property
    def addresses(self) -> dict[str, str]:
        """Of callers' and operators' ports, by name."""
        found: dict[str, str] = {}
        for place in self._places:
            if place.current is not None and place.current.serving is not None:
                found |= place.current.serving.addresses
        order = ("link", "grpc", "http", "metrics", "admin", "artifacts")
        return {name: found[name] for name in order if name in found}

    @property
    def models(self) -> list[str]:
        served = [place.current.serving.models for place in self._places if place.current and place.current.serving]
        return served[0] if served else []

    def members(self) -> list[Member]:
        now = clock.now()
        return [place.member(now) for place in self._places]

    def restart_soon(self) -> None:
        """Restart all in turn; where that is under way already, once more when it is done."""
        if self._stopping or self._restarts_wanted >= 2:
            return
        self._restarts_wanted += 1
        self._spawn_task(self._restart_logged(), "restarts in turn")

    async def restart_in_turn(self) -> None:
        """Replace each process by one that has read the configuration anew.

        Raises:
            CannotReplace: a successor did not serve; those after it were left as they are.
        """
        async with self._restarting:
            self._read_configuration()
            for place in (*self._places[1:], self._places[KEEPER]):
                if not self._stopping:
                    await self._replace(place)

    def _read_configuration(self) -> None:
        """See that the processes can read their configuration, and which of its keys a restart in turn leaves as it is.

        Raises:
            CannotReplace: they could not.
        """
        try:
            config = load(GatewayConfig, self._config_path)
        except ConfigError as error:
            raise CannotReplace(str(error)) from error
        held = [key for key in HELD if getattr(config, key) != getattr(self._config, key)]
        if held:
            log.warning("some keys change only when the gateway is started anew", keys=", ".join(held))

    # starting

    def _bind(self) -> None:
        config = self._config
        for port, key in ((config.http_port, "http_port"), (config.grpc_port, "grpc_port")):
            check_free(config.host, port, key)
        try:
            self._sets, http_port = bind_sets(config.host, config.http_port, config.workers)
            self._stack.callback(_close, self._sets)
        except OSError as error:
            raise cannot_listen(config.host, config.http_port, "http_port", error) from error
        try:
            self._grpc_held, grpc_port = bind_sets(config.host, config.grpc_port, 1)
            self._stack.callback(_close, self._grpc_held)
        except OSError as error:
            raise cannot_listen(config.host, config.grpc_port, "grpc_port", error) from error
        self._ports = http_port, grpc_port

    def _spawn_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a gateway's parent has crashed in part", task=task.get_name(), exc_info=task.exception())

    async def _all_serve(self) -> None:
        """Raises StartError: one of them does not."""
        give_up_at = clock.now() + STARTS_WITHIN_S
        while not all(place.serves for place in self._places):
            for place in self._places:
                if place.why:
                    raise StartError(place.why)
            if clock.now() >= give_up_at:
                late = ", ".join(member_name(one.number) for one in self._places if not one.serves)
                raise StartError(f"{late}: not serving after {STARTS_WITHIN_S:g} s")
            await clock.sleep(0.02)
        keeper = self._places[KEEPER].current
        assert keeper is not None and keeper.serving is not None
        self._keepers_ports = {name: int(at.rpartition(":")[2]) for name, at in keeper.serving.addresses.items()}
        for place in self._places:
            place.begun = True

    def _process(self, place: _ProcessSlot) -> GatewayProcess:
        self._generation += 1
        http_port, grpc_port = self._ports
        part = PartAssignment(
            role=place.role,
            number=place.number,
            workers=self._config.workers,
            sockets=[[one.fileno() for one in held] for held in self._sets] if place.number else [],
            http_port=http_port,
            grpc_port=grpc_port,
            folder=str(self._folder),
            generation=self._generation,
            ports={} if place.number else self._keepers_ports,
            counted={} if place.number else self._counted,
        )
        return GatewayProcess(part, self._config_path, self._heard, self._changed)

    # keeping

    async def _keep(self, place: _ProcessSlot) -> None:
        """Keep one place filled until the gateway stops."""
        while not self._stopping:
            process = self._process(place)
            place.current = process
            await process.start()
            await process.settled.wait()
            self._settle_sockets()
            await process.over.wait()
            while place.current is not process:  # it was replaced, maybe more than once
                process = place.current
                await process.over.wait()
            if self._stopping:
                return
            await self._bury(place, process)

    async def _bury(self, place: _ProcessSlot, process: GatewayProcess) -> None:
        why, place.current = process.how, None
        await process.aclose()
        place.why = process.why_not or f"{member_name(place.number)} {why}"
        self._settle_sockets()
        self._changed()
        if not place.begun:
            await asyncio.Event().wait()  # the start fails, and ends this
        if process.was_told_to_end:
            return
        place.ended += 1
        delay_s = place.backoff.next_delay_after_s(clock.now() - process.started_at, STEADY_S)
        log.error("a process of this gateway ended", process=process.name, how=why, again_in_s=round(delay_s, 2))
        events.emit("worker_ended", name=process.name, how=why)
        await clock.sleep(delay_s)

    async def _watch(self) -> None:
        """Kill what is silent: one that serves, or whose start takes for ever. The rest is a death like any other."""
        while not self._stopping:
            await clock.sleep(LOOK_S)
            now = clock.now()
            for process in [one for place in self._places for one in place.processes]:
                if process.is_hung() or process.starts_for_s(now) > STARTS_WITHIN_S:
                    process.kill_hung()

    async def _replace(self, place: _ProcessSlot) -> None:
        before = place.current
        if before is None or not place.serves:
            return  # it is being started anyway, with the configuration of now
        if place.number == KEEPER:
            before.terminate()  # `_keep` starts the next; what it holds exists once
            await before.gone(self._config.drain_s + KILL_AFTER_S)
            await self._serves_again(place, before)
            return
        place.starting = after = self._process(place)
        try:
            await after.start()
            async with asyncio.timeout(STARTS_WITHIN_S):
                await after.settled.wait()
        except TimeoutError:
            after.why_not = f"not serving after {STARTS_WITHIN_S:g} s"
        finally:
            place.starting = None
        if after.state != "ready":
            await after.aclose()
            raise CannotReplace(f"{after.name}: its successor {after.why_not or after.how}")
        if place.current is not before:  # that one ended meanwhile, and `_keep` has started another
            after.terminate()
            place.leaving.add(after)
            self._spawn_task(self._see_off(place, after), f"sees off {after.name}")
            return
        place.leaving.add(before)
        place.current = after
        before.leave()
        self._changed()
        self._spawn_task(self._see_off(place, before), f"sees off {before.name}")
        await self._left(before)
        log.info("a process was replaced", process=after.name, pid=after.pid, before=before.pid)

    async def _left(self, process: GatewayProcess) -> None:
        """Wait for the end of one with a successor; one with long answers under way is not waited for."""
        try:
            async with asyncio.timeout(LEAVES_WITHIN_S + KILL_AFTER_S):
                await process.over.wait()
        except TimeoutError:
            pass

    async def _see_off(self, place: _ProcessSlot, process: GatewayProcess) -> None:
        await process.gone(LEAVES_WITHIN_S + self._config.drain_s + KILL_AFTER_S)
        place.leaving.discard(process)
        await process.aclose()

    async def _serves_again(self, place: _ProcessSlot, before: GatewayProcess) -> None:
        try:
            async with asyncio.timeout(STARTS_WITHIN_S):
                while not place.serves or place.current is before:
                    await clock.sleep(0.05)
        except TimeoutError:
            raise CannotReplace(f"{member_name(place.number)}: {place.why}") from None

    async def _restart_logged(self) -> None:
        try:
            await self.restart_in_turn()
            log.info("all processes were restarted in turn", **{one.name: one.pid for one in self.members()})
            events.emit("restarted", workers={one.name: one.pid for one in self.members()})
        except CannotReplace as error:
            log.error("the restart in turn was given up: what served goes on", reason=str(error))
            events.emit("restart_failed", reason=str(error))
        finally:
            self._restarts_wanted -= 1

    def _settle_sockets(self) -> None:
        """Give the sockets of each worker that is down to one that serves, and take them back from stand-ins."""
        workers = self._places[1:]
        for place in workers:
            stand_in = place.stand_in
            if stand_in is not None and (place.serves or stand_in.state != "ready"):
                stand_in.send(AcceptNoMoreFor(place.number))
                place.stand_in = None
        for place in workers:
            if place.serves or place.stand_in is not None or not place.begun:
                continue
            able = [one.current for one in workers if one.current is not None and one.serves]
            if able:
                stands = [other.stand_in for other in workers]
                place.stand_in = min(able, key=stands.count)
                place.stand_in.send(AcceptFor(place.number))

    # messages

    def _heard(self, sender: GatewayProcess, message: FromProcess) -> None:
        match message:
            case Tell(to, kind, payload):
                told = Told(sender.name, kind, payload)
                for process in self._audience(sender, to):
                    process.send(told)
            case RestartAll():
                log.info("an operator asks for a restart in turn")
                self.restart_soon()
            case _:
                log.error("a process says what it should not", process=sender.name, message=type(message).__name__)

    def _audience(self, sender: GatewayProcess, to: str) -> list[GatewayProcess]:
        places: Sequence[_ProcessSlot] = self._places
        if to == "keeper":
            places = self._places[:1]
        elif to == "workers":
            places = self._places[1:]
        return [one for place in places for one in place.processes if one is not sender]

    def _changed(self) -> None:
        self._settle_sockets()
        told = Members(self.members())
        for place in self._places:
            for process in place.processes:
                process.send(told)
        if self._places[KEEPER].processes:
            self._counted = {one.name: one.ended for one in told.members if one.ended}

    # ending

    async def _drain(self) -> None:
        """Workers first: what they have under way may be at devices that are reached by way of the keeper."""
        self._stopping = True
        within_s = self._config.drain_s + KILL_AFTER_S
        for places in (self._places[1:], self._places[:1]):
            processes = [one for place in places for one in place.processes]
            for process in processes:
                process.terminate()
            await asyncio.gather(*(process.gone(within_s) for process in processes))

    async def _kill_all(self) -> None:
        self._stopping = True
        await cancel_and_wait(*self._tasks)
        for place in self._places:
            for process in place.processes:
                await process.aclose()

    def __repr__(self) -> str:
        return f"<GatewaySupervisor {self._places!r}>"


def _close(sets: Sequence[Sequence[socket.socket]]) -> None:
    for one in {id(one): one for held in sets for one in held}.values():
        one.close()


async def supervise(config: GatewayConfig, config_path: Path | None) -> None:
    """Run a gateway of several processes until cancelled; SIGHUP restarts them in turn."""
    async with GatewaySupervisor(config, config_path) as supervisor:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, supervisor.restart_soon)
        workers = {one.name: one.pid for one in supervisor.members()}
        addresses = supervisor.addresses
        log.info("serving in several processes", **workers)
        events.emit(
            "ready", role="gateway", name=config.name, addresses=addresses, models=supervisor.models, workers=workers
        )
        try:
            await asyncio.Event().wait()
        finally:
            log.info("stopping")

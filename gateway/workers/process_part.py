"""A process part is what one process of a gateway knows of its part, and how it tells the others something.

    keeper    holds what exists once: the broker's session that speaks, ingest, rollouts, `link_port` with the devices
              that ask for help there, the ports of operators and of metrics, trials. It has no port for callers
    worker    has callers' HTTP and gRPC ports together with the other workers, and nothing that must exist once

The keeper's word on what all must know (splits of versions, devices that have dialled in, log levels) is one message,
told whole each second and at each change: a worker that starts late or missed one is right within a second.

The process ends when its parent does: the channel breaks, and the kernel sends a signal besides.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec
import structlog

from gateway.config.gateway import GatewayConfig
from gateway.core.peers.peers import PeerReport
from gateway.core.peers.siblings import Siblings
from gateway.core.versions.traffic_split import TrafficSplits
from gateway.fleet_sync.gateway_report import decode_report, encode_report
from gateway.workers.channel import ProcessChannel
from gateway.workers.messages import (
    AcceptFor,
    AcceptNoMoreFor,
    Audience,
    CannotStart,
    FromParent,
    Leave,
    Member,
    Members,
    PartAssignment,
    RestartAll,
    Serving,
    Tell,
    Told,
)
from tidegate import clock
from tidegate.fleet.messages import BadMessage
from tidegate.models.manifest import Manifest
from tidegate.runtime.logs import Level
from tidegate.runtime.owned_task import OwnedTask
from tidegate.runtime.process_silence import SPEAKS_EVERY_S
from tidegate.servers.handed_sockets import HandedSockets

REPORT: Final = "report"
SAID_EVERY_S: Final = SPEAKS_EVERY_S
log = structlog.get_logger(__name__)
SaidT = TypeVar("SaidT", bound=msgspec.Struct)


class KeeperWord(msgspec.Struct, frozen=True):
    """What the keeper has all workers know. `dialled`: round trip by target id, -1 while it is not known."""

    splits: TrafficSplits = TrafficSplits()
    dialled: dict[str, float] = {}
    level: Level = "info"
    levels: dict[str, Level] = {}


class ShippedManifest(msgspec.Struct, frozen=True):
    """A version that devices have or may come to have, of which the keeper has all workers know."""

    manifest: Manifest


class WorkerWord(msgspec.Struct, frozen=True):
    """What a worker tells the keeper each second."""

    admin: str  # the path of its socket for operators' questions
    in_flight: int
    limit: float
    overloaded: bool
    shed: int
    connections: int
    answered: int
    by_target: dict[str, int] = {}  # requests in flight


class ProcessPart:
    """`async with` listens to the parent.

    Args:
        part: the parent's first message.
        channel: to the parent.
    """

    def __init__(self, part: PartAssignment, channel: ProcessChannel[FromParent]) -> None:
        self.part = part
        self.siblings = Siblings()
        self.members: list[Member] = []
        self.members_at = clock.now()  # when the parent said so
        self.handed = HandedSockets(part.sockets)
        self.leaving = asyncio.Event()
        self._channel = channel
        self._hearers: dict[str, Callable[[str, bytes], None]] = {REPORT: self._hear_report}
        self._on_members: list[Callable[[], None]] = []
        self._listening = OwnedTask(self._listen, name="parent's messages")

    @classmethod
    async def received(cls, fd: int) -> ProcessPart:
        """The part that the parent gives by an inherited socket."""
        channel: ProcessChannel[FromParent] = await ProcessChannel.open(socket.socket(fileno=fd), FromParent)
        async for message in channel.messages():
            assert isinstance(message, PartAssignment), message
            return cls(message, channel)
        raise ConnectionError("the parent of this process is gone")

    async def __aenter__(self) -> Self:
        self._listening.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listening.aclose()
        await self._channel.flush()
        await self._channel.aclose()

    @property
    def is_keeper(self) -> bool:
        return self.part.role == "keeper"

    @property
    def name(self) -> str:
        return member_name(self.part.number)

    @property
    def folder(self) -> Path:
        """Where the processes of this gateway meet: sockets, and shared counts. Only this account can enter it."""
        return Path(self.part.folder)

    @property
    def admin_path(self) -> Path:
        """A worker's socket for operators' questions, which come by way of the keeper."""
        return self.folder / f"{self.name}-{self.part.generation}.sock"

    @property
    def dial_in_path(self) -> Path:
        """The keeper's socket for streams to devices that have dialled in."""
        return self.folder / "dial-in.sock"

    @property
    def broker_path(self) -> Path:
        """The keeper's socket for what it hears from the broker."""
        return self.folder / "broker.sock"

    def config_of(self, config: GatewayConfig) -> GatewayConfig:
        """The configuration of this process: without what is another's, and with a part of what is divided."""
        changes: dict[str, object] = {"metrics_dir": config.metrics_dir or self.folder / "metrics"}
        for name in ("admin", "metrics", "link"):  # a free one was asked for: it stays what it was
            if getattr(config, f"{name}_port") == 0 and name in self.part.ports:
                changes[f"{name}_port"] = self.part.ports[name]
        if not self.is_keeper:
            one = dict.fromkeys(("ingest", "artifacts", "link_port", "link_advertise", "help", "trials_file"))
            held = max(1, config.limits.max_held_bytes // self.part.workers)
            changes |= {
                **one,
                "max_in_flight": -(-config.max_in_flight // self.part.workers),
                "limits": config.limits.model_copy(update={"max_held_bytes": held}),
            }
        return config.model_copy(update=changes)

    # to the others

    def serving(self, addresses: dict[str, str], models: list[str]) -> None:
        """Tell the parent that this process serves."""
        self._channel.send(Serving(addresses, models))

    async def cannot_start(self, reason: str) -> None:
        self._channel.send(CannotStart(reason))
        await self._channel.flush()

    def restart_all(self) -> None:
        """Have the parent restart all processes in turn."""
        self._channel.send(RestartAll())

    def tell(self, to: Audience, kind: str, said: msgspec.Struct) -> None:
        self._channel.send(Tell(to, kind, msgspec.msgpack.encode(said)))

    def tell_report(self, report: PeerReport) -> None:
        """Tell the other processes what is asked of this one."""
        self._channel.send(Tell("others", REPORT, encode_report(self.name, 1, report)))

    # from the others

    def hear(self, kind: type[SaidT], hearer: Callable[[str, SaidT], None]) -> None:
        """Call `hearer` with the name of a process and what it said, for what is of this kind."""
        decoder = msgspec.msgpack.Decoder(kind)
        self._hearers[kind.__name__] = lambda by, payload: hearer(by, decoder.decode(payload))

    def say(self, to: Audience, said: msgspec.Struct) -> None:
        """Tell it to those that `hear` its kind."""
        self.tell(to, type(said).__name__, said)

    def on_members(self, listener: Callable[[], None]) -> None:
        """Call `listener` after `members` has changed."""
        self._on_members.append(listener)

    async def _listen(self) -> None:
        async for message in self._channel.messages():
            try:
                await self._take(message)
            except Exception:
                log.exception("a message of this gateway's processes is not understood")
        log.warning("the parent of this process is gone")
        self.leaving.set()

    async def _take(self, message: FromParent) -> None:
        match message:
            case Told(by, kind, payload):
                if (hearer := self._hearers.get(kind)) is not None:
                    hearer(by, payload)
            case Members(members):
                self.members, self.members_at = members, clock.now()
                beside = [one.name for one in members if one.state == "ready" and one.name != self.name]
                self.siblings.alive(beside)
                for listener in self._on_members:
                    listener()
            case AcceptFor(number):
                await self.handed.accept(number - 1)
            case AcceptNoMoreFor(number):
                self.handed.release(number - 1)
            case Leave():
                self.leaving.set()
            case PartAssignment():
                log.error("this process has its part already")

    def _hear_report(self, by: str, payload: bytes) -> None:
        try:
            self.siblings.report(by, decode_report(payload).content, clock.now())
        except BadMessage as error:
            log.error("a report of this gateway's own is none", by=by, why=str(error))

    def __repr__(self) -> str:
        return f"<ProcessPart {self.name} of {self.part.workers} workers>"


def member_name(number: int) -> str:
    """The keeper's, for 0, or a worker's."""
    return f"worker-{number}" if number else "keeper"

"""The messages between the parent and the processes of one gateway, and between these by way of the parent.

All ends are of one installation, started by one parent, and the channel is a socket pair that no other process can
open: messages are typed and bounded, but not versioned. Bytes in `payload` are the business of sender and receiver.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

MOST_BYTES: Final = 16 * 2**20  # of one message: `asked` of a thousand quotas, ends of two thousand kinds

ProcessRole = Literal["keeper", "worker"]
MemberState = Literal["starting", "ready", "leaving", "down"]
Audience = Literal["keeper", "workers", "others"]  # "others": all but the sender


class Member(msgspec.Struct, frozen=True):
    """One process as the parent sees it; `ended` counts the ends that nobody asked for."""

    name: str
    role: ProcessRole
    pid: int = 0
    state: MemberState = "starting"
    up_s: float = 0.0
    ended: int = 0
    why: str = ""  # of its last such end


# from a process to the parent


class Serving(msgspec.Struct, tag=True, frozen=True):
    """It serves. Its addresses by name, and the models that it knows."""

    addresses: dict[str, str]
    models: list[str]


class CannotStart(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Tell(msgspec.Struct, tag=True, frozen=True):
    """To be handed to other processes of this gateway."""

    to: Audience
    kind: str
    payload: bytes


class RestartAll(msgspec.Struct, tag=True, frozen=True):
    """An operator asks the keeper to have all restarted in turn."""


# from the parent to a process


class PartAssignment(msgspec.Struct, tag=True, frozen=True):
    """The first message: which process of the gateway this is. File descriptors are those that it has inherited.

    `sockets` are the listening ones of each worker, for callers over HTTP, `accepts` the worker whose are its own.
    """

    role: ProcessRole
    number: int  # from 1; the keeper is 0
    workers: int
    sockets: list[list[int]]
    http_port: int
    grpc_port: int
    folder: str
    generation: int  # of this process's start: names in `folder` are new each time
    ports: dict[str, int] = {}  # that the keeper had before, by name: its successor answers where it did
    counted: dict[str, int] = {}  # ends of each process that the keeper before was told of, and has counted


class AcceptFor(msgspec.Struct, tag=True, frozen=True):
    """Accept what connects to another worker, which is down."""

    number: int


class AcceptNoMoreFor(msgspec.Struct, tag=True, frozen=True):
    number: int


class Leave(msgspec.Struct, tag=True, frozen=True):
    """Another process serves in its place: take no new connections, end the open ones with their next answers."""


class Members(msgspec.Struct, tag=True, frozen=True):
    """All processes of the gateway now."""

    members: list[Member]


class Told(msgspec.Struct, tag=True, frozen=True):
    """What another process has told."""

    by: str
    kind: str
    payload: bytes


FromProcess = Serving | CannotStart | Tell | RestartAll
FromParent = PartAssignment | AcceptFor | AcceptNoMoreFor | Leave | Members | Told

"""The first start of a model's replicas: one of them must come up, and the others are tried beside it.

A pool on four devices of which one is broken serves on three: the fourth is tried again and again, as after any loss of
a worker, and what is told of lost workers says so. Only what comes up nowhere is a reason not to start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

import structlog

from tidegate.runtime.owned_task import cancel_and_wait, until_one_ends
from tidegate.runtime.process import StartError

log = structlog.get_logger("supervisor")


class Startable(Protocol):
    """A place for one worker after another."""

    @property
    def name(self) -> str: ...

    @property
    def ready_once(self) -> asyncio.Event: ...

    @property
    def tried_once(self) -> asyncio.Event: ...

    async def live(self, *, must_start: bool = True) -> None: ...


S = TypeVar("S", bound=Startable)


async def start_one(replicas: Sequence[S], tasks: list[asyncio.Task[None]]) -> list[S]:
    """Try one replica after another until one is ready; returns the others.

    Args:
        tasks: the life of the one that came up is put there, and is its owner's.

    Raises:
        StartError: none came up; it is that of the first.
    """
    errors = list[StartError]()
    for replica in replicas:
        task = asyncio.create_task(replica.live(), name=f"{replica!r}")
        tasks.append(task)
        try:
            await _until_all_are(tasks, [replica.ready_once])
        except StartError as error:
            tasks.remove(task)
            errors.append(error)
        else:
            return [one for one in replicas if one is not replica]
    if errors:
        raise errors[0]
    return []


async def start_others(replicas: Sequence[Startable], tasks: list[asyncio.Task[None]]) -> None:
    """Start the rest, and wait until each has come up or has failed to for the first time."""
    tasks += [asyncio.create_task(one.live(must_start=False), name=f"{one!r}") for one in replicas]
    await _until_all_are(tasks, [one.tried_once for one in replicas])
    missing = [one.name for one in replicas if not one.ready_once.is_set()]
    if missing:
        log.warning("it is served by fewer workers than were asked for", missing=missing, workers=len(replicas) + 1)


async def _until_all_are(tasks: Sequence[asyncio.Task[None]], events: Sequence[asyncio.Event]) -> None:
    """Wait for all events, or for the end of a life: raises what it raised."""

    async def all_set() -> None:
        for event in events:
            await event.wait()

    waiting = asyncio.create_task(all_set(), name="first start")
    try:
        await until_one_ends((*tasks, waiting))
    finally:
        await cancel_and_wait(waiting)

"""Relayed links are a worker's streams to devices that have dialled the keeper: one each, kept up while it says so.

For the directory they are what `DialInServer` is in a gateway of one process: the links by target id, and a word when
one comes or goes. A link is an `AcceptedLink` as there, over a stream that this side dials (`dial_in_relay.py`). Its
round trip is the device's, as the keeper measures it: a ping on a unix socket says nothing about the way to a device.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

import grpc
import structlog

from gateway.targets.accepted_link import AcceptedLink
from gateway.workers.dial_in_relay import DEVICE_KEY
from tidegate import __version__, clock
from tidegate.link.frames import Greeting
from tidegate.link.streams import DIAL_OPTIONS, DialledStream
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.owned_task import cancel_and_wait

BACKOFF_BASE_S: Final = 0.05
BACKOFF_CAP_S: Final = 1.0
log = structlog.get_logger(__name__)


class RelayedLink(AcceptedLink):
    """A stream to a device by way of the keeper."""

    def measured(self, rtt_s: float) -> None:
        """The way to the keeper is not the way to the device."""

    def told_rtt(self, rtt_s: float) -> None:
        """The keeper's round trip to the device."""
        if rtt_s >= 0.0:
            super().measured(rtt_s)


class RelayedLinks:
    """`links` has the streams that may be used, by target id; `async with` keeps up those that `dialled` names.

    `on_in` is called with a stream that stands, `on_left` when it has ended.

    Args:
        path: the keeper's socket.
    """

    def __init__(self, path: Path, *, gateway_name: str, max_message_bytes: int) -> None:
        self.links: dict[str, AcceptedLink] = {}
        self.on_in: Callable[[AcceptedLink], None] = lambda _link: None
        self.on_left: Callable[[AcceptedLink], None] = lambda _link: None
        self._path = path
        self._greeting = Greeting(f"gateway/{gateway_name}", 0, __version__)
        self._max_message_bytes = max_message_bytes
        self._wanted: Mapping[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks, self._tasks = tuple(self._tasks.values()), {}
        await cancel_and_wait(*tasks)

    def dialled(self, rtt_s: Mapping[str, float]) -> None:
        """The devices that have dialled the keeper now, with their round trips; negative where that is not known."""
        self._wanted = rtt_s
        for target_id in rtt_s.keys() - self._tasks.keys():
            self._tasks[target_id] = asyncio.create_task(self._keep_up(target_id), name=f"relayed {target_id}")
        for target_id, rtt in rtt_s.items():
            link = self.links.get(target_id)
            if isinstance(link, RelayedLink):
                link.told_rtt(rtt)

    async def _keep_up(self, target_id: str) -> None:
        backoff = Backoff(random.random, BACKOFF_BASE_S, BACKOFF_CAP_S)
        try:
            while target_id in self._wanted:
                if await self._exchange(target_id):
                    backoff.reset()
                await clock.sleep(backoff.next_delay_s())
        finally:
            if self._tasks.get(target_id) is asyncio.current_task():
                del self._tasks[target_id]

    async def _exchange(self, target_id: str) -> bool:
        """Dial once and run the stream to its end; whether it stood."""
        channel = grpc.aio.insecure_channel(f"unix:{self._path}", options=DIAL_OPTIONS)
        stream = DialledStream(channel, ((DEVICE_KEY, target_id),))
        link = RelayedLink(
            stream,
            self._greeting,
            peer="the keeper",
            welcome=self._welcome,
            proven=target_id,
            max_message_bytes=self._max_message_bytes,
        )
        try:
            await link.run()
        except Exception:
            log.exception("a stream by way of the keeper failed", target=target_id)
        finally:
            stood = self.links.get(target_id) is link
            if stood:
                del self.links[target_id]
                self.on_left(link)
            stream.close()
            await channel.close(None)
        return stood

    def _welcome(self, link: AcceptedLink, greeting: Greeting) -> str:
        if greeting.name != link.proven:
            return f"the keeper answers as {greeting.name}"
        self.links[greeting.name] = link
        self.on_in(link)
        if isinstance(link, RelayedLink):
            link.told_rtt(self._wanted.get(greeting.name, -1.0))
        return ""

    def __repr__(self) -> str:
        return f"<RelayedLinks {len(self.links)} of {len(self._wanted)}>"

"""The forwarder sends the store's entries to a gateway at the pace of `core/drain.py`, and deletes accepted ones.

    session + a gateway that takes entries → train → receipts → deleted here → pause → train …

One gateway at a time: the last one used, while it is present, since only it knows what it has received; else the first
by name. A gateway that shares what it takes with others is asked about theirs too. "Present" means that the broker
reports it in this session or that it was heard since.

Receipts are processed in order, and are on the disk before the drain pacer learns of them. Answers to deferred requests
come in receipts too. Accepted requests without an answer are queried, at once when a session begins and then every
ASK_S: an answer that was sent while this device was away is not sent again by itself.

Every failure here is logged and tried again; the store keeps its entries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, Self

import structlog

from edge_agent.core.drain import DrainPacer
from edge_agent.offline.queue_db import SWEEP_ROWS, OutgoingEntry, StoredItem
from edge_agent.offline.store import OfflineStore
from tidegate import clock
from tidegate.fleet.messages import GatewayState
from tidegate.fleet.stored import MAX_IDS, Forwarded, Inquiry, Receipt, encode_stored
from tidegate.fleet.topics import StoredTopic
from tidegate.runtime.owned_task import OwnedTask
from tidegate.storage.database import DatabaseUnavailable

ASK_S: Final = 20.0
SWEEP_S: Final = 60.0
SWEEP_ON_S: Final = 0.1  # while a sweep leaves some: what is over hides what is behind it, and takes its room
THERE_S: Final = 20.0  # four of a gateway's heartbeats
NO_ROOM_S: Final = 0.5  # while the session has no room
RETRY_S: Final = 5.0  # after a defect or a disk that fails
MAX_RECEIPTS: Final = 256

log = structlog.get_logger(__name__)


class Uplink(Protocol):
    """The part of `EdgeSync` that is needed here."""

    def send_stored(self, kind: StoredTopic, gateway: str, payload: bytes) -> bool: ...


class Forwarder:
    """Called by `OfflineService` with what the sync receives; one task inside `async with`.

    Args:
        live: whether requests are being answered now.
        uplink: what sends to a gateway; None while there is nothing.
    """

    def __init__(
        self,
        store: OfflineStore,
        device: str,
        *,
        live: Callable[[], bool],
        uplink: Callable[[], Uplink | None],
        drain: DrainPacer | None = None,
    ) -> None:
        self.drain = drain or DrainPacer()
        self.gateway = ""  # the gateway that entries go to; "" while there is none
        self._store = store
        self._device = device
        self._live = live
        self._uplink = uplink
        self._session = False
        self._begun = False  # whether the drain pacer has begun this session
        self._sharing: set[str] = set()  # those of them that know what others took
        self._there: dict[str, float] = {}  # gateways that take entries → when each was heard in this session
        self._receipts: deque[Receipt] = deque(maxlen=MAX_RECEIPTS)
        self._news = asyncio.Event()
        self._ask_at = 0.0
        self._sweep_at = 0.0
        self._task = OwnedTask(self._run, name="forwarder")

    async def __aenter__(self) -> Self:
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    # called from the sync

    def session(self, *, up: bool) -> None:
        self._session = up
        self._there.clear()
        self._sharing.clear()
        self._begun = False
        self._news.set()

    def heard(self, state: GatewayState) -> None:
        now = clock.now()
        if state.online and state.ingest:
            self._there[state.gateway] = now
            (self._sharing.add if state.shares else self._sharing.discard)(state.gateway)
        else:
            self._there.pop(state.gateway, None)
        if (state.gateway == self.gateway) != (state.gateway in self._there):
            self._news.set()

    def receipt(self, receipt: Receipt) -> None:
        if len(self._receipts) == MAX_RECEIPTS:
            log.warning("receipts come faster than the disk takes them; the oldest is asked for again")
        self._receipts.append(receipt)
        self._news.set()

    def stored(self) -> None:
        """Note that there is a new entry to send."""
        self._news.set()

    # the task

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._turn()
                until = self._next_wake()
            except DatabaseUnavailable:
                until = clock.now() + RETRY_S  # the store has said so
            except Exception:
                log.exception("forwarding has a defect; what is stored stays stored")
                until = clock.now() + RETRY_S
            try:
                async with asyncio.timeout(max(0.0, until - clock.now())):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _turn(self) -> None:
        while self._receipts:
            await self._settle(self._receipts.popleft())
        self._follow(clock.now())
        if clock.now() >= self._sweep_at:
            self._sweep_at = clock.now() + SWEEP_S
            if await self._store.sweep() >= SWEEP_ROWS:
                self._sweep_at = clock.now() + SWEEP_ON_S
        if self.gateway:
            await self._ask()
            await self._send()

    def _next_wake(self) -> float:
        wake = self.drain.next_wake(clock.now())
        times = [self._sweep_at, self._ask_at if self.gateway else self._sweep_at]
        return min(times if wake is None else [*times, wake])

    def _follow(self, now: float) -> None:
        """Begin with a gateway that is there, end with one that is not."""
        there = {name for name, at in self._there.items() if now - at <= THERE_S} if self._session else set()
        if self._begun and self.gateway in there:
            return
        self.drain.end()  # entries under way in a session that ended are sent again
        if self.gateway not in there:
            self.gateway = min(there, default="")
        self._begun = bool(self.gateway)
        if self.gateway:
            self.drain.begin(now)
            self._ask_at = now

    async def _settle(self, receipt: Receipt) -> None:
        for id in await self._store.settle(receipt):
            why = next((one.why for one in receipt.refused if one.id == id), "")
            log.warning("a dead letter: no gateway takes it", id=id, why=why, see="tidegate edge store list")
        now = clock.now()
        named = [*receipt.taken, *(one.id for one in receipt.refused), *(one.id for one in receipt.answers)]
        for one in receipt.refused:
            self.drain.refused(one.id, now)
        self.drain.settled(named, now, live=self._live())
        if receipt.busy_s > 0.0:
            self.drain.busy(receipt.busy_s, now)

    async def _ask(self) -> None:
        now, uplink = clock.now(), self._uplink()
        if now < self._ask_at or uplink is None:
            return
        self._ask_at = now + ASK_S
        ids = await self._store.unanswered(None if self.gateway in self._sharing else self.gateway, MAX_IDS)
        if ids:
            uplink.send_stored(StoredTopic.RESULT, self.gateway, encode_stored(Inquiry(self._device, tuple(ids))))

    async def _send(self) -> None:
        budget, uplink = self.drain.budget(clock.now(), live=self._live()), self._uplink()
        if budget is None or uplink is None:
            return
        without = self.drain.held_back(clock.now())
        waiting = await self._store.waiting(budget.entries, without)
        for entry in self.drain.choose(waiting, budget, clock.now()):
            kind = StoredTopic.EVENT if entry.item.kind == "event" else StoredTopic.RESULT
            if not uplink.send_stored(kind, self.gateway, encode_stored(forwarded_message(self._device, entry))):
                # No session any more, or no room beside what is live. What has left is waited for; else again soon.
                if not self.drain.under_way:
                    self.drain.busy(NO_ROOM_S, clock.now())
                return
            self.drain.sent(entry, clock.now())

    def __repr__(self) -> str:
        return f"<Forwarder to {self.gateway or 'nobody'} {self.drain!r}>"


def forwarded_message(device: str, entry: OutgoingEntry) -> Forwarded:
    """The message in which an entry is sent."""
    item: StoredItem = entry.item
    return Forwarded(
        device=device,
        id=item.id,
        kind=item.kind,
        age_ms=round(entry.age_s * 1e3),
        body=item.body,
        key=item.key,
        priority=item.priority,
        model=item.model,
        version=item.version,
        variant=item.variant,
        attempt=entry.attempts + 1,
    )

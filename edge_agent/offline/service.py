"""The offline service combines connectivity watch, store and forwarder, so that a device works without a gateway.

    ConnectivityWatch  which of the four modes, by evidence              (`connectivity_watch.py`,
                                                                         `core/connectivity.py`)
    OfflineStore       deferred requests, their answers, results, events (`store.py`, `queue_db.py`)
    Forwarder          sends them to a gateway when there is one         (`forwarder.py`, `core/drain.py`)

It is entered before the servers listen and left after they are closed, so that a request that is under way at the end
can still be kept. No answer depends on it: without a broker, a network or a disk the models answer all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import structlog

from edge_agent.config import EdgeConfig, StoreConfig
from edge_agent.core.connectivity import ModeChange
from edge_agent.offline.connectivity_watch import ConnectivityWatch
from edge_agent.offline.forwarder import Forwarder, Uplink
from edge_agent.offline.queue_db import StoredItem
from edge_agent.offline.store import OfflineStore
from tidegate import clock
from tidegate.fleet.conditions import Mode
from tidegate.fleet.messages import GatewayState
from tidegate.fleet.stored import Kind, Receipt
from tidegate.storage.database import DatabaseUnavailable

EVENT_PRIORITY: Final = 4
MAX_EVENTS: Final = 64  # events that wait for the disk at most

log = structlog.get_logger(__name__)


class OfflineService:
    """An `OfflinePolicy`, and the sync's `Ear`, inside `async with`.

    Args:
        session: whether there is a session with the broker.
        links: how many link streams of gateways are open.
        live: whether requests are being answered.
        uplink: what sends to a gateway; None while there is nothing.
        on_mode: called when the mode changed.
    """

    def __init__(
        self,
        config: EdgeConfig,
        *,
        session: Callable[[], bool],
        links: Callable[[], int],
        live: Callable[[], bool],
        uplink: Callable[[], Uplink | None],
        on_mode: Callable[[], None],
    ) -> None:
        self._config = config
        self._bounds = config.store
        self._on_mode = on_mode
        self.store: OfflineStore | None = None
        self.forwarder: Forwarder | None = None
        self.forwards = "none"
        self.reach = ConnectivityWatch(
            has_broker=config.mqtt is not None, session=session, links=links, on_change=self._mode_changed
        )
        if (bounds := config.store) is not None and config.mqtt is not None:
            self.forwards = bounds.forward_results
            self.store = OfflineStore(
                config.state_dir, max_bytes=bounds.max_bytes, max_rows=bounds.max_rows, on_lost=self._lost
            )
            self.forwarder = Forwarder(self.store, config.name, live=live, uplink=uplink)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        async with self._stack:
            if self.store is not None and self.forwarder is not None:
                await self._stack.enter_async_context(self.store)
                self._stack.push_async_callback(self._events_end)
                await self._stack.enter_async_context(self.forwarder)
            await self._stack.enter_async_context(self.reach)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def mode(self) -> Mode:
        return self.reach.mode

    def session(self, *, up: bool) -> None:
        if self.forwarder is not None:
            self.forwarder.session(up=up)
        self.reach.look()

    def heard(self, state: GatewayState, *, retained: bool) -> None:
        if not state.online:
            self.reach.left(state.gateway)
        elif not retained:
            self.reach.heard(state.gateway)
            if self.store is not None:
                self.store.wall.heard(state.utc_ms / 1e3, clock.utc_s(), clock.now())
        if self.forwarder is not None:
            self.forwarder.heard(state)

    def receipt(self, receipt: Receipt) -> None:
        if self.forwarder is not None:
            self.forwarder.receipt(receipt)

    @property
    def backlog(self) -> int:
        """Entries that wait to be sent to a gateway."""
        return 0 if self.store is None else self.store.backlog

    def why_not(self) -> str:
        """Why nothing can be deferred on this device; "" where it can."""
        if self._config.mqtt is None:
            return "this device has no broker (key 'mqtt'), so no gateway would ever compute it"
        return "" if self.store is not None else "this device keeps nothing (key 'store' is null)"

    def stored(self) -> None:
        if self.forwarder is not None:
            self.forwarder.stored()

    def ttl_s(self, kind: Kind) -> float:
        assert self._bounds is not None
        return self._bounds.request_ttl_s if kind == "request" else self._bounds.result_ttl_s

    def bound(self, bounds: StoreConfig) -> None:
        """Keep by these bounds from now on, but for `max_bytes`, which the file has from its start."""
        if self.store is not None:
            self._bounds, self.forwards = bounds, bounds.forward_results
            self.store.ledger.max_rows = bounds.max_rows

    def note(self, event: str, **fields: Any) -> None:
        """Keep an event for a gateway. Never waits and never fails: an event that cannot be kept is counted."""
        if self.store is None or len(self._events) >= MAX_EVENTS:
            return
        body = msgspec.json.encode({"event": event, **fields})
        item = StoredItem(self.store.new_id(), "event", body, EVENT_PRIORITY, self.ttl_s("event"), "events")
        task = asyncio.get_running_loop().create_task(self._keep(self.store, item), name=f"event {event}")
        self._events.add(task)
        task.add_done_callback(self._events.discard)

    async def state(self) -> dict[str, Any]:
        """The part of `GET /v1/state` about the offline service."""
        told: dict[str, Any] = {"mode": self.mode, "mode_for_s": round(self.reach.since_s, 1), "store": None}
        if self.store is None or self.forwarder is None:
            return told
        told["gateway"] = self.forwarder.gateway
        told["store"] = self.store.state()
        try:
            usage = await self.store.usage()
        except DatabaseUnavailable:
            return told  # which says so
        told["store"] |= msgspec.to_builtins(usage)
        return told

    async def _keep(self, store: OfflineStore, item: StoredItem) -> None:
        try:
            await store.put(item)
        except DatabaseUnavailable:
            return
        self.stored()

    async def _events_end(self) -> None:
        await asyncio.gather(*self._events, return_exceptions=True)

    def _mode_changed(self, change: ModeChange) -> None:
        self.note("mode", mode=change.mode, before=change.before, why=change.why)
        self._on_mode()

    def _lost(self, aside: Path) -> None:
        # In the store's thread, which cannot wait for itself.
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self.note("store-corrupt", moved_to=aside.name))

    def __repr__(self) -> str:
        return f"<OfflineService {self.reach!r} {self.store!r} {self.forwarder!r}>"

"""The connectivity watch evaluates about once a second what the device can reach, and reports each change of mode.

`edge_agent/core/connectivity.py` interprets the evidence. A change is one line in the log, news for the fleet (the
heartbeat carries the mode), and an event in the store, so that an absent gateway learns of it later. Requests do not
pass here, and nothing that runs is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self

import structlog

from edge_agent.core.connectivity import Connectivity, ModeChange
from tidegate import clock
from tidegate.fleet.conditions import Mode
from tidegate.runtime.owned_task import OwnedTask

LOOK_S: Final = 1.0

log = structlog.get_logger(__name__)


class ConnectivityWatch:
    """Looks inside `async with`.

    Args:
        has_broker: whether a broker is configured.
        session: whether there is a session with it now.
        links: how many link streams of gateways are open now.
        on_change: called on the loop with each change of mode.
    """

    def __init__(
        self,
        *,
        has_broker: bool,
        session: Callable[[], bool],
        links: Callable[[], int],
        on_change: Callable[[ModeChange], None] = lambda _: None,
    ) -> None:
        self._connectivity = Connectivity(has_broker=has_broker)
        self._session = session
        self._links = links
        self._on_change = on_change
        self._task = OwnedTask(self._watch, name="reach")

    async def __aenter__(self) -> Self:
        self._connectivity.since = clock.now()
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()

    @property
    def mode(self) -> Mode:
        return self._connectivity.mode

    @property
    def since_s(self) -> float:
        """Seconds since the mode was entered."""
        return clock.now() - self._connectivity.since

    def heard(self, gateway: str = "") -> None:
        """Record a request or a heartbeat of a gateway."""
        self._connectivity.heard(clock.now(), gateway)

    def left(self, gateway: str) -> None:
        """Record a gateway's goodbye."""
        self._connectivity.left(gateway)

    def look(self) -> None:
        """Evaluate the evidence now; also called at once when a session ends."""
        change = self._connectivity.look(session=self._session(), links=self._links(), now=clock.now())
        if change is None:
            return
        say = log.warning if change.is_worse else log.info
        say("mode changed", mode=change.mode, before=change.before, why=change.why)
        self._on_change(change)

    async def _watch(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                log.exception("cannot evaluate what this device reaches")  # the next look may
            await clock.sleep_until_tick(LOOK_S)

    def __repr__(self) -> str:
        return f"<ConnectivityWatch {self._connectivity!r}>"

"""The keeper's side of a gateway in several processes tells workers what all must know, and counts what they tell.

Its word (`KeeperWord`) is told whole every second, and at once when a split of versions or a device's stream changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from typing import Self

import msgspec
import structlog

from gateway.delivery.trials import TrialCounts, Trials
from gateway.operate.console.history import ConsoleHistory
from gateway.targets.accepted_link import AcceptedLink
from gateway.workers.dial_in_relay import DialInRelay
from gateway.workers.overview import WorkersOverview
from gateway.workers.process_part import SAID_EVERY_S, KeeperWord, ProcessPart, ShippedManifest
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.runtime.logs import LEVELS
from tidegate.runtime.owned_task import OwnedTask

log = structlog.get_logger(__name__)


class WorkerCounts(msgspec.Struct, frozen=True):
    """What a worker has counted of versions on trial since the last second."""

    trials: list[TrialCounts]


class KeeperSide:
    """`async with` tells and listens.

    Args:
        links: the streams that devices have dialled, by target id; None: no port for them.
        manifest_of: of a model by name and version.
        shipped: the versions that were rolled out to devices; they only become more.
    """

    def __init__(
        self,
        part: ProcessPart,
        trials: Trials,
        watch: ConsoleHistory | None,
        links: Mapping[str, AcceptedLink] | None,
        manifest_of: Callable[[str, str], Manifest],
        shipped: Callable[[], Collection[Manifest]],
        *,
        max_message_bytes: int,
    ) -> None:
        self.overview = WorkersOverview(part)
        self._part = part
        self._trials = trials
        self._watch = watch
        self._links = links
        self._shipped = shipped
        self._told: dict[tuple[str, str], Manifest] = {}  # by name and version: what workers know of those
        self._max_message_bytes = max_message_bytes
        self._relay = DialInRelay(links, manifest_of) if links is not None else None
        self._telling = OwnedTask(self._keep_telling, name="the keeper's word")
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with self._stack:
            self.overview.hear(self._watch)
            self._part.hear(WorkerCounts, lambda _by, said: self._trials.add_counts(said.trials))
            self._part.on_members(self._tell_all)
            if self._relay is not None:
                opened = self._relay.opened(self._part.dial_in_path, self._max_message_bytes)
                await self._stack.enter_async_context(opened)
            await self._stack.enter_async_context(self._telling)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def left(self, link: AcceptedLink) -> None:
        """A device's stream has ended."""
        if self._relay is not None:
            self._relay.left(link)
        self.tell()

    def tell(self) -> None:
        """Tell the workers what all must know, as it is now."""
        links = self._links or {}
        dialled = {id: -1.0 if one.rtt_s is None else one.rtt_s for id, one in links.items() if one.open}
        word = KeeperWord(self._trials.splits, dialled, LEVELS.level, dict(LEVELS.modules))
        self._part.say("workers", word)
        for manifest in self._shipped():
            of = manifest.name, manifest.version
            if self._told.get(of) is not manifest:
                self._part.say("workers", ShippedManifest(manifest))
                self._told[of] = manifest

    def _tell_all(self) -> None:
        """There may be a new worker, which knows nothing yet."""
        self._told.clear()
        self.tell()

    async def _keep_telling(self) -> None:
        while True:
            try:
                self.tell()
            except Exception:
                log.exception("workers are not told what all must know")  # a defect here must not end it for good
            await clock.sleep(SAID_EVERY_S)

    def __repr__(self) -> str:
        return f"<KeeperSide {self.overview!r}>"

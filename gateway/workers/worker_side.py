"""A worker's side of a gateway in several processes follows the keeper's word, and tells what it does each second."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self

import structlog

from gateway.delivery.trials import Trials
from gateway.operate.console.history import Ends
from gateway.workers.keeper_side import WorkerCounts
from gateway.workers.overview import WorkerEnds
from gateway.workers.process_part import SAID_EVERY_S, KeeperWord, ProcessPart, ShippedManifest, WorkerWord
from gateway.workers.relayed_links import RelayedLinks
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.runtime.logs import LEVELS, Level
from tidegate.runtime.owned_task import OwnedTask

log = structlog.get_logger(__name__)


class WorkerSide:
    """`async with` follows and tells.

    Args:
        relayed: the streams to devices by way of the keeper; None: no port for them.
        word: what the keeper is told of this worker.
        on_shipped: called with each version that the keeper says was rolled out to devices.
    """

    def __init__(
        self,
        part: ProcessPart,
        trials: Trials,
        relayed: RelayedLinks | None,
        word: Callable[[], WorkerWord],
        on_shipped: Callable[[Manifest], None],
    ) -> None:
        self._part = part
        self._trials = trials
        self._relayed = relayed
        self._word = word
        self._on_shipped = on_shipped
        self._levels = LEVELS.level, dict(LEVELS.modules)  # then: as the keeper last said
        self._telling = OwnedTask(self._keep_telling, name="a worker's word")
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with self._stack:
            if self._relayed is not None:
                await self._stack.enter_async_context(self._relayed)
            self._part.hear(KeeperWord, self._follow)
            self._part.hear(ShippedManifest, lambda _by, said: self._on_shipped(said.manifest))
            await self._stack.enter_async_context(self._telling)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def counted(self, at: float, ends: Ends) -> None:
        """Tell the keeper's console how requests ended."""
        self._part.say("keeper", WorkerEnds.of(at, ends))

    def _follow(self, _by: str, said: KeeperWord) -> None:
        self._trials.follow(said.splits)
        if self._relayed is not None:
            self._relayed.dialled(said.dialled)
        levels = said.level, said.levels
        if levels != self._levels:  # what was changed in this process alone (SIGRTMIN) stays until then
            _set_levels(said.level, said.levels)
        self._levels = levels

    async def _keep_telling(self) -> None:
        while True:
            try:
                self._part.say("keeper", self._word())
                if counts := self._trials.take_counts():
                    self._part.say("keeper", WorkerCounts(counts))
            except Exception:
                log.exception("the keeper is not told of this worker")  # a defect here must not end it for good
            await clock.sleep(SAID_EVERY_S)

    def __repr__(self) -> str:
        return f"<WorkerSide of {self._part!r}>"


def _set_levels(level: Level, modules: dict[str, Level]) -> None:
    LEVELS.set(level)
    for module in LEVELS.modules.keys() - modules.keys():
        LEVELS.clear(module)
    for module, one in modules.items():
        LEVELS.set(one, module)

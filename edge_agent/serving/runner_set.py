"""The runner set owns the runners of a device: those that answer, those that start, and those that end.

A runner is a generation of one model (`runner.py`), and the host answers with the one that is routed. This file owns
their lives, because they begin and end at different times while the agent runs: `start` a generation that nobody uses
yet, `route` to it, `stop` the one before once no call is inside it any more. `renew` does all three for a model whose
worker shall run in another way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Self

import structlog

from edge_agent.serving.catalogue import CatalogueEntry
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.runner import Runner
from tidegate.runtime.owned_task import cancel_and_wait

MakeRunner = Callable[[CatalogueEntry, int], Runner]
log = structlog.get_logger(__name__)


class RunnerSet:
    """Runners live inside `async with` at the longest.

    Args:
        make: a runner of an entry and the number of its generation.
        on_routed: called when another runner answers for a model.
        drain_s: how long calls that are inside a generation may take to end when it is stopped.
    """

    def __init__(
        self, host: EdgeHost, make: MakeRunner, *, on_routed: Callable[[], None] = lambda: None, drain_s: float = 30.0
    ) -> None:
        self._host = host
        self._make = make
        self._on_routed = on_routed
        self._drain_s = drain_s
        self._lives: dict[Runner, AsyncExitStack] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._defect: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        self._defect = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *_: object) -> None:
        for runner in list(self._lives):
            await self._end(runner)
        await cancel_and_wait(*self._watches)
        assert self._defect is not None
        if self._defect.done():
            self._defect.exception()  # the one that waited has it
        self._defect.cancel()

    async def failed(self) -> None:
        """Wait for a defect that ends the supervision of a model: raises it."""
        assert self._defect is not None, "enter it first"
        await asyncio.shield(self._defect)

    @property
    def runners(self) -> tuple[Runner, ...]:
        """All runners that live now."""
        return tuple(self._lives)

    def routed(self, model: str) -> Runner | None:
        return self._host.routed(model)

    async def start(self, entry: CatalogueEntry, generation: int = 0) -> Runner:
        """Make a runner and wait until it is ready; no call uses it yet. Raises StartError."""
        return await self.enter(self._make(entry, generation))

    async def enter(self, runner: Runner) -> Runner:
        """Wait until this runner is ready. Raises StartError."""
        stack = AsyncExitStack()
        await stack.enter_async_context(runner)
        self._lives[runner] = stack
        watch = asyncio.create_task(self._watch(runner), name=f"watch {runner.name}")
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return runner

    def route(self, runner: Runner, *, soaking: bool = False) -> None:
        self._host.route(runner, soaking=soaking)
        self._on_routed()

    def unroute(self, model: str) -> None:
        self._host.unroute(model)
        self._on_routed()

    async def renew(self, models: Iterable[str]) -> None:
        """Put another runner in the place of each model's, made as runners are made now; no request is lost.

        Raises:
            StartError: one does not come up. It is left away, and its model's runner stays.
        """
        for model in models:
            before = self.routed(model)
            if before is None:
                continue
            runner = await self.start(CatalogueEntry(before.manifest, before.loadables), before.generation)
            if self.routed(model) is before:
                self.route(runner)
                await self.stop(before)
            else:
                await self.stop(runner)  # somebody else has brought another version meanwhile

    async def park(self, runner: Runner) -> None:
        """Free the memory of a runner that stays routed: its model is away until another one is."""
        await runner.park()
        await self._end(runner)

    async def stop(self, runner: Runner) -> None:
        """End a runner that is not routed any more, once its calls have ended; at once where the wait is cancelled."""
        try:
            async with asyncio.timeout(self._drain_s):
                await self._host.emptied(runner)
        except TimeoutError:
            log.warning("calls were still inside a generation that ends", model=runner.name)
        finally:  # nothing routes to it any more, so nobody else would ever end its worker
            await self._end(runner)

    async def _end(self, runner: Runner) -> None:
        stack = self._lives.pop(runner, None)
        if stack is not None:
            await stack.aclose()

    async def _watch(self, runner: Runner) -> None:
        try:
            await runner.failed()
        except Exception as error:
            if self._defect is not None and not self._defect.done():
                self._defect.set_exception(error)

    def __repr__(self) -> str:
        return f"<RunnerSet {', '.join(map(repr, self._lives))}>"

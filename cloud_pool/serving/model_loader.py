"""The model loader of a pool starts and ends a model's workers beside those of the others (`residents.py`).

A version that comes is warm before the first request reaches it, and the one before it answers until then. A version
that goes takes no new call, answers those inside, and then ends: a gateway hears of it by the offers, and what it sends
meanwhile is refused as a model that is not here, which a gateway takes elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from cloud_pool.serving.generating_model import PoolGeneratingModel
from cloud_pool.serving.host import PoolHost
from cloud_pool.serving.on_demand import OnDemand
from cloud_pool.serving.pool_model import PoolModel
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.residents import Resident, Residents
from tidegate.models.manifest import Manifest, Where

ReadModel = Callable[[str, int], Sequence[PoolLoadable]]  # a name, and the number of the reload


class PoolModelLoader:
    """A `ModelLoader` over the residents of one pool.

    Args:
        read: the loadable variants of a model in its highest version; blocks. Raises RepositoryError and StartError.
        make: a resident of such variants.
        on_demand: which models are in memory, where there are more than it has room for; None: all.
        check_room: raises Overloaded where there is no memory for what is to be loaded.
        on_change: called after a model came or went.
    """

    def __init__(
        self,
        host: PoolHost,
        residents: Residents,
        *,
        read: ReadModel,
        make: Callable[[Sequence[PoolLoadable]], Resident],
        check_room: Callable[[Sequence[PoolLoadable]], None] = lambda _loadables: None,
        on_demand: OnDemand | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.where: Where | None = "pool"
        self._on_demand = on_demand
        self._host = host
        self._residents = residents
        self._read = read
        self._make = make
        self._check_room = check_room
        self._on_change = on_change
        self._reloads = 0

    def served(self) -> Mapping[str, Manifest]:
        return {one.manifest.name: one.manifest for one in self._host.models}

    async def load(self, name: str) -> Manifest:
        before = self._of(name)
        if before:
            self._reloads += 1
        loadables = await asyncio.to_thread(self._read, name, self._reloads if before else 0)
        fresh = self._make(loadables)
        old = self._host.models.get(name)
        if self._comes_now(fresh, before):
            self._check_room(loadables)
            await self._enter(fresh, fresh.enter)
        elif before and self._on_demand is not None:
            on_demand = self._on_demand  # only what has been in memory once takes the place of what serves
            await self._enter(fresh, lambda: on_demand.try_in(fresh))
        else:
            self._residents.add(fresh)
        model = self._model(fresh)
        if self._on_demand is not None:
            await self._on_demand.take(fresh, model)
        self._host.models.replace(model)
        self._on_change()
        await self._end(before, old)
        return model.manifest

    async def _enter(self, fresh: Resident, enter: Callable[[], Awaitable[None]]) -> None:
        self._residents.add(fresh)
        try:
            await enter()
        except BaseException:
            self._residents.discard(fresh)
            raise

    def _comes_now(self, fresh: Resident, before: Sequence[Resident]) -> bool:
        """Whether it is loaded beside all others: on demand what must stay, has room, or replaces what is in memory."""
        if self._on_demand is None or fresh.generates or fresh.manifest.warm == "always":
            return True
        return any(one.in_memory for one in before) or self._on_demand.fits(fresh)

    async def restore(self, name: str) -> bool:
        """Whatever is served here comes from the repository."""
        return False

    async def unload(self, name: str) -> None:
        leaving, model = self._of(name), self._host.models.get(name)
        self._host.models.remove(name, unloaded=True)
        if self._on_demand is not None:
            self._on_demand.drop(name)
        self._on_change()
        await self._end(leaving, model)

    def _model(self, one: Resident) -> PoolModel | PoolGeneratingModel:
        if one.generates:
            return self._host.generating_model(list(one.variants.values()))
        hold = None if self._on_demand is None else self._on_demand.hold
        return self._host.batched_model(one.loadables, one, hold, steps=one.steps)

    async def _end(self, leaving: Sequence[Resident], model: PoolModel | PoolGeneratingModel | None) -> None:
        """End what answers no more, once the calls inside have their answers."""
        if model is not None:
            await model.emptied()
            self._host.sequences.drop(model)  # what it kept, another version does not take up
        for one in leaving:
            await one.leave(f"model {one.name} was unloaded")
            self._residents.discard(one)

    def _of(self, name: str) -> list[Resident]:
        return [one for one in self._residents if one.name == name]

    def __repr__(self) -> str:
        return f"<PoolModelLoader {self._residents!r}>"

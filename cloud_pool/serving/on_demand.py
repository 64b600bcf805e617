"""Models on demand: those that are offered and not in memory come in when they are asked for, and others go out.

`cloud_pool/core/memory/residency.py` decides; this file has requests wait, ends what goes out, once its calls are
answered, and starts what comes in, one after another. What gateways hear of a model that is not in memory is its state
`evicted` and the seconds that it should take to come in, so that they place elsewhere, or here knowingly.

A version that is to replace another one comes in once before it does (`try_in`), so that a version that cannot be
loaded takes the place of none that can.

A request that waits for its model waits here, before the queue of its model instance, and at most until its deadline.
A load that fails ends the requests that wait for it as a fault of this pool; the next request tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import structlog

from cloud_pool.core.memory.device_memory import RUNTIME_BYTES
from cloud_pool.core.memory.residency import Residency
from cloud_pool.serving.generating_model import PoolGeneratingModel
from cloud_pool.serving.pool_model import PoolModel
from cloud_pool.workers.catalogue import weights_bytes
from cloud_pool.workers.residents import Resident
from tidegate import clock
from tidegate.outcome import DeadlineExceeded, OutOfMemory, Overloaded, ServeError, Unreachable
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.runtime.process import StartError

_AGAIN_S = 5.0  # until a version that had no room may be tried again: another may have been unloaded
_START_S = 1.0  # of a process and its runtime, until a load was measured
_BYTES_PER_S = 200e6  # of reading and laying out weights, until then
_REST_S = 1.0  # after a defect
log = structlog.get_logger("model control")


class _Entry:
    """A resident with the model that is served by it, and the requests that wait for it."""

    def __init__(self, resident: Resident, model: PoolModel | PoolGeneratingModel) -> None:
        self.resident = resident
        self.model = model
        self.waiting: list[asyncio.Future[None]] = []


class OnDemand:
    """At work inside `async with`.

    Args:
        places: on how many places a model is loaded at once.
        on_change: called when a model has come in or gone out.
    """

    def __init__(self, residency: Residency, *, places: int = 1, on_change: Callable[[], None] = lambda: None) -> None:
        self.residency = residency
        self._places = places
        self._on_change = on_change
        self._entries: dict[str, _Entry] = {}
        self._look_again = asyncio.Event()
        self._turn = asyncio.Lock()  # of coming in
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work(), name="models on demand")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
        for entry in self._entries.values():
            _fail(entry, Unreachable("the pool is shutting down"))

    async def take(self, resident: Resident, model: PoolModel | PoolGeneratingModel) -> None:
        """Serve a model on demand from now on, instead of one of its name.

        One that is in memory counts at once; another comes in now where there is room without any other going out.
        """
        name = resident.name
        if (before := self._entries.get(name)) is not None:
            _fail(before, Unreachable(f"{name} is replaced by another version"))
            self.residency.forget(name)
        self._entries[name] = _Entry(resident, model)
        self._know(name, resident)
        if resident.in_memory:
            self._came(name)
        self._look_again.set()

    async def try_in(self, resident: Resident) -> None:
        """Bring in a version that is to replace another one, whatever goes out for it: only then is it known to work.

        What comes in for requests waits meanwhile; the version that serves stays what it is.

        Raises:
            StartError: it cannot be loaded.
            OutOfMemory: there is no room for it, whatever goes out.
        """
        label = f"{resident.name}:{resident.manifest.version}"  # no model's name, for that is the other version's
        async with self._turn:
            self._know(label, resident)
            try:
                victims = self.residency.room_for(label, clock.now())
                if victims is None:
                    raise OutOfMemory(
                        f"there is no room for {label} beside what stays in memory", retry_after_s=_AGAIN_S
                    )
                self.residency.loading(label, clock.now())
                for victim in victims:
                    await self._put_out(victim, label)
                await resident.enter()
            finally:
                self.residency.forget(label)
                self.residency.ended()
                self._look_again.set()

    def drop(self, name: str) -> None:
        """Serve a model no longer."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            _fail(entry, Unreachable(f"model {name} was unloaded"))
            self.residency.forget(name)

    def fits(self, resident: Resident) -> bool:
        """Whether a model may come in without another going out."""
        return self.residency.fits(_expected_bytes(resident) * self._places)

    def cold_s(self, name: str) -> float:
        """Seconds until a model should be in memory if it was asked for now; 0 of one that is."""
        if name not in self.residency or self.residency[name].resident:
            return 0.0
        return self.residency.wait_s(name, clock.now())

    def hold(self, name: str, deadline: float) -> asyncio.Future[None] | None:
        """What a request waits for until its model is in memory; None where it is.

        Raises:
            DeadlineExceeded: it would not come in in time.
            Overloaded: as many wait for it as its queue holds.
        """
        now, entry = clock.now(), self._entries[name]
        found = self.residency.ask(name, deadline - now, now)
        if found.verdict == "here":
            return None
        self._look_again.set()
        if found.verdict == "elsewhere":
            raise DeadlineExceeded(
                f"model {name} is not in memory here: it would take {found.wait_s:.2g} s, "
                f"and {max(0.0, deadline - now):.2g} s of the budget are left"
            )
        entry.waiting = [one for one in entry.waiting if not one.done()]
        if len(entry.waiting) >= entry.resident.manifest.batching.max_queue_size:
            raise Overloaded(f"too many wait for model {name} to come into memory", retry_after_s=found.wait_s)
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry.waiting.append(waits)
        return waits

    async def _work(self) -> None:
        while True:
            await self._look_again.wait()
            self._look_again.clear()
            try:
                while await self._bring_next():
                    pass
            except Exception:  # a defect with one model must not keep all others out for good
                log.exception("a model cannot be brought into memory")
                await clock.sleep(_REST_S)
                self._look_again.set()

    async def _bring_next(self) -> bool:
        """Bring in the model that should come in now; False where none should."""
        async with self._turn:
            found = self.residency.next_in(clock.now())
            if found is not None:
                await self._bring(*found)
            return found is not None

    async def _bring(self, name: str, victims: tuple[str, ...]) -> None:
        entry = self._entries[name]
        self.residency.loading(name, clock.now())
        try:
            for victim in victims:
                await self._put_out(victim, name)
            began_at = clock.now()
            await entry.resident.enter()
        except Exception as error:  # a defect of one model must not end the coming and going of the others
            known = isinstance(error, StartError | ServeError)
            words = str(error) if known else f"{type(error).__name__}: {error}"
            log.warning("a model could not be brought in", model=name, reason=words, exc_info=not known)
            if self._entries.get(name) is entry:  # else those who wait now wait for another version
                self.residency.failed(name)
            _fail(entry, Unreachable(f"model {name} could not be loaded: {words}"))
            return
        finally:
            self.residency.ended()
        if self._entries.get(name) is not entry:  # it was unloaded or replaced meanwhile
            await entry.resident.leave(f"model {name} was unloaded")
            return
        self._came(name, clock.now() - began_at)

    def _know(self, label: str, resident: Resident) -> None:
        pinned = resident.generates or resident.manifest.warm == "always"
        size_bytes = _expected_bytes(resident) * self._places
        cold_s = _START_S + size_bytes / _BYTES_PER_S
        self.residency.know(label, size_bytes=size_bytes, cold_s=cold_s, pinned=pinned)

    async def _put_out(self, name: str, instead: str) -> None:
        entry = self._entries.get(name)
        if entry is None:  # it was unloaded while another one went
            return
        self.residency.evicted(name)
        self._on_change()
        await entry.model.emptied()
        await entry.resident.leave(f"model {name} went out of memory for {instead}")
        log.info("model out of memory", model=name, instead=instead)

    def _came(self, name: str, took_s: float | None = None) -> None:
        entry = self._entries[name]
        held = entry.resident.held_bytes
        self.residency.loaded(name, clock.now(), size_bytes=held or None, took_s=took_s)
        waiting, entry.waiting = entry.waiting, []
        for one in waiting:
            if not one.done():
                # inside from now on: the model must not go out again before the callers' tasks have run
                assert isinstance(entry.model, PoolModel)
                entry.model.enter()
                one.set_result(None)
        self._on_change()

    def __repr__(self) -> str:
        return f"<OnDemand {self.residency!r}>"


def _expected_bytes(resident: Resident) -> float:
    """What its workers should hold, by the artefacts and their runtimes."""
    engines = {one.variant.engine for one in resident.loadables}
    runtimes = sum(RUNTIME_BYTES.get(engine, RUNTIME_BYTES["torch-export"]) for engine in engines)
    return float(runtimes + sum(weights_bytes(one.variant) for one in resident.loadables))


def _fail(entry: _Entry, error: ServeError) -> None:
    waiting, entry.waiting = entry.waiting, []
    for one in waiting:
        if not one.done():
            one.set_exception(error)

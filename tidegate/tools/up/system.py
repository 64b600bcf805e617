"""`System` starts all parts in order, watches them, and stops them in order.

Starting is a straight sequence (`plan.py` says why), and ends when the gateway itself reports every target
ready; a part that fails fails the start. Stopping is the reverse: the gateway first, which answers what is under way,
then its targets, which it needs until then, then the broker, so that edges can still sign off. Any process that is left
after that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import ssl
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final

import aiohttp

from tidegate import clock
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.tools.up.children import Child, ChildFailed, Event
from tidegate.tools.up.many_edges import share_costs
from tidegate.tools.up.plan import GATEWAY_DRAIN_S, Plan, ProcessPlan, Role
from tidegate.tools.up.screen import ProgressStep, Screen

# From front to back, so that no part loses another that it still needs, with the longest wait for each stroke. A
# gateway takes as long as what is under way, and some seconds to close; without requests all take less than 5 s.
STOP_STROKES: Final[tuple[tuple[frozenset[Role], float], ...]] = (
    (frozenset({"gateway"}), GATEWAY_DRAIN_S + 5.0),
    (frozenset({"pool", "edge"}), 2.0),
    (frozenset({"broker", "link"}), 0.5),
)
FLEET_WITHIN_S: Final = 20.0
POLL_EVERY_S: Final = 0.1


class DirectoryInUse(Exception):
    """Another `tidegate up` works in the same directory."""


class System:
    """Use `async with`; inside, `start()`, then wait for `all_ended()` or whatever else ends it."""

    def __init__(self, plan: Plan, screen: Screen, *, restart: bool) -> None:
        self._plan = plan
        self._screen = screen
        self._restart = restart
        self._children: list[Child] = []
        self._stack = AsyncExitStack()
        self._step: ProgressStep | None = None

    async def __aenter__(self) -> System:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop()
        finally:
            await self._stack.aclose()

    @property
    def pids(self) -> dict[str, int | None]:
        return {child.plan.name: child.pid for child in self._children}

    async def start(self) -> Mapping[str, Any]:
        """Start every part; the gateway's own account of its targets once all of them are ready.

        Raises:
            ChildFailed: a part did not start.
        """
        for together in self._plan.starts:
            if len(together) == 1 or not await self._costs_are_known(together):
                for process in together:
                    with self._screen.step(_title(process)) as self._step:
                        await self._start_one(process)
            else:
                with self._screen.step(f"{together[0].name} to {together[-1].name} warm up") as step:
                    await self._start_together(together, step)
        with self._screen.step("gateway finds its targets") as self._step:
            state = await self._fleet_ready()
        self._step = None
        return state

    async def all_ended(self) -> None:
        """Return once no child runs and none will be started again."""
        await asyncio.gather(*(child.gone() for child in self._children))

    def kill(self) -> None:
        """End everything at once."""
        for child in self._children:
            child.kill()

    def __repr__(self) -> str:
        return f"<System {', '.join(map(repr, self._children))}>"

    async def _costs_are_known(self, edges: Sequence[ProcessPlan]) -> bool:
        """Whether these edges need not measure what models cost, since the first one has."""
        first = next(process for process in self._plan.processes if process.role == "edge")
        return await asyncio.to_thread(share_costs, first, edges)

    async def _start_together(self, processes: Sequence[ProcessPlan], step: ProgressStep) -> None:
        """Start all of them, so many at a time; the first failure ends the others."""
        self._step = None  # their own words would be mixed
        room, ready = asyncio.Semaphore(self._plan.at_once), 0

        async def start(process: ProcessPlan) -> None:
            nonlocal ready
            async with room:
                await self._start_one(process)
            ready += 1
            what = f"{process.name} is ready, {ready} of {len(processes)}"
            step.update({"what": what, "done_ratio": ready / len(processes)})

        tasks = [asyncio.create_task(start(one), name=f"start {one.name}") for one in processes]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait(*tasks)

    async def _start_one(self, process: ProcessPlan) -> None:
        _keep_one_old_log(process.log_path)
        child = Child(process, on_event=self._take, on_change=self._tell, restart=self._restart)
        self._children.append(child)
        await self._stack.enter_async_context(child)
        await child.ready()

    def _take(self, process: ProcessPlan, event: Event) -> None:
        if event["event"] == "served":
            self._screen.request(event)
        elif event["event"] == "progress" and self._step is not None:
            self._step.update(event)

    def _tell(self, change: str) -> None:
        self._screen.say(change, "yellow")

    async def _fleet_ready(self) -> Mapping[str, Any]:
        give_up_at = clock.now() + FLEET_WITHIN_S
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=2.0), connector=self._connector()
        ) as session:
            while True:
                state = await _read_state(session, f"{self._plan.admin}/v1/state")
                if len(_ready_targets(state)) >= self._plan.targets:
                    return state
                if clock.now() > give_up_at:
                    raise ChildFailed(self._why_incomplete(state))
                await clock.sleep(POLL_EVERY_S)

    def _connector(self) -> aiohttp.TCPConnector | None:
        secure = self._plan.secure
        return None if secure is None else aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(secure.ca)))

    def _why_incomplete(self, state: Mapping[str, Any]) -> str:
        seen = [f"  {one.get('id')}: {one.get('state')} {one.get('reason') or ''}" for one in state.get("targets", ())]
        ready, wanted = len(_ready_targets(state)), self._plan.targets
        words = f"the gateway sees {ready} of {wanted} targets ready after {FLEET_WITHIN_S:g} s:"
        return "\n".join([words, *seen, f"(log: {self._plan.processes[-1].log_path})"])

    async def _stop(self) -> None:
        for roles, within_s in STOP_STROKES:
            stroke = [child for child in self._children if child.plan.role in roles]
            for child in stroke:
                child.terminate()
            await _gone(stroke, within_s)
        for child in self._children:
            child.kill()


async def _gone(children: list[Child], within_s: float) -> None:
    """Return when all of them have ended, or when the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(child.gone() for child in children))


async def _read_state(session: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    """The gateway's state; empty while it does not answer."""
    try:
        async with session.get(url) as response:
            state = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _ready_targets(state: Mapping[str, Any]) -> list[Any]:
    """The targets that are ready with every model that they offer."""
    return [target for target in state.get("targets", ()) if target.get("state") == "ready" and _offers_ready(target)]


def _offers_ready(target: Mapping[str, Any]) -> bool:
    models = target.get("models", ())
    return bool(models) and all(model.get("state", "ready") == "ready" for model in models)


def _title(process: ProcessPlan) -> str:
    warms_up = " warms up" if process.role in ("pool", "edge") else " starts"
    return process.name + warms_up


def _keep_one_old_log(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.replace(path.with_suffix(".log.1"))


@contextlib.contextmanager
def only_one(data_dir: Path) -> Any:
    """Hold the directory for this process; the kernel lets go of it however the process ends.

    Raises:
        DirectoryInUse: another process holds it.
    """
    path = data_dir / "run" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as lock:
        _take_lock(lock, data_dir)
        yield


def _take_lock(lock: BinaryIO, data_dir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().decode(errors="replace") or "unknown"
        raise DirectoryInUse(
            f"another `tidegate up` (process {holder}) works in {data_dir}; stop it or choose another --data-dir"
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()

"""The rollout steps do the work of each state of a rollout, with disk, network and workers.

Each step returns when it has succeeded and raises one of `failures.py` when not; each can be done again, from any state
that an earlier try has left. Between LOADING and the end this object holds the new generation's runner and the
old one's: the old one stays loaded while the new one soaks, unless the memory was too little for both and it was
parked. A rollback is then one switch.

A disk that fails for a moment ends no rollout: where nothing was touched yet the rollout is deferred, and begins again
after a wait that doubles each time; later the step itself tries again. What the disk has damaged is fetched again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ssl import SSLContext
from typing import Any, Final, TypeVar

import structlog

from edge_agent.core.fetch_retry import DownloadBudget
from edge_agent.core.rollout_machine import UNTOUCHED, WORK, Rollout, RolloutEvent, RolloutWork, S
from edge_agent.core.soak import ComputeTimes, SoakTrial
from edge_agent.delivery import preconditions
from edge_agent.delivery.boot import boot_candidates
from edge_agent.delivery.failures import WorkDeferred, WorkerExited, WorkFailed
from edge_agent.delivery.fetching import ArtefactFetcher, session
from edge_agent.delivery.golden_probe import probe
from edge_agent.delivery.golden_prompts_probe import probe_prompts
from edge_agent.delivery.model_store import ModelStore
from edge_agent.delivery.verifying import verify
from edge_agent.serving.catalogue import CatalogueEntry, read_entry
from edge_agent.serving.runner import Runner
from edge_agent.serving.runner_set import RunnerSet
from tidegate import clock
from tidegate.models.manifest import EngineName
from tidegate.models.repository import RepositoryError
from tidegate.rollout.golden import decode_golden
from tidegate.rollout.golden_prompts import decode_prompts
from tidegate.rollout.plan import ModelPlan
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.process import StartError
from tidegate.storage.disk_failure import is_disk_failure

log = structlog.get_logger(__name__)
T = TypeVar("T")
SOAK_TICK_S: Final = 0.5
DISK_AGAIN_S: Final = 2.0  # at most, until the first try after the disk has failed; twice as long each time
DISK_LATEST_S: Final = 300.0
_DAMAGED: Final = "disk: files that were here already are damaged, and are fetched again"
Advance = Callable[[RolloutEvent, str], Awaitable[Rollout]]
Live = Callable[[], Rollout]


class RolloutSteps:
    """Mutable: the runners of the rollout that is under way.

    Args:
        statics: the models of the static repository, by name; what a removed model falls back to.
        servers: of artefacts, instead of those that documents name; empty: theirs.
        device: the resources of the device now.
        linked: whether the fleet can be reached.
        draw: chance, uniform in [0, 1).
        tls: makes the context for servers of artefacts with https; None: the machine's trusted CAs.
        on_change: called when there is progress to report.
        recheck_s: seconds between checks of what a rollout waits for.
    """

    def __init__(
        self,
        store: ModelStore,
        serving: RunnerSet,
        *,
        statics: Mapping[str, CatalogueEntry],
        servers: Sequence[str] = (),
        allowed_engines: tuple[EngineName, ...],
        device: Callable[[], preconditions.DeviceResources],
        linked: Callable[[], bool],
        draw: Callable[[], float],
        on_change: Callable[[], None],
        tls: Callable[[], SSLContext] | None = None,
        recheck_s: float = 5.0,
    ) -> None:
        self.trial: SoakTrial | None = None
        self._store = store
        self._serving = serving
        self._statics = statics
        self._servers = tuple(servers)
        self._allowed = allowed_engines
        self._device = device
        self._linked = linked
        self._draw = draw
        self._on_change = on_change
        self._tls = tls
        self._recheck_s = recheck_s
        self._patience: DownloadBudget | None = None
        self._fetcher: ArtefactFetcher | None = None
        self._verified: set[str] = set()  # digests of files that this rollout has fetched or read back
        self._new: Runner | None = None
        self._old: Runner | None = None
        self._must_park = False  # the memory is too little for both
        self._parked = False  # the old one was stopped to make room, or is about to be
        self._exits_seen = 0  # of the new one: those that the journal has
        self._disk = Backoff(draw, base_s=DISK_AGAIN_S, cap_s=DISK_LATEST_S)
        self._not_before = 0.0  # when the disk is tried again
        self._times: dict[str, ComputeTimes] = {}  # of real requests to the generation that is committed, by model
        self._works: dict[RolloutWork, Callable[[Rollout], Awaitable[None]]] = {
            RolloutWork.PLAN: self._plan, RolloutWork.STAGE: self._stage, RolloutWork.GATE: self._gate,
            RolloutWork.LOAD: self._load, RolloutWork.PROBE: self._probe, RolloutWork.ACTIVATE: self._activate,
            RolloutWork.ROLL_BACK: self._roll_back,
        }  # fmt: skip

    async def do(self, rollout: Rollout, advance: Advance, live: Live) -> RolloutEvent:
        """Do the work of the rollout's state; the event that it ended with.

        Args:
            advance: applies an event meanwhile, and returns the rollout after it.
            live: the rollout as it is now: a document may change its rules during the work.

        Raises:
            WorkFailed, WorkerExited, WorkDeferred: see `failures.py`.
            StartError, RepositoryError: a generation does not load.
            OSError: the disk, where that does not pass by itself.
        """
        try:
            return await self._do(rollout, advance, live)
        except OSError as error:
            if rollout.state in UNTOUCHED and is_disk_failure(error):
                raise self._disk_failed(error) from error
            raise

    async def _do(self, rollout: Rollout, advance: Advance, live: Live) -> RolloutEvent:
        if rollout.state is S.DEFERRED:
            await self._wait_for_better_times(advance, live)
            return RolloutEvent.RESUMED
        if rollout.state is S.DOWNLOADING:
            await self._fetch(rollout, live)
        elif rollout.state is S.ACTIVE:
            await self._soak(advance, live)
        else:
            await self._works[WORK[rollout.state]](rollout)
        return RolloutEvent.DONE

    def answered(self, runner: Runner, compute_s: float | None) -> None:
        """Record a runner's request: its compute time, or None if it failed by its own fault."""
        if self.trial is not None and runner is self._new:
            self.trial.record(compute_s)
        elif compute_s is not None and runner is self._serving.routed(runner.manifest.name):
            self._times.setdefault(runner.manifest.name, ComputeTimes()).record(compute_s)

    @property
    def fetched_bytes(self) -> int:
        """Bytes fetched over the network for the rollout under way, since this start of the agent."""
        return self._patience.fetched_bytes if self._patience else 0

    @property
    def last_trouble(self) -> str:
        """The reason for which the last try of a download ended."""
        return self._fetcher.last_trouble if self._fetcher else ""

    # -- before anything is touched --------------------------------------------------------------------------------

    async def _plan(self, rollout: Rollout) -> None:
        missing = self._store.missing_bytes(rollout.plan)
        if missing and not self._servers_of(rollout):
            raise WorkFailed("no_server: neither the document nor the key 'rollout.servers' names one")
        _not_now(self._to_fetch(rollout))

    async def _fetch(self, rollout: Rollout, live: Live) -> None:
        plan, servers = rollout.plan, self._servers_of(rollout)
        self._patience = DownloadBudget(plan.net, plan.max_bytes, len(servers), rollout.fetched_bytes)
        missing = {artefact.sha256 for artefact in plan.artefacts if not self._store.has(artefact)}
        async with session(tls=self._tls() if self._tls else None) as http:
            self._fetcher = ArtefactFetcher(
                http,
                self._store,
                hindrance=lambda: self._to_fetch(live()),
                draw=self._draw,
                on_progress=self._on_change,
            )
            await self._fetcher.fetch(plan, servers, self._patience)
        self._verified |= missing
        await self._check_the_rest(plan)
        try:
            await verify(rollout.model, plan, self._store, self._allowed)
        except (WorkFailed, OSError) as error:
            may_be_damage = isinstance(error, WorkFailed) or is_disk_failure(error)
            if may_be_damage and await self._discard_damaged(plan):  # it was damaged since, or is read only at times
                raise WorkDeferred(_DAMAGED) from error
            raise

    async def _check_the_rest(self, plan: ModelPlan) -> None:
        """Read back the files that were here before, and what is staged of them.

        Now, and not where they are loaded: from there a rollout can only end. Those that it has read back once count as
        right until it ends: a device that is at times too hot to load would be kept hot by reading them again.
        """
        damaged = await self._discard_damaged(plan, self._verified)
        self._verified = {artefact.sha256 for artefact in plan.artefacts if self._store.has(artefact)}
        if damaged and not self._store.is_complete(plan):  # else only what was staged, which is staged anew
            raise WorkDeferred(_DAMAGED)

    async def _stage(self, rollout: Rollout) -> None:
        await blocking(self._store.stage, rollout.model, rollout.plan)

    async def _gate(self, rollout: Rollout) -> None:
        beside, device = self._has_old(rollout), self._device()
        _not_now(preconditions.load_hindrance(rollout.plan, device, beside=beside))
        self._must_park = beside and not preconditions.fits_beside(rollout.plan, device)

    async def _wait_for_better_times(self, advance: Advance, live: Live) -> None:
        await clock.sleep(max(0.0, self._not_before - clock.now()))
        while why := self._hindrance(live()):
            if why.partition(":")[0] != live().reason.partition(":")[0]:
                await advance(RolloutEvent.DEFERRED, why)
            await clock.sleep(self._recheck_s)

    def _hindrance(self, rollout: Rollout) -> str:
        """Why the next part of the rollout must wait, "" when it need not."""
        if not self._store.is_complete(rollout.plan):
            return self._to_fetch(rollout)
        return preconditions.load_hindrance(rollout.plan, self._device(), beside=self._has_old(rollout))

    def _to_fetch(self, rollout: Rollout) -> str:
        return preconditions.fetch_hindrance(rollout.plan, self._store.missing_bytes(rollout.plan), self._device())

    def _has_old(self, rollout: Rollout) -> bool:
        return self._serving.routed(rollout.model) is not None

    async def _discard_damaged(self, plan: ModelPlan, verified: Collection[str] = ()) -> bool:
        """Remove what the disk has damaged of the files, so that the next try fetches it; whether there was any."""
        files = [file.sha256 for file in plan.files]
        others = [artefact.sha256 for artefact in plan.artefacts if artefact.sha256 not in files]
        stop = threading.Event()  # a card reads a large file for minutes, and a rollout may end in between
        discard = partial(self._store.discard_damaged, verified=frozenset(verified), stopped=stop.is_set)
        return await blocking(discard, plan.content, files, others, on_cancel=stop.set)

    def _servers_of(self, rollout: Rollout) -> tuple[str, ...]:
        return self._servers or rollout.urls

    # -- with a generation beside ----------------------------------------------------------------------------------

    async def _load(self, rollout: Rollout) -> None:
        if self._new is not None:  # left by a try that the journal could not record
            await self._serving.stop(self._new)
            self._new = None
        self._old = self._serving.routed(rollout.model)
        root = self._store.repository(rollout.content)
        try:
            entry = await blocking(read_entry, root, rollout.model, self._allowed)
        except (RepositoryError, StartError, OSError) as error:
            await self._defer_unread(rollout, error)
            raise
        if self._old is not None and self._must_park:
            self._parked = True  # before it is: a parking that is cut short is no worker to go back to
            await self._serving.park(self._old)
        try:
            self._new, self._exits_seen = await self._serving.start(entry, rollout.generation), 0
        except StartError as error:  # its worker has read the files once more
            await self._defer_unread(rollout, error)
            raise

    async def _defer_unread(self, rollout: Rollout, error: Exception) -> None:
        """Raise WorkDeferred where a version was not loaded because of the disk; then nothing is left to undo."""
        failure = error if isinstance(error, OSError) else error.__cause__
        failed = isinstance(failure, OSError) and is_disk_failure(failure)
        try:
            damaged = await self._discard_damaged(rollout.plan)
        except OSError as again:  # of the disk: what is damaged is found when it can be read
            failed, damaged, failure = True, False, again
        if not (failed or damaged):
            return
        await self._roll_back(rollout)  # the old one may have been stopped already
        if damaged:
            raise WorkDeferred(_DAMAGED) from error
        assert isinstance(failure, OSError)
        raise self._disk_failed(failure) from error

    def _disk_failed(self, error: OSError) -> WorkDeferred:
        """The deferral because of a disk that may be well later."""
        self._not_before = clock.now() + self._disk.next_delay_s()
        return WorkDeferred(f"disk: {error.strerror or error}")

    async def _persistently(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do work on the disk, again and again while the disk fails; the rollout's state bounds the time."""
        while True:
            try:
                return await blocking(work, *arguments)
            except OSError as error:
                if not is_disk_failure(error):
                    raise
                delay_s = self._disk.next_delay_s()
                log.warning("the disk fails a rollout", reason=str(error), again_in_s=round(delay_s, 1))
            await clock.sleep(delay_s)

    async def _probe(self, rollout: Rollout) -> None:
        golden, new = rollout.plan.probe.golden, self._new
        if golden is None or new is None:
            return
        raw = await self._persistently(self._store.path(golden.sha256).read_bytes)
        old = None if self._parked else self._old
        if (generative := new.manifest.generative) is not None:
            await probe_prompts(rollout.plan.probe, decode_prompts(raw, generative), new, old)
        else:
            await probe(rollout.plan.probe, decode_golden(raw), new, old)

    async def _activate(self, rollout: Rollout) -> None:
        assert self._new is not None
        self._serving.route(self._new, soaking=True)

    async def _soak(self, advance: Advance, live: Live) -> None:
        """Judge the new generation by real requests; then the commit on disk."""
        rollout = live()
        new, before = self._new, self._times.get(rollout.model)
        assert new is not None
        trial = self.trial = SoakTrial(rollout.plan.soak, before.p95_s if before else None)
        while True:
            while self._exits_seen < new.exits:
                if rollout.exits + 1 >= rollout.plan.soak.max_exits:
                    raise WorkerExited(new.last_exit)
                rollout = await advance(RolloutEvent.WORKER_EXITED, new.last_exit)
                self._exits_seen += 1  # only now: an exit that the journal could not take is still to be counted
            rollout = live()
            trial.rules = rollout.plan.soak
            trial.tick(clock.now(), linked=self._linked())
            if why := trial.failure():
                raise WorkFailed(why)
            self._on_change()
            if trial.passed:
                break
            await clock.sleep(SOAK_TICK_S)
        committed = self._store.committed()
        generation = committed.with_model(rollout.model, rollout.plan, rollout.generation)
        await self._persistently(self._store.commit, generation)

    async def _roll_back(self, rollout: Rollout) -> None:
        new, old, self.trial = self._new, self._old, None
        if new is None and not self._parked:
            return  # the agent has restarted since, with the committed generation
        if old is not None and not self._parked:
            self._serving.route(old)
        elif self._serving.routed(rollout.model) is new and new is not None:
            self._serving.unroute(rollout.model)
        if new is not None:
            await self._serving.stop(new)
        if self._parked:  # after it: the memory was too little for both
            if old is not None:
                await self._serving.park(old)  # where its parking was cut short
            await self._bring_back(rollout.model)
            # Done once, also where the journal cannot record it: another try would start one more.
            self._new = self._old = None
            self._parked = False

    async def _bring_back(self, model: str) -> None:
        """Start the old runner again, which was stopped to make room."""
        trouble = "there is none"
        for candidate in await blocking(boot_candidates, model, self._store, self._statics, self._allowed):
            try:
                entry = await blocking(candidate.read)
                self._serving.route(await self._serving.start(entry, candidate.generation))
                return
            except (StartError, RepositoryError, OSError) as error:
                trouble = str(error)
        raise WorkFailed(f"the generation before does not start again: {trouble}")

    # -- after it --------------------------------------------------------------------------------------------------

    async def settle(self, rollout: Rollout) -> None:
        """Clean up after a settled rollout, so that one generation of its model is left."""
        new, old, parked = self._new, self._old, self._parked
        self.trial = self._new = self._old = self._patience = self._fetcher = None
        self._parked = self._must_park = False
        self._verified = set()
        self._disk.reset()
        self._not_before = 0.0
        if rollout.state is S.COMMITTED:  # here, since a soak that is ended while it commits is committed all the same
            self._store.healed(rollout.content)
        if rollout.state is S.COMMITTED and new is not None:
            self._serving.route(new)
            self._times.pop(rollout.model, None)
            if old is not None and not parked:
                await self._serving.stop(old)
        elif new is not None and self._serving.routed(rollout.model) is new:  # its rollback failed, too
            self._serving.unroute(rollout.model)
            await self._serving.stop(new)

    async def remove(self, model: str) -> None:
        """Remove a deployed model: the static repository's model answers, if there is one."""
        committed = self._store.committed()
        if model in committed.models:
            await blocking(self._store.commit, committed.without(model, self._store.next_number()))
        runner, static = self._serving.routed(model), self._statics.get(model)
        if static is not None:
            with suppress(StartError):
                self._serving.route(await self._serving.start(static))
        if runner is not None:
            if self._serving.routed(model) is runner:
                self._serving.unroute(model)
            await self._serving.stop(runner)
        self._times.pop(model, None)

    def __repr__(self) -> str:
        return f"<RolloutSteps new {self._new!r} old {self._old!r}{' parked' if self._parked else ''}>"


def _not_now(why: str) -> None:
    if why:
        raise WorkDeferred(why)


async def blocking(function: Callable[..., T], *arguments: Any, on_cancel: Callable[[], None] = lambda: None) -> T:
    """Run blocking disk work in a thread; a cancellation waits for its end, so that its outcome is always known.

    Args:
        on_cancel: has the work end soon.
    """
    work = asyncio.create_task(asyncio.to_thread(function, *arguments), name="disk work of the deployer")
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait((work,))
        raise

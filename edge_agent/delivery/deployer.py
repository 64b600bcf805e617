"""The deployer drives rollouts: it takes documents in, performs each state's work, and journals each transition.

    document → documents.py → edge_agent/core/reconcile.py: next action → a Rollout in the journal
    while it is not settled:  its state's work (steps.py)  →  event  →  apply_event  →  journal  →  next state

One task does all of it, one rollout at a time. A state's work counts only once the journal has the next state, and
each piece of work can be done again; so a power cut anywhere costs that work and nothing else. A document that arrives
meanwhile is taken in at once: it may change the rules of the rollout under way, or end it.

`edge_agent/core/rollout_machine.py` has the transitions, `edge_agent/core/reconcile.py` decides what is next, and
`edge_agent/core/soak.py` judges the soak.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Self

import structlog
from msgspec.structs import replace

from edge_agent.core.reconcile import (
    BeginRollout,
    RemoveModel,
    SettleFulfilled,
    is_still_wanted,
    next_action,
    with_newest_rules,
)
from edge_agent.core.reporting import RolloutReport
from edge_agent.core.rollout_machine import TRANSITIONS, Rollout, RolloutEvent, S, after_restart, apply_event, left_s
from edge_agent.delivery.documents import TrustedDocuments
from edge_agent.delivery.failures import WorkDeferred, WorkerExited, WorkFailed
from edge_agent.delivery.journal import DeploymentJournal
from edge_agent.delivery.model_store import ModelStore
from edge_agent.delivery.steps import RolloutSteps, blocking
from edge_agent.serving.runner import Runner
from tidegate import clock
from tidegate.fleet.reported import ModelReport
from tidegate.models.repository import RepositoryError
from tidegate.rollout.desired import DesiredModel
from tidegate.runtime.owned_task import OwnedTask, cancel_and_wait
from tidegate.runtime.process import StartError
from tidegate.storage.disk_failure import is_disk_failure

NOTE_GAP_S: Final = 60.0  # spent bytes and time are journaled this often; a power cut loses no more
REST_S: Final = 5.0  # until the next try, when the journal could not be written
_MAX_REASON: Final = 300
log = structlog.get_logger(__name__)


class Deployer:
    """Works inside `async with`.

    Args:
        routed: the runner that answers for a model now.
        on_change: called when `rollouts` has something new.
        on_documents: called after documents were read or came in.
    """

    def __init__(
        self,
        store: ModelStore,
        journal: DeploymentJournal,
        documents: TrustedDocuments,
        works: RolloutSteps,
        *,
        routed: Callable[[str], Runner | None],
        on_change: Callable[[], None] = lambda: None,
        on_documents: Callable[[TrustedDocuments], None] = lambda _: None,
    ) -> None:
        self._on_documents = on_documents
        self._beginning = asyncio.Lock()  # no rollout begins while it is held
        self._store = store
        self._journal = journal
        self._documents = documents
        self._works = works
        self._routed = routed
        self._on_change = on_change
        self._inbox: dict[str, bytes] = {}  # the newest message of each scope
        self._news = asyncio.Event()
        self._task = OwnedTask(self._run, name="deployer")
        self._rollout: Rollout | None = None  # under way
        self._writing = asyncio.Lock()
        self._counted_at = self._noted_at = 0.0  # `spent_s` has the time up to it
        self._opened = False
        self._trouble = ""
        self._told: RolloutReport | None = None

    async def __aenter__(self) -> Self:
        try:
            await blocking(self._open)
        except OSError as error:
            if not is_disk_failure(error):
                raise
            self._trouble = f"disk: {error.strerror or error}"  # the task tries again; the models serve
        if self._opened:
            self._on_documents(self._documents)
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.aclose()
        if self._rollout is not None:
            try:
                await self._advance(RolloutEvent.STOPPED, "")
            except OSError:
                log.warning("the rollout journal cannot be written at the end", exc_info=True)

    # -- called by others -------------------------------------------------------------------------------------------

    def take(self, scope: str, message: bytes) -> None:
        """Take in a message on a scope's topic; it is verified later, in the task."""
        if scope in self._documents.scopes:
            self._inbox[scope] = message
            self._news.set()

    @property
    def busy(self) -> str:
        """Which rollout is under way; "" for none."""
        return "" if self._rollout is None else f"{self._rollout.model} {self._rollout.plan.version} is rolled out"

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[bool]:
        """Keep rollouts from beginning; whether none is under way."""
        async with self._beginning:
            yield not self.busy

    @property
    def disk_trouble(self) -> str:
        """Why the journal cannot be written; "" while it can."""
        return self._trouble.removeprefix("disk: ") if self._trouble.startswith("disk: ") else ""

    @property
    def rollouts(self) -> RolloutReport:
        """The report of all rollouts; the same object until something changed."""
        if self._told is None:
            accepted = tuple(sorted(self._documents.accepted.items()))
            models = tuple(self._report(record) for _, record in sorted(self._journal.records.items()))
            groups = tuple(scope.removeprefix("group/") for scope in self._documents.scopes[1:])
            self._told = RolloutReport(accepted, models, tuple(self._documents.refused.values()), groups)
        return self._told

    def changed(self) -> None:
        """Note that there is something new to report."""
        self._told = None
        self._on_change()

    # -- the task --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._store.prepare()
        self._journal.open()
        self._documents.open()
        committed = self._store.committed().number
        for record in list(self._journal.records.values()):
            found = after_restart(record, committed)
            if found is not record:
                log.info("a rollout was interrupted", model=record.model, was=record.state, now=found.state)
                self._journal.write(found)
            if not found.state.is_settled:
                self._enter(found)
        self._opened = True

    async def _run(self) -> None:
        while True:
            try:
                if not self._opened:
                    await blocking(self._open)
                    self._on_documents(self._documents)
                    self._over()
                await self._turn()
                self._trouble = ""
            except OSError as error:  # the journal could not be written: nothing changed, and the old model serves
                self._trouble = f"disk: {error.strerror or error}"
                log.warning("the rollout journal cannot be written", reason=self._trouble)
                await self._rest()
            except Exception as error:  # a defect: the serving models go on, and the report names it
                self._trouble = f"internal: {error!r}"
                log.exception("the deployer has a defect")
                await self._rest()

    def _over(self) -> None:
        """The trouble is over; reported at once, since nothing more may happen for long."""
        if self._trouble:
            self._trouble = ""
            self.changed()

    async def _rest(self) -> None:
        self.changed()
        await clock.sleep(REST_S)

    async def _turn(self) -> None:
        await self._take_documents()
        if self._rollout is not None:
            await self._perform(self._rollout)
        elif not await self._begin_next():
            self._over()
            await self._news.wait()

    async def _take_documents(self) -> None:
        self._news.clear()
        inbox, self._inbox = self._inbox, {}
        for scope, message in inbox.items():
            try:
                await blocking(self._documents.take, scope, message)
            except OSError:
                self._inbox = {**inbox, **self._inbox}
                raise
            except Exception as error:  # a defect: the other documents are taken in, and the report names it
                log.exception("a document could not be looked at, by a defect", scope=scope)
                self._documents.refuse(scope, message, f"internal: {error!r}")
        if inbox:
            self._on_documents(self._documents)
            self.changed()

    async def _begin_next(self) -> bool:
        async with self._beginning:
            return await self._begin()

    async def _begin(self) -> bool:
        """Begin the next action of the documents; whether there was one."""
        committed = self._store.committed()
        contents = {model: one.content for model, one in committed.models.items()}
        damaged = {content for content in contents.values() if not self._store.holds(content)}
        journal = self._journal
        found = next_action(self._documents.wishes(), contents, journal.records, journal.blocked, damaged)
        match found:
            case RemoveModel():
                log.info("a model is removed", model=found.model)
                await self._works.remove(found.model)
                await blocking(self._journal.forget, found.model)
                await self._collect()
            case BeginRollout() | SettleFulfilled():
                rollout = self._of(found.model, found.wish)
                if isinstance(found, SettleFulfilled):
                    rollout = replace(rollout, state=S.COMMITTED, generation=committed.number)
                log.info("rollout", model=found.model, version=rollout.plan.version, state=str(rollout.state))
                await blocking(self._journal.write, rollout)
                self._enter(rollout)
        self.changed()
        return found is not None

    def _of(self, model: str, wish: DesiredModel) -> Rollout:
        assert wish.plan is not None
        number, previous = self._store.next_number(), self._store.committed().number
        return Rollout(
            model=model,
            plan=wish.plan,
            scope=wish.scope,
            revision=wish.revision,
            generation=number,
            previous=previous,
            urls=wish.urls,
        )

    def _enter(self, rollout: Rollout) -> None:
        self._counted_at = self._noted_at = clock.now()
        self._rollout = None if rollout.state.is_settled else rollout

    async def _perform(self, rollout: Rollout) -> None:
        """Do the work of the rollout's state, and make the transition that follows from it."""
        began_at = clock.now()
        work = asyncio.create_task(self._outcome(rollout), name=f"rollout {rollout.model} {rollout.state}")
        try:
            event, reason = await self._work_until_done(work, began_at)
        finally:
            await cancel_and_wait(work)
        if event is not RolloutEvent.DONE and self._store.committed().number == rollout.generation:
            event, reason = RolloutEvent.DONE, ""  # committed at the moment at which it was to end
        found = await self._advance(event, reason)
        if found.state.is_settled:
            self._rollout = None
            await self._works.settle(found)
            self.changed()
            await self._collect()

    async def _work_until_done(
        self, work: asyncio.Task[tuple[RolloutEvent, str]], began_at: float
    ) -> tuple[RolloutEvent, str]:
        while not work.done():
            assert self._rollout is not None
            # Checked anew each time: a document may also have come between two states.
            may_end = (self._rollout.state, RolloutEvent.SUPERSEDED) in TRANSITIONS  # a rollback finishes
            if may_end and not is_still_wanted(self._rollout, self._documents.wishes()):
                return RolloutEvent.SUPERSEDED, ""
            await self._note()
            now = clock.now()
            still_s = left_s(self._rollout, in_state_s=now - began_at, unspent_s=now - self._counted_at)
            if still_s <= 0:
                return RolloutEvent.TIMED_OUT, self._works.last_trouble
            news = asyncio.create_task(self._news.wait(), name="news for the deployer")
            try:
                await asyncio.wait((work, news), timeout=min(still_s, NOTE_GAP_S), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait(news)
            if self._news.is_set():
                await self._take_documents()
        return work.result()

    async def _note(self) -> None:
        """Journal new rules, and now and then what was spent."""
        async with self._writing:
            assert self._rollout is not None
            found = with_newest_rules(self._rollout, self._documents.wishes())
            if found != self._rollout or clock.now() >= self._noted_at + NOTE_GAP_S:
                await self._write(found)

    async def _advance(self, event: RolloutEvent, reason: str) -> Rollout:
        """Apply an event, and write the rollout to the journal."""
        async with self._writing:
            assert self._rollout is not None
            before = self._rollout
            rollout = apply_event(before, event, reason)
            if rollout.state is not before.state or rollout.reason != before.reason:
                words = {"model": rollout.model, "version": rollout.plan.version, "reason": rollout.reason}
                log.info("rollout", state=str(rollout.state), event_was=str(event), **words)
            return await self._write(rollout)

    async def _write(self, rollout: Rollout) -> Rollout:
        """Journal a rollout with what it has spent by now."""
        now = clock.now()
        spent_s = rollout.spent_s + now - self._counted_at
        spent = replace(rollout, spent_s=spent_s, fetched_bytes=max(rollout.fetched_bytes, self._works.fetched_bytes))
        try:
            await blocking(self._journal.write, spent)
        finally:  # whatever ended the wait, the journal is right
            self._rollout = self._journal.records[rollout.model]
            if self._rollout is spent:  # what could not be written is still to be counted
                self._counted_at = now
        self._noted_at = clock.now()
        self.changed()
        return spent

    async def _outcome(self, rollout: Rollout) -> tuple[RolloutEvent, str]:
        """Do the state's work; the event that it ended with, and the reason."""
        try:
            return await self._works.do(rollout, self._advance, lambda: self._rollout or rollout), ""
        except WorkDeferred as error:
            return RolloutEvent.DEFERRED, str(error)
        except WorkerExited as error:
            return RolloutEvent.WORKER_EXITED, str(error)
        except WorkFailed as error:
            return RolloutEvent.FAILED, str(error)
        except (StartError, RepositoryError) as error:
            return RolloutEvent.FAILED, f"load: {error}"
        except OSError as error:  # what may pass was deferred by the steps
            return RolloutEvent.FAILED, f"disk: {error.strerror or error}"
        except Exception as error:
            log.exception("a rollout's work has a defect", model=rollout.model, state=str(rollout.state))
            return RolloutEvent.FAILED, f"internal: {error!r}"

    async def _collect(self) -> None:
        wanted = [wish.plan for wish in self._documents.wishes().values() if wish.plan is not None]
        await blocking(self._store.collect, wanted)

    # -- the report ------------------------------------------------------------------------------------------------

    def _report(self, record: Rollout) -> ModelReport:
        is_current = not record.state.is_settled
        runner, plan = self._routed(record.model), record.plan
        trial = self._works.trial if is_current else None
        done_bytes = plan.size_bytes if record.state is S.COMMITTED else 0
        if is_current:
            done_bytes = plan.size_bytes - self._store.missing_bytes(plan)
        return ModelReport(
            name=record.model,
            state=record.state,
            version=plan.version,
            content=record.content,
            reason=(self._trouble if is_current and self._trouble else record.reason)[:_MAX_REASON],
            scope=record.scope,
            revision=record.revision,
            running=runner.manifest.version if runner else "",
            generation=runner.generation if runner else 0,
            done_bytes=done_bytes,
            total_bytes=plan.size_bytes,
            fetched_bytes=max(record.fetched_bytes, self._works.fetched_bytes if is_current else 0),
            requests=trial.requests if trial else 0,
            errors=trial.errors if trial else 0,
        )

    def __repr__(self) -> str:
        return f"<Deployer {self._rollout!r} of {self._journal!r}>"

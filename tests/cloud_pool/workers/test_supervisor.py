"""One worker after another: on virtual time, with fake workers that die when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from cloud_pool.core.sharing.worker_layout import WorkerPlace
from cloud_pool.scheduling.job import PoolRequest
from cloud_pool.scheduling.scheduler import PoolScheduler
from cloud_pool.workers.device_worker import PoolLoadable
from cloud_pool.workers.supervisor import PoolSupervisor
from tests.cloud_pool.models import TEXT
from tests.cloud_pool.workers_support import Arrays, text
from tests.support.loop import on_virtual_time, settle
from tests.support.pool.fake_worker import FakeWorker
from tidegate import clock
from tidegate.fleet.offers import WorkerReport
from tidegate.models.manifest import Manifest
from tidegate.outcome import InternalError
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.process import StartError
from tidegate.workers.process import EngineSpec, LoadResult, WorkerDied
from tidegate.workers.supervised import CRASH_LOOP, HEALTHY_S

LOADABLE = PoolLoadable(TEXT, TEXT.variants[0], Path(__file__))


def service_s(inputs: Arrays) -> float:
    return 0.001 * inputs["ids"].size


@dataclass
class Pool:
    scheduler: PoolScheduler
    supervisor: PoolSupervisor
    states: list[str]
    progress: list[str]
    processes: list[FakeWorker] = field(default_factory=list)
    told: list[WorkerReport | None] = field(default_factory=list)

    async def answer(self, budget_s: float = 60.0) -> float:
        now = clock.now()
        answer = await self.scheduler.submit(LOADABLE.key, PoolRequest(text(8), 8.0, now, now + budget_s))
        return float(answer.outputs["sum"][0, 0])


@asynccontextmanager
async def pool(
    *loadables: PoolLoadable,
    service_s: Callable[[Arrays], float] = service_s,
    hang_timeout_s: float = 30.0,
    places: Sequence[WorkerPlace] = (WorkerPlace("0"),),
    progress: list[str] | None = None,
    leave_out: Callable[[Manifest, str], None] | None = None,
    make: Callable[[], FakeWorker] | None = None,
) -> AsyncIterator[Pool]:
    states, processes = list[str](), list[FakeWorker]()
    progress = [] if progress is None else progress
    told = list[WorkerReport | None]()

    def start_process(life: str, cores: frozenset[int]) -> FakeWorker:
        processes.append(FakeWorker(service_s=service_s) if make is None else make())
        return processes[-1]

    async with PoolScheduler() as scheduler:
        supervisor = PoolSupervisor(
            loadables or [LOADABLE],
            scheduler,
            start_process=start_process,
            new_backoff=lambda: Backoff(lambda: 1.0, base_s=0.5, cap_s=30.0),
            places=places,
            hang_timeout_s=hang_timeout_s,
            on_change=lambda: states.append(supervisor.state),
            on_lost=lambda: told.append(supervisor.worker_report),
            on_progress=progress.append,
            leave_out=leave_out,
        )
        with capture_logs():
            async with supervisor:
                yield Pool(scheduler, supervisor, states, progress, processes, told)


async def replacement(subject: Pool) -> asyncio.Task[bool]:
    """Of its only worker, by one that begins to load first."""
    (slot,) = subject.supervisor.slots
    recycled = asyncio.create_task(slot.recycle(successor_first=True))
    while len(subject.processes) < 2:
        await settle(1)
    return recycled


@on_virtual_time
async def test_it_is_ready_when_everything_is_loaded_and_measured() -> None:
    async with pool() as subject:
        assert subject.states == ["warming", "ready"]
        assert subject.progress == ["loading text:1/fp32", "measuring text:1/fp32"]
        assert dict(subject.supervisor.lanes[LOADABLE.key].cost)[256.0] == pytest.approx(0.256)
        assert await subject.answer() == 8.0
        assert repr(subject.supervisor) == "<PoolSupervisor ready, 1 variants, <Replica 0 ready, life 1>>"


@on_virtual_time
async def test_a_worker_that_died_is_replaced_after_a_wait_and_warmed_without_measuring() -> None:
    async with pool() as subject:
        subject.processes[0].kill()
        await settle(20)
        assert subject.supervisor.state == "loading"
        died_at = clock.now()
        assert await subject.answer() == 8.0
        assert subject.states == ["warming", "ready", "loading", "ready"]
        assert clock.now() - died_at == pytest.approx(0.5 + 2 * 0.001 + 0.512 + 0.008)
        assert [inputs["ids"].shape for inputs in subject.processes[1].begun] == [(1, 1), (1, 1), (8, 64), (1, 8)]


@on_virtual_time
async def test_a_worker_that_hangs_is_replaced() -> None:
    turns = iter([0.001] * 40 + [1e9] + [0.001] * 40)
    async with pool(service_s=lambda _: next(turns), hang_timeout_s=1.0) as subject:
        while len(subject.processes[0].begun) < 40:
            await subject.answer()
        hung_at = clock.now()
        assert await subject.answer() == 8.0
        assert len(subject.processes) == 2
        assert clock.now() - hung_at == pytest.approx(1.0 + 0.5, abs=0.1)


@on_virtual_time
async def test_a_pool_tells_of_one_lost_worker_though_another_serves_on() -> None:
    async with pool(places=(WorkerPlace("0"), WorkerPlace("1"))) as subject:
        assert subject.supervisor.worker_report is None
        subject.processes[1].kill()
        await settle(20)
        assert subject.supervisor.state == "ready"
        assert subject.told == [WorkerReport(1, "worker was killed by SIGKILL")]


@on_virtual_time
async def test_a_batch_that_takes_far_longer_than_any_like_it_is_not_waited_for_as_long_as_the_most_allowed() -> None:
    stuck = list[bool]()
    async with pool(service_s=lambda inputs: 1e9 if stuck and stuck.pop() else service_s(inputs)) as subject:
        stuck.append(True)
        hung_at = clock.now()
        assert await subject.answer() == 8.0
        assert len(subject.processes) == 2
        assert clock.now() - hung_at < 4.0
        assert subject.states == ["warming", "ready", "loading", "ready"]


@on_virtual_time
async def test_a_worker_that_dies_again_and_again_is_called_bad_and_still_tried() -> None:
    async with pool() as subject:
        for _ in range(CRASH_LOOP):
            subject.processes[-1].kill()
            await settle(20)
            lives = len(subject.processes)
            state = subject.supervisor.state
            while len(subject.processes) == lives or subject.supervisor.state != "ready":
                await clock.sleep(0.1)
        assert state == "bad"
        assert await subject.answer() == 8.0


@on_virtual_time
async def test_what_cannot_wait_for_the_next_try_of_a_worker_is_refused_at_once() -> None:
    async with pool() as subject:
        for _ in range(CRASH_LOOP):  # the third is followed by 2 s, and then it is warmed
            lives = len(subject.processes)
            subject.processes[-1].kill()
            await settle(20)
            if lives < CRASH_LOOP:
                while subject.supervisor.state != "ready":
                    await clock.sleep(0.1)
        refused_at = clock.now()
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await subject.answer(budget_s=1.5)
        assert clock.now() == refused_at
        assert await subject.answer(budget_s=5.0) == 8.0


class LastingWorker(FakeWorker):
    """A worker whose end takes its time, as it does where it hangs in the kernel."""

    lasts_s = 20.0

    async def __aexit__(self, *_: object) -> None:
        await clock.sleep(self.lasts_s)
        await super().__aexit__(None, None, None)


@on_virtual_time
async def test_a_worker_that_hangs_is_fed_no_longer_though_it_takes_long_to_end() -> None:
    async with pool(make=lambda: LastingWorker(service_s=service_s), hang_timeout_s=1.0) as subject:
        subject.processes[0].service_s = lambda _: 1e9
        stuck = asyncio.create_task(subject.answer())
        await clock.sleep(5.0)
        assert subject.supervisor.state == "loading" and len(subject.scheduler.seats) == 0
        assert await subject.answer() == 8.0
        assert await stuck == 8.0
        assert subject.states == ["warming", "ready", "loading", "ready"]


@on_virtual_time
async def test_a_worker_whose_end_comes_while_its_successor_fails_is_not_called_ready() -> None:
    loads = count(1)

    class Successors(LastingWorker):
        async def load(self, spec: EngineSpec) -> LoadResult:
            if next(loads) == 2:
                await clock.sleep(5.0)
                self.lasts_s = 0.0
                raise InternalError("the file is cut")
            return await super().load(spec)

    async with pool(make=lambda: Successors(service_s=service_s)) as subject:
        recycled = await replacement(subject)
        subject.processes[0].kill()
        assert not await recycled
        await settle(20)
        assert subject.supervisor.state == "loading" and len(subject.scheduler.seats) == 0
        assert await subject.answer() == 8.0


@on_virtual_time
async def test_a_supervision_that_ends_in_the_midst_of_a_replacement_leaves_no_worker_with_the_scheduler() -> None:
    async with pool() as subject:
        (slot,) = subject.supervisor.slots
        subject.processes[0].service_s = lambda _: 1.5
        running = asyncio.create_task(subject.answer())
        await settle()
        recycled = asyncio.create_task(slot.recycle(successor_first=True))
        while len(subject.scheduler.seats) < 2:
            await clock.sleep(0.01)
        await subject.supervisor.leave("unloaded")
        await subject.supervisor.__aexit__()
        assert len(subject.scheduler.seats) == 0
        assert (await running, await recycled) == (8.0, False)


@on_virtual_time
async def test_a_stretch_of_health_forgets_earlier_deaths() -> None:
    async with pool() as subject:
        for _ in range(2 * CRASH_LOOP):
            await clock.sleep(HEALTHY_S)
            subject.processes[-1].kill()
            await settle(20)
            assert subject.supervisor.state == "loading"
            await clock.sleep(10.0)
        assert subject.supervisor.state == "ready"


@on_virtual_time
async def test_an_artefact_that_does_not_load_is_a_reason_not_to_start() -> None:
    missing = PoolLoadable(TEXT, TEXT.variants[0], Path("/nowhere/text.onnx"))
    with pytest.raises(StartError, match=r"/nowhere/text\.onnx"):
        async with pool(missing):
            raise AssertionError("it started")


@on_virtual_time
async def test_a_model_that_does_not_load_or_warm_is_left_out_where_that_is_wanted() -> None:
    cut, spoiled = replace(TEXT, name="cut"), replace(TEXT, name="spoiled")
    missing = PoolLoadable(cut, TEXT.variants[0], Path("/nowhere/text.onnx"))
    second = PoolLoadable(spoiled, replace(TEXT.variants[0], name="second"), LOADABLE.artefact)
    three = (missing, PoolLoadable(spoiled, TEXT.variants[0], LOADABLE.artefact), second, LOADABLE)
    progress, left = list[str](), dict[str, str]()

    def failing(inputs: Arrays) -> float:
        if progress[-1] == f"measuring {second.key}":
            raise InternalError("it has no such operator")
        return service_s(inputs)

    def leave_out(manifest: Manifest, why: str) -> None:
        left[manifest.name] = why

    two = (WorkerPlace("0"), WorkerPlace("1"))
    async with pool(*three, service_s=failing, places=two, progress=progress, leave_out=leave_out) as subject:
        assert left.keys() == {"cut", "spoiled"}
        assert "/nowhere/text.onnx" in left["cut"] and left["spoiled"] == "it has no such operator"
        assert await subject.answer() == 8.0
        assert list(subject.supervisor.lanes) == [LOADABLE.key]
        subject.processes[0].kill("died")
        await settle()
        await clock.sleep(60.0)
        assert subject.supervisor.state == "ready"
        assert [list(one.loaded) for one in subject.processes[1:]] == [[LOADABLE.key]] * 2
    with pytest.raises(StartError, match="it has no such operator"):
        async with pool(*three[1:], service_s=failing, progress=progress):
            raise AssertionError("it started")


class BreakingWorker(FakeWorker):
    """Dies while it loads a model that is called "fatal", and has a device with memory of its own."""

    async def load(self, spec: EngineSpec) -> LoadResult:
        if spec.key.startswith("fatal:"):
            self.kill("was killed by SIGSEGV")
        await super().load(spec)
        return LoadResult(0.0, held_bytes=1 << 20, device_bytes=1 << 30)


def named(name: str, size_bytes: int = 1) -> PoolLoadable:
    variant = replace(TEXT.variants[0], size_bytes=size_bytes)
    return PoolLoadable(replace(TEXT, name=name, variants=(variant,)), variant, LOADABLE.artefact)


@on_virtual_time
@pytest.mark.parametrize("places", [1, 2])
async def test_a_model_at_which_a_worker_dies_or_hangs_or_that_does_not_fit_is_left_out(places: int) -> None:
    progress, left = list[str](), dict[str, str]()

    def hanging(inputs: Arrays) -> float:
        return 1e9 if progress[-1].startswith("measuring hangs:") else service_s(inputs)

    async with pool(
        named("fatal"),
        named("hangs"),
        named("huge", 1 << 40),
        LOADABLE,
        service_s=hanging,
        places=[WorkerPlace(str(n)) for n in range(places)],
        progress=progress,
        leave_out=lambda manifest, why: left.update({manifest.name: why}),
        make=lambda: BreakingWorker(service_s=hanging),
    ) as subject:
        assert left.keys() == {"fatal", "hangs", "huge"}
        assert "SIGSEGV" in left["fatal"] and "hung for 30 s in hangs:1/" in left["hangs"]
        assert "GiB of memory on" in left["huge"] and "huge:1/" in left["huge"]
        assert await subject.answer() == 8.0
        assert [list(one.loaded) for one in subject.processes if one.alive] == [[LOADABLE.key]] * places
        subject.processes[-1].kill("died")
        await clock.sleep(60.0)
        assert subject.supervisor.state == "ready" and list(subject.supervisor.lanes) == [LOADABLE.key]
    with pytest.raises(StartError, match="SIGSEGV"):
        async with pool(named("fatal"), LOADABLE, make=BreakingWorker):
            raise AssertionError("it started")


@on_virtual_time
@pytest.mark.parametrize("leaves_out", [True, False])
async def test_a_model_that_keeps_all_workers_from_starting_again_is_left_out_then(leaves_out: bool) -> None:
    left, spoiled = list[str](), list[str]()

    class SpoiledWorker(FakeWorker):
        async def load(self, spec: EngineSpec) -> LoadResult:
            if spec.key.partition(":")[0] in spoiled:
                raise InternalError(f"the file of {spec.key} is cut")
            return await super().load(spec)

    two = [WorkerPlace("0"), WorkerPlace("1")]
    async with pool(
        named("cut"),
        LOADABLE,
        places=two,
        leave_out=(lambda manifest, _: left.append(manifest.name)) if leaves_out else None,
        make=lambda: SpoiledWorker(service_s=service_s),
    ) as subject:
        spoiled.append("cut")
        subject.processes[0].kill("died")
        await clock.sleep(600.0)
        assert left == [] and subject.supervisor.state == "ready"  # the other one has it still
        subject.processes[1].kill("died")
        await settle(20)
        await clock.sleep(600.0)
        if not leaves_out:
            assert subject.supervisor.state == "bad"
            return
        assert left == ["cut"] and list(subject.supervisor.lanes) == [LOADABLE.key]
        assert [one.state for one in subject.supervisor.slots] == ["ready", "ready"]
        assert await subject.answer() == 8.0


@on_virtual_time
async def test_a_worker_that_never_gets_warm_is_a_reason_not_to_start() -> None:
    with pytest.raises(StartError, match="hung for 30 s"):
        async with pool(service_s=lambda _: 1e9):
            raise AssertionError("it started")


class TestSeveral:
    TWO = (WorkerPlace("0"), WorkerPlace("1"))

    @on_virtual_time
    async def test_only_the_first_measures_and_all_are_warm_before_it_is_ready(self) -> None:
        async with pool(places=self.TWO) as subject:
            assert subject.states == ["warming", "ready"]
            assert [len(process.begun) > 3 for process in subject.processes] == [True, False]
            assert [inputs["ids"].shape for inputs in subject.processes[1].begun] == [(1, 1), (1, 1), (8, 64)]
            assert len(subject.scheduler.seats) == 2

    @on_virtual_time
    @pytest.mark.parametrize("works", [1, 2], ids=["the second is broken", "the first is broken"])
    @pytest.mark.parametrize("leaves_out", [True, False])
    async def test_a_place_where_no_worker_comes_up_does_not_keep_the_others_from_serving(
        self, works: int, leaves_out: bool
    ) -> None:
        left, numbers, is_mended = list[str](), count(1), False

        class PlacedWorker(FakeWorker):
            def __init__(self) -> None:
                super().__init__(service_s=service_s)
                self.number = next(numbers)

            async def load(self, spec: EngineSpec) -> LoadResult:
                if self.number != works and not is_mended:
                    self.kill("was killed by SIGBUS")
                return await super().load(spec)

        leave_out = (lambda manifest, _: left.append(manifest.name)) if leaves_out and works == 1 else None
        async with pool(places=self.TWO, make=PlacedWorker, leave_out=leave_out) as subject:
            assert subject.supervisor.state == "ready" and len(subject.scheduler.seats) == 1
            assert await subject.answer() == 8.0
            await clock.sleep(600.0)
            broken = subject.supervisor.slots[2 - works]
            assert (broken.state, left) == ("bad", []) and len(subject.processes) > 5, "it is still tried"
            assert (report := subject.supervisor.worker_report) is not None and "SIGBUS" in str(report)
            is_mended = True
            await clock.sleep(60.0)
            assert (broken.state, len(subject.scheduler.seats)) == ("ready", 2)

    @on_virtual_time
    async def test_where_no_place_has_a_worker_that_comes_up_the_first_ones_reason_is_told(self) -> None:
        numbers = count(1)

        class BrokenWorker(FakeWorker):
            async def load(self, spec: EngineSpec) -> LoadResult:
                raise InternalError(f"broken {next(numbers)}")

        with pytest.raises(StartError, match="broken 1"):
            async with pool(places=self.TWO, make=BrokenWorker):
                raise AssertionError("it started")

    @on_virtual_time
    async def test_while_one_is_replaced_the_pool_stays_ready_and_answers(self) -> None:
        async with pool(places=self.TWO) as subject:
            subject.processes[0].kill()
            await settle(20)
            assert subject.supervisor.state == "ready"
            asked_at = clock.now()
            assert await subject.answer() == 8.0
            assert clock.now() - asked_at == pytest.approx(0.008)
            await clock.sleep(5.0)
            assert len(subject.scheduler.seats) == 2
            assert subject.states == ["warming", "ready"]

    @on_virtual_time
    async def test_when_all_are_gone_the_pool_is_not_ready(self) -> None:
        async with pool(places=self.TWO) as subject:
            for process in subject.processes[:2]:
                process.kill()
            await settle(20)
            assert subject.supervisor.state == "loading"
            assert await subject.answer() == 8.0
            assert subject.states == ["warming", "ready", "loading", "ready"]


class TestRecycling:
    @on_virtual_time
    async def test_a_successor_is_warm_before_the_old_one_goes_and_nobody_waits_for_it(self) -> None:
        async with pool() as subject:
            (slot,) = subject.supervisor.slots
            recycled = asyncio.create_task(slot.recycle(successor_first=True))
            while len(subject.processes) < 2:
                assert await subject.answer() == 8.0
            asked_at = clock.now()
            assert await subject.answer() == 8.0
            assert clock.now() - asked_at == pytest.approx(0.008), "while the successor warms up"
            assert await recycled
            assert (subject.processes[0].alive, subject.processes[1].alive) == (False, True)
            assert subject.states == ["warming", "ready"]
            assert await subject.answer() == 8.0

    @on_virtual_time
    async def test_without_memory_for_two_the_old_one_ends_its_batch_and_goes_first(self) -> None:
        async with pool() as subject:
            (slot,) = subject.supervisor.slots
            running = asyncio.create_task(subject.answer())
            await settle()
            recycled = asyncio.create_task(slot.recycle(successor_first=False))
            await settle()
            waiting = asyncio.create_task(subject.answer())
            assert await running == 8.0
            assert await recycled
            assert await waiting == 8.0
            assert [process.alive for process in subject.processes] == [False, True]

    @on_virtual_time
    async def test_a_successor_that_does_not_come_up_leaves_the_old_one_in_place(self) -> None:
        async with pool() as subject:
            recycled = await replacement(subject)
            subject.processes[1].kill()
            assert not await recycled
            assert subject.processes[0].alive
            assert await subject.answer() == 8.0
            (slot,) = subject.supervisor.slots
            assert await slot.recycle(successor_first=True), "it can be tried again"

    @on_virtual_time
    async def test_an_old_one_that_dies_meanwhile_is_followed_by_its_successor(self) -> None:
        async with pool() as subject:
            recycled = await replacement(subject)
            subject.processes[0].kill()
            assert await recycled
            assert await subject.answer() == 8.0
            assert len(subject.processes) == 2

    @on_virtual_time
    async def test_who_is_not_ready_is_not_recycled(self) -> None:
        async with pool() as subject:
            (slot,) = subject.supervisor.slots
            subject.processes[0].kill()
            await settle(20)
            assert not await slot.recycle(successor_first=True)

"""A model's worker dies, hangs, does not start: what the model's callers and its gateway get to know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from edge_agent.serving.runner import EdgeLoadable, EngineWorker, Runner
from tests.support.loop import elapsed, on_virtual_time, settle
from tests.support.models.tiny_models import FOREVER, double_manifest, rounds_manifest
from tests.support.pool.fake_worker import FakeWorker
from tidegate import clock
from tidegate.fleet.offers import VariantOffer, WorkerReport
from tidegate.models.manifest import Manifest, Variant
from tidegate.outcome import InternalError, Unreachable
from tidegate.runtime.backoff import Backoff
from tidegate.runtime.process import StartError
from tidegate.workers.incarnation import WARMUP_TIMEOUT_S
from tidegate.workers.process import EngineSpec
from tidegate.workers.supervised import CRASH_LOOP, HEALTHY_S
from tidegate.workers.warming.device_choice import DeviceChoice
from tidegate.workers.warming.device_trial import DeviceTrials
from tidegate.workers.warmup import CostPoints

COST: CostPoints = ((1.0, 0.001), (16.0, 0.004))
X = np.ones((1, 1), dtype=np.float32)
ENDLESS = {"rounds": np.array([FOREVER])}


class Stage:
    """Hands out fake workers and remembers what became of them."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.states: list[str] = []
        self.measured = 0
        self.warmed = 0
        self.fail_starts = 0
        self.hang_warm_ups = False

    def start_worker(self, name: str) -> FakeWorker:
        if self.fail_starts:
            self.fail_starts -= 1
            raise OSError("no processes left")
        self.workers.append(FakeWorker(name))
        return self.workers[-1]

    async def measure(self, worker: EngineWorker, key: str, manifest: Manifest, variant: Variant) -> CostPoints:
        self.measured += 1
        if self.hang_warm_ups:
            await asyncio.get_running_loop().create_future()
        return COST

    async def warm(self, *_: object) -> None:
        self.warmed += 1

    def runner(
        self, manifest: Manifest, artefact: str = "", *, draw: float = 0.5, trials: DeviceTrials | None = None
    ) -> Runner:
        loadables = [EdgeLoadable(one, Path(artefact or f"{manifest.name}.onnx")) for one in manifest.variants]
        return Runner(
            manifest,
            loadables,
            start_worker=self.start_worker,
            measure=self.measure,
            warm=self.warm,
            backoff=Backoff(lambda: draw, base_s=0.5, cap_s=30.0),
            on_change=lambda runner: self.states.append(runner.state),
            hang_timeout_s=30.0,
            trials=trials,
        )

    @asynccontextmanager
    async def running(self, manifest: Manifest) -> AsyncIterator[Runner]:
        async with self.runner(manifest) as runner:
            yield runner


@on_virtual_time
async def test_a_model_is_ready_once_it_is_loaded_and_measured() -> None:
    stage = Stage()
    async with stage.running(double_manifest()) as runner:
        assert stage.states == ["warming", "ready"]
        assert runner.offer().state == "ready"
        assert runner.offer().variants == (VariantOffer("int8", "int8", cost=COST, max_batch=4, max_tokens=16),)
        computed = await runner.infer("int8", {"x": X})
        assert computed.outputs["y"][0, 0] == 2.0
        assert next(iter(stage.workers[0].loaded.values())).outputs == ("y",)
    assert not stage.workers[0].alive


@on_virtual_time
async def test_an_artefact_that_does_not_load_is_a_reason_not_to_start() -> None:
    with pytest.raises(StartError, match=r"model 'double:1' cannot be served: .*broken\.onnx"):
        async with Stage().runner(double_manifest(), "broken.onnx"):
            pass


@on_virtual_time
async def test_a_worker_that_cannot_be_started_at_first_is_a_reason_not_to_start() -> None:
    stage = Stage()
    stage.fail_starts = 1

    with pytest.raises(StartError, match="no processes left"):
        async with stage.running(double_manifest()):
            pass


@on_virtual_time
async def test_a_first_warm_up_that_never_ends_is_given_up() -> None:
    stage = Stage()
    stage.hang_warm_ups = True

    with pytest.raises(StartError, match="not warm within 300 s"):
        async with stage.running(double_manifest()):
            pass
    assert WARMUP_TIMEOUT_S == 300.0
    assert not stage.workers[0].alive


@on_virtual_time
async def test_a_killed_worker_fails_its_call_at_once_and_is_replaced_after_the_backoff() -> None:
    stage = Stage()
    async with stage.running(rounds_manifest()) as runner:
        call = asyncio.create_task(runner.infer("int8", ENDLESS))
        await settle()

        stage.workers[0].kill()
        with pytest.raises(Unreachable, match="was killed by SIGKILL"):
            await call
        await settle()

        assert runner.state == "loading"
        with pytest.raises(Unreachable, match="model 'rounds:1' is loading here"):
            await runner.infer("int8", ENDLESS)
        await clock.sleep(0.25)  # half of the base
        await settle(20)
        assert stage.states == ["warming", "ready", "loading", "ready"]
        await runner.infer("int8", {"rounds": np.array([0])})
        assert (stage.measured, stage.warmed) == (1, 1)


@on_virtual_time
async def test_a_hung_worker_fails_its_call_and_is_replaced() -> None:
    stage = Stage()
    async with stage.running(rounds_manifest()) as runner:
        with pytest.raises(Unreachable, match="hung for 30 s"):
            await runner.infer("int8", ENDLESS)
        await settle(20)

        assert not stage.workers[0].alive
        assert runner.state == "loading"
        await clock.sleep(0.25)
        await settle(20)
        await runner.infer("int8", {"rounds": np.array([0])})


@on_virtual_time
async def test_a_worker_that_shows_no_sign_is_given_up_after_the_patience_of_its_call() -> None:
    stage = Stage()
    async with stage.running(rounds_manifest()) as runner:
        stage.workers[0].kept_from_sleeping_s = lambda: 0.0
        call = elapsed(runner.infer("int8", ENDLESS, 0.5))
        with pytest.raises(Unreachable, match=r"hung for 0\.5 s"):
            await call
        await settle(20)
        assert runner.state == "loading"


@on_virtual_time
async def test_a_worker_that_hangs_is_told_while_it_does_and_afterwards_and_a_planned_end_is_not() -> None:
    stage = Stage()
    async with stage.running(rounds_manifest()) as runner:
        assert runner.offer().worker is None
        stage.workers[0].kept_from_sleeping_s = lambda: 0.0
        call = asyncio.create_task(elapsed(runner.infer("int8", ENDLESS, 0.5)))
        await clock.sleep(0.2)
        assert runner.told(clock.now())["overdue_s"] == 0.0
        await clock.sleep(0.2)
        assert runner.told(clock.now())["overdue_s"] == pytest.approx(0.4)
        with pytest.raises(Unreachable):
            await call
        await settle(20)
        assert runner.offer().worker == WorkerReport(1, "hung for 0.5 s")
        await clock.sleep(5.0)
        told = runner.told(clock.now())
        assert (told["state"], told["lost"], told["overdue_s"]) == ("ready", 1, 0.0)
        assert told["lost_ago_s"] == pytest.approx(5.0, abs=0.3)
        runner.recycle("its memory grows")
        await clock.sleep(5.0)
        assert (runner.restarts, runner.lost_workers.count) == (2, 1)


@on_virtual_time
async def test_one_that_computes_all_the_time_is_waited_for_longer_but_not_for_ever() -> None:
    stage = Stage()
    async with stage.running(rounds_manifest()) as runner:
        began_at = clock.now()
        stage.workers[0].kept_from_sleeping_s = lambda: clock.now() - began_at
        with pytest.raises(Unreachable, match="hung for 30 s"):
            await runner.infer("int8", ENDLESS, 0.5)
        assert clock.now() - began_at == pytest.approx(30.0), "its hang_timeout_s"


@on_virtual_time
async def test_a_worker_that_keeps_dying_is_offered_as_bad_and_still_tried_with_growing_waits() -> None:
    stage = Stage()
    async with stage.running(double_manifest()) as runner:
        waits = []
        for life in range(1, CRASH_LOOP + 2):
            stage.workers[-1].kill()
            _, waited_s = await elapsed(_until_life(stage, life + 1))
            waits.append(waited_s)

        assert waits == pytest.approx([0.25, 0.5, 1.0, 2.0], abs=0.011)
        mended, given_up = ["loading", "ready"], ["loading", "bad", "ready"]
        assert stage.states == ["warming", "ready", *mended, *mended, *given_up, *given_up]
        assert runner.state == "ready"


@on_virtual_time
async def test_a_stretch_of_health_makes_a_death_a_first_one_again() -> None:
    stage = Stage()
    async with stage.running(double_manifest()):
        for life in range(2, 4):
            stage.workers[-1].kill()
            await _until_life(stage, life)
        await clock.sleep(HEALTHY_S)
        stage.workers[-1].kill()

        _, waited_s = await elapsed(_until_life(stage, 4))

        assert waited_s == pytest.approx(0.25, abs=0.011)


@on_virtual_time
async def test_a_restart_that_fails_is_tried_again() -> None:
    stage = Stage()
    async with stage.running(double_manifest()) as runner:
        stage.fail_starts = 2
        stage.workers[-1].kill()

        await _until_life(stage, 2)

        assert (await runner.infer("int8", {"x": X})).outputs["y"][0, 0] == 2.0


@on_virtual_time
async def test_losing_and_regaining_a_worker_is_logged_once_each() -> None:
    stage = Stage()
    with capture_logs() as logs:
        async with stage.running(double_manifest()):
            stage.workers[-1].kill()
            await _until_life(stage, 2)

    assert [(entry["event"], entry["model"]) for entry in logs] == [
        ("worker lost", "double:1"),
        ("worker back", "double:1"),
    ]
    assert logs[0]["reason"] == "was killed by SIGKILL"


@on_virtual_time
async def test_an_engine_that_raises_is_the_callers_answer_and_no_reason_to_restart() -> None:
    stage = Stage()
    async with stage.running(double_manifest()) as runner:
        with pytest.raises(InternalError, match="x is missing"):
            await runner.infer("int8", {})

        assert runner.state == "ready"
        assert repr(runner) == "<Runner double:1 ready life 1>"


@on_virtual_time
async def test_a_defect_in_the_supervision_is_raised_to_whoever_watches() -> None:
    stage = Stage()

    async def broken_warm(*_: object) -> None:
        raise ZeroDivisionError

    stage.warm = broken_warm  # type: ignore[method-assign]
    async with stage.running(double_manifest()) as runner:
        stage.workers[-1].kill()

        with pytest.raises(ZeroDivisionError):
            await runner.failed()


async def _until_life(stage: Stage, number: int) -> None:
    """Wait until the worker of that number is ready, in steps of 10 ms of virtual time."""
    while len(stage.workers) < number or stage.states[-1] != "ready":
        await clock.sleep(0.01)


class Chosen(DeviceTrials):
    """Trials that are over at once, with one device that wins."""

    def __init__(self, device: str) -> None:
        super().__init__((device,), FakeWorker)
        self.asked: list[EngineSpec] = []
        self._chosen = DeviceChoice(device, (f"{device}: taken",))

    async def choose(self, manifest: Manifest, variant: Variant, spec: EngineSpec) -> DeviceChoice:
        self.asked.append(spec)
        return self._chosen


@on_virtual_time
async def test_a_device_is_tried_once_and_used_by_later_workers_until_two_were_lost_on_it() -> None:
    stage, trials = Stage(), Chosen("openvino")
    async with stage.runner(double_manifest(), trials=trials) as runner:
        assert [one.device for one in trials.asked] == ["cpu"]
        for number, device in enumerate(["openvino", "openvino", "cpu", "cpu"]):
            await settle()
            assert stage.workers[number].loaded["int8"].device == device
            told = runner.told(clock.now())["devices"]["int8"]
            assert told["device"] == device
            stage.workers[number].kill()
            await clock.sleep(60.0)
        assert "left out: 2 workers were lost on it, the last one was killed by SIGKILL" in told["tried"][0]
        assert len(trials.asked) == 1
        assert stage.measured == 2  # once on each


@on_virtual_time
async def test_without_a_device_nothing_is_tried_and_nothing_is_told() -> None:
    stage = Stage()
    async with stage.running(double_manifest()) as runner:
        assert stage.workers[0].loaded["int8"].device == "cpu"
        assert "devices" not in runner.told(clock.now())

"""The dispatcher under chance, on virtual time: targets answer, fail, hang or defy cancellation, and callers leave.

The core's own interleavings are fuzzed without a loop (`tests/gateway/core/request/test_interleavings.py`). Here the
shell is: tasks, timers, the inline attempt and the cancellation that is taken back. Each run has an event loop, a fleet
and a dozen callers of its own; what each target does with each attempt is drawn when the attempt gets there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import structlog

from gateway.core.fleet.link_events import LinkDown, LinkUp
from gateway.core.placement.placer import Placer
from gateway.core.placement.utility import UtilityPlacer
from gateway.core.request.hedge_by_chance import ChanceHedging
from gateway.serving.dispatcher import Dispatcher
from gateway.targets.target import Target
from tests.support import loop as virtual
from tests.support.gateway.conductor import CountingTarget, call
from tests.support.gateway.fleets import NOW, fleet_of, offer, variant
from tests.support.serving.host import minilm
from tidegate import clock
from tidegate.outcome import ERRORS, DeadlineExceeded, ServeError
from tidegate.types import Accepted, Call, InferRequest, InferResponse, LoadReport, Reply

RUNS = 2000
CALLERS = 12
MOMENTS_S = (0.0, 0.0, 0.001, 0.005, 0.01, 0.03, 0.1, 0.3, 2.0)


class FickleTarget(CountingTarget):
    """Does what chance wants with each attempt."""

    def __init__(self, id: str, random: Random) -> None:
        super().__init__(id)
        self._random = random
        self.did: Counter[str] = Counter()

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        assert budget_s > 0.0, "nothing is sent at or after its deadline"
        deed = self._random.choice(["answer", "answer", "answer", "fail", "fail", "crash", "hang", "outlast", "defy"])
        self.did[deed] += 1
        try:
            return await self._do(deed, request, variant, budget_s, on_accepted)
        except asyncio.CancelledError:
            if deed == "outlast":  # lets go at once, as a `Target` must, but not in this turn of the loop
                await virtual.settle(self._random.randrange(1, 6))
            if deed == "defy":
                return self._reply(request, variant)
            raise

    async def _do(
        self, deed: str, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        for _ in range(self._random.randrange(3)):
            await clock.sleep(self._moment_s())
            on_accepted(Accepted(1, self._moment_s()))
        await clock.sleep(self._moment_s())
        if deed == "fail":
            raise self._random.choice(ERRORS)("as an error of its class")
        if deed == "crash":
            raise KeyError("a defect")
        if deed in ("hang", "outlast", "defy"):
            await clock.sleep(1e6)
        return self._reply(request, variant)

    def _reply(self, request: InferRequest, variant: str) -> Reply:
        load = LoadReport(1, self._random.randrange(99), 1, 1, self._random.choice(MOMENTS_S))
        stages = self._random.choice([{}, {"queue": 0.001, "compute": 0.004}])
        response = InferResponse(request.model_name, request.model_version, (), id=request.id)
        return Reply(response, stages=stages, variant=variant, load=load)

    def _moment_s(self) -> float:
        return self._random.choice(MOMENTS_S)


class Run:
    """One loop's worth: a conductor, its targets, and the callers' ends."""

    def __init__(self, seed: int) -> None:
        self._random = random = Random(seed)
        offers = {
            "edge_a": variant("int8", compute_s=0.010),
            "edge_b": variant("int8", compute_s=0.015),
            "pool_c": variant("fp32", compute_s=0.030),
            "pool_d": variant("fp32", compute_s=None),
        }
        self.fleet = fleet_of(**{key: offers[key] for key in random.sample(sorted(offers), 1 + random.randrange(4))})
        self.fickle = [FickleTarget(id, random) for id in self.fleet.targets]
        self.targets: dict[str, Target] = {one.id: one for one in self.fickle}
        placer = Placer(self.fleet) if random.random() < 0.4 else UtilityPlacer(self.fleet)
        hedges = ChanceHedging(placer) if isinstance(placer, UtilityPlacer) else None
        self.dispatcher = Dispatcher(
            placer, self.targets, lambda name, version: minilm(), draw=random.random, hedges=hedges
        )
        self.ends: Counter[str] = Counter()
        self._breakers = {target.breaker for target in self.fleet.targets.values()}

    async def live(self) -> None:
        calling = [asyncio.create_task(self._call(number), name=f"caller {number}") for number in range(CALLERS)]
        meddling = asyncio.create_task(self._meddle(), name="meddler")
        for task in calling:
            await asyncio.wait([task])
            self.ends["left" if task.cancelled() else task.result()] += 1
        meddling.cancel()
        await asyncio.wait([meddling])
        await self.dispatcher.close()
        self._assert_at_rest()

    async def _call(self, number: int) -> str:
        random = self._random
        await clock.sleep(random.choice(MOMENTS_S))
        budget_s = random.choice([0.002, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
        request = call(id=f"{number}", budget_s=budget_s)
        now = request.arrived_at
        me = asyncio.current_task()
        assert me is not None
        patience = random.choice(["none", "none", "none", "leaves", "leaves twice", "timeout"])
        leaves_at = now + random.choice([0.0, 0.001, 0.01, 0.03, 0.1, budget_s])
        if patience.startswith("leaves"):
            for _ in range(2 if patience == "leaves twice" else 1):
                asyncio.get_running_loop().call_at(leaves_at, me.cancel)
        try:
            async with asyncio.timeout_at(leaves_at if patience == "timeout" else None):
                reply = await self.dispatcher.infer(request)
        except TimeoutError:
            assert me.cancelling() == 0
            return "timeout"
        except ServeError as error:
            return self._refused(error, request, leaves_at if patience.startswith("leaves") else None)
        assert reply.response.id == f"{number}", "an answer to another request"
        assert clock.now() <= now + budget_s, "nobody waits past the deadline"
        return "answered"

    def _refused(self, error: ServeError, call: Call, leaves_at: float | None) -> str:
        assert call.deadline is not None
        assert clock.now() <= call.deadline + 1e-6, "nobody waits past the deadline"
        assert leaves_at is None or clock.now() <= leaves_at, "who left is not told"
        return error.code

    async def _meddle(self) -> None:
        """Links come and go meanwhile, and targets leave for good."""
        random = self._random
        while True:
            await clock.sleep(random.choice(MOMENTS_S) + 0.001)
            id = random.choice(self.fickle).id
            if (target := self.fleet.targets.get(id)) is None:
                continue
            event = LinkUp(id, id, target.epoch + random.randrange(2), target.offers or (offer(variant()),))
            self.fleet.fold(LinkDown(id, "gone") if random.random() < 0.3 else event, clock.now())
            self._breakers.add(target.breaker)
            if random.random() < 0.02:
                del self.targets[id]

    def _assert_at_rest(self) -> None:
        running = asyncio.get_running_loop()
        assert isinstance(running, virtual.VirtualTimeLoop)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left over"
        assert all("cancel" in repr(timer) for timer in running.timers), "only callers' own plans to leave are left"
        assert not any(one.under_way for one in self.fickle)
        assert "0 attempts in tasks" in repr(self.dispatcher)
        for target in self.fleet.targets.values():
            assert target.queue_estimate.in_flight == 0 and not target.link.unaccepted
        assert not any(breaker.is_probing for breaker in self._breakers)
        assert sum(self.ends.values()) == CALLERS


def live(seed: int) -> Run:
    run = Run(seed)
    virtual.run(run.live(), start_s=NOW)
    return run


@pytest.fixture
def silent_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defects of targets are part of the plan here, and a traceback each would be most of the time."""
    quiet: Any = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    monkeypatch.setattr("gateway.serving.execution.log", quiet)


@pytest.mark.slow
def test_whatever_targets_and_callers_do_nothing_is_left_over(silent_log: None) -> None:
    ends: Counter[str] = Counter()
    did: Counter[str] = Counter()
    for seed in range(RUNS):
        try:
            run = live(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}: live({seed}) is the whole case")
            raise
        ends += run.ends
        for target in run.fickle:
            did += target.did
    assert sum(ends.values()) == RUNS * CALLERS
    assert set(ends) >= {"answered", "left", "timeout", DeadlineExceeded.code, "nothing_alive", "bad_answer"}
    assert set(did) == {"answer", "fail", "crash", "hang", "outlast", "defy"}

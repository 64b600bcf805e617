"""A dispatcher over fake targets that are all up, for virtual time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from msgspec.structs import replace

from gateway.core.access.sequence_home import SequenceHomes
from gateway.core.placement.placer import Placer
from gateway.serving.dispatcher import Dispatcher
from tests.support.gateway.fleets import fleet_of, variant
from tests.support.serving.host import minilm
from tidegate import clock
from tidegate.fleet.offers import VariantOffer
from tidegate.models.manifest import Manifest
from tidegate.outcome import DeadlineExceeded
from tidegate.token_sink import TokenBatch, TokenObjectives, TokenSink
from tidegate.types import Accepted, Call, Datatype, InferRequest, InferResponse, LoadReport, Reply, Tensor

INT8, FP32 = variant("int8", compute_s=0.010), variant("fp32", compute_s=0.050)


class CountingTarget(ABC):
    """A `Target` that counts the attempts under way; what becomes of one is `take`'s."""

    def __init__(self, id: str) -> None:
        self._id = id
        self.under_way = 0
        self.tokens: TokenSink | None = None  # of the newest attempt

    @property
    def id(self) -> str:
        return self._id

    async def infer(
        self,
        request: InferRequest,
        *,
        variant: str,
        budget_s: float,
        priority: int,
        traceparent: str,
        on_accepted: Callable[[Accepted], None],
        tracestate: str = "",
        tokens: TokenSink | None = None,
        objectives: TokenObjectives | None = None,
    ) -> Reply:
        self.under_way += 1
        self.tokens = tokens
        try:
            return await self.take(request, variant, budget_s, on_accepted)
        finally:
            self.under_way -= 1

    @abstractmethod
    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply: ...


class FakeTarget(CountingTarget):
    """Takes `takes_s` to answer or to raise `error`, and never longer than its budget unless it `ignores_budget`."""

    def __init__(
        self, id: str, *, takes_s: float = 0.010, error: Exception | None = None, ignores_budget: bool = False
    ) -> None:
        super().__init__(id)
        self.takes_s = takes_s
        self.error = error
        self.ignores_budget = ignores_budget
        self.promise: Accepted | None = None
        self.load: LoadReport | None = None
        self.seen: list[tuple[InferRequest, str, float]] = []
        self.cancelled = 0
        self.credits: list[int] = []
        self.says_at_s: tuple[float, ...] = ()  # when it puts its tokens

    async def take(
        self, request: InferRequest, variant: str, budget_s: float, on_accepted: Callable[[Accepted], None]
    ) -> Reply:
        self.seen.append((request, variant, budget_s))
        if self.promise is not None:
            on_accepted(self.promise)
        try:
            await self._talk()
            await clock.sleep(self.takes_s if self.ignores_budget else min(self.takes_s, budget_s))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        if self.takes_s > budget_s:
            assert not self.ignores_budget, "nobody ended it"
            raise DeadlineExceeded("the budget ran out")
        response = InferResponse(request.model_name, request.model_version, (), id=request.id)
        return Reply(response, stages={"queue": 0.001, "compute": 0.006}, variant=variant, load=self.load)

    async def _talk(self) -> None:
        """Each token is its own number and the target's."""
        began_at, sink = clock.now(), self.tokens
        for index, at_s in enumerate(self.says_at_s):
            await clock.sleep_until(began_at + at_s)
            if sink is not None:
                if index == 0:
                    sink.on_credit(self.credits.append)
                    sink.started(31, 24)
                sink.put(TokenBatch(index, (100 * len(self.id) + index,)))


def call(*, id: str = "7", budget_s: float = 1.0) -> Call:
    """A request for the model of `minilm`, as a caller sends it now."""
    ids = Tensor("input_ids", Datatype.INT64, (1, 4), bytes(32))
    now = clock.now()
    return Call(InferRequest("minilm", (ids,), id=id), "oip-http", now, now + budget_s)


class Scene:
    """A dispatcher over fake targets that are all up."""

    def __init__(self, targets: dict[str, tuple[FakeTarget, VariantOffer]], homes: SequenceHomes | None = None) -> None:
        self.targets = {key.replace("_", "/", 1): target for key, (target, _) in targets.items()}
        self.fleet = fleet_of(**{key: offered for key, (_, offered) in targets.items()})
        self.dispatcher = Dispatcher(Placer(self.fleet), self.targets, self._manifest, draw=lambda: 0.5, homes=homes)

    def _manifest(self, name: str, version: str) -> Manifest:
        return minilm()

    def call(self, *, budget_s: float = 1.0, tokens: TokenSink | None = None) -> Call:
        return replace(call(budget_s=budget_s), tokens=tokens)

    def assert_at_rest(self) -> None:
        assert all(target.under_way == 0 for target in self.targets.values())
        assert all(view.queue_estimate.in_flight == 0 for view in self.fleet.targets.values())
        assert "0 attempts in tasks of their own" in repr(self.dispatcher)
        mine = asyncio.current_task()
        assert mine is not None
        assert mine.cancelling() == 0


def target(key: str, **more: object) -> FakeTarget:
    return FakeTarget(key.replace("_", "/", 1), **more)  # type: ignore[arg-type]

"""A request that is cut between layers asks an edge for its head, then a pool for its tail, as two ordinary requests.

    head    the whole's inputs, pinned to edges, due when the tail has to begin
    tail    the head's outputs, with the inputs of the whole that it takes as well, due when the whole is

Either half is placed, hedged, tried again elsewhere, cancelled and counted by the dispatcher like any request, so that
another pool takes the same activations where one is lost. What is left for here is what concerns both:

    the head fails            the whole is placed, as if nothing had been cut, in the time that is left
    the tail fails            the same; where the pools are gone, that is an edge with the full model
    the tail is silent        at the last instant at which an edge can still make it, the full model is asked there
                              beside it, and the first answer counts (`insure_at`)

The answer declares all of it: the reason `split`, the edge that computed the head, and the attempts of both halves. The
caller's deadline is over both; a caller that leaves cancels whatever is under way, here and at the targets.

Source: Laskaridis et al., "SPINN: Synergistic Progressive Inference of Neural Networks over Device and Cloud", MobiCom
2020, for finishing on the device when the cloud does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from gateway.core.placement.ask import Ask
from gateway.core.placement.layer_split import SplitOption, head_deadline
from tidegate import clock
from tidegate.models.split_halves import CutHalves
from tidegate.outcome import BadAnswer, ServeError
from tidegate.runtime.owned_task import cancel_and_wait
from tidegate.types import NO_PARAMETERS, Call, InferRequest, Reply, Route, RouteHead, SplitNote, Tensor

REASON: Final = "split"
Service = Callable[[Call], Awaitable[Reply]]


class SplitPlan(NamedTuple):
    """What was decided for one request: the cut with its halves, and the words of why."""

    option: SplitOption
    halves: CutHalves
    ask: Ask  # of the whole
    why: str


class SplitWatch(NamedTuple):
    """What an execution needs of the outside."""

    insure_at: Callable[[Ask, float], float | None]  # (whole, when the tail is expected at the latest)
    record: Callable[[str, str], None]  # (model, how it ended)


class SplitExecution:
    """One request under way, in halves. Args: infer: places one request and answers it."""

    def __init__(self, call: Call, plan: SplitPlan, infer: Service, watch: SplitWatch) -> None:
        self._call = call
        self._plan = plan
        self._infer = infer
        self._watch = watch

    async def run(self) -> Reply:
        """The answer. Raises ServeError: of the whole, where neither it nor its halves could answer."""
        try:
            head = await self._infer(self._head_call())
            tail = self._tail_call(head)
        except ServeError as error:
            return await self._whole_after(error, "head-failed", attempts=1)
        try:
            return await self._tail_or_insured(head, tail)
        except ServeError as error:
            return await self._whole_after(error, "tail-failed", attempts=2)

    # the halves

    def _head_call(self) -> Call:
        call, plan = self._call, self._plan
        now = clock.now()
        wanted = {spec.name for spec in plan.halves.head.inputs}
        request = InferRequest(
            plan.halves.head.name,
            tuple(one for one in call.request.inputs if one.name in wanted),
            plan.halves.head.version,
            call.request.id,
        )
        note = SplitNote(plan.ask.model, "head", plan.option.cut.layer, plan.why)
        deadline = head_deadline(plan.option, plan.ask, now)
        return replace(
            call, request=request, deadline=deadline, pin="edge", min_quality=plan.ask.min_quality, half=note
        )

    def _tail_call(self, head: Reply) -> Call:
        """Raises BadAnswer: the head did not give what the tail takes."""
        call, plan = self._call, self._plan
        given: Mapping[str, Tensor] = {
            **{one.name: one for one in call.request.inputs},
            **{one.name: one for one in head.response.outputs},
        }
        wanted = [spec.name for spec in plan.halves.tail.inputs]
        if missing := [name for name in wanted if name not in given]:
            raise BadAnswer(f"{plan.halves.head.name} gave no {missing[0]!r}, which {plan.halves.tail.name} takes")
        request = InferRequest(
            plan.halves.tail.name,
            tuple(replace(given[name], parameters=NO_PARAMETERS) for name in wanted),
            plan.halves.tail.version,
            call.request.id,
            call.request.outputs,
            call.request.parameters,
        )
        note = SplitNote(plan.ask.model, "tail", plan.option.cut.layer, f"its head was computed by {_by(head)}")
        pin = "any" if plan.ask.pin == "edge-input" else plan.ask.pin
        return replace(call, request=request, pin=pin, min_quality=plan.ask.min_quality, on_accepted=None, half=note)

    async def _tail_or_insured(self, head: Reply, tail: Call) -> Reply:
        option = self._plan.option
        expected_by = clock.now() + option.tail.finish_s + option.tail.margin_s
        insure_at = self._watch.insure_at(self._plan.ask, expected_by)
        if insure_at is None:
            return self._joined(head, await self._infer(tail))
        asked = asyncio.ensure_future(self._infer(tail))
        try:
            await asyncio.wait({asked}, timeout=max(0.0, insure_at - clock.now()))
            if asked.done():
                return self._joined(head, asked.result())
            return await self._race(head, asked)
        finally:
            await cancel_and_wait(asked)

    async def _race(self, head: Reply, asked: asyncio.Future[Reply]) -> Reply:
        """The first answer, of the tail that is silent or of an edge's full model; the other one is cancelled."""
        note = SplitNote(self._plan.ask.model, "whole", self._plan.option.cut.layer, "the tail has not answered")
        insured = asyncio.ensure_future(self._infer(replace(self._call, pin="edge", half=note)))
        try:
            pending: set[asyncio.Future[Reply]] = {asked, insured}
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if asked in done and asked.exception() is None:
                    return self._joined(head, asked.result())
                if insured in done and insured.exception() is None:
                    self._watch.record(self._plan.ask.model, "insured")
                    return _fallen_back(insured.result(), attempts=2)
            return self._joined(head, asked.result())  # raises what the tail failed with
        finally:
            await cancel_and_wait(insured)

    # the ends

    def _joined(self, head: Reply, tail: Reply) -> Reply:
        """The tail's reply as that of the whole model."""
        plan, first, last = self._plan, head.route, tail.route
        assert first is not None and last is not None  # the dispatcher says where it was
        self._watch.record(plan.ask.model, "answered")
        stages = dict(head.stages)
        for stage, took_s in tail.stages.items():
            stages[stage] = stages.get(stage, 0.0) + took_s
        variant = first.variant if first.variant == last.variant else f"{first.variant}+{last.variant}"
        route = replace(
            last,
            reason=REASON,
            variant=variant,
            attempts=first.attempts + last.attempts,
            hedged=first.hedged or last.hedged,
            fallback=first.fallback or last.fallback,
            degraded=first.degraded or last.degraded,
            head=RouteHead(first.served_by, first.variant, plan.option.cut.layer),
        )
        response = replace(tail.response, model_name=plan.ask.model, model_version=plan.ask.version)
        return replace(tail, response=response, stages=stages, route=route, variant=variant)

    async def _whole_after(self, error: ServeError, how: str, *, attempts: int) -> Reply:
        """The whole, placed in the time that is left; where there is none, the error."""
        call = self._call
        self._watch.record(self._plan.ask.model, how)
        if call.deadline is not None and clock.now() >= call.deadline:
            raise error
        note = SplitNote(self._plan.ask.model, "whole", self._plan.option.cut.layer, f"{how}: {error.code}")
        return _fallen_back(await self._infer(replace(call, half=note)), attempts=attempts)

    def __repr__(self) -> str:
        return f"<SplitExecution {self._call.request.id or '-'} at {self._plan.option.cut.layer}>"


def _fallen_back(reply: Reply, *, attempts: int) -> Reply:
    """The whole's reply, which says that others were tried before it."""
    route = reply.route
    if route is None:
        return reply
    return replace(reply, route=_after(route, attempts))


def _after(route: Route, attempts: int) -> Route:
    return replace(route, attempts=route.attempts + attempts, fallback=True)


def _by(reply: Reply) -> str:
    return reply.route.served_by if reply.route is not None else "an edge"

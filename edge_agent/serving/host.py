"""The edge's host: the common pipeline (`tidegate/serving/target_host.py`) over one runner for each model.

What is an edge's own: the runner that answers for a model changes while the agent runs, offers are made anew only when
something has changed, and a device that spares its battery takes no new work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from edge_agent.serving.edge_model import EdgeModel, OnAnswered
from edge_agent.serving.runner import Runner
from edge_agent.serving.scheduler import EdgeScheduler
from tidegate.fleet.offers import ModelOffer
from tidegate.models.share_weights import ShareWeights
from tidegate.models.work import fits, work_of
from tidegate.outcome import NotSupported, Overloaded, ServeError
from tidegate.serving.generation.sequence_scheduler import SequenceScheduler
from tidegate.serving.joint_queue import JointQueue
from tidegate.serving.model_table import ModelTable
from tidegate.serving.target_host import TargetHost
from tidegate.tracing.served import ServedTraces
from tidegate.types import Call

EXHAUSTED_FOR_S = 30.0  # a battery does not fill faster


class EdgeHost(TargetHost[EdgeModel]):
    """A `ModelHost` over one runner per model.

    Args:
        name: of this edge in its fleet; answers say "edge/NAME".
        epoch: the number of this agent's session, the same that its MQTT messages carry.
        exhausted: why the device takes no new work just now, "" while it does; asked for every call.
        shares: the weights by which models share the device.
        on_answered: as `EdgeModel` calls it.
        on_missed: as `TargetHost` calls it.
    """

    def __init__(
        self,
        name: str,
        runners: Sequence[Runner],
        scheduler: EdgeScheduler,
        *,
        epoch: Callable[[], int],
        exhausted: Callable[[], str] = lambda: "",
        shares: ShareWeights | None = None,
        on_answered: OnAnswered = lambda runner, compute_s: None,
        traces: ServedTraces | None = None,
        on_missed: Callable[[float, float], None] = lambda _arrived_at, _ended_at: None,
    ) -> None:
        server_name = f"edge/{name}"
        super().__init__(
            server_name,
            ModelTable(server_name),
            JointQueue(scheduler, self.sequences),
            epoch=epoch,
            check_open=lambda: _check_not_exhausted(server_name, exhausted()),
            traces=traces,
            on_missed=on_missed,
        )
        self._name = name
        self._scheduler = scheduler
        self._shares = shares
        self._on_answered = on_answered
        self._leaving: list[EdgeModel] = []  # routed no more, with calls inside
        for runner in runners:
            self.models.replace(self._model(runner))
        self._offers = super().offers()

    def offers(self) -> tuple[ModelOffer, ...]:
        """What is offered now; the same object until `refresh`."""
        return self._offers

    def finish_in_s(self, call: Call, deadline: float) -> float | None:
        """The predicted time until a call would be done if it came now; None where only `infer` can tell.

        A prediction only: it changes nothing, and what it was made of may be another thing a moment later.
        """
        model = self.models.get(call.request.model_name)
        if model is None or call.request.model_version not in ("", model.manifest.version):
            return None
        try:
            work = work_of(model.manifest, call.request)
            variant = model.choose(self._demanded(model, call), work, call.variant)
        except ServeError:
            return None
        return model.finish_in_s(variant, work, deadline, call.priority)

    def most_rows(self, call: Call, enough: int) -> int | None:
        """How many rows, `enough` at most, a call like this one may have here; None: no variant takes even this one."""
        request = call.request
        model = self.models.find(request.model_name, request.model_version)
        try:
            variants = self._demanded(model, call)
        except NotSupported:
            return None
        work = work_of(model.manifest, request)
        most = [
            enough if one.max_batch is None else min(one.max_batch, enough)
            for one in variants
            if fits(work, max_batch=one.max_batch, max_tokens=one.max_tokens)
        ]
        return max(most, default=None)

    @property
    def queued(self) -> int:
        """How many requests wait."""
        return self._queue.queued

    @property
    def busy(self) -> bool:
        """Whether anything waits or is computed."""
        return self._queue.queued + self._queue.in_flight > 0

    def sequences(self) -> list[SequenceScheduler]:
        """Of the variants that generate and are routed, or have calls inside."""
        runners = [model.runner for model in (*self.models, *self._leaving)]
        return [one.scheduler for runner in runners for one in runner.generating.values()]

    async def drained(self) -> None:
        """Wait until no caller waits for an answer."""
        await asyncio.gather(self._scheduler.drained(), *[one.drained() for one in self.sequences()])

    def refresh(self, runner: Runner) -> None:
        """Take note of a runner's new state: what waits for a lost worker is refused, and the offers are made anew."""
        answers = self.routed(runner.manifest.name)
        # A runner that another one of the same name replaces (`RunnerSet.renew`) has no requests to fail.
        if runner.state != "ready" and (answers is None or answers is runner or answers.name != runner.name):
            self._scheduler.close(runner.name, runner.unready())
        self._offers = super().offers()

    def routed(self, name: str) -> Runner | None:
        """The runner that answers for a model now."""
        model = self.models.get(name)
        return model.runner if model is not None else None

    def route(self, runner: Runner, *, soaking: bool = False) -> None:
        """From the next call on this runner answers for its model; calls that are inside the one before end there."""
        before = self.models.get(runner.manifest.name)
        if before is not None and before.runner is runner:
            before.soaking = soaking
        else:
            self._put_aside(before)
            self.models.replace(self._model(runner, soaking=soaking))
        self._offers = super().offers()

    def unroute(self, name: str) -> None:
        """From the next call on no runner answers for the model."""
        self._put_aside(self.models.get(name))
        self.models.remove(name, unloaded=True)
        self._offers = super().offers()

    async def emptied(self, runner: Runner) -> None:
        """Return once no call is inside a runner that is not routed any more."""
        for model in [one for one in self._leaving if one.runner is runner]:
            await model.idle.wait()
            # Another model that was put aside since its last call left may have taken it out already.
            self._leaving = [one for one in self._leaving if one is not model]

    def _model(self, runner: Runner, *, soaking: bool = False) -> EdgeModel:
        return EdgeModel(
            self.server_name,
            runner,
            self._scheduler,
            soaking=soaking,
            shares=self._shares,
            on_answered=self._on_answered,
        )

    def _put_aside(self, model: EdgeModel | None) -> None:
        self._leaving = [one for one in self._leaving if one.calls_inside]
        if model is not None and model.calls_inside:
            self._leaving.append(model)

    def __repr__(self) -> str:
        states = ", ".join(f"{model.runner.name} {model.runner.state}" for model in self.models)
        return f"<EdgeHost {self._name} {states} {self._scheduler!r}>"


def _check_not_exhausted(server_name: str, reason: str) -> None:
    """Also a caller that does not know of the condition yet is refused at once, and may go elsewhere."""
    if reason:
        raise Overloaded(f"{server_name} takes no new work: {reason}", retry_after_s=EXHAUSTED_FOR_S)

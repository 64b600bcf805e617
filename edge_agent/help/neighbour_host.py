"""The neighbour's host is this device as one neighbour may use it, for the requests of that neighbour's own callers.

It stands around the device's own models alone, so that what a neighbour asks can go nowhere else.
`edge_agent/core/help/neighbour_admission.py` decides; the request then waits in the device's own queue, at the last
level of priority.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from edge_agent.core.help.neighbour_admission import NeighbourRequest, OwnLoad, check_neighbours_request
from edge_agent.core.help.neighbour_counts import NeighbourCounts
from edge_agent.serving.host import EdgeHost
from edge_agent.serving.host_around import HostAround
from tidegate import clock
from tidegate.fleet.offers import ModelOffer
from tidegate.models.manifest import Manifest
from tidegate.oip.sequence import sequence_of
from tidegate.outcome import ModelNotFound, Outcome
from tidegate.placement_pin import stricter
from tidegate.priority import LAST_LEVEL
from tidegate.types import HELP, Call, Reply


class NeighbourAnswers:
    """What neighbours may have here, and have had (`counts`).

    Args:
        may_use: whether neighbours are answered for a model of this name.
        most_queued: how many requests may wait here now.
    """

    def __init__(self, may_use: Callable[[str], bool], *, max_in_flight: int, most_queued: Callable[[], int]) -> None:
        self.may_use = may_use
        self.max_in_flight = max_in_flight
        self.most_queued = most_queued
        self.counts = NeighbourCounts()

    def serves(self, manifest: Manifest) -> bool:
        return self.may_use(manifest.name) and manifest.generative is None

    def offers(self, host: EdgeHost) -> tuple[ModelOffer, ...]:
        """Of what the device offers what neighbours may have."""
        served = {one.name for one in host.manifests() if self.serves(one)}
        return tuple([one for one in host.offers() if one.name in served])

    def __repr__(self) -> str:
        return f"<NeighbourAnswers {self.counts!r} of {self.max_in_flight}>"


class NeighbourHost(HostAround[EdgeHost]):
    """A `ModelHost` for one neighbour. Args: asker: "edge/NAME", as it has proven."""

    __slots__ = ("_answers", "_asker")

    def __init__(self, host: EdgeHost, answers: NeighbourAnswers, asker: str) -> None:
        super().__init__(host)
        self._answers = answers
        self._asker = asker

    def manifests(self) -> Sequence[Manifest]:
        return [one for one in self._host.manifests() if self._answers.serves(one)]

    def manifest(self, name: str, version: str = "") -> Manifest:
        if not self._answers.may_use(name):
            raise ModelNotFound(f"{self.server_name} does not answer neighbours for {name!r}")
        return self._host.manifest(name, version)

    async def infer(self, call: Call) -> Reply:
        """The device's own answer. Raises as `check_neighbours_request` and `EdgeHost.infer`."""
        requests = self._answers.counts.requests
        try:
            reply = await self._answered(call)
        except (Exception, asyncio.CancelledError) as error:
            requests[Outcome.of(error).value] += 1
            raise
        requests[Outcome.OK.value] += 1
        return reply

    async def _answered(self, call: Call) -> Reply:
        host, answers, request = self._host, self._answers, call.request
        manifest = self.manifest(request.model_name, request.model_version)
        deadline = call.arrived_at + manifest.default_budget_s if call.deadline is None else call.deadline
        call = replace(call, protocol=HELP, priority=LAST_LEVEL, deadline=deadline)
        check_neighbours_request(
            NeighbourRequest(
                asker=self._asker,
                path=call.path,
                pin=stricter(call.pin, manifest.pin),
                is_step=sequence_of(request.parameters) is not None,
                generates=manifest.generative is not None or call.tokens is not None,
                left_s=deadline - clock.now(),
                finish_s=host.finish_in_s(call, deadline),
            ),
            OwnLoad(answers.counts.in_flight, answers.max_in_flight, host.queued, answers.most_queued()),
        )
        answers.counts.in_flight += 1
        try:
            return await host.infer(call)
        finally:
            answers.counts.in_flight -= 1

    def __repr__(self) -> str:
        return f"<NeighbourHost for {self._asker} {self._host!r}>"

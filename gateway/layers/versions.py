"""Choose a version for a request that names none, and another one where no target can answer with the first.

While a new version is rolled out, some devices have it and some do not (`gateway/core/versions/version_shares.py`
computes the shares). The version is settled here, before placement, so that all attempts of one execution ask for one.
Where an execution fails for want of a place or of a working target, the request is executed again with another version
that is served, while its time lasts. A first execution with a version that no device has committed yet, or that is on
trial, gets most of the time and not all of it: a device that hangs with it costs a request some of its budget and not
its answer.

Where an operator has two versions on trial, the trial chooses the version instead
(`gateway/core/versions/traffic_split.py`), and records the outcome of each.

Models of which no version was shipped and none is on trial are passed on at the cost of two look-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from gateway.core.fleet.fleet import SERVING, Fleet
from gateway.core.versions.version_shares import VersionTargets, sample_order, shares_by_version
from gateway.layers.stack import Layer, Service
from tidegate.outcome import CapacityError, ModelNotFound, NothingAlive, NotSupported, PeerError
from tidegate.types import Call, Reply

FIRST_FLIGHT: Final = 0.6  # of the budget that is left, for a version that is not proved yet
KEEP_S: Final = 0.2  # how old a count of serving targets may be
_NOWHERE: Final = (NothingAlive, ModelNotFound)
_ELSEWHERE: Final = (CapacityError, PeerError, ModelNotFound, NotSupported)


class TrialPolicy(Protocol):
    """What an operator has set (`gateway/delivery/trials.py`)."""

    def turn(self, call: Call) -> Sequence[str]:
        """The versions to ask, in this order; none: nothing is set for its model. Raises InvalidRequest."""
        ...

    def answered(self, call: Call, version: str, reply: Reply, took_s: float) -> None: ...

    def failed(self, call: Call, version: str, error: BaseException, took_s: float) -> None: ...


def versions(
    siblings: Callable[[str], Sequence[str]],
    fleet: Fleet,
    now: Callable[[], float],
    draw: Callable[[], float],
    trial: TrialPolicy,
) -> Layer:
    """Args:
    siblings: the versions of a model that may stand in for one another, the standing one first; fewer than two: none.
    """
    counts = _ServingCounts(fleet, now)

    def layer(inner: Service) -> Service:
        watched = _watched(inner, trial, now)

        async def service(call: Call) -> Reply:
            model = call.request.model_name
            if call.request.model_version:
                return await inner(call)
            if order := trial.turn(call):
                return await _in_order(call, order, watched, now)
            names = siblings(model)
            if len(names) < 2:
                return await inner(call)
            served = counts.of(model, names)
            try:
                return await by_share(call, served)
            except _NOWHERE:  # all devices may have changed their version since they were counted
                anew = counts.anew(model, names)
                if anew.keys() <= served.keys():
                    raise
            return await by_share(call, anew)

        async def by_share(call: Call, served: Mapping[str, VersionTargets]) -> Reply:
            proved = [name for name, one in served.items() if one.edges or one.pools]
            return await _in_order(
                call, sample_order(list(served), shares_by_version(served), draw()), inner, now, proved
            )

        return service

    return layer


class _ServingCounts:
    """Counts the targets that serve each version of a model, and keeps a count for a moment."""

    def __init__(self, fleet: Fleet, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self._now = now
        self._known: dict[str, tuple[float, dict[str, VersionTargets]]] = {}  # by model, and when it was counted

    def of(self, model: str, names: Sequence[str]) -> dict[str, VersionTargets]:
        """Of the versions that are served now; the standing one where none is."""
        known = self._known.get(model)
        if known is None or self._now() - known[0] > KEEP_S:
            return self.anew(model, names)
        return known[1]

    def anew(self, model: str, names: Sequence[str]) -> dict[str, VersionTargets]:
        at = self._now()
        found = {name: standing(self._fleet, model, name, at) for name in names}
        served = {name: one for name, one in found.items() if any(one)} or {names[0]: found[names[0]]}
        self._known[model] = at, served
        return served


async def _in_order(
    call: Call, order: Sequence[str], execute: Service, now: Callable[[], float], proved: Sequence[str] = ()
) -> Reply:
    """Execute the call with each version until one answers; the last has all the time that is left."""
    assert call.deadline is not None, "the expire layer sets a deadline"
    for version in order[:-1]:
        at = now()
        share = 1.0 if version in proved else FIRST_FLIGHT
        try:
            return await execute(_of(call, version, at + share * (call.deadline - at)))
        except _ELSEWHERE:
            if now() >= call.deadline:
                raise
    return await execute(_of(call, order[-1], call.deadline))


def _watched(inner: Service, trial: TrialPolicy, now: Callable[[], float]) -> Service:
    """The service, with each outcome reported to the trial."""

    async def service(call: Call) -> Reply:
        began_at, version = now(), call.request.model_version
        try:
            reply = await inner(call)
        except Exception as error:  # a caller that left says nothing of a version
            trial.failed(call, version, error, now() - began_at)
            raise
        trial.answered(call, version, reply, now() - began_at)
        return reply

    return service


def standing(fleet: Fleet, model: str, version: str, now: float) -> VersionTargets:
    """How many targets serve this version and may be asked."""
    edges = soaking = pools = 0
    for target in fleet.targets.values():
        if not (target.up and target.accepting and target.allows(now)):
            continue
        for offer in target.offers:
            if (offer.name, offer.version) == (model, version) and offer.state in SERVING:
                edges += target.spec.tier == "edge" and offer.state == "ready"
                soaking += target.spec.tier == "edge" and offer.state == "soaking"
                pools += target.spec.tier != "edge"
    return VersionTargets(edges, soaking, pools)


def _of(call: Call, version: str, deadline: float) -> Call:
    return replace(call, request=call.request.pinned(version), deadline=deadline)

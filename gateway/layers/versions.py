"""Choose a version for a request that names none, and another one where no target can answer with the first.

Which versions may answer, and with which share, is `gateway/core/versions/default_version.py`. The version is settled
here, before placement, so that all attempts of one execution ask for one. Where an execution fails for want of a place
or of a working target, the request is executed again with another version that has a share, while its time lasts. A
first execution with a version that no device has committed yet, or that is on trial, gets most of the time and not all
of it: a device that hangs with it costs a request some of its budget and not its answer. Of a stream that is the time
for its first token; behind that no other version answers (`first_token.py`), and a failure is the caller's to see.

Where no target was found at all, as when all devices change their version in one instant, targets are counted anew, and
any version that they serve by now and that may stand in answers.

Where an operator has two versions on trial, the candidate is tried first for the requests that are its share
(`gateway/core/versions/traffic_split.py`), and the trial records the outcome of each. A version that a caller demands
is executed as it is: it answers, or the caller is told which version had no target.

Models with one version are passed on at the cost of two look-ups.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from msgspec.structs import replace

from gateway.core.versions.default_version import VersionLine, default_shares
from gateway.core.versions.version_shares import VersionTargets, sample_order
from gateway.layers.first_token import FirstToken
from gateway.layers.stack import Layer, Service
from tidegate.outcome import CapacityError, ModelNotFound, NothingAlive, NotSupported, PeerError
from tidegate.types import Call, Reply, Route

FIRST_FLIGHT: Final = 0.6  # of the budget that is left, for a version that is not proved yet
KEEP_S: Final = 0.2  # how old a count of serving targets may be
_NOWHERE: Final = (NothingAlive, ModelNotFound)
_ELSEWHERE: Final = (CapacityError, PeerError, ModelNotFound, NotSupported)
_Served = Mapping[str, VersionTargets]
Watch = Callable[[Service], Service]


class TrialPolicy(Protocol):
    """What an operator has set (`gateway/delivery/trials.py`)."""

    def demanded(self, call: Call) -> str:
        """The version that the caller demands in a header; "" for none. Raises InvalidRequest."""
        ...

    def tried(self, call: Call) -> str:
        """The version to try ahead of the default one; "" for none."""
        ...

    def watches(self, call: Call) -> bool:
        """Whether outcomes of the call's model are recorded."""
        ...

    def answered(self, call: Call, version: str, reply: Reply, took_s: float) -> None: ...

    def failed(self, call: Call, version: str, error: BaseException, took_s: float) -> None: ...


class VersionSource(Protocol):
    """What may answer, and what is served now (`gateway/default_versions.py`)."""

    def line(self, name: str) -> VersionLine | None:
        """The versions that may answer a request that names none; None where there are not several."""
        ...

    def count(self, name: str, versions: tuple[str, ...], now: float) -> _Served:
        """By version: the targets that serve it and may be asked."""
        ...


def versions(source: VersionSource, now: Callable[[], float], draw: Callable[[], float], trial: TrialPolicy) -> Layer:
    counts = _ServingCounts(source, now)

    def layer(inner: Service) -> Service:
        def service(call: Call) -> Awaitable[Reply]:
            request = call.request
            if request.model_version:
                return inner(call)
            watch = partial(_watched, trial=trial, now=now) if trial.watches(call) else _unwatched
            if version := trial.demanded(call):
                return _in_order(call, [version], watch, inner, now=now)
            line = source.line(request.model_name)
            return inner(call) if line is None else by_line(call, line, watch)

        async def by_line(call: Call, line: VersionLine, watch: Watch) -> Reply:
            first = None if call.tokens is None else FirstToken(call.tokens)
            if first is not None:
                call = replace(call, tokens=first)
            served = counts.of(call.request.model_name, line)
            order, proved = _order(line, served, draw), _proved(served)
            if (candidate := trial.tried(call)) in served:
                order, proved = [candidate, *(one for one in order if one != candidate)], []
            try:
                return await _in_order(call, order or line.names[:1], watch, inner, now=now, proved=proved, first=first)
            except _NOWHERE:  # all devices may have changed their version since they were counted
                if first is not None and first.has_come:
                    raise
                anew = counts.anew(call.request.model_name, line)
                left = [one for one in sorted(anew, key=line.names.index) if one not in order]
                if not left:
                    raise
            return await _in_order(call, left, watch, inner, now=now, proved=_proved(anew), first=first)

        return service

    return layer


def _order(line: VersionLine, served: _Served, draw: Callable[[], float]) -> list[str]:
    """The served versions to execute: the first by share, then the others that have or may have one."""
    shares = default_shares(line, served)
    within = [one for one in served if one in shares or one in line.sharing]
    return sample_order(within, shares, draw() if len(shares) > 1 else 0.0)


def _proved(served: _Served) -> list[str]:
    return [name for name, one in served.items() if one.edges or one.pools]


class _ServingCounts:
    """Counts the targets that serve each version of a line, and keeps a count for a moment."""

    def __init__(self, source: VersionSource, now: Callable[[], float]) -> None:
        self._source = source
        self._now = now
        self._known: dict[str, tuple[float, VersionLine, _Served]] = {}  # by model, and when it was counted

    def of(self, model: str, line: VersionLine) -> _Served:
        """Of the versions that are served now, in the order of the line."""
        known = self._known.get(model)
        if known is None or known[1] is not line or self._now() - known[0] > KEEP_S:
            return self.anew(model, line)
        return known[2]

    def anew(self, model: str, line: VersionLine) -> _Served:
        at = self._now()
        found = self._source.count(model, line.names, at)
        served = {name: found[name] for name in line.names if any(found[name])}
        self._known[model] = at, line, served
        return served


async def _in_order(
    call: Call,
    order: Sequence[str],
    watch: Watch,
    inner: Service,
    *,
    now: Callable[[], float],
    proved: Sequence[str] = (),
    first: FirstToken | None = None,
) -> Reply:
    """Execute the call with each version until one answers; the last has all the time that is left.

    Args:
        watch: reports the outcome of each execution where a trial wants it.
        first: the call's own sink; None where nobody reads its tokens before the end.
    """
    assert call.deadline is not None, "the expire layer sets a deadline"
    for version in order[:-1]:
        at = now()
        share = 1.0 if version in proved else FIRST_FLIGHT
        within_s = share * (call.deadline - at)
        try:
            if first is not None:
                return await watch(_begun_within(inner, first, within_s))(_of(call, version, call.deadline))
            return await watch(inner)(_of(call, version, at + within_s))
        except _ELSEWHERE:
            if now() >= call.deadline or (first is not None and first.has_come):
                raise
    return await watch(inner)(_of(call, order[-1], call.deadline))


def _begun_within(inner: Service, first: FirstToken, limit_s: float) -> Service:
    def service(call: Call) -> Awaitable[Reply]:
        return first.within(limit_s, inner(call))

    return service


def _unwatched(inner: Service) -> Service:
    return inner


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


def _of(call: Call, version: str, deadline: float) -> Call:
    on_begun = None if call.on_begun is None else partial(_begun_as, version, call.on_begun)
    return replace(call, request=call.request.pinned(version), deadline=deadline, on_begun=on_begun)


def _begun_as(version: str, on_begun: Callable[[Route], None], route: Route) -> None:
    """Tell a stream's front which version answers: it learns the rest from the reply, and that comes last."""
    on_begun(replace(route, version=version))

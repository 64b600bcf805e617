"""Known answers: which kept answer may be given for a call now, and which new answer may be kept.

`gateway/core/response_cache` keeps answers by their request; this says what they are worth at the moment of a call. A
kept answer is given only where the same request would be answered by the same version now:

    version     the one that is demanded, or the one that gets all requests that name none; while several versions share
                requests (a rollout, a traffic split) only a demanded one has known answers
    served      a target that may be asked serves it: what was called back or unloaded everywhere answers no longer
    manifest    the same to the last byte, checksums of artefacts included: a reloaded model is another one
    source      a target whose answers drifted from the pool's (docs/agreement.md) loses all that it has answered

and none during a trial, whose figures would count it. Kept is what its caller got whole: no degraded answer, no
provisional one, none that was cut or gone on with elsewhere, none in another variant or version than was demanded.

A *last-known* answer is given where nothing else answers (`gateway/layers/cached.py`), for `stale_for_s` after `ttl_s`.
No target need serve its version then; all else holds. A caller that names a series (`tidegate-series`: a camera, a
sensor) gets the series' newest answer, which is to another input, where there is none to the same input. Both are
declared with their age, and no older than its caller says (`tidegate-max-age-s`).

A known answer is declared, counted as an answer of the tier `cache`, and recorded for `tidegate explain`. It teaches
no estimate anything: nothing was placed.

It can be wrong where a target serves another artefact under the same version and checksum than the manifest here says:
a new artefact needs a new version. `ttl_s` bounds how long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from typing import Final, Literal, NamedTuple

from msgspec.structs import replace

from gateway.core.history.recorder import (
    AnswerRecord,
    FlightRecorder,
    RequestEvent,
    RequestRecord,
    trace_id_of,
    truncated_words,
)
from gateway.core.response_cache.cache_key import cache_key, manifest_mark, series_key, uncacheable
from gateway.core.response_cache.response_cache import KeptAnswer, LastKnown, ResponseCache
from gateway.core.versions.default_version import VersionLine
from gateway.default_versions import DefaultVersions
from tidegate import clock
from tidegate.models.manifest import Manifest
from tidegate.oip.request_constraints import max_age_of, series_of
from tidegate.outcome import ModelNotFound, ServeError
from tidegate.types import Call, InferResponse, Reply, Route, Tensor

CACHE: Final = "cache"  # stands where other answers have a target
CACHED: Final = "cached"  # and this where they have a reason
LAST_KNOWN: Final = "last-known"  # or this
COUNTED_AGAIN_S: Final = 0.2  # how old a count of serving targets may be, as in `gateway/layers/versions.py`
_NOT_CACHEABLE: Final = "manifest"


class CacheTerms(NamedTuple):
    """What an operator allows.

    Args:
        max_input_bytes: a larger request is computed: reading it for its key would hold up others.
        shares_tenants: whether a tenant may get what another one's request was answered with.
    """

    max_input_bytes: int
    shares_tenants: bool


class AnswerKeys(NamedTuple):
    """Under what an answer to a call is known. Args: max_age_s: how old it may be."""

    exact: bytes | None  # None: such answers are not kept
    series: bytes | None = None  # of the series that the call names
    max_age_s: float = inf


class LastKnownAnswer(NamedTuple):
    """A last-known answer that may be given for a call."""

    known: LastKnown
    of: Literal["input", "series"]


class _SoleVersion(NamedTuple):
    at: float
    line: VersionLine
    version: str  # "" while several share requests


class KnownAnswers:
    """An `AnswerMemory`.

    Mutable: `outcomes` counts by model what became of lookups, `kept` of new answers, and `lent` the last-known answers
    that were given, by the code of the refusal instead of which.

    Args:
        demanded: the version that a call demands in a header; "" for none. Raises InvalidRequest.
        on_trial: whether outcomes of the call's model are being compared.
        is_drifting: whether a target's answers (target, model, version, variant) drift now.
    """

    def __init__(
        self,
        cache: ResponseCache,
        terms: CacheTerms,
        defaults: DefaultVersions,
        recorder: FlightRecorder,
        *,
        demanded: Callable[[Call], str],
        on_trial: Callable[[Call], bool],
        is_drifting: Callable[[str, str, str, str], bool],
    ) -> None:
        self.cache = cache
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.kept: Counter[tuple[str, str]] = Counter()
        self.lent: Counter[tuple[str, str]] = Counter()
        self._terms = terms
        self._defaults = defaults
        self._recorder = recorder
        self._demanded = demanded
        self._on_trial = on_trial
        self._is_drifting = is_drifting
        self._marks: dict[str, tuple[Manifest, str]] = {}  # by model: of the version that was asked for last
        self._sole: dict[str, _SoleVersion] = {}

    # as an `AnswerMemory`

    def keys(self, call: Call) -> AnswerKeys | None:
        """The keys of a call that may have a known answer. Raises InvalidRequest: a demand that cannot be read."""
        request = call.request
        model = request.model_name
        if model not in self.cache.limits or self._on_trial(call):
            return None
        version = request.model_version or self._demanded(call)
        manifest = self._known_manifest(model, version)
        if manifest is None:
            return None  # the layers further in say what is wrong
        tenant, mark = "" if self._terms.shares_tenants else call.tenant, self._mark(manifest)
        exact = series = None
        why = uncacheable(call, manifest, self._terms.max_input_bytes) if manifest.cacheable else _NOT_CACHEABLE
        if why:
            self.outcomes[model, why] += 1
        else:
            exact = cache_key(call, version, mark=mark, tenant=tenant)
        named = series_of(call.headers, request.parameters)
        if named and why in ("", "large") and self.cache.limits[model].stale_for_s > 0.0:
            # Its answer is to another input, so that a name must not be shared with other tenants.
            series = series_key(call, version, mark=mark, tenant=call.tenant, series=named)
        return AnswerKeys(exact, series, max_age_of(call.headers, request.parameters))

    def answer(self, call: Call, keys: AnswerKeys) -> Reply | None:
        """The known answer, where the same version would give it now."""
        if keys.exact is None:
            return None
        now, model = clock.now(), call.request.model_name
        known = self.cache.find(keys.exact, now, keys.max_age_s)
        if known is None:
            self.outcomes[model, "miss"] += 1
            return None
        if not self._stands(call, known):
            self.outcomes[model, "stale"] += 1  # perhaps for a moment only: it is kept, and replaced by what comes
            return None
        self.outcomes[model, "hit"] += 1
        return self._reply(call, known, now)

    def last_known(self, call: Call, keys: AnswerKeys) -> LastKnownAnswer | None:
        """What may be given for the call where nothing else answers; None where nothing may."""
        if self.cache.limits[call.request.model_name].stale_for_s <= 0.0:
            return None
        now = clock.now()
        for key, of in ((keys.exact, "input"), (keys.series, "series")):
            known = None if key is None else self.cache.last_known(key, now, keys.max_age_s)
            if known is not None and self._stood(call, known.answer):
                return LastKnownAnswer(known, "input" if of == "input" else "series")
        return None

    def lend(self, call: Call, last: LastKnownAnswer, error: ServeError) -> Reply:
        """The answer of last resort. Args: error: what the caller would have got else."""
        model, (answer, age_s) = call.request.model_name, last.known
        self.lent[model, error.code] += 1
        now = clock.now()
        note = RequestEvent(now, "lent", 0, seconds=age_s, words=f"{error.code}: {error.message}")
        reply = self._reply(call, answer, now, reason=LAST_KNOWN, notes=(note,))
        return replace(reply, last_known=f"age-s={age_s:.1f}; of={last.of}")

    def keep(self, call: Call, keys: AnswerKeys, reply: Reply) -> None:
        """Keep an answer that its caller got whole and as it was demanded."""
        route, response = reply.route, reply.response
        if route is None or not _is_whole(reply, route) or call.variant not in ("", reply.variant):
            return
        demanded = call.request.model_version or self._demanded(call)
        if demanded not in ("", response.model_version) or self._on_trial(call):
            return
        model, version = call.request.model_name, response.model_version
        manifest = self._known_manifest(model, version)
        if manifest is None or not manifest.cacheable or response.model_name != model:
            return
        if uncacheable(call, manifest, inf if keys.exact is None else self._terms.max_input_bytes):
            return  # of the version that answered, where it is another than that of the key
        if self._is_drifting(route.served_by, model, version, reply.variant):
            return
        answer = KeptAnswer(_owned(response), reply.variant, route.served_by, self._mark(manifest))
        now = clock.now()
        if keys.exact is not None:
            self.kept[model, "kept" if self.cache.keep(keys.exact, model, answer, now) else "large"] += 1
        if keys.series is not None:
            self.cache.keep(keys.series, model, answer, now, fresh=False)

    # what has become of a source

    def distrust(self, target: str, model: str, version: str, variant: str) -> int:
        """Forget all that a target has answered in this variant, since its answers drift; how many they were."""

        def is_its(known: KeptAnswer) -> bool:
            return (known.source, known.response.model_version, known.variant) == (target, version, variant)

        return self.cache.drop_where(model, is_its)

    def _stands(self, call: Call, known: KeptAnswer) -> bool:
        """Whether the same version would give it now."""
        model, version = call.request.model_name, known.response.model_version
        demanded = call.request.model_version or self._demanded(call)
        if version != (demanded or self._sole_version(model)) or not self._is_sound(model, known):
            return False
        return self._defaults.serves(model, version, clock.now())

    def _stood(self, call: Call, known: KeptAnswer) -> bool:
        """Whether the same version would give it, if any target served it."""
        model, version = call.request.model_name, known.response.model_version
        demanded = call.request.model_version or self._demanded(call)
        return version == (demanded or self._defaults.manifest(model).version) and self._is_sound(model, known)

    def _is_sound(self, model: str, known: KeptAnswer) -> bool:
        """Whether nothing has become known against what made it."""
        version = known.response.model_version
        if self._is_drifting(known.source, model, version, known.variant):
            return False
        manifest = self._known_manifest(model, version)
        return manifest is not None and known.model_mark == self._mark(manifest)

    def _sole_version(self, model: str) -> str:
        """The version that gets every request that names none; "" while several share them."""
        line = self._defaults.line(model)
        if line is None:
            return self._defaults.manifest(model).version
        now, sole = clock.now(), self._sole.get(model)
        if sole is None or sole.line is not line or now - sole.at > COUNTED_AGAIN_S:
            shares = self._defaults.shares(model, now)
            sole = self._sole[model] = _SoleVersion(now, line, next(iter(shares)) if len(shares) == 1 else "")
        return sole.version

    def _known_manifest(self, model: str, version: str) -> Manifest | None:
        try:
            return self._defaults.manifest(model, version)
        except ModelNotFound:
            return None

    def _mark(self, manifest: Manifest) -> str:
        marked = self._marks.get(manifest.name)
        if marked is None or marked[0] is not manifest:
            marked = self._marks[manifest.name] = manifest, manifest_mark(manifest)
        return marked[1]

    def _reply(
        self,
        call: Call,
        known: KeptAnswer,
        now: float,
        *,
        reason: str = CACHED,
        notes: tuple[RequestEvent, ...] = (),
    ) -> Reply:
        version, is_old = known.response.model_version, reason == LAST_KNOWN
        route = Route(CACHE, reason, known.variant, attempts=0, degraded=is_old, version=version)
        number = self._recorder.next_number()
        self._recorder.add(_record(call, route, number, now, notes))
        return Reply(
            replace(known.response, id=call.request.id),
            route=route,
            budget_left_s=call.budget_s(now),
            variant=known.variant,
            request_id=self._recorder.name_of(number),
        )

    def rows(self) -> Iterable[tuple[str, int, int, int, int]]:
        """By model: hits, lookups, answers that are kept, and their bytes."""
        for model in self.cache.limits:
            hits = self.outcomes[model, "hit"]
            asked = hits + self.outcomes[model, "miss"] + self.outcomes[model, "stale"]
            yield model, hits, asked, *self.cache.of_model(model)

    def __repr__(self) -> str:
        return f"<KnownAnswers {self.cache!r}>"


def _is_whole(reply: Reply, route: Route) -> bool:
    inner = route.inner
    lesser = route.degraded or route.provisional or (inner is not None and (inner.degraded or inner.provisional))
    return not (lesser or route.resumed or reply.cut or reply.attested)


def _owned(response: InferResponse) -> InferResponse:
    """The response with bytes of its own: a view would keep the whole message alive that it came in."""
    outputs = tuple(
        [Tensor(one.name, one.datatype, one.shape, bytes(one.raw), one.parameters) for one in response.outputs]
    )
    return replace(response, id="", outputs=outputs)


def _record(call: Call, route: Route, number: int, now: float, notes: tuple[RequestEvent, ...]) -> RequestRecord:
    return RequestRecord(
        number=number,
        request_id=truncated_words(call.request.id),
        trace_id=trace_id_of(call),
        protocol=call.protocol,
        model=call.request.model_name,
        tenant=call.tenant,
        arrived_at=call.arrived_at,
        taken_at=now,
        asked_at=now,
        placed_at=now,
        decision=None,
        reasons=(),
        notes=notes,
        end=AnswerRecord(0, route),
        elapsed_s=now - call.arrived_at,
        deadline=call.deadline,
    )

"""Decides of each call whether it is cut between layers: reads manifests, asks the core, and words the reasons.

The halves of a model are looked up once and kept as long as its manifest is the same object; a model whose halves are
not known is looked up again, since they may be loaded while the gateway runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set

from msgspec.structs import replace
from prometheus_client.metrics_core import Metric

from gateway.core.placement.ask import Ask
from gateway.core.placement.layer_split import CutTerms, SplitDecision, choose_split, insure_at
from gateway.core.placement.placer import Placer
from gateway.serving.split_execution import Service, SplitExecution, SplitPlan, SplitWatch
from gateway.serving.work_estimate import AskBuilder, ManifestOf
from tidegate import clock
from tidegate.metrics.families import counter
from tidegate.models.manifest import Bounds, Manifest, TensorSpec
from tidegate.models.split_halves import CutHalves, whole_halves
from tidegate.outcome import ModelNotFound
from tidegate.types import Call, Datatype, Reply, SplitNote

_MASK = Bounds(0, 1)


class LayerSplitting:
    """Mutable: counts what came of cut requests."""

    def __init__(
        self, manifest_of: ManifestOf, placer: Placer, asks: AskBuilder, left_out: Callable[[Call], Set[str]]
    ) -> None:
        self._manifest_of = manifest_of
        self._placer = placer
        self._asks = asks
        self._left_out = left_out
        self._halves: dict[tuple[str, str], tuple[Manifest, tuple[CutHalves, ...]]] = {}
        self._ended: Counter[tuple[str, str]] = Counter()  # (model, how)

    def served(self, call: Call, infer: Service) -> Awaitable[Reply]:
        """The call by `infer`, in halves where that is better. Raises what `infer` raises."""
        request = call.request
        try:
            manifest = self._manifest_of(request.model_name, request.model_version)
        except ModelNotFound:
            return infer(call)  # it says so
        if manifest.split is None or call.half is not None or call.variant or call.tokens is not None:
            return infer(call)
        return self._weighed(call, manifest, infer)

    def _weighed(self, call: Call, manifest: Manifest, infer: Service) -> Awaitable[Reply]:
        halves = self._halves_of(manifest)
        if not halves:
            return infer(call)
        ask = self._asks.ask(call)._replace(left_out=self._left_out(call))
        decision = choose_split(self._placer, ask, [_terms(one, ask) for one in halves], clock.now())
        why = split_words(decision)
        if decision.chosen is None:
            note = SplitNote(manifest.name, "whole", "", why)
            return infer(replace(call, half=note))
        cut = next(one for one in halves if one.cut.layer == decision.chosen.cut.layer)
        plan = SplitPlan(decision.chosen, cut, ask, why)
        return SplitExecution(call, plan, infer, SplitWatch(self._insure_at, self._count)).run()

    def _halves_of(self, manifest: Manifest) -> tuple[CutHalves, ...]:
        key = manifest.name, manifest.version
        known = self._halves.get(key)
        if known is not None and known[0] is manifest:
            return known[1]
        cuts = () if manifest.split is None else manifest.split.cuts
        found = tuple(
            one
            for cut in cuts
            if (one := whole_halves(manifest, self._known(cut.head, key[1]), self._known(cut.tail, key[1]), cut))
        )
        if len(found) == len(cuts):
            self._halves[key] = manifest, found
        return found

    def _known(self, name: str, version: str) -> Manifest | None:
        try:
            return self._manifest_of(name, version)
        except ModelNotFound:
            return None

    def _insure_at(self, ask: Ask, expected_by: float) -> float | None:
        return insure_at(self._placer, ask, expected_by, clock.now())

    def _count(self, model: str, how: str) -> None:
        self._ended[model, how] += 1

    def families(self) -> Iterator[Metric]:
        return split_families(self._ended)

    def __repr__(self) -> str:
        return f"<LayerSplitting {self._ended.total()} requests cut>"


def split_families(ended: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """Args: ended: by model and by what became of the request."""
    words = "Requests cut between layers by what became of them."
    yield counter("tidegate_split_requests", words, ("model", "result"), ended.items())


def _terms(one: CutHalves, ask: Ask) -> CutTerms:
    cut = one.cut
    units = float(ask.rows) if one.tail.cost.feature == "items" else ask.units
    between = cut.bytes_between(ask.rows, ask.units)
    return CutTerms(cut.layer, cut.head, cut.tail, units, between, _keeps_input(one))


def _keeps_input(one: CutHalves) -> bool:
    """Whether the tail takes nothing of the whole's inputs but masks."""
    given = {spec.name for spec in one.head.outputs}
    return all(spec.name in given or _is_mask(spec) for spec in one.tail.inputs)


def _is_mask(spec: TensorSpec) -> bool:
    return spec.datatype is Datatype.BOOL or spec.bounds == _MASK


def split_words(decision: SplitDecision) -> str:
    """Why it was cut there, or was not, in numbers."""
    best, whole = decision.best, decision.whole
    words = (
        "no target takes the whole"
        if whole is None
        else f"the whole is expected at {whole.target.id} in {whole.finish_s * 1e3:.0f} ms, worth "
        f"{decision.whole_value:.3f}"
    )
    if best is None:
        return f"{words}; no cut can be made now"
    return (
        f"{words}; cut at {best.cut.layer} {best.head.target.id} takes {best.head.finish_s * 1e3:.0f} ms, "
        f"{best.cut.between_bytes} bytes go on, and {best.tail.target.id} takes {best.tail.finish_s * 1e3:.0f} ms, in "
        f"time with a chance of {best.chance:.1%}, worth {best.value:.3f}"
    )

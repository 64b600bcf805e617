"""The golden probe runs known cases on a new generation, and compares its times with the running generation's.

Accuracy first, of every variant that runs here; then the times. The two generations take turns, case by case, so that
whatever else the device does slows both; what is compared is the time inside the worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from edge_agent.core.soak import p95_s
from edge_agent.delivery.failures import WorkerExited, WorkFailed
from tidegate.models.manifest import Variant
from tidegate.outcome import ServeError, Unreachable
from tidegate.rollout.golden import inaccuracy
from tidegate.rollout.plan import Probe
from tidegate.workers.process import ComputeResult

Arrays = Mapping[str, NDArray[Any]]
Cases = Sequence[tuple[Arrays, Arrays]]


class ProbedRunner(Protocol):
    """The part of a `Runner` that is needed here."""

    @property
    def variants(self) -> tuple[Variant, ...]: ...
    async def infer(self, variant: str, inputs: Arrays) -> ComputeResult: ...


async def probe(rules: Probe, cases: Cases, new: ProbedRunner, old: ProbedRunner | None) -> None:
    """Raises WorkFailed with the rule that the new generation breaks, WorkerExited when its worker exits."""
    if not cases:
        return
    for variant in new.variants:
        answers = [(await _computed(new, variant.name, inputs)).outputs for inputs, _ in cases]
        if why := inaccuracy(rules, [expected for _, expected in cases], answers):
            raise WorkFailed(f"probe_accuracy: {variant.name}: {why}")
    if rules.p95_max_s is not None or rules.p95_ratio_max is not None:
        await _compare_times(rules, cases, new, old)


async def _compare_times(rules: Probe, cases: Cases, new: ProbedRunner, old: ProbedRunner | None) -> None:
    variant = new.variants[0].name
    beside = _same_variant(old, variant)
    new_s: list[float] = []
    old_s: list[float] = []
    for _ in range(rules.repeats):
        for inputs, _ in cases:
            new_s.append((await _computed(new, variant, inputs)).compute_s)
            if old is not None and beside:
                try:
                    old_s.append((await old.infer(beside, inputs)).compute_s)
                except ServeError:  # the old one takes other inputs, or is gone: there is nothing to compare with
                    beside = ""
    found_s = p95_s(new_s)
    if rules.p95_max_s is not None and found_s > rules.p95_max_s:
        raise WorkFailed(f"probe_slow: p95 is {found_s:.4g} s, at most {rules.p95_max_s:g} s is allowed")
    if rules.p95_ratio_max is not None and len(old_s) == len(new_s):
        ratio = found_s / p95_s(old_s)
        if ratio > rules.p95_ratio_max:
            words = f"p95 is {ratio:.2f} times the running generation's, at most {rules.p95_ratio_max:g} is allowed"
            raise WorkFailed(f"probe_slow: {words}")


def _same_variant(old: ProbedRunner | None, name: str) -> str:
    names = [variant.name for variant in old.variants] if old is not None else []
    return name if name in names else (names[0] if names else "")


async def _computed(new: ProbedRunner, variant: str, inputs: Arrays) -> ComputeResult:
    try:
        return await new.infer(variant, inputs)
    except Unreachable as error:
        raise WorkerExited(error.message) from error
    except ServeError as error:
        raise WorkFailed(f"probe_error: {error.message}") from error

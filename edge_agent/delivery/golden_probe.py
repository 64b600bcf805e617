"""The golden probe runs known cases on a new generation, and compares its times with the running generation's.

Accuracy first, of every variant that runs here; then the times (`probe_times.py`). Models that generate are probed with
prompts (`golden_prompts_probe.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from edge_agent.delivery.failures import WorkFailed
from edge_agent.delivery.probe_times import compare_times, has_time_bounds, of_new
from tidegate.models.manifest import Variant
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
    if has_time_bounds(rules):
        calls = [partial(_timed, inputs) for inputs, _ in cases]
        await compare_times(rules, calls, new, old)


async def _computed(new: ProbedRunner, variant: str, inputs: Arrays) -> ComputeResult:
    return await of_new(new.infer(variant, inputs))


async def _timed(inputs: Arrays, runner: ProbedRunner, variant: str) -> float:
    return (await runner.infer(variant, inputs)).compute_s

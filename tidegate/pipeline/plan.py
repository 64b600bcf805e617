"""The plan of a pipeline: what a worker process needs of the manifest to run its steps, as it travels there.

A worker that has the model runs `all`. Where one model answers requests in batches, the steps of each request run in
a worker of their own, `before` the batch and `after` it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidegate.models.manifest import Axis, Manifest, Pipeline, TensorSpec

Part = Literal["all", "before", "after"]


class WasmLimits(msgspec.Struct, frozen=True):
    """What one call of a WebAssembly step may take at most; fuel is about one an instruction."""

    fuel: int
    memory_bytes: int
    time_s: float
    result_bytes: int
    module_bytes: int


class StepPlan(msgspec.Struct, frozen=True):
    """The steps of one model version, and where their files are."""

    pipeline: Pipeline
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: dict[str, Axis]
    folder: str
    limits: WasmLimits
    part: Part = "all"

    @property
    def kept(self) -> tuple[str, ...]:
        """Tensors from before the model that are needed after it, and are none of its outputs."""
        before = {spec.name for spec in self.inputs} | {name for step in self.pipeline.before for name in step.outputs}
        needed = [name for step in self.pipeline.after for name in step.inputs]
        needed += [spec.name for spec in self.outputs]
        return tuple(name for name in dict.fromkeys(needed) if name in before)


def plan_of(manifest: Manifest, folder: str, limits: WasmLimits, part: Part = "all") -> StepPlan | None:
    """The plan of a manifest whose files are in `folder`; None where it has no pipeline."""
    if manifest.pipeline is None:
        return None
    return StepPlan(
        pipeline=manifest.pipeline,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        axes=manifest.axes,
        folder=folder,
        limits=limits,
        part=part,
    )

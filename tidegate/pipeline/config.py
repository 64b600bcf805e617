"""The section `steps` of an edge's or a pool's configuration: whether modules may run here, and what each may take."""

from __future__ import annotations

from pydantic import Field

from tidegate.config import Section
from tidegate.models.manifest import Manifest
from tidegate.pipeline.plan import WasmLimits
from tidegate.runtime.process import StartError


class StepsConfig(Section):
    """What the steps of pipelines may do here (`docs/pipelines.md`)."""

    wasm: bool = Field(
        False,
        description="Whether steps that are WebAssembly modules may run. They are sandboxed, and still programs of "
        "whoever made the model. False: such models are refused. Needs `pip install 'tidegate[wasm]'`.",
    )
    wasm_fuel: int = Field(
        200_000_000,
        ge=10_000,
        le=100_000_000_000,
        description="Most fuel of one call of a module, about one an instruction; a request with little budget left "
        "gets less. More lets steps do more, and an endless one hold its worker for longer.",
    )
    wasm_memory_bytes: int = Field(
        64 * 2**20, ge=65_536, le=2**32, description="Most bytes of memory of one call; growing beyond fails in it."
    )
    wasm_time_s: float = Field(
        0.1,
        gt=0,
        le=1.0,
        description="Most seconds of one call, whatever its fuel. Requests behind it wait as long; more lets slow "
        "devices end what they began.",
    )
    wasm_result_bytes: int = Field(16 * 2**20, ge=64, le=2**30, description="Most bytes that a call may give back.")
    wasm_module_bytes: int = Field(
        4 * 2**20,
        ge=64,
        le=64 * 2**20,
        description="Largest module. It is compiled when its model loads, which takes some seconds for the largest.",
    )

    @property
    def limits(self) -> WasmLimits:
        return WasmLimits(
            fuel=self.wasm_fuel,
            memory_bytes=self.wasm_memory_bytes,
            time_s=self.wasm_time_s,
            result_bytes=self.wasm_result_bytes,
            module_bytes=self.wasm_module_bytes,
        )

    def check(self, manifest: Manifest) -> None:
        """Raises StartError for a model with steps that may not run here."""
        modules = () if manifest.pipeline is None else manifest.pipeline.modules
        if modules and not self.wasm:
            raise StartError(
                f"model {manifest.name}:{manifest.version}: its step {modules[0].file!r} is a WebAssembly module, and "
                "key 'steps.wasm' is false: set it to true if you trust whoever made the model with what its callers "
                "send (docs/pipelines.md)"
            )


def default_steps() -> StepsConfig:
    return StepsConfig.model_validate({})  # mypy does not see that every field has a default

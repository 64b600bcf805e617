"""The configuration of vLLM in a pool."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.config import Section

Use = Literal["auto", "always", "never"]
Argument = Annotated[str, Field(min_length=1, max_length=4096)]


class VllmConfig(Section):
    """Whether vLLM serves variants with `engine: transformers`, and how: docs/generating-models.md."""

    use: Use = Field(
        "auto",
        description="auto: vLLM on CUDA devices where `executable` is found, transformers' own batching elsewhere. "
        "always: vLLM on every device, or no start. never: transformers everywhere.",
    )
    executable: str = Field(
        "vllm",
        min_length=1,
        description="vLLM's command, a name on PATH or a path. It may be in an environment of its own, as its pins "
        "do not fit every other package's.",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Answers at a time on one device (max-num-seqs). More gives more tokens a second in all, and each "
        "its own more slowly. None: as the manifest says.",
    )
    gpu_memory_ratio: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that vLLM may take, and has to find free when it starts. Less leaves room "
        "for the pool's other models. What caches take of it is `generation_cache_bytes`.",
    )
    start_timeout_s: float = Field(
        1800.0,
        gt=0,
        le=86400,
        description="Seconds until the server has to be ready: weights are read, kernels compiled.",
    )
    arguments: tuple[Argument, ...] = Field(
        (),
        max_length=64,
        description="Further arguments of `vllm serve`, such as [--tensor-parallel-size=2]. Those that the pool gives "
        "by itself win.",
    )

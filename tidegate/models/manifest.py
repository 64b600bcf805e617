"""The manifest of one model version: `model.yaml`, the single place that says what a model takes, gives and costs.

Everyone reads it and nobody guesses: the gateway checks requests against its shapes and bounds (so that a bad tensor
never reaches batch-mates) and prices them by its cost feature; edge and pool pick the variant they may run and find
its artefact.

Axes are named once and used in shapes, so `[batch, sequence]` on two inputs means that both must agree. Work is
counted in the unit of `cost.feature`; a variant's `max_tokens` bounds the longest row (last axis of the cost input)
and its `max_batch` the rows, because those are what a small device runs out of.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidegate.types import Datatype

Where = Literal["edge", "pool"]
Feature = Literal["tokens", "pixels", "items", "bytes"]
EngineName = Literal["onnx", "torch-export", "torchscript"]


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named dimension and the lengths it may have."""

    min: int = 1
    max: int = 2**31 - 1


class Bounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Smallest and largest element value that the model is defined for; NaN and infinity are outside of any bounds."""

    min: float
    max: float


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One input or output. A shape's entry is a length or the name of an axis."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...]
    bounds: Bounds | None = None
    optional: bool = False


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A measured quality: `cosine` to the reference (mean), or `top1` accuracy on a held-out split."""

    metric: Literal["cosine", "top1"]
    value: float
    samples: int


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One artefact of the model: a precision, an engine to run it, and where it may run."""

    name: str
    artefact: str  # a file name inside the version's folder
    engine: EngineName
    precision: str  # fp32, bf16, int8
    where: tuple[Where, ...]
    sha256: str
    size_bytes: int
    quality: Quality | None = None
    max_batch: int | None = None
    max_tokens: int | None = None


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How work is counted: tokens and pixels by the elements of `input`, items by its first axis, bytes by its size."""

    feature: Feature
    input: str


class Batching(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of one batch in the pool. Work is in the cost feature's unit, padding included."""

    max_batch_size: int = 32
    max_work: int | None = None
    max_queue_delay_s: float = 0.0
    max_queue_size: int = 256
    pad_axis: str | None = None  # the axis along which requests of unequal length may be padded together


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How text becomes this model's input, for the OpenAI routes."""

    tokenizer: str  # a file name inside the version's folder
    max_tokens: int
    input_ids: str
    attention_mask: str
    output: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    variants: tuple[Variant, ...]
    cost: Cost
    schema: Literal[1] = 1
    summary: str = ""
    axes: dict[str, Axis] = {}
    default_budget_s: float = 2.0
    max_batch_size: int = 0  # what /config tells clients; 0: shapes are taken as they are, batch axis included
    batching: Batching = Batching()
    text: Text | None = None

    def variant(self, name: str) -> Variant | None:
        return next((variant for variant in self.variants if variant.name == name), None)

    def variants_for(self, where: Where) -> tuple[Variant, ...]:
        return tuple(variant for variant in self.variants if where in variant.where)

    @property
    def platform(self) -> str:
        return f"tidegate_{self.variants[0].engine}" if self.variants else "tidegate"

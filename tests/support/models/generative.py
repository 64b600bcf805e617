"""A generating model's manifest, whose only variant is paced."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tidegate.models.generative import GenerationCost, Generative
from tidegate.models.manifest import Axis, Cost, Manifest, TensorSpec, Variant
from tidegate.types import Datatype

COST = GenerationCost(prefill_ms=0.5, step_ms=((1, 4.0), (4, 6.0)), cache_bytes=1024, slots=4)
GENERATIVE = Generative(
    context=512,
    vocabulary="d" * 64,
    vocabulary_size=1000,
    tokenizer="tokenizer.json",
    tokenizer_sha256="e" * 64,
    stop_tokens=(2,),
    chat_template="chat_template.jinja",
    chat_template_sha256="f" * 64,
    default_max_tokens=64,
)
TALKER = Manifest(
    name="talker",
    version="1",
    inputs=(
        TensorSpec("input_ids", Datatype.INT32, ("prompt",), optional=True),
        TensorSpec("text_input", Datatype.BYTES, (1,), optional=True),
    ),
    outputs=(
        TensorSpec("output_ids", Datatype.INT32, ("answer",)),
        TensorSpec("text_output", Datatype.BYTES, (1,)),
    ),
    variants=(
        Variant(
            name="paced",
            artefact="talker.yaml",
            engine="paced",
            precision="none",
            where=("edge", "pool"),
            sha256="a" * 64,
            size_bytes=1,
            generation=COST,
        ),
    ),
    cost=Cost("tokens", "input_ids"),
    axes={"prompt": Axis(1, 512), "answer": Axis(0, 512)},
    default_budget_s=30.0,
    generative=GENERATIVE,
)


def talker(**changes: Any) -> Manifest:
    """The manifest with other `generative` values."""
    return replace(TALKER, generative=replace(GENERATIVE, **changes))

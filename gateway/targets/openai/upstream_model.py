"""One model as a server serves it: its names, what it can be asked, and why no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gateway.targets.openai.dialect import Dialect
from tidegate.fleet.offers import REASON_CHARS, Grade, ModelOffer, VariantOffer
from tidegate.generate.text.text_side import TextSide
from tidegate.models.generative import MAX_CONTEXT, Generative
from tidegate.models.manifest import Batching, Cost, Manifest, TensorSpec, Variant
from tidegate.types import Datatype

VERSION: Final = "1"  # of a model that has no manifest here
PRECISION: Final = "unknown"


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """A model that was probed.

    Args:
        manifest: of the gateway's repository; None: nothing is known of its tokens here.
        text: its tokenizer, where ids travel.
        context: tokens, as the server says; None: it does not.
    """

    name: str
    name_there: str
    kind: str  # of the server
    grade: Grade
    why: str  # the grade is no better, or what was compared
    dialect: Dialect
    manifest: Manifest | None
    text: TextSide | None
    context: int | None
    slots: int

    def offer(self, variant: str) -> ModelOffer:
        """What the target offers of it."""
        known = self.manifest.variant(variant) if self.manifest is not None else None
        one = VariantOffer(
            variant,
            known.precision if known is not None else PRECISION,
            max_tokens=self.context,
            quality=known.quality.value if known is not None and known.quality is not None else None,
            slots=self.slots,
            schemas=True,  # asked for in OpenAI's form, and refused by a server that has no such thing
            grade=self.grade,
        )
        version = VERSION if self.manifest is None else self.manifest.version
        return ModelOffer(self.name, version, (one,), upstream=f"{self.kind}: {self.why}"[:REASON_CHARS])

    def __repr__(self) -> str:
        return f"<UpstreamModel {self.name} as {self.name_there!r} of {self.kind} by {self.grade}>"


def text_manifest(
    name: str, kind: str, *, variant: str, context: int | None, default_max_tokens: int, default_budget_s: float
) -> Manifest:
    """The manifest of a model of which only its server knows the tokens."""
    context = context or MAX_CONTEXT
    return Manifest(
        name=name,
        version=VERSION,
        inputs=(TensorSpec("text_input", Datatype.BYTES, (1,), optional=True),),
        outputs=(TensorSpec("text_output", Datatype.BYTES, (1,)),),
        variants=(
            Variant(
                name=variant,
                artefact="",
                engine="onnx",
                precision=PRECISION,
                where=("edge", "pool"),
                sha256="",
                size_bytes=0,
            ),
        ),
        cost=Cost("tokens", "text_input"),
        summary=f"served by {kind}",
        default_budget_s=default_budget_s,
        batching=Batching(max_batch_size=1),
        generative=Generative(
            context=context,
            vocabulary="",
            vocabulary_size=0,
            tokenizer="",
            tokenizer_sha256="",
            default_max_tokens=min(default_max_tokens, context),
        ),
    )

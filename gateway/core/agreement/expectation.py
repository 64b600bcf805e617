"""What agreement a variant promises: the disagreement that its manifest recorded, and the limit above it.

    metric    score of a row                                 recorded disagreement
    cosine    1 − 2·⟨a, b⟩ / (|a|² + |b|²)                    1 − the mean cosine
    top1      1 where the largest column is another one      1 − top-1
    tokens    the share of greedy tokens that differ         1 − the share that agrees, of the quality's golden answers

A row of `tokens` is a generating model's answer (`token_comparison.py`). The score of vectors is one less the cosine
where both are of one length, and more where they are not: a normalisation that is left out turns no vector, and would
not be seen by a cosine.

    limit = TOLERANCE · (recorded of the device's variant + recorded of the reference's) + FLOOR

`TOKEN_FLOOR` takes the place of `FLOOR` for tokens: the same weights on another processor, or with another number of
threads, differ at some places where two tokens are nearly as likely (`tidegate/tools/build/evaluate/greedy.py`).

Both are measured against the same original. A top-1 that is an accuracy on labels, and no agreement, makes the limit
too wide and never too narrow: two variants differ at most where one of them is wrong. What was not measured is taken to
be what is usual for the precision (`gateway/core/fleet/variant_rank.py`). `TOLERANCE` is for inputs that differ from
those of the measurement: docs/agreement.md has the spread of real texts by length.

Pure.
"""

from __future__ import annotations

from math import log
from typing import Final, Literal, NamedTuple

from tidegate.models.generative import ANSWER_OUTPUT
from tidegate.models.manifest import Manifest
from tidegate.types import Datatype

FLOOR: Final = 0.002
TOKEN_FLOOR: Final = 0.02
TOLERANCE: Final = 2.0
_MOST: Final = 0.5
_SLICES: Final = 10
_FLOATS: Final = (Datatype.FP16, Datatype.FP32, Datatype.FP64)

Metric = Literal["cosine", "top1", "tokens"]


class AgreementTerms(NamedTuple):
    """How two answers are compared, and from which mean disagreement on they differ."""

    metric: Metric
    output: str
    limit: float
    recorded: float = 0.0  # the mean disagreement that both variants' qualities say


def agreement_terms(
    manifest: Manifest, variant: str, quality: float, reference_quality: float, tolerance: float = TOLERANCE
) -> AgreementTerms | None:
    """None: the model's answers are not compared.

    Args:
        variant: the device's.
        quality: of the device's variant (`promised_quality`); of the reference likewise.
    """
    if manifest.sequence is not None:
        return None
    recorded = max(0.0, 1.0 - quality) + max(0.0, 1.0 - reference_quality)
    if manifest.generative is not None:
        return AgreementTerms("tokens", ANSWER_OUTPUT, min(_MOST, tolerance * recorded + TOKEN_FLOOR), recorded)
    output = _output(manifest)
    if output is None:
        return None
    known = manifest.variant(variant)
    if known is not None and known.quality is not None:
        metric: Metric = known.quality.metric
    else:
        metric = "cosine" if manifest.confidence is None else "top1"
    return AgreementTerms(metric, output, min(_MOST, tolerance * recorded + FLOOR), recorded)


def promised_quality(manifest: Manifest, variant: str, offered: float) -> float:
    """The gateway's own record of a variant's quality, else what the target offers, which may be wrong as well."""
    known = manifest.variant(variant)
    return min(1.0, offered) if known is None or known.quality is None else known.quality.value


def _output(manifest: Manifest) -> str | None:
    """The output whose quality was measured: the one that confidence is read from, else the first one of floats."""
    if manifest.confidence is not None:
        return manifest.confidence.output
    return next((one.name for one in manifest.outputs if one.datatype in _FLOATS and len(one.shape) > 1), None)


def slice_of(units_a_row: float) -> int:
    """The slice of inputs by size: each is four times as large as the one before."""
    return 0 if units_a_row < 4.0 else min(_SLICES - 1, int(log(units_a_row) / log(4.0) + 1e-9))


def slice_words(number: int, feature: str) -> str:
    """The slice in words."""
    low, high = 4**number, 4 ** (number + 1) - 1
    if number == 0:
        return f"rows of up to {high} {feature}"
    return f"rows of {low} {feature} and more" if number == _SLICES - 1 else f"rows of {low} to {high} {feature}"

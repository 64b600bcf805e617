"""The rank of variants says which of two is the lesser one: by measured quality, else by precision.

A fallback to a lesser variant is a degraded answer and must be declared. Precisions that are not known here compare as
equal: a claim of degradation needs a ground.

A target may lessen its precision for a while (`VersionTargets`). Then its lesser variant answers requests that demand
nothing, as a degraded answer, and its full one requests that demand it or a floor of quality; before and after, the
lesser one keeps out of the way. A variant whose answers were found to disagree with the reference's (`demoted`) keeps
out of the way of every request, also of one that demands it where another target has it.
"""

from __future__ import annotations

from typing import Final

from tidegate.fleet.offers import VariantOffer

_RANK: Final = {"fp64": 5, "fp32": 4, "tf32": 4, "bf16": 3, "fp16": 3, "fp8": 2, "int8": 2, "uint8": 2, "int4": 1}


# Where it was not measured: what quantization usually costs. A precision that is not known here is given credit.
_USUAL_QUALITY: Final = {"fp8": 0.99, "int8": 0.98, "uint8": 0.98, "int4": 0.95}


def quality_of(variant: VariantOffer) -> float:
    """The variant's measured quality, else what is usual for its precision; above 0."""
    if variant.quality is None:
        return _USUAL_QUALITY.get(variant.precision, 1.0)
    return max(variant.quality, 1e-3)


def deferred_to(variant: VariantOffer, demanded: str, min_quality: float) -> bool:
    """Whether the variant is not meant for a request just now that demands this variant ("": any) or quality (0: any).

    That is no misfit: where no other variant takes the request, this one does.
    """
    if variant.standing == "demoted":
        return True
    if demanded or variant.standing in ("", "relief"):
        return False
    return variant.standing == "spare" or not min_quality


def is_degraded_answer(variant: VariantOffer, *, demanded: bool) -> bool:
    """Whether an answer by it is degraded, by itself: a fuller one would have given it but for the target's trouble."""
    return variant.standing == "demoted" or (not demanded and variant.standing in ("relief", "spare"))


def is_lesser(one: VariantOffer, than: VariantOffer) -> bool:
    """Whether `one` answers less precisely than `than`."""
    if one.quality is not None and than.quality is not None:
        return one.quality < than.quality
    ranks = _RANK.get(one.precision), _RANK.get(than.precision)
    return ranks[0] is not None and ranks[1] is not None and ranks[0] < ranks[1]

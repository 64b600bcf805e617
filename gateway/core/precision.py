"""Which of two variants is the lesser one: by measured quality where both have it, else by precision.

A fallback to a lesser variant is a degraded answer and must be declared. Precisions that are not known here compare as
equal: a claim of degradation needs a ground.
"""

from __future__ import annotations

from typing import Final

from tidegate.fleet.offers import VariantOffer

_RANK: Final = {"fp64": 5, "fp32": 4, "tf32": 4, "bf16": 3, "fp16": 3, "fp8": 2, "int8": 2, "uint8": 2, "int4": 1}


def is_lesser(one: VariantOffer, than: VariantOffer) -> bool:
    """Whether `one` answers less precisely than `than`."""
    if one.quality is not None and than.quality is not None:
        return one.quality < than.quality
    ranks = _RANK.get(one.precision), _RANK.get(than.precision)
    return ranks[0] is not None and ranks[1] is not None and ranks[0] < ranks[1]

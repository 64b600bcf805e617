"""How many rows a request may have that is still to be made: those of the largest variant that a target offers now.

Callers of embeddings send lists of any length, which are cut into requests. With the pool there, these may have as many
rows as its batches; with devices alone no target would take so many, and all of the list would be refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from gateway.core.fleet.offer_index import Offer
from gateway.core.placement.ask import Ask
from gateway.core.placement.eligibility import ineligible

_MOST_OFFERS: Final = 256  # that are looked at: devices of one fleet hardly differ in it


def most_rows(offers: Iterable[Offer], ask: Ask, now: float, *, enough: int) -> int | None:
    """How many rows a request like this one may have on some target now; None where none takes even this one.

    Args:
        enough: more are not wanted.
    """
    most: int | None = None
    for offer in islice(offers, _MOST_OFFERS):
        if ineligible(offer.target, offer.variant, ask, now, deferred=True) is None:
            rows = offer.variant.max_batch
            if rows is None or rows >= enough:
                return enough
            most = rows if most is None else max(most, rows)
    return most

"""A traffic split decides which of two versions of a model answers: by a share, a tenant, or the caller's header.

    the caller says which (`tidegate-version: candidate | standing | 2`)    that one, and no other in its place
    the caller's tenant is among the candidate's                            candidate, then standing
    a drawn share                                                           candidate, then standing
    all others                                                              standing

A request that came to the candidate by a share or a tenant did not ask for it, so it does not bear its failure: the
standing version answers instead. The other way round it does not: work that the standing version has no room for would
rush a version that is on trial. A version that a caller demands is answered by itself or not at all, as with every
demand.

Promotion makes the candidate what is meant where no version is named; the return ends the split and changes nothing
else. Both keep nothing of the split, so neither can be half done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

CANDIDATE, STANDING = "candidate", "standing"
MAX_TENANTS: Final = 1000


class InvalidSplit(ValueError):
    """What an operator asks for makes no sense; the message says why."""


class TrafficSplit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two versions of one model side by side.

    Args:
        share: of the requests that name no version, from 0 to 1.
        tenants: whose requests all go to the candidate.
        compare: the share of the standing version's answers of which the candidate is asked too, for comparison.
    """

    standing: str
    candidate: str
    share: float = 0.0
    tenants: tuple[str, ...] = ()
    compare: float = 0.0

    def __post_init__(self) -> None:
        if self.standing == self.candidate:
            raise InvalidSplit(f"the candidate is the standing version {self.standing!r}: there is nothing to split")
        for name, value in (("share", self.share), ("compare", self.compare)):
            if not 0.0 <= value <= 1.0:
                raise InvalidSplit(f"{name} must be a number from 0 to 1, got {value:g}")
        if len(self.tenants) > MAX_TENANTS:
            raise InvalidSplit(f"tenants: at most {MAX_TENANTS}, got {len(self.tenants)}")


class TrafficSplits(msgspec.Struct, frozen=True):
    """All that is set: splits by model, and what is meant by a model of which a candidate was promoted."""

    split: Mapping[str, TrafficSplit] = {}
    promoted: Mapping[str, str] = {}

    def turn(self, model: str, wish: str, tenant: str, draw: float) -> tuple[str, ...]:
        """The versions to ask, in this order; empty: whatever is meant without a split.

        Args:
            wish: the caller's header; "" for none.
            draw: uniform in [0, 1).
        """
        split = self.split.get(model)
        if split is None:
            meant = self.promoted.get(model, "")
            named = wish if wish not in ("", CANDIDATE, STANDING) else meant
            return (named,) if named else ()
        if wish:
            return ({CANDIDATE: split.candidate, STANDING: split.standing}.get(wish, wish),)
        if tenant in split.tenants or draw < split.share:
            return split.candidate, split.standing
        return (split.standing,)

    def begun(self, model: str, split: TrafficSplit) -> TrafficSplits:
        """With this split in the place of any other of the model."""
        return msgspec.structs.replace(self, split={**self.split, model: split})

    def after_promotion(self, model: str) -> TrafficSplits:
        """Raises InvalidSplit: there is no candidate."""
        candidate = self._of(model).candidate
        return TrafficSplits(self._without(model), {**self.promoted, model: candidate})

    def after_return(self, model: str) -> TrafficSplits:
        """The standing version is meant again, as before the split. Raises InvalidSplit: there is none."""
        standing = self._of(model).standing
        return TrafficSplits(self._without(model), {**self.promoted, model: standing})

    def _of(self, model: str) -> TrafficSplit:
        if model not in self.split:
            raise InvalidSplit(f"no candidate of {model!r} is on trial")
        return self.split[model]

    def _without(self, model: str) -> dict[str, TrafficSplit]:
        return {name: split for name, split in self.split.items() if name != model}

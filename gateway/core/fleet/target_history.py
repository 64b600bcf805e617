"""The target history keeps what was learned of targets that sources of discovery have dropped, for when they come back.

A pod of a StatefulSet that is replaced is away for as long as its successor takes to start and warm up, a minute or
ten. It comes back under its own name at another address, and its measured costs and its link are much as they were. A
fresh start would cost it a slow minute of priors.

Invariants: at most `MOST` targets, each for at most `KEPT_S`; a history is handed out once. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from gateway.core.estimate.link_estimate import LinkEstimate
from gateway.core.estimate.service_cost import VariantCost

KEPT_S: Final = 900.0  # large models load for minutes
MOST: Final = 1024


class Learned(NamedTuple):
    """What outlives a process: what its variants cost, and the link to it."""

    costs: Mapping[tuple[str, str, str], VariantCost]
    link: LinkEstimate


class TargetHistory:
    """Mutable: `keep` what was learned of a target, `take` it out when the target is back."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Learned]] = {}  # the oldest first

    def keep(self, target_id: str, learned: Learned, now: float) -> None:
        self._kept.pop(target_id, None)
        self._kept[target_id] = now, learned
        if len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]

    def take(self, target_id: str, now: float) -> Learned | None:
        """What is known of the target from before, if that is not too long ago."""
        kept_at, learned = self._kept.pop(target_id, (0.0, None))
        return learned if now < kept_at + KEPT_S else None

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<TargetHistory of {len(self._kept)} targets>"

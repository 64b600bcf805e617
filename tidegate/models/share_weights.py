"""The share weights say how much more than others' a model's work counts, by the model's name or by its modality.

A pool divides its devices' seconds by them, an edge the turns in its queue (both by `fair_share.py`), and a gateway
multiplies the worth of an answer by them where it places, sheds and refuses. One table means one thing everywhere:
with `{generation: 0.2, keyword: 3}` generated text gives way to the model `keyword` wherever they meet.

Invariants: a weight is above 0; a model has its own weight, else its modality's, else 1. One look-up in a table.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.models.manifest import Manifest


class ShareWeights:
    """A table of weights, never changed."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})

    def __bool__(self) -> bool:
        return bool(self._weights)

    def group_of(self, manifest: Manifest) -> str:
        """The model's name, or its modality where that has a weight and the model itself has none."""
        by_kind = manifest.kind in self._weights and manifest.name not in self._weights
        return manifest.kind if by_kind else manifest.name

    def of_group(self, group: str) -> float:
        return self._weights.get(group, 1.0)

    def of(self, manifest: Manifest) -> float:
        """The weight of a model."""
        return self.of_group(self.group_of(manifest)) if self._weights else 1.0

    def __repr__(self) -> str:
        return f"<ShareWeights {self._weights}>"

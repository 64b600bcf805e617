"""Footprint: what a batch of so many units of work takes beside the weights, before it is tried.

A device that is full does not become slower, it fails, and on a CPU the kernel may end the whole process. So what a
batch will take is predicted, from peaks that workers measure (`tidegate/workers/meter.py`):

    bytes(units) = base + slope · (units − least)         the line from the smallest measured batch over all others

The line lies on or over every measured peak between the smallest and the largest batch. Beyond the largest it goes on
EXTRAPOLATION times as steeply, since attention over long rows grows faster than their length. Peaks are kept for sizes
in half powers of two, the largest of each: memory is wanted for the worst batch of a size, not for the usual one.

Before anything was measured there is only the artefact and the manifest. A transformer of L layers and width h has
12·L·h² weights of 4 bytes, and a token holds some 16 vectors of width h at a time: with six layers 3.8·√bytes for each
token, which is rounded up and taken for any model, with what goes in and out of it.

It can be wrong for models whose memory does not follow their work; then `core/memory.py` learns it the hard way.
"""

from __future__ import annotations

from math import inf, log2, prod, sqrt
from typing import Final

from tidegate.models.manifest import Manifest, TensorSpec, Variant

EXTRAPOLATION: Final = 1.5
_BUCKETS_PER_DOUBLING: Final = 2
_VECTORS: Final = 4.0
_BYTES_ELEMENT: Final = 64  # of BYTES, whose elements are as long as they are


class Footprint:
    """Mutable: `record` what was measured, `predict_bytes` what will be needed.

    Args:
        prior_bytes_per_unit: believed until something has been measured.
    """

    def __init__(self, prior_bytes_per_unit: float) -> None:
        if not 0.0 < prior_bytes_per_unit < inf:
            raise ValueError(f"a unit of work takes some memory, not {prior_bytes_per_unit}")
        self._prior = prior_bytes_per_unit
        self._peaks: dict[int, tuple[float, float]] = {}  # size class → units and the most bytes that it took
        self._base = 0.0
        self._least = 0.0
        self._most = 0.0
        self._slope = prior_bytes_per_unit

    @property
    def measured(self) -> bool:
        return bool(self._peaks)

    def record(self, units: float, peak_bytes: float) -> None:
        """A batch of so many units took so many bytes beyond what was held before it."""
        bucket = round(_BUCKETS_PER_DOUBLING * log2(max(units, 1.0)))
        known = self._peaks.get(bucket)
        if known is None or peak_bytes > known[1]:
            self._peaks[bucket] = units, max(0.0, peak_bytes)
            self._fit()

    def predict_bytes(self, units: float) -> float:
        """What a batch of so many units takes at most."""
        inside = min(max(units, self._least), self._most) - self._least
        beyond = max(0.0, units - max(self._most, self._least))
        return self._base + self._slope * (inside + self._steepness * beyond)

    def most_units(self, room_bytes: float) -> float:
        """The largest batch that fits into so many bytes; 0 when none does."""
        if room_bytes < self._base or room_bytes <= 0.0:
            return 0.0
        if self._slope <= 0.0:
            return inf
        span, room = self._most - self._least, (room_bytes - self._base) / self._slope
        return self._least + (room if room <= span else span + (room - span) / self._steepness)

    @property
    def _steepness(self) -> float:
        return EXTRAPOLATION if self._peaks else 1.0

    def _fit(self) -> None:
        points = sorted(self._peaks.values())
        self._least, self._base = points[0]
        self._most = points[-1][0]
        slopes = [(peak - self._base) / (units - self._least) for units, peak in points[1:] if units > self._least]
        self._slope = max(0.0, *slopes) if slopes else self._prior

    def __repr__(self) -> str:
        kind = "measured" if self.measured else "expected"
        return f"<Footprint {kind}: {self._base / 1e6:.1f} MB and {self._slope / 1e3:.1f} kB a unit>"


def expected_bytes_per_unit(manifest: Manifest, variant: Variant) -> float:
    """The formula above."""
    counted = next((spec for spec in manifest.inputs if spec.name == manifest.cost.input), None)
    elements = _fixed(counted) if counted is not None and manifest.cost.feature in ("tokens", "pixels") else 1
    through = sum(_fixed(spec) * (spec.datatype.itemsize or _BYTES_ELEMENT) for spec in manifest.inputs)
    through += sum(_fixed(spec) * (spec.datatype.itemsize or _BYTES_ELEMENT) for spec in manifest.outputs)
    return _VECTORS * sqrt(max(variant.size_bytes, 1)) + through / elements


def _fixed(spec: TensorSpec) -> int:
    """Elements along the axes whose length is known."""
    return prod(entry for entry in spec.shape if isinstance(entry, int) and entry > 0)

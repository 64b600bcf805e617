"""A footprint predicts the memory that a batch takes beside the weights, from its units of work.

A device that is full does not become slower, it fails, and on a CPU the kernel may end the whole process. So the memory
of a batch is predicted, from peaks that workers measure (`tidegate/workers/memory_meter.py`):

    bytes(units) = the line through the largest peaks of batches of each size and of smaller ones

Peaks are kept for sizes in half powers of two, the largest of each: memory is wanted for the worst batch of a size, not
for the usual one. Between two sizes the straight line is above the real use, since attention over long rows grows
faster than their length. Each pair of neighbours has a line of its own: with one line for all, a few MB by chance
between batches of five and of six tokens would, a hundred sizes further on, be all the memory that there is.

Beyond the largest size the prediction rises EXTRAPOLATION times as steeply as the steepest line to it from a size of at
most half as much, or as the prior says, where there is none so far away.

Before anything was measured there is only the artefact and the manifest. A transformer of L layers and width h has
12·L·h² weights of 4 bytes, and a token holds some 16 vectors of width h at a time: with six layers 3.8·√bytes for each
token, which is rounded up and taken for any model, with what goes in and out of it.

It can be wrong for models whose memory does not follow their work; then `device_memory.py` learns it from failures.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import inf, log2, prod, sqrt
from operator import itemgetter
from typing import Final

from tidegate.models.manifest import Manifest, TensorSpec, Variant

EXTRAPOLATION: Final = 1.5
_BUCKETS_PER_DOUBLING: Final = 2
_FAR: Final = 2.0  # times as large; two sizes that are closer say little about what is beyond them
_VECTORS: Final = 4.0
_BYTES_ELEMENT: Final = 64  # of BYTES, whose elements are as long as they are


class Footprint:
    """Mutable: `record` measured peaks, `predict_bytes` of a batch.

    Args:
        prior_bytes_per_unit: used until a peak has been measured.
    """

    def __init__(self, prior_bytes_per_unit: float) -> None:
        if not 0.0 < prior_bytes_per_unit < inf:
            raise ValueError(f"a unit of work takes some memory, not {prior_bytes_per_unit}")
        self._prior = prior_bytes_per_unit
        self._peaks: dict[int, tuple[float, float]] = {}  # size class → units and the most bytes that it took
        self._line: list[tuple[float, float]] = [(0.0, 0.0)]  # (units, bytes), both growing
        self._beyond = prior_bytes_per_unit  # bytes a unit after the line's last point

    @property
    def measured(self) -> bool:
        return bool(self._peaks)

    def record(self, units: float, peak_bytes: float) -> None:
        """Record the peak of a batch: bytes beyond what was held before it."""
        bucket = round(_BUCKETS_PER_DOUBLING * log2(max(units, 1.0)))
        known = self._peaks.get(bucket)
        if known is None or peak_bytes > known[1]:
            self._peaks[bucket] = units, max(0.0, peak_bytes)
            self._fit()

    def predict_bytes(self, units: float) -> float:
        """The most bytes that a batch of this size should take."""
        at = bisect_left(self._line, units, key=itemgetter(0))
        if at == len(self._line):
            last_units, last_bytes = self._line[-1]
            return last_bytes + self._beyond * (units - last_units)
        if at == 0:
            return self._line[0][1]
        (low_units, low_bytes), (high_units, high_bytes) = self._line[at - 1 : at + 1]
        return low_bytes + (high_bytes - low_bytes) * (units - low_units) / (high_units - low_units)

    def most_units(self, room_bytes: float) -> float:
        """The largest batch, in units, that fits into `room_bytes`; 0 when none does."""
        at = bisect_right(self._line, room_bytes, key=itemgetter(1))
        if at == 0 or room_bytes <= 0.0:
            return 0.0
        low_units, low_bytes = self._line[at - 1]
        if at == len(self._line):
            return inf if self._beyond <= 0.0 else low_units + (room_bytes - low_bytes) / self._beyond
        high_units, high_bytes = self._line[at]
        return low_units + (high_units - low_units) * (room_bytes - low_bytes) / (high_bytes - low_bytes)

    def _fit(self) -> None:
        # The line never falls: each size counts as at least the largest peak of all smaller sizes.
        points = sorted(self._peaks.values())
        most = accumulate((peak for _, peak in points), max)
        self._line = [(units, peak) for (units, _), peak in zip(points, most, strict=True)]
        # Beyond its end, the steepest slope from a size of at most half the last one.
        last_units, last_bytes = self._line[-1]
        slopes = [
            (last_bytes - peak) / (last_units - units)
            for units, peak in self._line
            if units <= last_units / _FAR and units < last_units  # of a batch of no rows nothing lies before
        ]
        self._beyond = EXTRAPOLATION * (max(slopes) if slopes else self._prior)

    def __repr__(self) -> str:
        if not self.measured:
            return f"<Footprint expected: {self._prior / 1e3:.1f} kB a unit>"
        units, most_bytes = self._line[-1]
        return f"<Footprint measured: {most_bytes / 1e6:.1f} MB for {units:g} units>"


def expected_bytes_per_unit(manifest: Manifest, variant: Variant) -> float:
    """The prior of the module docstring: bytes of memory for one unit of work."""
    counted = next((spec for spec in manifest.inputs if spec.name == manifest.cost.input), None)
    elements = _fixed(counted) if counted is not None and manifest.cost.feature in ("tokens", "pixels") else 1
    through = sum(_fixed(spec) * (spec.datatype.itemsize or _BYTES_ELEMENT) for spec in manifest.inputs)
    through += sum(_fixed(spec) * (spec.datatype.itemsize or _BYTES_ELEMENT) for spec in manifest.outputs)
    # Vectors inside the model, by the width that its size suggests, and the tensors that go in and out.
    return _VECTORS * sqrt(max(variant.size_bytes, 1)) + through / elements


def _fixed(spec: TensorSpec) -> int:
    """Elements along the axes whose length is known."""
    return prod(entry for entry in spec.shape if isinstance(entry, int) and entry > 0)

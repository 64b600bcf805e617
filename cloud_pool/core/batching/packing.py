"""A packed layout joins the rows of all members without padding, and splits the outputs by member.

It has the interface of the padded layout (`padding.py`), for variants that take packed rows (the format is in
`tidegate/models/packing.py`). Nothing is padded, so requests with the same datatypes and fixed axes may share a batch
whatever their lengths, and a batch costs what its real tokens cost: groups of like lengths gain nothing.

A member's rows are packed behind those of the member before it. The number of rows, and for outputs that are packed the
number of tokens, is checked before anything is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloud_pool.core.batching.padding import Arrays, BatchLayout, Extent
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.packing import Packing, pack, packing_of, row_lengths, unpack


class PackedLayout(BatchLayout):
    """A layout whose batches are packed."""

    def __init__(self, manifest: Manifest, packing: Packing) -> None:
        super().__init__(manifest)
        self._packing = packing

    def extent(self, arrays: Arrays) -> Extent:
        """The extent of a request, with the real length of each row."""
        lengths = row_lengths(self._packing, arrays)
        width = next(arrays[name].shape[1] for name in self._packing.inputs if name in arrays)
        return Extent(len(lengths), width, tuple(lengths.tolist()))

    def stack(self, members: Sequence[Arrays]) -> Arrays:
        return pack(self._packing, members, [row_lengths(self._packing, member) for member in members])

    def _free_dims(self, name: str) -> set[int]:
        return {0, 1} if name in self._packing.inputs else {0}

    def _entries(self, name: str, extent: Extent) -> int:
        return sum(extent.row_lengths) if name in self._packing.outputs else extent.rows

    def _trimmed(self, name: str, array: NDArray[Any], extent: Extent) -> NDArray[Any]:
        if name not in self._packing.outputs:
            return array
        return unpack(array, np.array(extent.row_lengths), extent.length)

    def __repr__(self) -> str:
        return f"<PackedLayout of {', '.join(self._packing.inputs)}>"


def layout_of(manifest: Manifest, variant: Variant) -> BatchLayout:
    """How batches of the variant are laid out."""
    packing = packing_of(manifest, variant.packed)
    return BatchLayout(manifest) if packing is None else PackedLayout(manifest, packing)

"""An engine whose artefact takes packed rows; it serves callers that pack and packs plain batches itself.

The pool's batcher hands over rows that it has packed (`models/packing.py`); they are known by the input that holds the
lengths, and go straight through. All other callers (warm-up, measurements, an edge) have plain batches, as any other
engine takes them: these are packed here, and the outputs are unpacked.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from tidegate.engines.errors import EngineError
from tidegate.engines.protocol import Arrays, Engine
from tidegate.models.packing import Packing, pack, row_lengths, unpack


class PackingEngine:
    """`inner`, which takes packed batches only, behind the interface that takes both."""

    def __init__(self, inner: Engine, packing: Packing) -> None:
        self._inner = inner
        self._packing = packing
        self.device_meter = getattr(inner, "device_meter", None)

    def infer(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """All outputs by name, packed as the inputs were. Blocks. Raises EngineError."""
        if self._packing.lengths in inputs:
            return self._inner.infer(inputs)
        if not any(name in inputs for name in self._packing.inputs):
            given = ", ".join(inputs) or "nothing"
            raise EngineError(f"it packs {', '.join(self._packing.inputs)}, but {given} came")
        lengths = row_lengths(self._packing, inputs)
        length = next(inputs[name].shape[1] for name in self._packing.inputs if name in inputs)
        outputs = self._inner.infer(pack(self._packing, [inputs], [lengths]))
        packed = [name for name in self._packing.outputs if name in outputs]
        return outputs | {name: unpack(outputs[name], lengths, length) for name in packed}

    def __repr__(self) -> str:
        return f"<PackingEngine {self._inner!r}>"

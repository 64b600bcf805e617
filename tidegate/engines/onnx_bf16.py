"""Runs a session whose inputs or outputs are bfloat16, which numpy lacks: they are its bits, in uint16.

The runtime takes no such array by itself, and gives none back: each such input becomes a value of its own kind, and the
bits of an output are copied out of its memory. Where outputs are bfloat16 every input has to be such a value, and the
runtime makes none of texts. Sessions without bfloat16 go the shorter way, through numpy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tidegate.engines.errors import EngineError

BF16: Final = "tensor(bfloat16)"
_TEXT: Final = "tensor(string)"
_ONNX_TYPE: Final = 16  # TensorProto.BFLOAT16
_ITEM_BYTES: Final = 2


class Bf16Session:
    """A session with bfloat16 among its ports. Args: inputs, outputs: their kinds by name, as the runtime says them.

    Raises:
        EngineError: this ONNX Runtime cannot be given what the model takes.
    """

    def __init__(self, session: Any, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
        if not hasattr(onnxruntime.OrtValue, "ortvalue_from_numpy_with_onnx_type"):
            raise EngineError(f"bfloat16 needs ONNX Runtime 1.20 or later, and this is {onnxruntime.__version__}")
        self._session = session
        self._inputs = inputs
        self._gives_bits = BF16 in outputs.values()
        if self._gives_bits and _TEXT in inputs.values():
            raise EngineError("ONNX Runtime takes no texts where it gives bfloat16: cast the outputs to float32")

    def run(self, feed: Mapping[str, NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """The outputs in the session's order. Blocks."""
        values = {
            name: _value(array, self._inputs.get(name, ""), every=self._gives_bits) for name, array in feed.items()
        }
        if self._gives_bits:
            return [_array(one) for one in self._session.run_with_ort_values(None, values)]
        arrays: Sequence[NDArray[Any]] = self._session.run(None, values)
        return arrays

    def __repr__(self) -> str:
        return f"<Bf16Session {self._inputs}>"


def _value(array: NDArray[Any], kind: str, *, every: bool) -> Any:
    if kind == BF16 and array.dtype == np.uint16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_TYPE)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array) if every else array


def _array(value: Any) -> NDArray[Any]:
    if value.data_type() != BF16:
        array: NDArray[Any] = value.numpy()
        return array
    if value.device_name().lower() != "cpu":  # its memory is not to be read from here
        raise EngineError(f"ONNX Runtime left an output of bfloat16 on {value.device_name()}")
    shape = tuple(value.shape())
    bits = ctypes.string_at(value.data_ptr(), _ITEM_BYTES * prod(shape)) if prod(shape) else b""
    return np.frombuffer(bits, np.uint16).reshape(shape)

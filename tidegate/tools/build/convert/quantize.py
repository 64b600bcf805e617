"""Quantization turns fp32 ONNX into int8: a quarter of the size and two to three times the speed on a device.

Two ways. *Dynamic* takes no data: weights become int8, activations are scaled anew in each call. It suits transformers,
whose activations have outliers that one fixed scale cannot hold. *Static* fixes the scales from calibration data and is
written as QDQ pairs, which every runtime understands; it suits convolutions. Both quantize weights per channel and
signed: unsigned ones miss the fast VNNI path, and one scale per tensor costs MiniLM another hundredth of its cosine.

Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
CVPR 2018, for static; ONNX Runtime's quantization guide for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

from tidegate.tools.build.errors import BuildError

Feed = Mapping[str, NDArray[Any]]


def quantize_dynamically(source: Path, target: Path) -> None:
    """Write `source` with int8 weights and activations that are scaled in each call. Raises BuildError."""
    with _prepared(source) as prepared:
        quantize_dynamic(prepared, target, per_channel=True, weight_type=QuantType.QInt8)


def quantize_statically(
    source: Path, target: Path, calibration: Iterable[Feed], *, operators: Sequence[str] | None = None
) -> None:
    """Write `source` in int8 with scales from `calibration`, all operators or those named. Raises BuildError."""
    with _prepared(source) as prepared:
        quantize_static(
            prepared,
            target,
            _Reader(calibration),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=None if operators is None else list(operators),
        )


@contextmanager
def _prepared(source: Path) -> Iterator[Path]:
    """The graph with its shapes inferred and its constants folded, as the quantizers want it."""
    with TemporaryDirectory(prefix="tidegate-quantize-") as folder:
        prepared = Path(folder) / "prepared.onnx"
        try:
            # Symbolic inference is for graphs that ONNX's own cannot follow; it is slow and fails more than it helps.
            quant_pre_process(source, prepared, skip_symbolic_shape=True)
        except Exception as error:  # protobuf's, ONNX's and ONNX Runtime's errors have no class in common
            raise BuildError(f"{source}: cannot be read as an ONNX model: {error}") from error
        try:
            yield prepared
        except BuildError:
            raise
        except Exception as error:  # as above
            raise BuildError(f"{source}: cannot be quantized: {error}") from error


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime has no types
    def __init__(self, feeds: Iterable[Feed]) -> None:
        self._feeds: Iterator[Feed] = iter(feeds)

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        feed = next(self._feeds, None)
        return None if feed is None else dict(feed)

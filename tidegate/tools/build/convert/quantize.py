"""Quantization turns fp32 ONNX into int8: a quarter of the size and two to three times the speed on a device.

Two ways. *Dynamic* takes no data: weights become int8, activations are scaled anew in each call. It suits transformers,
whose activations have outliers that one fixed scale cannot hold. *Static* fixes the scales from calibration data and is
written as QDQ pairs, which every runtime understands; it suits convolutions. Both quantize weights per channel and
signed: unsigned ones miss the fast VNNI path, and one scale per tensor costs MiniLM another hundredth of its cosine.
Weights take 7 of their 8 bits, because an x86 processor with AVX2 and without VNNI adds two products in 16 bits, which
saturate: a small network's cosine to fp32 was 0.93 there and above 0.99 elsewhere, and the machine that quantizes is
seldom the one that runs it. The bit costs MiniLM nothing that can be measured (0.9917 for 0.9918).

Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference",
CVPR 2018, for static; ONNX Runtime's quantization guide for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
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
from tidegate.tools.build.inspect.onnx_file import is_quantized
from tidegate.tools.build.inspect.onnx_weights import load_onnx

_PORTABLE = True  # 7 bits of weight, as above
_NAMED = 8
_MOST_WORDS = 400  # characters of another library's error
_AS_IT_IS = "serve it as it is: tidegate model add NAME --edge"

Feed = Mapping[str, NDArray[Any]]


def quantize_dynamically(source: Path, target: Path) -> None:
    """Write `source` with int8 weights and activations that are scaled in each call. Raises BuildError."""
    with _prepared(source) as prepared:
        quantize_dynamic(prepared, target, per_channel=True, weight_type=QuantType.QInt8, reduce_range=_PORTABLE)
        _check_quantized(source, target)


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
            reduce_range=_PORTABLE,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=None if operators is None else list(operators),
        )
        _check_quantized(source, target)


@contextmanager
def _prepared(source: Path) -> Iterator[Path]:
    """The graph in one file with its shapes inferred and its constants folded, as the quantizers want it."""
    model = load_onnx(source)
    operators = _operators(model.graph)
    if not any(domain in ("", "ai.onnx") for domain, _ in operators):
        raise _nothing_to_quantize(source, operators)
    # What an exporter noted of shapes within is dropped and inferred anew: torch's also lists weights, and a quantizer
    # that transposes one leaves the note as it was, which the next inference calls an error.
    _forget_shapes(model)
    with TemporaryDirectory(prefix="tidegate-quantize-") as folder:
        plain, prepared = Path(folder) / "plain.onnx", Path(folder) / "prepared.onnx"
        plain.write_bytes(model.SerializeToString())
        try:
            # Symbolic inference is for graphs that ONNX's own cannot follow; it is slow and fails more than it helps.
            quant_pre_process(plain, prepared, skip_symbolic_shape=True)
        except OSError:  # a full disk says nothing of the model
            raise
        except Exception as error:  # protobuf's, ONNX's and ONNX Runtime's errors have no class in common
            raise BuildError(f"{source}: cannot be read as an ONNX model: {_one_line(error)}") from error
        try:
            yield prepared
        except (BuildError, OSError):
            raise
        except Exception as error:  # as above
            raise BuildError(f"{source}: cannot be quantized: {_one_line(error)}; {_AS_IT_IS} {source}") from error


def _forget_shapes(model: onnx.ModelProto) -> None:
    for graph in _graphs(model.graph):
        graph.ClearField("value_info")


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those of the branches and loops in it."""
    yield graph
    for node in graph.node:
        for one in node.attribute:
            for inner in (*([one.g] if one.HasField("g") else []), *one.graphs):
                yield from _graphs(inner)


def _operators(graph: onnx.GraphProto) -> list[tuple[str, str]]:
    return sorted({(node.domain, node.op_type) for one in _graphs(graph) for node in one.node})


def _check_quantized(source: Path, target: Path) -> None:
    graph = load_onnx(target).graph
    if not is_quantized(graph):
        raise _nothing_to_quantize(source, _operators(graph))


def _nothing_to_quantize(source: Path, operators: Sequence[tuple[str, str]]) -> BuildError:
    names = ", ".join(name for _, name in operators[:_NAMED]) + (", …" if len(operators) > _NAMED else "")
    return BuildError(f"{source}: has nothing to quantize, its operators are {names}; {_AS_IT_IS} {source}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MOST_WORDS]


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime has no types
    def __init__(self, feeds: Iterable[Feed]) -> None:
        self._feeds: Iterator[Feed] = iter(feeds)

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        feed = next(self._feeds, None)
        return None if feed is None else dict(feed)

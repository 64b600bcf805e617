"""An export turns a torch module into files that run without its code: an exported program, and ONNX.

Both take the example inputs by the names of `forward`'s parameters, which become the names of the model's inputs.
The ONNX exporter is the one that traces (`dynamo=False`): it needs nothing beside torch, gives smaller graphs that ONNX
Runtime fuses further, and its int8 versions were a fifth faster on short rows than those of the newer exporter.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tidegate.models.digest import sha256_of
from tidegate.models.trusted_digests import TrustedDigests
from tidegate.storage.atomic_file import write_atomically

Axes = Mapping[str, Mapping[int, str]]  # tensor → dimension → the axis' name
_OPSET = 17  # the first with LayerNormalization


def export_program(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], axes: Axes, path: Path, *, most: Mapping[str, int]
) -> None:
    """Write a .pt2 whose named axes go from 1 to `most` (not in it: without limit), and trust it in its repository."""
    _check_is_eval(module)
    names = {axis for dimensions in axes.values() for axis in dimensions.values()}
    dims = {name: torch.export.Dim(name, min=1, max=most.get(name)) for name in sorted(names)}
    shapes = {tensor: {at: dims[axis] for at, axis in axes[tensor].items()} for tensor in example}
    program = torch.export.export(module, tuple(example.values()), dynamic_shapes=shapes, strict=False)
    content = io.BytesIO()  # on a full disk torch's own writer ends the process (std::terminate), and no error names it
    torch.export.save(program, content)
    write_atomically(path, content.getvalue(), durable=False)  # its build flushes the whole version
    TrustedDigests.of_artefact(path).add({sha256_of(path): f"built here: {path.parent.parent.name}/{path.name}"})


def export_onnx(
    module: torch.nn.Module, example: Mapping[str, torch.Tensor], outputs: Sequence[str], axes: Axes, path: Path
) -> None:
    _check_is_eval(module)
    with warnings.catch_warnings():
        # Deprecated in favour of dynamo=True (why not, above), and tracing warns about each Python number it fixes;
        # what was fixed wrongly shows in the checks that every build makes on other shapes.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(example.values()),
            str(path),
            dynamo=False,
            opset_version=_OPSET,
            input_names=list(example),
            output_names=list(outputs),
            dynamic_axes={name: dict(dimensions) for name, dimensions in axes.items()},
        )


def _check_is_eval(module: torch.nn.Module) -> None:
    """The ONNX exporter restores the mode of the outermost module into all of its children, so that one in training
    mode around an inner model in eval mode has dropout afterwards."""
    if module.training:
        raise ValueError("call .eval() on the module that is exported, not only on a module inside of it")

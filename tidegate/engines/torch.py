"""PyTorch engines: exported programs (.pt2) and TorchScript, on the pool's CPU or GPU.

An exported program is a graph with its weights: it loads and runs without the code that made it, so a pool needs torch
and nothing else. Inputs are matched by name to the program's own parameters, never by the order in which they came.

Arrays that came over the wire are read-only views of a message. They are copied once on the way in: a graph may write
to its inputs, and torch cannot promise that it will not. bfloat16, which numpy lacks, travels as its bits in uint16.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C import PyTorchFileReader

from tidegate.engines.archive import is_document, no_pickles, private_copy, refuse_code, require_trust
from tidegate.engines.errors import EngineError, UntrustedProgram, failure_of
from tidegate.engines.staging import CudaMeter, Staged, Staging, release_cached
from tidegate.engines.torch_device import compiled, device_of, say_if_emulated
from tidegate.models.trusted_digests import TrustedDigests

Kind = Literal["torch-export", "torchscript"]


class TorchEngine:
    """One program on one device.

    Args:
        outputs: the manifest's output names, in the order in which the program returns them.
        threads: threads within one operator, set for the whole process; 0 leaves torch's choice, all cores.
        device: "cpu", "cuda", "cuda:1" or "auto" (CUDA where there is one).
        trusted: the digests that may be loaded; None: those of the repository that the artefact lies in.
        compile: by torch.compile, which takes a minute at the first calls, and pays where a model is many small steps.

    Raises:
        EngineError: torch does not see the device, or refuses the artefact.
    """

    def __init__(
        self,
        kind: Kind,
        artefact: Path,
        *,
        outputs: Sequence[str],
        threads: int = 1,
        device: str = "cpu",
        compile: bool = False,
        trusted: TrustedDigests | None = None,
    ) -> None:
        self.artefact = artefact
        self.outputs = tuple(outputs)
        self.device = device_of(device)
        if not artefact.is_file():
            raise EngineError(f"{artefact}: there is no such artefact")
        if threads > 0:
            torch.set_num_threads(threads)
        load = _Exported if kind == "torch-export" else _Script
        try:
            allowed = trusted or TrustedDigests.of_artefact(artefact)
            self._program: _Exported | _Script = load(artefact, self.device, allowed)
        except UntrustedProgram:
            raise
        except Exception as error:  # torch's loaders raise whatever zip, pickle and C++ raise
            raise failure_of(error, f"{artefact}: torch cannot load it as {kind}") from error
        for dtype in (torch.bfloat16, torch.float16):
            if dtype in self._program.weights:
                say_if_emulated(artefact.name, dtype, self.device)
        self._run = compiled(artefact.name, self._program.run, self.device) if compile else self._program.run
        self.inputs = self._program.inputs
        on_cuda = self.device.type == "cuda"
        self.device_meter = CudaMeter(self.device) if on_cuda else None
        self._staging = Staging(self.device) if on_cuda else None

    @property
    def prepares(self) -> bool:
        """Whether `prepare` does anything."""
        return self._staging is not None

    def prepare(self, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """The inputs of a later call, on their way to the device. For another thread than the one that computes."""
        return inputs if self._staging is None else self._staging.prepare(inputs)

    def infer(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """All outputs by name. Blocks. Raises EngineError."""
        if set(inputs) != set(self.inputs):
            given = ", ".join(inputs) or "nothing"
            raise EngineError(f"{self.artefact.name} takes {', '.join(self.inputs)}, but {given} came")
        try:
            with torch.inference_mode():
                leaves = [self._leaf(name, inputs) for name in self.inputs]
                return self._named(self._run(leaves))
        except EngineError:
            raise
        except Exception as error:  # a guard, a shape, the device's memory: many classes, most of them RuntimeError
            release_cached(self.device)
            raise failure_of(error, f"{self.artefact.name}: torch cannot run it") from error

    def _leaf(self, name: str, inputs: Mapping[str, NDArray[Any]]) -> torch.Tensor:
        array = inputs[name]
        tensor = None
        if isinstance(inputs, Staged) and self._staging is not None:
            tensor = self._staging.arrived(inputs, name)
        if tensor is None:
            owned = array if array.flags.writeable and array.flags.c_contiguous else array.copy(order="C")
            tensor = torch.from_numpy(owned).to(self.device)
        if self._program.dtypes.get(name) is torch.bfloat16 and array.dtype == np.uint16:
            tensor = tensor.view(torch.bfloat16)
        return tensor

    def _named(self, returned: Any) -> dict[str, NDArray[Any]]:
        if isinstance(returned, Mapping):
            returned = [returned.get(name) for name in self.outputs]
        values = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        if len(values) != len(self.outputs) or not all(isinstance(value, torch.Tensor) for value in values):
            raise EngineError(f"{self.artefact.name} does not return one tensor for each of {', '.join(self.outputs)}")
        return {name: _array(value) for name, value in zip(self.outputs, values, strict=True)}

    def __repr__(self) -> str:
        return f"<TorchEngine {self.artefact.name} on {self.device}>"


def load_program(artefact: Path, trusted: TrustedDigests) -> Any:
    """The exported program in a file that is trusted, and was checked to run no code while it is read.

    Raises:
        EngineError: its digest is not trusted, a part of it would run, or is not a part that exported programs have.
    """
    with private_copy(artefact) as copied:
        require_trust(copied, artefact, trusted)
        documents = refuse_code(copied, shown=artefact)
        # torch's reader of archives is another one than Python's; what it finds must be what was checked.
        reader = PyTorchFileReader(str(copied))
        root = next(iter(documents)).partition("/")[0]
        names = {f"{root}/{name}" for name in reader.get_all_records() if is_document(f"{root}/{name}")}
        for name, content in documents.items():
            if names != set(documents) or reader.get_record(name.partition("/")[2]) != content:
                raise EngineError(f"{artefact}: {name} can be read in two ways: refused")
        with no_pickles():
            return torch.export.load(copied)


class _Exported:
    """A program of `torch.export`, moved to its device with the constants that its graph holds."""

    def __init__(self, artefact: Path, device: torch.device, trusted: TrustedDigests) -> None:
        program = load_program(artefact, trusted)
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        self.inputs = tuple(str(name) for name in program.graph_signature.user_inputs)
        self.dtypes = {
            node.name: node.meta["val"].dtype
            for node in program.graph.nodes
            if node.op == "placeholder" and node.name in self.inputs and hasattr(node.meta.get("val"), "dtype")
        }
        self.weights = {weight.dtype for weight in program.state_dict.values()}
        self._in_spec = program.call_spec.in_spec
        self._module = program.module()

    def run(self, leaves: list[torch.Tensor]) -> Any:
        args, kwargs = self._in_spec.unflatten(leaves)
        return self._module(*args, **kwargs)


class _Script:
    """A TorchScript module; its parameter names come from the schema of `forward`."""

    def __init__(self, artefact: Path, device: torch.device, trusted: TrustedDigests) -> None:
        with private_copy(artefact) as copied, warnings.catch_warnings():
            require_trust(copied, artefact, trusted)
            # TorchScript is deprecated in favour of torch.export, but many models that people have are still in it.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._module = torch.jit.load(str(copied), map_location=device).eval()  # type: ignore[no-untyped-call]
        self.inputs = tuple(argument.name for argument in self._module.forward.schema.arguments[1:])
        self.dtypes: dict[str, torch.dtype] = {}
        self.weights = {weight.dtype for weight in self._module.parameters()}

    def run(self, leaves: list[torch.Tensor]) -> Any:
        return self._module(*leaves)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: NDArray[Any] = tensor.contiguous().cpu().numpy()
    return array

"""Encoders over packed rows: weights in a safetensors file, which holds no code, run by the network that it names.

The file's metadata has `tidegate: {"architecture": "bert", …}` (`bert.Architecture`), its weights the names that
Hugging Face's models have, in the precision in which they compute. `tidegate model pack` writes such a file, and
`tidegate model build minilm` two of them. Inputs and outputs are fixed:

    input_ids int64[tokens], attention_mask int64[tokens], lengths int64[rows]  →  float32[rows, hidden]

On a CPU that has no instructions for bf16 a line in the log says that fp32 is faster there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import torch
from numpy.typing import NDArray

from tidegate.engines.encoder.attention_kernel import attention_kernel
from tidegate.engines.encoder.bert import Architecture, PackedBert
from tidegate.engines.encoder.graph_replay import MOST_GRAPHS
from tidegate.engines.errors import EngineError, failure_of
from tidegate.engines.staging import CudaMeter, release_cached
from tidegate.engines.torch_device import device_of, say_if_emulated
from tidegate.models.array_files import UnsafeArrayFile, check_safetensors

METADATA = "tidegate"
IDS, MASK, LENGTHS = "input_ids", "attention_mask", "lengths"
WAY_OUT = "`tidegate model pack` writes such a file"
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class PackedMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata. A second architecture makes this a union."""

    architecture: str
    bert: Architecture


class TorchPackedEngine:
    """One file on one device.

    Args:
        outputs: the manifest's; there must be one.
        threads: threads within one operator, set for the whole process; 0 leaves torch's choice, all cores.
        device: "cpu", "cuda", "cuda:1" or "auto" (CUDA where there is one).

    Raises:
        EngineError: torch does not see the device, or refuses the artefact.
    """

    def __init__(self, artefact: Path, *, outputs: Sequence[str], threads: int = 1, device: str = "cpu") -> None:
        self.artefact = artefact
        if len(outputs) != 1:
            raise EngineError(f"{artefact}: a packed encoder has one output, but the manifest names {len(outputs)}")
        (self._output,) = outputs
        if threads > 0:
            torch.set_num_threads(threads)
        chosen = device_of(device)
        self._model = load_packed(artefact, chosen)
        graphs = self._model.graphs
        beside = (lambda: graphs.held_bytes) if graphs is not None else None
        self.device_meter = CudaMeter(chosen, beside) if chosen.type == "cuda" else None

    def infer(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """One vector a row. Blocks. Raises EngineError."""
        ids, mask, lengths = self._checked(inputs)
        try:
            with torch.inference_mode():
                return {self._output: self._model(ids, lengths, mask)}
        except Exception as error:  # the device's memory: many classes, most of them RuntimeError
            release_cached(self._model.device)
            raise failure_of(error, f"{self.artefact.name}: torch cannot run it") from error

    def _checked(
        self, inputs: Mapping[str, NDArray[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None, NDArray[np.int64]]:
        """What indexes tables, checked, since an index past a table's end may end a process or a GPU's context."""
        if set(inputs) != {IDS, MASK, LENGTHS}:
            given = ", ".join(inputs) or "nothing"
            raise EngineError(f"{self.artefact.name} takes {IDS}, {MASK} and {LENGTHS}, but {given} came")
        ids, lengths = (np.asarray(inputs[name], dtype=np.int64) for name in (IDS, LENGTHS))
        real = inputs[MASK] != 0
        if ids.ndim != 1 or real.shape != ids.shape or lengths.sum() != len(ids) or not lengths.size:
            raise EngineError(f"{self.artefact.name}: cannot run it: {list(ids.shape)} tokens for {lengths.tolist()}")
        if lengths.min() < 1 or lengths.max() > self._model.most_tokens:
            raise EngineError(f"{self.artefact.name}: cannot run it: rows are of 1 to {self._model.most_tokens} tokens")
        if ids.min() < 0 or ids.max() >= self._model.vocabulary:
            raise EngineError(f"{self.artefact.name}: cannot run it: ids go from 0 to {self._model.vocabulary - 1}")
        return ids, None if real.all() else real, lengths

    def __repr__(self) -> str:
        return f"<TorchPackedEngine {self.artefact.name} {self._model!r}>"


def load_packed(path: Path, device: torch.device, *, most_graphs: int = MOST_GRAPHS) -> PackedBert:
    """The network with its weights. Raises EngineError, naming the file and the way out."""
    described = describe(path)
    try:
        with safetensors.safe_open(str(path), framework="pt", device=str(device)) as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError, RuntimeError) as error:
        raise failure_of(error, f"{path}: torch cannot load it") from error
    types = {weight.dtype for weight in weights.values()}
    if len(types) != 1 or not types <= set(_DTYPES):
        raise EngineError(f"{path}: its weights must be of one type of {', '.join(_DTYPES.values())}; {WAY_OUT}")
    say_if_emulated(path.name, next(iter(types)), device)
    kernel = attention_kernel() if device.type == "cpu" else None
    try:
        return PackedBert(described.bert, weights, kernel, most_graphs=most_graphs)
    except KeyError as error:
        raise EngineError(f"{path}: lacks the weight {error}; {WAY_OUT}") from error


def describe(path: Path) -> PackedMetadata:
    """The architecture in the file's metadata. Raises EngineError."""
    if not path.is_file():
        raise EngineError(f"{path}: there is no such artefact")
    try:
        check_safetensors(path)
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
        described = msgspec.json.decode(metadata.get(METADATA, "null"), type=PackedMetadata)
    except UnsafeArrayFile as error:
        raise EngineError(f"{error}; {WAY_OUT}") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise EngineError(f"{path}: torch cannot load it as torch-packed: {error}") from error
    except msgspec.ValidationError as error:
        raise EngineError(f"{path}: its metadata {METADATA!r} says no network ({error}); {WAY_OUT}") from error
    if described.architecture != "bert":
        raise EngineError(f"{path}: the architecture {described.architecture!r} is not known (known: bert)")
    return described

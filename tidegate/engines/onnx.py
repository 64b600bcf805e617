"""The ONNX Runtime engine: the runtime of edge devices, int8 or fp32, on a given number of threads.

Spinning is off. ONNX Runtime's threads otherwise burn their core for a while after each call in the hope of another
one, which on a device that also does other work costs more than the wake-up it saves, and makes its neighbours late.

A file is checked before the runtime opens it, here and so for every process and command: its bytes are walked
(`onnx_wire.py`), and weights in other files, foreign operators and impossible tensors are refused. What is loaded is
the copy that was checked, a file in memory that no other account can write, so that a file which is replaced or
rewritten in between gains nothing. The copy costs the file's size while the model loads and is given back whole, as the
runtime's own copy of a model that comes as bytes is not.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tidegate.engines.device_memory_meter import arena_meter
from tidegate.engines.errors import EngineError, InputRefused, failure_of
from tidegate.engines.onnx_bf16 import BF16, Bf16Session
from tidegate.engines.onnx_providers import CPU, cuda_index, providers_of
from tidegate.engines.onnx_wire import problem_in

# ONNX Runtime's log severity. What fails is raised as well, and one line about it is enough; below errors it warns
# every device without a GPU about having none.
_FATAL_ONLY = 4
_BLOCK_BYTES = 8 * 2**20


class OnnxPort(NamedTuple):
    """An input or output as the runtime sees it: `kind` as "tensor(float)", a name or None where a length varies."""

    name: str
    kind: str
    shape: tuple[int | str | None, ...]


class OnnxEngine:
    """One session on one artefact.

    Args:
        threads: threads within one operator; 0 takes as many as there are cores.
        device: "cpu", "auto" (CUDA where this ONNX Runtime has it), or one of `onnx_providers.py`, such as "cuda:1".
        copied: a `checked_copy` of the artefact, where the caller has one.

    Raises:
        EngineError: the file may not be loaded, or ONNX Runtime does not have the device or refuses the artefact.
    """

    def __init__(
        self, artefact: Path, *, threads: int = 1, device: str = "cpu", copied: str | bytes | None = None
    ) -> None:
        self.artefact = artefact
        if not artefact.is_file():
            raise EngineError(f"{artefact}: there is no such artefact")
        providers = providers_of(device, threads, onnxruntime.get_available_providers())
        gpu = cuda_index(device) if providers[0] != CPU else None
        # Before the session, so that what the device loses while it is made is known to be the engine's.
        meter = self.device_meter = arena_meter(gpu) if gpu is not None else None
        if copied is not None:
            self._session = _session(artefact, copied, threads, providers)
        else:
            with checked_copy(artefact) as copied:
                self._session = _session(artefact, copied, threads, providers)
        if meter is not None:
            meter.loaded()
        self.input_ports = tuple(map(_port, self._session.get_inputs()))
        self.output_ports = tuple(map(_port, self._session.get_outputs()))
        self.inputs = tuple(port.name for port in self.input_ports)
        self.outputs = tuple(port.name for port in self.output_ports)
        self._bits = self._bf16_session()

    def infer(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """All outputs by name. Blocks. Raises EngineError; InputRefused for a text that is not UTF-8."""
        feed = {name: _fed(name, array) for name, array in inputs.items()}
        try:
            values = self._session.run(None, feed) if self._bits is None else self._bits.run(feed)
        except Exception as error:  # as above
            raise failure_of(error, f"{self.artefact.name}: ONNX Runtime cannot run it") from error
        return dict(zip(self.outputs, values, strict=True))

    def _bf16_session(self) -> Bf16Session | None:
        """What runs the session where a port of it is bfloat16; else None."""
        inputs, outputs = ({port.name: port.kind for port in ports} for ports in (self.input_ports, self.output_ports))
        if BF16 not in {*inputs.values(), *outputs.values()}:
            return None
        try:
            return Bf16Session(self._session, inputs, outputs)
        except EngineError as error:
            raise EngineError(f"{self.artefact}: {error}") from error

    def __repr__(self) -> str:
        provider = self._session.get_providers()[0].removesuffix("ExecutionProvider")
        return f"<OnnxEngine {self.artefact.name} on {provider}>"


@contextmanager
def checked_copy(artefact: Path) -> Iterator[str | bytes]:
    """Within, what the runtime may load: the path of a private copy in memory, or bytes where the system has no such.

    Raises:
        EngineError: the file cannot be read, or may not be loaded.
    """
    if not hasattr(os, "memfd_create"):
        whole = _read(artefact)
        _refuse(artefact, memoryview(whole))
        yield whole
        return
    with os.fdopen(os.memfd_create("tidegate-model"), "wb") as copy:
        try:
            with artefact.open("rb") as source:
                shutil.copyfileobj(source, copy, _BLOCK_BYTES)
            copy.flush()
        except OSError as error:
            raise EngineError(f"{artefact}: it cannot be read: {error.strerror or error}") from error
        if not copy.tell():
            raise EngineError(f"{artefact}: is not an ONNX model: it is empty")
        with mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            _refuse(artefact, view)
        yield f"/proc/self/fd/{copy.fileno()}"


def _read(artefact: Path) -> bytes:
    try:
        return artefact.read_bytes()
    except OSError as error:
        raise EngineError(f"{artefact}: it cannot be read: {error.strerror or error}") from error


def _refuse(artefact: Path, model: memoryview) -> None:
    if problem := problem_in(model):
        raise EngineError(f"{artefact}: {problem}")


def _session(artefact: Path, copied: str | bytes, threads: int, providers: list[Any]) -> Any:
    try:
        session = onnxruntime.InferenceSession(copied, _options(threads), providers=providers)
    except Exception as error:  # ONNX Runtime has a class for each status code, and none that they share
        failure = failure_of(error, f"{artefact}: ONNX Runtime cannot load it")
        shown = str(failure).replace(copied, artefact.name) if isinstance(copied, str) else str(failure)
        raise type(failure)(shown) from error
    wanted = providers[0] if isinstance(providers[0], str) else providers[0][0]
    if (used := session.get_providers()[0]) != wanted:  # it goes on without a device that did not start
        raise EngineError(f"{artefact}: {wanted} did not start here, and ONNX Runtime took {used}")
    return session


def _port(one: Any) -> OnnxPort:
    return OnnxPort(str(one.name), str(one.type), tuple(one.shape))


def _fed(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """An input as the runtime takes it."""
    if array.dtype.kind == "O":
        return _texts(name, array)
    return np.asarray(array, order="C")  # `ascontiguousarray` would make a row of a scalar


def _texts(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Elements of BYTES as str: of bytes the runtime takes what Python shows of them, which is b'text'."""
    texts = np.empty(array.size, object)
    for at, element in enumerate(array.reshape(-1)):
        try:
            texts[at] = element if isinstance(element, str) else bytes(element).decode()
        except UnicodeDecodeError as error:
            raise InputRefused(
                f"input {name!r}: element {at} is not UTF-8, as strings of an ONNX model are: {error.reason} at byte "
                f"{error.start}"
            ) from error
    return texts.reshape(array.shape)


def _options(threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1  # the worker runs one call after another
    options.log_severity_level = _FATAL_ONLY
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options

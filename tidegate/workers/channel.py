"""Frames between a process and its worker: a small msgpack header, then the arrays' bytes as they lie in memory.

    prefix   8 bytes   length of the header, length of the payload (two little-endian uint32)
    header   msgpack   one message (a tagged struct); it names each array's dtype and shape, in order
    payload  bytes     the arrays, row-major, each padded to ALIGNMENT so that engines get aligned memory

Where a payload lies in memory that both ends share (`shared_memory.py`), the header names the segment and none follows.

Elements are never encoded: an array is written from where it lies and read in place from the buffer that it came
in. Arrays of `bytes` or text (OIP's BYTES) are the exception; they travel as OIP's raw BYTES.

Both ends of the socket pair are our own code, but a worker runs foreign native code over foreign input, so lengths
are bounded before memory is taken, and a frame that does not parse is a FrameError: for the parent that is a dead
worker.

Pure: no sockets and no memory here. `process.py` (asyncio) and `child.py` (blocking) move the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.models.packing import Packing
from tidegate.outcome import InvalidRequest
from tidegate.pipeline.plan import StepPlan
from tidegate.types import Buffer, Datatype, Tensor
from tidegate.workers.generation.messages import (
    BeginSequence,
    CancelSequence,
    Count,
    CreditSequence,
    Seconds,
    SequenceToChild,
    StepTaken,
)

MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 30
ALIGNMENT = 64  # a cache line, and what AVX-512 loads like best

_PREFIX = struct.Struct("<II")
PREFIX_BYTES = _PREFIX.size
_MAX_TEXT = 4000  # characters of an error message that travel
# By how numpy spells them: of any other text numpy would read a type as Python reads an expression.
_DTYPES: Final = {
    dtype.str: dtype
    for code in np.typecodes["AllInteger"] + np.typecodes["Float"] + np.dtype(bool).char
    for dtype in (np.dtype(code), np.dtype(code).newbyteorder())
}

Arrays = Mapping[str, NDArray[Any]]


class FrameError(Exception):
    """A frame that is too large or does not parse."""


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """One array of the payload. `dtype` as numpy spells it, or "O" for an array of bytes."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    size_bytes: Count


class WorkerMessage(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of what travels. Each Load and Infer is answered once, under its `id`, in the order of sending.

    What travels for generations is in `generation/messages.py`.
    """


class LoadEngine(WorkerMessage, frozen=True, tag="load"):
    """Parent → child: load an engine and keep it under `key`, with the `steps` around it. "" is none: steps alone."""

    id: int
    key: str
    engine: str
    artefact: str
    outputs: tuple[str, ...]
    threads: int
    device: str
    paced_slow: float = 1.0
    packing: Packing | None = None
    compile: bool = False
    generation: GenerationLimits | None = None
    steps: StepPlan | None = None
    sha256: str = ""


class RunEngine(WorkerMessage, frozen=True, tag="infer"):
    """Parent → child: run the engine under `key` on the payload's arrays.

    `budget_s` is what is left of the request's, for steps that may take only so much; None: nobody said.

    `segment` holds them, where they do not follow; `freed` names segments of earlier outputs that nobody reads now.
    """

    id: int
    key: str
    arrays: tuple[ArraySpec, ...] = ()
    segment: int = -1
    freed: tuple[int, ...] = ()
    budget_s: float | None = None


class CancelRun(WorkerMessage, frozen=True, tag="cancel"):
    """Parent → child: do not begin `id` if it has not begun. It is still answered (Skipped)."""

    id: int


class WorkerHello(WorkerMessage, frozen=True, tag="hello"):
    """Child → parent, once: it runs and listens."""

    pid: int


class EngineLoaded(WorkerMessage, frozen=True, tag="loaded"):
    """Child → parent: what it holds now, all engines together; None where nobody knows. `device_bytes`: of its device,
    where that is not the machine's memory. `slots`: sequences that it takes at a time, if it generates."""

    id: int
    load_s: Seconds
    held_bytes: int | None = None
    device_bytes: int | None = None
    slots: int = 0


class RunCompleted(WorkerMessage, frozen=True, tag="computed"):
    """Child → parent: the payload, or `segment`, holds the outputs. `peak_bytes`: beyond what was held before, if it
    was measured. `gc_s`: what garbage collections took since the last such answer."""

    id: int
    compute_s: Seconds
    arrays: tuple[ArraySpec, ...] = ()
    peak_bytes: int | None = None
    segment: int = -1
    gc_s: Seconds = 0.0


class RunSkipped(WorkerMessage, frozen=True, tag="skipped"):
    id: int


class RunFailed(WorkerMessage, frozen=True, tag="failed"):
    """Child → parent: the engine refused or raised; the worker lives on. `refused`: the request's fault, or `late`."""

    id: int
    message: str
    out_of_memory: bool = False
    refused: bool = False
    late: bool = False


ToChild = LoadEngine | RunEngine | CancelRun | BeginSequence | CreditSequence | CancelSequence
Answer = WorkerHello | EngineLoaded | RunCompleted | RunSkipped | RunFailed
FromChild = Answer | StepTaken

_encoder = msgspec.msgpack.Encoder()
_to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
_from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)


def pack(message: ToChild | FromChild) -> bytes:
    """A whole frame of a message without arrays."""
    header = _encoder.encode(message)
    return _prefix(len(header), 0) + header


class ArrayPayload(NamedTuple):
    """Arrays as a payload: what a header says of them, and their bytes in parts that alias the arrays' memory."""

    specs: tuple[ArraySpec, ...]
    parts: list[Buffer]
    size_bytes: int


def lay_out(arrays: Arrays) -> ArrayPayload:
    """Raises FrameError: the payload is over MAX_PAYLOAD_BYTES, or an array is of a type that does not travel."""
    parts: list[Buffer] = []
    specs, size_bytes = [], 0
    for name, array in arrays.items():
        dtype, raw = _raw(name, array)
        specs.append(ArraySpec(name, dtype, array.shape, len(raw)))
        parts += (raw, bytes(-len(raw) % ALIGNMENT))
        size_bytes += _aligned(len(raw))
    _check_sizes(0, size_bytes)
    return ArrayPayload(tuple(specs), parts, size_bytes)


def pack_with(message: RunEngine | RunCompleted, laid: ArrayPayload) -> list[Buffer]:
    """The frame of `message` with the payload after it, in parts. Raises FrameError: the header is too large."""
    header = _encoder.encode(msgspec.structs.replace(message, arrays=laid.specs))
    return [_prefix(len(header), laid.size_bytes), header, *laid.parts]


def pack_beside(message: RunEngine | RunCompleted, laid: ArrayPayload, segment: int) -> list[Buffer]:
    """The frame of `message` whose payload lies in a segment. Raises FrameError: the header is too large."""
    header = _encoder.encode(msgspec.structs.replace(message, arrays=laid.specs, segment=segment))
    return [_prefix(len(header), 0), header]


def pack_sequence(message: SequenceToChild, prompt: bytes) -> bytes:
    """The frame of a message about a sequence, with the prompt of one that begins. Raises FrameError."""
    header = _encoder.encode(message)
    return _prefix(len(header), len(prompt)) + header + prompt


def parse_prefix(prefix: Buffer) -> tuple[int, int]:
    """The lengths of the header and the payload that follow. Raises FrameError when one is over its bound."""
    header_bytes, payload_bytes = _PREFIX.unpack(prefix)
    _check_sizes(header_bytes, payload_bytes)
    return header_bytes, payload_bytes


def parse_to_child(header: Buffer) -> ToChild:
    """Raises FrameError."""
    try:
        return _to_child.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError(f"a frame from the parent does not parse: {error}") from error


def parse_from_child(header: Buffer) -> FromChild:
    """Raises FrameError."""
    try:
        return _from_child.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError(f"a frame from the worker does not parse: {error}") from error


def unpack(specs: tuple[ArraySpec, ...], payload: Buffer) -> dict[str, NDArray[Any]]:
    """The arrays of a payload; they alias it. Raises FrameError when `specs` and `payload` do not match."""
    view = memoryview(payload)
    try:
        arrays = {spec.name: _array(spec, view[at : at + spec.size_bytes]) for at, spec in _layout(specs)}
    except (ValueError, TypeError, InvalidRequest) as error:
        raise FrameError(f"a frame's arrays do not match its payload: {error}") from error
    if (expected := payload_bytes(specs)) != len(view):
        raise FrameError(f"a frame names arrays of {expected} bytes, but {len(view)} came")
    return arrays


def payload_bytes(specs: Iterable[ArraySpec]) -> int:
    """How long the payload of these arrays is."""
    return sum(_aligned(spec.size_bytes) for spec in specs)


def shorten(text: str) -> str:
    """An error message cut to what fits in a header."""
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " …"


def _layout(specs: tuple[ArraySpec, ...]) -> Iterator[tuple[int, ArraySpec]]:
    at = 0
    for spec in specs:
        yield at, spec
        at += _aligned(spec.size_bytes)


def _raw(name: str, array: NDArray[Any]) -> tuple[str, Buffer]:
    if array.dtype.kind in "OSU":
        try:
            return "O", array_to_tensor(name, array, Datatype.BYTES).raw
        except TypeError as error:
            raise FrameError(f"array {name!r} holds something that is neither bytes nor text: {error}") from error
    if array.dtype.kind not in "biuf":
        raise FrameError(f"array {name!r} is of type {array.dtype}, which does not travel")
    flat = array.reshape(-1)  # a view where the array is contiguous, and else a copy that is
    return array.dtype.str, flat.view(np.uint8).data


def _array(spec: ArraySpec, raw: memoryview) -> NDArray[Any]:
    if spec.dtype == "O":
        return tensor_to_array(Tensor(spec.name, Datatype.BYTES, spec.shape, raw))
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        raise FrameError(f"array {spec.name!r} is of type {spec.dtype[:20]!r}, which does not travel")
    return np.frombuffer(raw, dtype=dtype).reshape(spec.shape)


def _prefix(header_bytes: int, payload_bytes: int) -> bytes:
    _check_sizes(header_bytes, payload_bytes)
    return _PREFIX.pack(header_bytes, payload_bytes)


def _check_sizes(header_bytes: int, payload_bytes: int) -> None:
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise FrameError(
            f"a frame with {header_bytes} bytes of header and {payload_bytes} of arrays is over the limits "
            f"of {MAX_HEADER_BYTES} and {MAX_PAYLOAD_BYTES}"
        )


def _aligned(size_bytes: int) -> int:
    return size_bytes + -size_bytes % ALIGNMENT

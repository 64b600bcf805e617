"""An ONNX model is read whole: weights that an exporter put into files beside it are taken in, from its folder only.

torch's default exporter writes MODEL.onnx and MODEL.onnx.data. A location comes from the file, so it is as trusted as
the file: it must be a plain relative path, no part of it may be a symbolic link, what it names must be a regular file
with exactly the bytes that the tensor's dimensions need, and the model as a whole must fit into one file, which
protobuf limits to 2 GiB. Each file is opened once, by folders that were opened before it, so that nothing changes in
between.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

import onnx
from onnx import TensorProto

from tidegate.engines.errors import EngineError
from tidegate.engines.onnx_wire import problem_in
from tidegate.tools.build.errors import BuildError

_MOST_BYTES: Final = 2**31 - 1  # of a protobuf message
_BITS: Final[Mapping[str, int]] = {
    "DOUBLE": 64, "INT64": 64, "UINT64": 64, "COMPLEX64": 64, "COMPLEX128": 128, "FLOAT": 32, "INT32": 32, "UINT32": 32,
    "FLOAT16": 16, "BFLOAT16": 16, "INT16": 16, "UINT16": 16, "INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2,
    "UINT2": 2,
}  # fmt: skip
_BITS_OF_OTHERS: Final = 8  # int8, uint8, bool, the kinds of float8
_WAY_OUT: Final = (
    "put a copy of that file into the model's folder, or store the model in one file with "
    "onnx.save(onnx.load(path), path, save_as_external_data=False)"
)


def load_onnx(path: Path) -> onnx.ModelProto:
    """The model with all of its weights in it.

    Raises:
        BuildError: it is no ONNX model, may not be loaded, or keeps weights in a file that may not be read.
    """
    content = _content(path)
    with memoryview(content) as view:
        if problem := problem_in(view, beside=True):
            raise BuildError(f"{path}: {problem}")
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's errors differ between its versions
        raise BuildError(f"{path}: is not an ONNX model: {error}") from error
    with _Beside(path, len(content)) as beside:
        for tensor in _tensors(model):
            if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
                beside.take_in(tensor)
    return model


@contextmanager
def in_one_file(path: Path) -> Iterator[Path]:
    """Within, a file with the whole model: `path` itself where it is whole, otherwise a temporary one of its name.

    Errors of the block name `path`.
    """
    content = _content(path)
    with memoryview(content) as view:
        whole = not problem_in(view)
    del content
    if whole:
        yield path
        return
    with TemporaryDirectory(prefix="tidegate-onnx-") as folder:
        written = Path(folder) / path.name
        written.write_bytes(load_onnx(path).SerializeToString())
        try:
            yield written
        except (BuildError, EngineError) as error:
            raise type(error)(str(error).replace(str(written), str(path))) from error


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise BuildError(f"{path}: is not an ONNX model: it has more than {_MOST_BYTES} bytes")
    return content


def _tensors(message: Any) -> Iterator[TensorProto]:
    """Every tensor of a message, wherever it is: by the message's own description, so that no place is forgotten."""
    if isinstance(message, TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for one in [value] if hasattr(value, "ListFields") else value:
            yield from _tensors(one)


class _Beside:
    """The files beside one model, each opened once and without following links."""

    def __init__(self, path: Path, taken: int) -> None:
        self._path, self._taken = path, taken
        self._opened: dict[str, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take_in(self, tensor: TensorProto) -> None:
        """Put the tensor's bytes into it. Raises BuildError."""
        told = {entry.key: entry.value for entry in tensor.external_data}
        location, needed = told.get("location", ""), _bytes_of(tensor)
        descriptor = self._descriptor(location)
        there = os.fstat(descriptor).st_size
        try:
            offset = int(told.get("offset") or 0)
            length = int(told["length"]) if told.get("length") else there - offset
        except ValueError:
            raise self._refused(location, f"a place that is no number, for {tensor.name!r}") from None
        if length != needed or offset < 0 or offset + length > there:
            raise self._refused(
                location, f"{there} bytes; {tensor.name!r} needs {needed} and names {length} from {offset} on"
            )
        self._taken += needed
        if self._taken > _MOST_BYTES:
            raise BuildError(
                f"{self._path}: with its weights it has more than {_MOST_BYTES} bytes, which is what one ONNX file may "
                "have; serve it from a pool as an exported program: tidegate model add NAME --pool MODEL.pt2"
            )
        tensor.raw_data = _read(descriptor, offset, length)
        if len(tensor.raw_data) != needed:
            raise self._refused(location, "fewer bytes than a moment ago")
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")

    def _descriptor(self, location: str) -> int:
        if location not in self._opened:
            parts = PurePosixPath(location).parts
            if not parts or location.startswith("/") or ".." in parts or "\0" in location or "\\" in location:
                raise self._refused(location, "not inside the model's folder")
            try:
                self._opened[location] = self._open(parts)
            except OSError as error:
                is_link = False
                with suppress(OSError):
                    links = (self._path.parent / Path(*parts[:at]) for at in range(1, len(parts) + 1))
                    is_link = any(one.is_symlink() for one in links)
                raise self._refused(location, "a symbolic link" if is_link else str(error.strerror)) from error
            if not stat.S_ISREG(os.fstat(self._opened[location]).st_mode):
                raise self._refused(location, "not a regular file")
        return self._opened[location]

    def _open(self, parts: tuple[str, ...]) -> int:
        at = self._keep(os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            at = self._keep(os.open(part, flags, dir_fd=at))
        # Without waiting: a pipe would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return self._keep(os.open(parts[-1], flags, dir_fd=at))

    def _keep(self, descriptor: int) -> int:
        self._stack.callback(os.close, descriptor)
        return descriptor

    def _refused(self, location: str, why: str) -> BuildError:
        return BuildError(
            f"{self._path}: keeps its weights in another file, {location[:200]!r}, which cannot be used: {why}; "
            f"{_WAY_OUT}"
        )


def _read(descriptor: int, offset: int, length: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(offset)
        return file.read(length)


def _bytes_of(tensor: TensorProto) -> int:
    """How many bytes the tensor's dimensions need; -1 for dimensions that are none."""
    if any(size < 0 for size in tensor.dims):
        return -1
    known = TensorProto.DataType.items()
    name = next((name for name, number in known if number == tensor.data_type), "")
    bits = _BITS.get(name, _BITS_OF_OTHERS)
    return (prod(tensor.dims) * bits + 7) // 8

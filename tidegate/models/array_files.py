"""Array files are checked against bounds of their own before a library reads them: safetensors, .npz and .npy.

Such a file states what it holds: names, shapes, places, lengths. A library believes that, and allocates first. Of 128
bytes NumPy makes a terabyte, of a megabyte of zeros `zipfile` a gigabyte, and a member that several entries share is
read once for each. So whatever a file states is held against what the file is:

    safetensors   header ≤ 8 MiB · tensors ≤ 65,536 · names once · shape × type = bytes · no gap, no overlap, no rest
    .npz          members ≤ 1,024 · names once · no overlap · not encrypted · unpacked ≤ 4 GiB where it is packed
    each .npy     header ≤ 64 KiB · plain numbers, no objects · ≤ 32 axes · shape × type = the bytes that are there

Two readers of one file must not see two things: hence names that occur twice are refused, and bytes that nothing names.
Real files have none of these. What is checked is the file at this moment; where another account may rewrite it, a copy
is checked and read (`tidegate/engines/archive.py`).

Sources: the safetensors format, "Format"; NumPy's `lib.format`; Fifield, "A better zip bomb", WOOT 2019.
"""

from __future__ import annotations

import ast
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_HEADER_BYTES: Final = 8 * 2**20
MOST_TENSORS: Final = 65_536
MOST_AXES: Final = 32
MOST_MEMBERS: Final = 1_024
MOST_UNPACKED_BYTES: Final = 4 * 2**30
_NPY_HEADER_BYTES: Final = 64 * 1024
_NPY_KEYS: Final = {"descr", "fortran_order", "shape"}
_PLAIN_KINDS: Final = "biufcSU"
_BLOCK_BYTES: Final = 8 * 2**20
_LOCAL_HEADER_BYTES: Final = 30  # of a zip's member, before its name
_ENCRYPTED: Final = 0x1
_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class UnsafeArrayFile(ValueError):
    """A file of arrays states what it is not; the message names the file, what it states and what is there."""


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor as a safetensors header has it; its offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file holds, by name, once all it states is true of it.

    Raises:
        UnsafeArrayFile: it is not; OSError: it cannot be read.
    """
    with path.open("rb") as file:
        there = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(8), "little")
        if there < 8 or not 2 <= header_bytes <= min(MOST_HEADER_BYTES, there - 8):
            raise UnsafeArrayFile(
                f"{path}: is no safetensors file: a header of {header_bytes} bytes in a file of {there}; at most "
                f"{MOST_HEADER_BYTES} are allowed"
            )
        header = file.read(header_bytes)
    tensors = _tensors_of(path, header)
    for name, tensor in tensors.items():
        _check_tensor(path, name, tensor)
    places = [(one.data_offsets[0], one.data_offsets[1], name) for name, one in tensors.items()]
    check_places(path, places, 0, there - 8 - header_bytes, whole=True)
    return tensors


def check_places(path: Path, places: Iterable[tuple[int, int, str]], begin: int, end: int, *, whole: bool) -> None:
    """Check that the (begin, end, name) of a file's parts lie within it and that no two overlap.

    Args:
        whole: whether every byte from `begin` to `end` must belong to a part.

    Raises:
        UnsafeArrayFile: they do not.
    """
    at, before = begin, "the beginning"
    for start, stop, name in sorted(places):
        if not at <= start <= stop <= end:
            raise UnsafeArrayFile(
                f"{path}: {name!r} lies from {start} to {stop}, but {before} ends at {at} and the file at {end}"
            )
        if whole and start != at:
            raise UnsafeArrayFile(f"{path}: nothing names the {start - at} bytes before {name!r}")
        at, before = stop, repr(name)
    if whole and at != end:
        raise UnsafeArrayFile(f"{path}: nothing names its last {end - at} bytes")


def load_npz(path: Path, *, most_bytes: int = MOST_UNPACKED_BYTES) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file, by name, read once all it states is true of it.

    Args:
        most_bytes: of all members together that are compressed; what is stored as it is takes no more than the file.

    Raises:
        UnsafeArrayFile: it is not, or it is no .npz; OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _check_members(path, members, os.fstat(file.fileno()).st_size, most_bytes)
            return {one.filename.removesuffix(".npy"): _member(path, archive, one) for one in members}
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RecursionError) as error:
        raise UnsafeArrayFile(f"{path}: is not an .npz of plain arrays (numpy.savez): {error}") from error


def read_npy(name: str, stream: IO[bytes], there: int) -> NDArray[Any]:
    """The array of an .npy stream of `there` bytes. Raises UnsafeArrayFile, naming `name`."""
    import numpy as np

    shape, fortran, dtype, begin = _npy_header(name, stream, there)
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != there - begin:
        raise UnsafeArrayFile(
            f"{name}: {list(shape)} of {dtype} are {count * dtype.itemsize} bytes, but {there - begin} are there"
        )
    array = np.empty(shape, dtype, order="F" if fortran else "C")
    room = (array.T if fortran else array).reshape(-1).view(np.uint8).data
    while room:
        piece = stream.read(min(len(room), _BLOCK_BYTES))
        if not piece:
            raise UnsafeArrayFile(f"{name}: ends {len(room)} bytes too early")
        room[: len(piece)] = piece
        room = room[len(piece) :]
    return array


def _tensors_of(path: Path, header: bytes) -> dict[str, StoredTensor]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        if len(entries) > MOST_TENSORS + 1:
            raise UnsafeArrayFile(f"{path}: {len(entries)} tensors; at most {MOST_TENSORS} are allowed")
        msgspec.json.decode(entries.pop("__metadata__", b"{}"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(raw, type=StoredTensor) for name, raw in entries.items()}
        json.loads(header, object_pairs_hook=_unrepeated)  # last, since only now it is known to be small objects
    except UnsafeArrayFile:
        raise
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise UnsafeArrayFile(f"{path}: its header is none of a safetensors file: {error}") from error
    return tensors


def _unrepeated(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def _check_tensor(path: Path, name: str, tensor: StoredTensor) -> None:
    bits = _BITS.get(tensor.dtype)
    if bits is None:
        raise UnsafeArrayFile(f"{path}: {name!r} is of the type {tensor.dtype!r}; known are {', '.join(_BITS)}")
    if len(tensor.shape) > MOST_AXES or any(length < 0 for length in tensor.shape):
        raise UnsafeArrayFile(f"{path}: {name!r} has the shape {list(tensor.shape)[: MOST_AXES + 1]}")
    needed, (begin, end) = bits // 8, tensor.data_offsets
    for length in tensor.shape:
        needed *= length
    if end - begin != needed:
        raise UnsafeArrayFile(
            f"{path}: {name!r}, {tensor.dtype} {list(tensor.shape)}, needs {needed} bytes, but lies from {begin} "
            f"to {end}"
        )


def _check_members(path: Path, members: Sequence[zipfile.ZipInfo], there: int, most_bytes: int) -> None:
    if len(members) > MOST_MEMBERS:
        raise UnsafeArrayFile(f"{path}: {len(members)} members; at most {MOST_MEMBERS} are allowed")
    if len({one.filename for one in members}) != len(members):
        raise UnsafeArrayFile(f"{path}: two of its members have one name")
    for one in members:
        if one.flag_bits & _ENCRYPTED or not one.filename.endswith(".npy"):
            raise UnsafeArrayFile(f"{path}: {one.filename!r} is no plain .npy member (numpy.savez)")
        if one.compress_type == zipfile.ZIP_STORED and one.file_size != one.compress_size:
            raise UnsafeArrayFile(f"{path}: {one.filename!r} is stored as it is, but states two sizes")
    packed = sum(one.file_size for one in members if one.compress_type != zipfile.ZIP_STORED)
    if packed > most_bytes:
        raise UnsafeArrayFile(
            f"{path}: unpacks to {packed} bytes; at most {most_bytes} are read from a packed file "
            "(numpy.savez stores arrays unpacked, for which this bound is none)"
        )
    places = [
        (one.header_offset, one.header_offset + _LOCAL_HEADER_BYTES + one.compress_size, one.filename)
        for one in members
    ]
    check_places(path, places, 0, there, whole=False)


def _member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as stream:
        try:
            return read_npy(f"{path}: {member.filename}", stream, member.file_size)
        except zlib.error as error:
            raise UnsafeArrayFile(f"{path}: {member.filename!r} is damaged: {error}") from error


def _npy_header(name: str, stream: IO[bytes], there: int) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether it is in Fortran's order, type, and where the data begins."""
    import numpy as np

    head = stream.read(10)
    if len(head) < 10 or head[:6] != b"\x93NUMPY" or head[6] not in (1, 2, 3):
        raise UnsafeArrayFile(f"{name}: is no array of NumPy")
    length = int.from_bytes(head[8:10], "little") if head[6] == 1 else _long_length(head, stream)
    begin = length + (10 if head[6] == 1 else 12)
    if length > _NPY_HEADER_BYTES or begin > there:
        raise UnsafeArrayFile(f"{name}: a header of {length} bytes in {there}; at most {_NPY_HEADER_BYTES} are allowed")
    try:
        found = ast.literal_eval(stream.read(length).decode("utf-8" if head[6] == 3 else "latin-1").strip())
        shape, fortran, described = found["shape"], found["fortran_order"], found["descr"]
        plain = isinstance(described, str) and isinstance(fortran, bool) and set(found) == _NPY_KEYS
        whole = type(shape) is tuple and all(type(one) is int and one >= 0 for one in shape)
        dtype = np.dtype(described) if plain and whole else None
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise UnsafeArrayFile(f"{name}: its header is none of an array: {error}") from error
    if dtype is None or dtype.hasobject or not dtype.itemsize or dtype.kind not in _PLAIN_KINDS:
        raise UnsafeArrayFile(f"{name}: {described!r} {shape!r:.80} is no plain array of numbers or text")
    if len(shape) > MOST_AXES:
        raise UnsafeArrayFile(f"{name}: {len(shape)} axes; at most {MOST_AXES} are allowed")
    return shape, fortran, dtype, begin


def _long_length(head: bytes, stream: IO[bytes]) -> int:
    return int.from_bytes(head[8:10] + stream.read(2), "little")

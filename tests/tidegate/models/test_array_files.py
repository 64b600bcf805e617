"""Files of arrays that state what they are not are refused before a library or memory believes them."""

from __future__ import annotations

import io
import json
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidegate.engines.errors import EngineError
from tidegate.models.array_files import (
    MOST_HEADER_BYTES,
    MOST_MEMBERS,
    MOST_TENSORS,
    UnsafeArrayFile,
    check_safetensors,
    load_npz,
)
from tidegate.models.manifest import Cost, Manifest, TensorSpec
from tidegate.models.repository import RepositoryError
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.samples import load_samples
from tidegate.tools.delivery.plan import golden_of
from tidegate.types import Datatype

GiB = 2**30


def safetensors(header: Mapping[str, Any] | bytes, data: bytes = b"", *, stated: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if stated is None else stated) + raw + data


def tensor(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": tensor("F32", [2, 3], 0, 24), "b": tensor("BF16", [4], 24, 32), "__metadata__": {"k": "v"}}
BYTE = json.dumps(tensor("U8", [1], 0, 1)).encode()


def test_a_file_that_is_what_it_states_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(safetensors(GOOD, bytes(32)))
    assert {name: (one.dtype, one.shape) for name, one in check_safetensors(path).items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
    }


def test_a_file_that_the_library_writes_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "written.safetensors"
    arrays = {f"t{index}": np.zeros((index, 3), np.float32) for index in range(5)} | {"scalar": np.array(1.0)}
    library.save_file(arrays, path, metadata={"k": "v"})
    assert set(check_safetensors(path)) == set(arrays)


HOSTILE: list[tuple[str, bytes, str]] = [
    ("empty", b"", "header of 0 bytes in a file of 0"),
    ("cut in its length", b"\x10\x00", "in a file of 2"),
    ("a header beyond the file", safetensors(GOOD, bytes(32), stated=10**6), "header of 1000000 bytes"),
    ("a header of 2^64 bytes", safetensors(GOOD, bytes(32), stated=2**64 - 1), "header of"),
    ("a header beyond the bound", safetensors(b" " * (MOST_HEADER_BYTES + 1)), f"at most {MOST_HEADER_BYTES}"),
    ("no JSON", safetensors(b"\x80\x04."), "none of a safetensors file"),
    ("deep", safetensors(b'{"a":' + b"[" * 200_000), "none of a safetensors file"),
    ("a list", safetensors(b"[1]"), "none of a safetensors file"),
    ("a name twice", safetensors(b'{"a":%b,"a":%b}' % (BYTE, BYTE), b"1"), "occurs twice"),
    (
        "a key twice",
        safetensors(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"1"),
        "occurs twice",
    ),
    (
        "too many",
        safetensors({str(n): tensor("U8", [0], 0, 0) for n in range(MOST_TENSORS + 2)}),
        f"at most {MOST_TENSORS}",
    ),
    ("an unknown type", safetensors({"a": tensor("O", [1], 0, 1)}, b"1"), "'O'"),
    (
        "a shape beyond the file",
        safetensors({"a": tensor("F32", [2**40], 0, 24)}, bytes(24)),
        "needs 4398046511104 bytes",
    ),
    ("a product that wraps", safetensors({"a": tensor("U8", [2**32, 2**32], 0, 0)}), "needs"),
    ("a negative length", safetensors({"a": tensor("U8", [-1, -4], 0, 4)}, bytes(4)), "[-1, -4]"),
    (
        "a length that is no number",
        safetensors(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"1"),
        "none of",
    ),
    ("a length that is infinite", safetensors({"a": tensor("U8", [1e400], 0, 1)}, b"1"), "none of"),
    ("too many axes", safetensors({"a": tensor("U8", [1] * 33, 0, 1)}, b"1"), "shape"),
    (
        "offsets that overlap",
        safetensors({"a": tensor("U8", [8], 0, 8), "b": tensor("U8", [8], 4, 12)}, bytes(12)),
        "lies from 4 to 12",
    ),
    (
        "one place for two",
        safetensors({"a": tensor("U8", [8], 0, 8), "b": tensor("U8", [8], 0, 8)}, bytes(8)),
        "lies from 0 to 8",
    ),
    (
        "a gap",
        safetensors({"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 4, 6)}, bytes(6)),
        "nothing names the 2 bytes",
    ),
    ("bytes at the end", safetensors({"a": tensor("U8", [2], 0, 2)}, bytes(9)), "its last 7 bytes"),
    ("offsets beyond the end", safetensors({"a": tensor("U8", [9], 0, 9)}, bytes(4)), "lies from 0 to 9"),
    ("backwards", safetensors({"a": tensor("U8", [0], 4, 4), "b": tensor("U8", [4], 4, 0)}, bytes(4)), "'b'"),
    ("metadata that is no text", safetensors({"__metadata__": {"k": 1}}), "none of a safetensors file"),
    (
        "a field too many",
        safetensors({"a": tensor("U8", [1], 0, 1) | {"code": "x"}}, b"1"),
        "none of a safetensors file",
    ),
]


@pytest.mark.parametrize(("what", "content", "words"), HOSTILE, ids=[one[0] for one in HOSTILE])
def test_a_safetensors_file_that_lies_is_refused(tmp_path: Path, what: str, content: bytes, words: str) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnsafeArrayFile) as refused:
        check_safetensors(path)
    assert words in str(refused.value) and str(path) in str(refused.value)


# -- .npz --------------------------------------------------------------------------------------------------------------


def npy(described: str, shape: str, data: bytes = b"", *, length: int | None = None) -> bytes:
    header = f"{{'descr': {described}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) if length is None else length) + header + data


def npz(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_writes_is_read_as_numpy_reads_it(tmp_path: Path, save: Callable[..., None]) -> None:
    path = tmp_path / "good.npz"
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "x": np.arange(24, dtype=">f4").reshape(2, 3, 4),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "words": np.array(["one", "three"]),
        "none": np.zeros((0, 7), np.int8),
        "one": np.array(2.5),
        "yes": np.array([True, False]),
    }
    save(path, **arrays)
    found = load_npz(path)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name
        assert found[name].flags.writeable


def bomb() -> bytes:
    """Two members that state three gigabytes each; what they really hold is a kilobyte."""
    content = npy("'|u1'", f"({3 * GiB},)", bytes(1000))
    raw = bytearray(npz(("a.npy", content), ("b.npy", content), compression=zipfile.ZIP_DEFLATED))
    at = 0
    for _ in range(2):
        at = raw.index(b"PK\x01\x02", at + 1)
        raw[at + 24 : at + 28] = struct.pack("<I", 3 * GiB)
    return bytes(raw)


def shared_member() -> bytes:
    """Two entries of the directory that are one member."""
    raw = npz(("a.npy", npy("'|u1'", "(4,)", b"1234")), ("b.npy", npy("'|u1'", "(4,)", b"1234")))
    second = raw.index(b"PK\x01\x02", raw.index(b"PK\x01\x02") + 1)
    return raw[: second + 42] + struct.pack("<I", 0) + raw[second + 46 :]


def twice() -> bytes:
    return npz(("a.npy", npy("'|u1'", "(1,)", b"1")), ("b.npy", npy("'|u1'", "(1,)", b"2"))).replace(b"b.npy", b"a.npy")


def encrypted() -> bytes:
    raw = bytearray(npz(("a.npy", npy("'|u1'", "(1,)", b"1"))))
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    return bytes(raw)


HOSTILE_NPZ: list[tuple[str, bytes, str]] = [
    ("no zip", npy("'|u1'", "(1099511627776,)"), "is not an .npz"),
    ("empty", b"", "is not an .npz"),
    (
        "a shape beyond the bytes",
        npz(("a.npy", npy("'<f8'", "(1099511627776,)"))),
        "8796093022208 bytes, but 0 are there",
    ),
    ("a shape of fewer bytes", npz(("a.npy", npy("'|u1'", "(1,)", bytes(9)))), "but 9 are there"),
    ("a packed bomb", bomb(), "at most 4294967296 are read"),
    ("one member for two", shared_member(), "but 'a.npy' ends at"),
    ("a name twice", twice(), "two of its members have one name"),
    ("encrypted", encrypted(), "no plain .npy member"),
    ("another member", npz(("run.py", b"print()")), "'run.py' is no plain .npy member"),
    ("objects", npz(("a.npy", npy("'|O'", "(1,)", bytes(8)))), "no plain array"),
    ("fields", npz(("a.npy", npy("[('x', '<f4')]", "(1,)", bytes(4)))), "no plain array"),
    ("dates", npz(("a.npy", npy("'<M8[s]'", "(1,)", bytes(8)))), "no plain array"),
    ("text without width", npz(("a.npy", npy("'<U0'", "(1000000000000,)"))), "no plain array"),
    ("a negative length", npz(("a.npy", npy("'|u1'", "(-1,)"))), "no plain array"),
    ("an infinite length", npz(("a.npy", npy("'|u1'", "(1e400,)"))), "no plain array"),
    ("a product that wraps", npz(("a.npy", npy("'|u1'", "(4294967296, 4294967296)"))), "but 0 are there"),
    ("too many axes", npz(("a.npy", npy("'|u1'", str((1,) * 33), b"1"))), "33 axes"),
    ("an expression", npz(("a.npy", npy("__import__('os')", "(1,)"))), "none of an array"),
    ("deep", npz(("a.npy", npy("(" * 5000, "(1,)"))), "none of an array"),
    (
        "a long header",
        npz(("a.npy", npy("'|u1'", "(1,)" + " " * 65_000, b"1", length=65_535))),
        "a header of 65535 bytes",
    ),
    ("cut", npz(("a.npy", npy("'|u1'", "(1,)", b"1")))[:60], "is not an .npz"),
    ("no array", npz(("a.npy", b"text")), "no array of NumPy"),
    ("too many", npz(*((f"{n}.npy", b"") for n in range(MOST_MEMBERS + 1))), f"at most {MOST_MEMBERS}"),
]


@pytest.mark.parametrize(("what", "content", "words"), HOSTILE_NPZ, ids=[one[0] for one in HOSTILE_NPZ])
def test_an_npz_that_lies_is_refused_without_the_memory_that_it_states(
    tmp_path: Path, what: str, content: bytes, words: str
) -> None:
    path = tmp_path / "hostile.npz"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UnsafeArrayFile) as refused:
            load_npz(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words in str(refused.value) and str(path) in str(refused.value)
    assert peak_bytes < 32 * 2**20


def test_what_a_packed_file_may_unpack_to_is_the_readers_choice(tmp_path: Path) -> None:
    packed, plain = tmp_path / "packed.npz", tmp_path / "plain.npz"
    np.savez_compressed(packed, x=np.zeros(100_000))
    np.savez(plain, x=np.zeros(100_000))
    with pytest.raises(UnsafeArrayFile, match="unpacks to 800128 bytes; at most 100000"):
        load_npz(packed, most_bytes=100_000)
    assert load_npz(plain, most_bytes=100_000)["x"].shape == (100_000,), "it is as large as its file"


# -- readers -----------------------------------------------------------------------------------------------------------


def test_every_reader_refuses_such_a_file_in_its_own_words(tmp_path: Path) -> None:
    manifest = Manifest("m", "1", (TensorSpec("x", Datatype.UINT8, ("n",)),), (), (), Cost("items", "x"))
    arrays, weights = tmp_path / "bomb.npz", tmp_path / "model.safetensors"
    arrays.write_bytes(bomb())
    weights.write_bytes(safetensors({"a": tensor("U8", [8], 0, 8), "b": tensor("U8", [8], 0, 8)}, bytes(8)))
    with pytest.raises(BuildError, match="at most 4294967296 are read"):
        load_samples(arrays, ["x"])
    with pytest.raises(RepositoryError, match="at most 67108864 are read"):
        golden_of(arrays, manifest)

    packed = pytest.importorskip("tidegate.engines.encoder.torch_packed")
    inspect = pytest.importorskip("tidegate.tools.build.inspect.packed_weights")
    convert = pytest.importorskip("tidegate.tools.build.convert.pack")
    with pytest.raises(EngineError, match="lies from 0 to 8"):
        packed.describe(weights)
    with pytest.raises(BuildError, match="lies from 0 to 8"):
        inspect.inspect_packed(weights)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 1, "num_hidden_layers": 1}')
    with pytest.raises(BuildError, match="lies from 0 to 8"):
        convert.pack_bert(tmp_path, tmp_path / "out.safetensors", "fp32")


# -- fuzz --------------------------------------------------------------------------------------------------------------


def mutated(raw: bytes, chance: random.Random) -> bytes:
    content = bytearray(raw)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(content))
        match chance.randrange(4):
            case 0:
                content[at] = chance.randrange(256)
            case 1:
                content[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", bytes(4), b"\x00\x00\x00\x80"))
            case 2:
                del content[at : at + chance.randrange(1, 20)]
            case _:
                content[at:at] = content[at : at + chance.randrange(1, 20)]
        if not content:
            break
    return bytes(content)


def test_whatever_is_done_to_a_file_it_is_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    chance, path = random.Random(7), tmp_path / "fuzzed"
    arrays = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "labels": np.arange(3)}
    plain, packed = io.BytesIO(), io.BytesIO()
    np.savez(plain, **arrays)  # type: ignore[arg-type]
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    refused = 0
    readers: tuple[tuple[bytes, Callable[[Path], Any]], ...] = (
        (safetensors(GOOD, bytes(32)), check_safetensors), (plain.getvalue(), load_npz), (packed.getvalue(), load_npz),
    )  # fmt: skip
    for raw, read in readers:
        for _ in range(50):
            path.write_bytes(mutated(raw, chance))
            try:
                read(path)
            except UnsafeArrayFile:
                refused += 1
    assert refused > 80

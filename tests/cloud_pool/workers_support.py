"""The text model of `models.py` as a real ONNX file; `FakeWorker` computes the same without a process.

ids from 0 to LAST_ID are summed under the mask; larger ids are out of the model's table, so its engine raises.
The spin model runs a loop as often as its input says: a computation of any length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tests.cloud_pool.models import TEXT, manifest_of
from tests.support.models.trusted import trust_file
from tests.support.pool.fake_worker import LAST_ID
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import ArtefactFile, Variant
from tidegate.models.repository import load_manifest, save_manifest

OPSET = 17

Arrays = dict[str, NDArray[Any]]


def text(length: int, *, rows: int = 1, fill: int = 1) -> Arrays:
    return {"ids": np.full((rows, length), fill, np.int64), "mask": np.ones((rows, length), np.int64)}


def spin(turns: int) -> Arrays:
    return {"turns": np.array(turns, np.int64)}


def write_text_model(path: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper

    integers, floats = TensorProto.INT64, TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["values"]),
            helper.make_node("Mul", ["values", "mask"], ["masked"]),
            helper.make_node("Cast", ["masked"], ["numbers"], to=floats),
            helper.make_node("ReduceSum", ["numbers", "axis"], ["sum"], keepdims=1),
            helper.make_node("Add", ["masked", "masked"], ["twice"]),
        ],
        "text",
        [helper.make_tensor_value_info(name, integers, ["batch", "sequence"]) for name in ("ids", "mask")],
        [
            helper.make_tensor_value_info("sum", floats, ["batch", 1]),
            helper.make_tensor_value_info("twice", integers, ["batch", "sequence"]),
        ],
        [
            helper.make_tensor("table", integers, [LAST_ID + 1], list(range(LAST_ID + 1))),
            helper.make_tensor("axis", integers, [1], [1]),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
    return path


def write_spin_model(path: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper

    integers, boolean = TensorProto.INT64, TensorProto.BOOL
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes_on"]),
            helper.make_node("Add", ["count", "one"], ["counted"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", integers, []),
            helper.make_tensor_value_info("going", boolean, []),
            helper.make_tensor_value_info("count", integers, []),
        ],
        [helper.make_tensor_value_info("goes_on", boolean, []), helper.make_tensor_value_info("counted", integers, [])],
        [helper.make_tensor("one", integers, [], [1])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["turns", "", "zero"], ["count"], body=body)],
        "spin",
        [helper.make_tensor_value_info("turns", integers, [])],
        [helper.make_tensor_value_info("count", integers, [])],
        [helper.make_tensor("zero", integers, [], [0])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
    return path


def text_repository(root: Path, *, queue: int | None = None) -> Path:
    """A repository with the text model, for a pool that need not wait for torch; its `queue` holds so many requests."""
    folder = root / TEXT.name / TEXT.version
    folder.mkdir(parents=True)
    path = write_text_model(folder / TEXT.variants[0].artefact)
    variant = msgspec.structs.replace(TEXT.variants[0], sha256=sha256_of(path), size_bytes=path.stat().st_size)
    batching = TEXT.batching if queue is None else msgspec.structs.replace(TEXT.batching, max_queue_size=queue)
    save_manifest(folder, manifest_of(variants=(variant,), batching=batching))
    return root


def write_hungry_model(path: Path, *, floats_per_row: int) -> Path:
    """A model that takes 4 bytes × `floats_per_row` for each row while it runs: y = the sum of so many copies of x."""
    import onnx
    from onnx import TensorProto, helper

    integers, floats = TensorProto.INT64, TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node("Shape", ["x"], ["shape"], start=0, end=1),
            helper.make_node("Concat", ["shape", "width"], ["wide"], axis=0),
            helper.make_node("Expand", ["x", "wide"], ["copies"]),
            helper.make_node("ReduceSum", ["copies", "axis"], ["y"], keepdims=1),
        ],
        "hungry",
        [helper.make_tensor_value_info("x", floats, ["batch", 1])],
        [helper.make_tensor_value_info("y", floats, ["batch", 1])],
        [
            helper.make_tensor("width", integers, [1], [floats_per_row]),
            helper.make_tensor("axis", integers, [1], [1]),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
    return path


def write_hungry_program(path: Path, *, floats_per_row: int) -> Path:
    """The same for torch, which keeps nothing of what a call had: the next one must find it anew.

    Args:
        path: in a repository, ROOT/NAME/VERSION/FILE, whose trust list it is put on.
    """
    import torch

    class Hungry(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.expand(-1, floats_per_row).contiguous().sum(1, keepdim=True)

    rows = {"x": {0: torch.export.Dim("batch", min=1, max=1024)}}
    torch.export.save(torch.export.export(Hungry(), (torch.ones(2, 1),), dynamic_shapes=rows), path)
    trust_file(path)
    return path


def rows_of_ones(rows: int) -> Arrays:
    return {"x": np.ones((rows, 1), np.float32)}


def leave_room(pid: int, room_bytes: int) -> None:
    """From now on the process may map so many bytes more and no more: allocations beyond fail in it, for real."""
    import resource

    import psutil

    limit = psutil.Process(pid).memory_info().vms + room_bytes
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def put(root: Path, name: str, version: str = "1") -> Path:
    """The text model under a name of its own."""
    folder = root / name / version
    folder.mkdir(parents=True)
    path = write_text_model(folder / TEXT.variants[0].artefact)
    variant = msgspec.structs.replace(TEXT.variants[0], sha256=sha256_of(path), size_bytes=path.stat().st_size)
    save_manifest(folder, msgspec.structs.replace(manifest_of(variants=(variant,)), name=name, version=version))
    return folder


def make_unloadable(folder: Path) -> None:
    """Give a model files that no engine loads, under their right digests."""
    manifest, wrong = load_manifest(folder), list[Variant]()
    for one in manifest.variants:
        artefact = folder / one.artefact
        artefact.write_bytes(b"this is no model")
        size_bytes = artefact.stat().st_size
        wrong.append(msgspec.structs.replace(one, sha256=sha256_of(artefact), size_bytes=size_bytes))
    save_manifest(folder, msgspec.structs.replace(manifest, variants=tuple(wrong)))


def make_larger(folder: Path, size_bytes: int) -> None:
    """Give a model a file beside its artefact that is as large as that, and takes no room on the disk."""
    manifest, path = load_manifest(folder), folder / "weights.bin"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    beside = ArtefactFile(path.name, sha256_of(path), size_bytes)
    variants = tuple(msgspec.structs.replace(one, files=(beside,)) for one in manifest.variants)
    save_manifest(folder, msgspec.structs.replace(manifest, variants=variants))

"""Weights beside a model are taken in from its folder alone, with exactly the bytes that they need."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.models.tiny_models import double_graph
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.inspect.onnx_file import inspect_onnx
from tidegate.tools.build.inspect.onnx_weights import in_one_file, load_onnx


def apart(location: str, *, dims: tuple[int, ...] = (2,), kind: int = TensorProto.FLOAT, **place: int) -> TensorProto:
    weight = TensorProto(name="w", data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    for key, value in place.items():
        weight.external_data.add(key=key, value=str(value))
    return weight


def write(folder: Path, weight: TensorProto) -> Path:
    model = double_graph()
    model.graph.initializer.append(weight)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.bin").write_bytes(b"12345678")
    folder = tmp_path / "model"
    (folder / "deep").mkdir(parents=True)
    (folder / "w.bin").write_bytes(np.array([7, 8, 9], dtype=np.float32).tobytes())
    (folder / "deep" / "w.bin").write_bytes(np.array([1, 2], dtype=np.float32).tobytes())
    (folder / "link.bin").symlink_to(folder / "w.bin")
    (folder / "up").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.bin")
    return folder


def test_weights_in_the_models_folder_are_taken_in(folder: Path) -> None:
    taken = load_onnx(write(folder, apart("w.bin", offset=4, length=8))).graph.initializer[0]
    assert numpy_helper.to_array(taken).tolist() == [8.0, 9.0]
    assert numpy_helper.to_array(load_onnx(write(folder, apart("deep/w.bin"))).graph.initializer[0]).tolist() == [1, 2]


def test_weights_in_a_branch_and_in_an_attribute_are_taken_in(folder: Path) -> None:
    inner = helper.make_node("Constant", [], ["c"], value=apart("deep/w.bin"))
    body = helper.make_graph([inner], "body", [], [helper.make_tensor_value_info("c", TensorProto.FLOAT, [2])])
    model = double_graph()
    model.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=body, else_branch=body))
    onnx.save(model, folder / "m.onnx")
    branch = load_onnx(folder / "m.onnx").graph.node[1].attribute[0].g
    assert numpy_helper.to_array(branch.node[0].attribute[0].t).tolist() == [1.0, 2.0]
    with in_one_file(folder / "m.onnx") as written:
        assert written.name == "m.onnx"
        assert b"location" not in written.read_bytes()
    assert not written.exists()


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (apart("{outside}"), "not inside the model's folder"),
        (apart("../secret.bin"), "not inside the model's folder"),
        (apart("deep/../../secret.bin"), "not inside the model's folder"),
        (apart(""), "not inside the model's folder"),
        (apart("link.bin"), "a symbolic link"),
        (apart("up/secret.bin"), "a symbolic link"),
        (apart("pipe.bin"), "not a regular file"),
        (apart("deep"), "not a regular file"),
        (apart("gone.bin"), "No such file"),
        (apart("w.bin"), "12 bytes; 'w' needs 8 and names 12 from 0 on"),
        (apart("w.bin", offset=8, length=8), "12 bytes; 'w' needs 8 and names 8 from 8 on"),
        (apart("w.bin", offset=-4, length=8), "12 bytes; 'w' needs 8 and names 8 from -4 on"),
        (apart("w.bin", dims=(1 << 40,)), "12 bytes; 'w' needs 4398046511104"),
        (apart("w.bin", dims=(-2,)), "12 bytes; 'w' needs -1"),
    ],
)
def test_a_file_that_may_not_be_read_is_named_with_the_way_out(folder: Path, weight: TensorProto, why: str) -> None:
    for entry in weight.external_data:
        entry.value = entry.value.format(outside=folder.parent / "secret.bin")
    with pytest.raises(BuildError) as caught:
        load_onnx(write(folder, weight))
    assert "m.onnx: keeps its weights in another file" in str(caught.value)
    assert why in str(caught.value)
    assert "save_as_external_data=False" in str(caught.value)


@pytest.mark.parametrize(("kind", "size"), [("INT4", 1), ("FLOAT16", 4), ("INT64", 16), ("BOOL", 2)])
def test_the_bytes_that_are_needed_follow_from_the_type(folder: Path, kind: str, size: int) -> None:
    (folder / "t.bin").write_bytes(bytes(size))
    path = write(folder, apart("t.bin", kind=TensorProto.DataType.Value(kind)))
    assert len(load_onnx(path).graph.initializer[0].raw_data) == size


def test_foreign_operators_and_endless_inputs_are_refused_when_a_model_is_inspected(folder: Path) -> None:
    model = double_graph()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1 << 40
    onnx.save(model, folder / "m.onnx")
    with pytest.raises(BuildError, match="'x' has more than 2147483647 elements"):
        inspect_onnx(folder / "m.onnx")
    model.graph.node.append(helper.make_node("Steal", ["x"], ["z"], domain="evil.ops"))
    onnx.save(model, folder / "m.onnx")
    with pytest.raises(BuildError, match=r"not ONNX Runtime's own \(domains evil\.ops\)"):
        inspect_onnx(folder / "m.onnx")

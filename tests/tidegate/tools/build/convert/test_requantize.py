"""Models as people's exporters write them are quantized and compared, or refused in one sentence with the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from tidegate.models.repository import Repository
from tidegate.tools.build.cli import model

pytestmark = pytest.mark.slow

OPSETS = [helper.make_opsetid("", 17)]
ML_OPSETS = [*OPSETS, helper.make_opsetid("ai.onnx.ml", 3)]
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def run(*words: Any) -> tuple[int, str]:
    result = CliRunner().invoke(model, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.output


def weights(name: str, *shape: int) -> TensorProto:
    values = np.random.default_rng(len(name)).standard_normal(shape) / np.sqrt(shape[-1])
    return numpy_helper.from_array(values.astype(np.float32), name)


def whole(nodes: list[Any], held: list[TensorProto], x: Any, y: Any, **more: Any) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", [x], y if isinstance(y, list) else [y], held, **more)
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=9)


def tensor(name: str, *shape: int | str, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def mlp() -> onnx.ModelProto:
    """As torch's default exporter writes it: each weight is listed among the shapes within the graph as well."""
    held = [weights("w1", 64, 16), weights("b1", 64), weights("w2", 4, 64), weights("b22", 4)]
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2", "b22"], ["y"], transB=1),
    ]
    noted = [tensor(one.name, *one.dims) for one in held] + [tensor("h", "rows", 64), tensor("r", "rows", 64)]
    return whole(nodes, held, tensor("x", "rows", 16), tensor("y", "rows", 4), value_info=noted)


def convolutions() -> onnx.ModelProto:
    """Depthwise and pointwise, as in the networks that are made for phones."""
    held = [weights("c1", 8, 3, 3, 3), weights("c22", 8, 1, 3, 3), weights("c333", 16, 8, 1, 1), weights("w", 10, 16)]
    nodes = [
        helper.make_node("Conv", ["x", "c1"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["a", "c22"], ["b"], group=8, pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["b", "c333"], ["c"]),
        helper.make_node("HardSwish", ["c"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["e"]),
        helper.make_node("Flatten", ["e"], ["f"]),
        helper.make_node("Gemm", ["f", "w"], ["y"], transB=1),
    ]
    noted = [tensor(one.name, *one.dims) for one in held]
    return whole(nodes, held, tensor("x", "rows", 3, 16, 16), tensor("y", "rows", 10), value_info=noted)


def recurrent() -> onnx.ModelProto:
    held = [weights("w", 1, 32, 6), weights("r1", 1, 32, 8), weights("b22", 1, 64)]
    node = helper.make_node("LSTM", ["x", "w", "r1", "b22"], ["y"], hidden_size=8)
    return whole([node], held, tensor("x", 5, "rows", 6), tensor("y", 5, 1, "rows", 8))


def encoder_of_tokens() -> onnx.ModelProto:
    """An answer of [rows, length, 8]: as long as the request."""
    held = [weights("table", 50, 16), weights("w1", 16, 8)]
    nodes = [helper.make_node("Gather", ["table", "ids"], ["e"]), helper.make_node("MatMul", ["e", "w1"], ["y"])]
    return whole(nodes, held, tensor("ids", "rows", "length", kind=INT64), tensor("y", "rows", "length", 8))


def forest() -> onnx.ModelProto:
    """As skl2onnx writes a forest, without its ZipMap."""
    node = helper.make_node(
        "TreeEnsembleClassifier",
        ["x"],
        ["label", "probabilities"],
        domain="ai.onnx.ml",
        nodes_treeids=[0, 0, 0],
        nodes_nodeids=[0, 1, 2],
        nodes_featureids=[0, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_values=[0.5, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0],
        nodes_falsenodeids=[2, 0, 0],
        class_treeids=[0, 0],
        class_nodeids=[1, 2],
        class_ids=[0, 1],
        class_weights=[1.0, 1.0],
        classlabels_int64s=[0, 1],
        post_transform="NONE",
    )
    outputs = [tensor("label", "rows", kind=INT64), tensor("probabilities", "rows", 2)]
    graph = helper.make_graph([node], "g", [tensor("x", "rows", 3)], outputs)
    return helper.make_model(graph, opset_imports=ML_OPSETS[1:], ir_version=9)


def forest_with_maps() -> onnx.ModelProto:
    made = forest()
    made.graph.node.append(
        helper.make_node("ZipMap", ["probabilities"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    )
    kind = helper.make_sequence_type_proto(helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, [])))
    made.graph.output[1].CopyFrom(helper.make_value_info("maps", kind))
    return made


def support_vectors() -> onnx.ModelProto:
    """ONNX's own operators beside scikit-learn's, and none with weights."""
    made = forest()
    made.opset_import.extend(OPSETS)
    made.graph.node[0].output[1] = "raw"
    made.graph.node.append(helper.make_node("Softmax", ["raw"], ["probabilities"]))
    return made


def fixed_by_tracing() -> onnx.ModelProto:
    """A length that its description calls free, and its operators do not."""
    held = [numpy_helper.from_array(np.array([2, 32], dtype=np.int64), "shape"), weights("w", 32, 4)]
    nodes = [helper.make_node("Reshape", ["x", "shape"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    return whole(nodes, held, tensor("x", "rows", 32), tensor("y", "rows", 4))


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("make", [mlp, convolutions, recurrent, encoder_of_tokens])
def test_a_model_is_quantized_and_its_agreement_is_printed(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], apart: bool
) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "int8.onnx"
    onnx.save(make(), source, save_as_external_data=apart, size_threshold=0, location="m.onnx.data")
    code, output = run("quantize", source, target)
    assert code == 0, output
    assert float(output.rsplit("cosine to fp32 ", 1)[1].split()[0]) > 0.9
    assert ("try --static --calibration" in output) == (make is convolutions)
    assert run("add", "m", "--edge", target, "--repository", tmp_path / "r")[0] == 0
    assert Repository(tmp_path / "r").manifest("m").variants[0].precision == "int8"
    assert run("verify", "m", "--repository", tmp_path / "r")[0] == 0


@pytest.mark.parametrize("make", [mlp, convolutions])
def test_a_model_with_weights_apart_is_quantized_with_fixed_scales(
    tmp_path: Path, make: Callable[[], onnx.ModelProto]
) -> None:
    source, samples = tmp_path / "m.onnx", tmp_path / "x.npz"
    onnx.save(make(), source, save_as_external_data=True, size_threshold=0, location="m.onnx.data")
    shape = [one.dim_value for one in make().graph.input[0].type.tensor_type.shape.dim][1:]
    np.savez(samples, x=np.random.default_rng(0).standard_normal((20, *shape)).astype(np.float32))
    code, output = run("quantize", source, tmp_path / "int8.onnx", "--static", "--calibration", samples)
    assert code == 0, output
    assert float(output.rsplit("cosine to fp32 ", 1)[1].split()[0]) > 0.9


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (forest, "has nothing to quantize, its operators are TreeEnsembleClassifier; serve it as it is: tidegate"),
        (support_vectors, "has nothing to quantize, its operators are Softmax, TreeEnsembleClassifier; serve it as"),
        (forest_with_maps, "'maps' is a sequence or a map, and requests and answers are made of tensors"),
        (fixed_by_tracing, "where an exporter fixed a length that the file calls free, export it anew"),
    ],
)
def test_what_cannot_be_quantized_is_one_sentence_with_the_way_out(
    tmp_path: Path, make: Callable[[], onnx.ModelProto], sentence: str
) -> None:
    onnx.save(make(), tmp_path / "m.onnx")
    code, output = run("quantize", tmp_path / "m.onnx", tmp_path / "int8.onnx")
    assert code == 1
    assert len(output.splitlines()) == 1
    assert sentence in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"]


def test_a_forest_is_served_as_it_is(tmp_path: Path) -> None:
    onnx.save(forest(), tmp_path / "m.onnx")
    code, output = run("add", "m", "--edge", tmp_path / "m.onnx", "--repository", tmp_path / "r")
    assert code == 0, output


def test_a_model_with_weights_apart_is_added_in_one_file(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.onnx.data")
    code, output = run("add", "m", "--edge", tmp_path / "m.onnx", "--repository", tmp_path / "r")
    assert code == 0, output
    placed = tmp_path / "r" / "m" / "1"
    assert sorted(path.name for path in placed.iterdir()) == ["edge.onnx", "model.yaml"]
    assert onnx.load(placed / "edge.onnx").graph.initializer[0].raw_data == mlp().graph.initializer[0].raw_data


def test_an_error_about_a_model_in_two_files_names_the_file_that_was_given(tmp_path: Path) -> None:
    broken = mlp()
    broken.graph.initializer.append(
        TensorProto(name="other", data_type=TensorProto.DOUBLE, dims=[64], raw_data=b"12345678" * 64)
    )
    broken.graph.node[0].input[2] = "other"
    onnx.save(broken, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.onnx.data")
    for words in (
        ("quantize", tmp_path / "m.onnx", tmp_path / "int8.onnx"),
        ("add", "m", "--edge", tmp_path / "m.onnx"),
    ):
        code, output = run(*words, *(("--repository", tmp_path / "r") if words[0] == "add" else ()))
        assert code == 1
        assert f"Error: {tmp_path / 'm.onnx'}: ONNX Runtime cannot load it" in output
        assert "/proc/" not in output

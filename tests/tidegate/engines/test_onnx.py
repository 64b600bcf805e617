"""What the ONNX engine loads is the file that was checked, in every process, and a file with references is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.models.tiny_models import double_graph, rounds_graph
from tidegate.engines import onnx as engine_module
from tidegate.engines.engine import load_engine
from tidegate.engines.errors import EngineError, InputRefused
from tidegate.engines.onnx import OnnxEngine

X = np.array([[1.0, 2.0]], dtype=np.float32)


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(double_graph(), path)
    return path


def weights_in(location: str) -> onnx.ModelProto:
    """y = x + w, with w in another file."""
    model = double_graph()
    model.graph.node[0].input[1] = "w"
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=location)
    weight.external_data.add(key="length", value="4")
    model.graph.initializer.append(weight)
    return model


@pytest.mark.parametrize("location", ["{outside}", "../secret.bin", "link.bin", "beside.bin"])
def test_weights_in_other_files_are_not_followed(tmp_path: Path, location: str) -> None:
    outside, folder = tmp_path / "secret.bin", tmp_path / "model"
    folder.mkdir()
    outside.write_bytes(b"1234")
    (folder / "beside.bin").write_bytes(b"1234")
    (folder / "link.bin").symlink_to(outside)
    onnx.save(weights_in(location.format(outside=outside)), folder / "m.onnx")
    with pytest.raises(EngineError, match=r"m\.onnx: keeps weights in other files \(w\)"):
        load_engine("onnx", folder / "m.onnx", outputs=("y",))


def test_operators_of_others_are_refused_before_the_runtime_sees_them(artefact: Path) -> None:
    model = double_graph()
    model.graph.node.append(helper.make_node("Steal", ["x"], ["z"], domain="evil.ops"))
    onnx.save(model, artefact)
    with pytest.raises(EngineError, match=r"not ONNX Runtime's own \(domains evil\.ops\)"):
        OnnxEngine(artefact)


@pytest.mark.parametrize("rewrite", ["in place", "by another file"])
@pytest.mark.parametrize("memory", [True, False])
def test_a_file_that_changes_after_the_check_is_loaded_as_it_was(
    artefact: Path, monkeypatch: pytest.MonkeyPatch, rewrite: str, memory: bool
) -> None:
    real = engine_module.onnxruntime.InferenceSession
    other = rounds_graph().SerializeToString()

    def session(*given: Any, **more: Any) -> Any:
        if rewrite == "by another file":
            artefact.unlink()
        artefact.write_bytes(other)
        return real(*given, **more)

    monkeypatch.setattr(engine_module.onnxruntime, "InferenceSession", session)
    if not memory:
        monkeypatch.delattr(os, "memfd_create")
    assert OnnxEngine(artefact).infer({"x": X})["y"].tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize("content", [b"", b"\x00not a model", double_graph().SerializeToString()[:-3]])
def test_a_damaged_file_is_no_model_and_the_error_names_it(artefact: Path, content: bytes) -> None:
    artefact.write_bytes(content)
    with pytest.raises(EngineError, match=r"m\.onnx: is not an ONNX model"):
        OnnxEngine(artefact)


@pytest.mark.slow
def test_the_confined_check_of_a_rollout_says_the_same(tmp_path: Path) -> None:
    from tests.support.models.tiny_models import tiny_repository

    folder = tiny_repository(tmp_path) / "double" / "1"
    artefact = next(folder.glob("*.onnx"))
    assert checked(artefact) == ""
    onnx.save(weights_in("/etc/passwd"), artefact)
    assert checked(artefact) == "keeps weights in other files (w)"
    onnx.save(rounds_graph(), artefact)
    assert checked(artefact).startswith("its inputs are rounds")
    artefact.write_bytes(b"")
    assert checked(artefact) == "is not an ONNX model: it is empty"


def checked(artefact: Path) -> str:
    command = (sys.executable, "-P", "-m", "tidegate.engines.onnx_check")
    said = subprocess.run(
        [*command, str(artefact), str(artefact.parent / "model.yaml"), "int8", str(os.getpid())],
        capture_output=True,
        check=True,
    )
    return str(json.loads(said.stdout)["problem"])


def same_graph(kind: int, shape: list[str]) -> onnx.ModelProto:
    """y = x, of any type."""
    tensors = [helper.make_tensor_value_info(name, kind, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", tensors[:1], tensors[1:])
    return helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])


def test_texts_reach_the_model_as_they_came(artefact: Path) -> None:
    onnx.save(same_graph(TensorProto.STRING, ["rows", "words"]), artefact)
    came = np.array([[b"abc", "né".encode()], [b"", b"a\0b"]], dtype=object)
    answer = OnnxEngine(artefact).infer({"x": came})["y"]
    assert answer.tolist() == [["abc", "né"], ["", "a\0b"]]


def test_bytes_and_texts_are_the_same_to_a_model(artefact: Path) -> None:
    onnx.save(same_graph(TensorProto.STRING, ["n"]), artefact)
    engine = OnnxEngine(artefact)

    for texts in (["a", "é\u4e2d", "", "z\0y"], []):
        given = np.array([text.encode() for text in texts], dtype=object)
        assert engine.infer({"x": given})["y"].tolist() == texts
        assert engine.infer({"x": np.array(texts, dtype=object)})["y"].tolist() == texts


def test_a_text_that_is_not_utf_8_is_its_callers_error(artefact: Path) -> None:
    onnx.save(same_graph(TensorProto.STRING, ["rows"]), artefact)
    with pytest.raises(InputRefused, match=r"^input 'x': element 1 is not UTF-8, .*invalid start byte at byte 2"):
        OnnxEngine(artefact).infer({"x": np.array([b"ok", b"ab\xff"], dtype=object)})


def test_a_scalar_stays_one(artefact: Path) -> None:
    onnx.save(same_graph(TensorProto.FLOAT, []), artefact)
    assert OnnxEngine(artefact).infer({"x": np.array(3, np.float32)})["y"].shape == ()


def bits_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What bfloat16 keeps of float32 whose lower half is zeros."""
    return (array.astype("<f4").view("<u4") >> 16).astype("<u2")


def bf16_model(path: Path, *, into: int = TensorProto.BFLOAT16, beside: int = TensorProto.FLOAT16) -> Path:
    """y = 2 x from bfloat16 to another type, beside what passes through, and a number; `path`."""
    rows = ["rows", 2]
    ports = {"x": (TensorProto.BFLOAT16, rows), "beside": (beside, ["rows"]), "one": (TensorProto.INT64, [])}
    inputs = [helper.make_tensor_value_info(name, *port) for name, port in ports.items()]
    nodes = [
        helper.make_node("Cast", ["x"], ["single"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["single", "single"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=into),
        helper.make_node("Identity", ["beside"], ["same"]),
        helper.make_node("Add", ["one", "one"], ["two"]),
    ]
    ends = {"y": (into, rows), "same": ports["beside"], "two": ports["one"]}
    outputs = [helper.make_tensor_value_info(name, *port) for name, port in ends.items()]
    graph = helper.make_graph(nodes, "bf16", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_bfloat16_goes_in_and_comes_out_as_its_bits_beside_other_types(tmp_path: Path, rows: int) -> None:
    engine = load_engine("onnx", bf16_model(tmp_path / "m.onnx"), outputs=("y", "same", "two"))
    x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2) - 1.5
    beside = np.arange(rows, dtype=np.float16)
    answer = engine.infer({"x": bits_of(x), "beside": beside, "one": np.array(1, np.int64)})
    assert answer["y"].dtype == np.uint16
    assert np.array_equal(answer["y"], bits_of(2 * x))
    assert np.array_equal(answer["same"], beside)
    assert answer["two"].shape == () and answer["two"] == 2


def test_texts_come_beside_inputs_of_bfloat16_and_not_beside_outputs(tmp_path: Path) -> None:
    of_texts = {"beside": TensorProto.STRING}
    engine = OnnxEngine(bf16_model(tmp_path / "in.onnx", into=TensorProto.FLOAT, **of_texts))
    x, texts = np.array([[1.5, -2.0]], np.float32), np.array(["süß".encode()], dtype=object)
    answer = engine.infer({"x": bits_of(x), "beside": texts, "one": np.array(1, np.int64)})
    assert np.array_equal(answer["y"], 2 * x)
    assert answer["same"].tolist() == ["süß"]
    with pytest.raises(EngineError, match=r"out\.onnx: ONNX Runtime takes no texts where it gives bfloat16"):
        OnnxEngine(bf16_model(tmp_path / "out.onnx", **of_texts))


def test_bfloat16_needs_a_runtime_that_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type")
    with pytest.raises(EngineError, match=r"bfloat16 needs ONNX Runtime 1\.20 or later"):
        OnnxEngine(bf16_model(tmp_path / "m.onnx"))

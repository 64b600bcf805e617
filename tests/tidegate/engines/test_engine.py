"""Engines on real artefacts made here: names decide, not order; errors name the artefact and the way out."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models.trusted import trust_file
from tidegate.engines.engine import EngineError, load_engine

pytestmark = pytest.mark.slow

LEFT = np.arange(6, dtype=np.float32).reshape(2, 3)
RIGHT = np.ones((2, 3), dtype=np.float32)


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`left - 2 * right` and the row sums of `left`, once for each engine."""
    import torch

    class Difference(torch.nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return left - 2 * right, left.sum(dim=1)

    folder = tmp_path_factory.mktemp("artefacts") / "m" / "1"
    folder.mkdir(parents=True)
    paths = {name: folder / f"m.{name}" for name in ("onnx", "torch-export", "torchscript", "bf16")}
    example = (torch.ones(2, 3), torch.ones(2, 3))
    rows = torch.export.Dim("rows", min=1)
    shapes = {"left": {0: rows}, "right": {0: rows}}
    torch.export.save(torch.export.export(Difference(), example, dynamic_shapes=shapes), paths["torch-export"])
    half = tuple(one.to(torch.bfloat16) for one in example)
    torch.export.save(torch.export.export(Difference(), half, dynamic_shapes=shapes), paths["bf16"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Difference()).save(str(paths["torchscript"]))
        torch.onnx.export(
            Difference(),
            example,
            str(paths["onnx"]),
            dynamo=False,
            input_names=["left", "right"],
            output_names=["difference", "sum"],
            dynamic_axes={"left": {0: "rows"}, "right": {0: "rows"}},
        )
    for kind in ("torch-export", "bf16", "torchscript"):
        trust_file(paths[kind])
    return paths


def load(artefacts: dict[str, Path], kind: str, outputs: tuple[str, ...] = ("difference", "sum")) -> Any:
    return load_engine(kind, artefacts[kind], outputs=outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["onnx", "torch-export", "torchscript"])
def test_inputs_are_matched_by_name_whatever_their_order(artefacts: dict[str, Path], kind: str) -> None:
    engine = load(artefacts, kind)
    answer = engine.infer({"right": RIGHT, "left": LEFT})
    np.testing.assert_allclose(answer["difference"], LEFT - 2)
    np.testing.assert_allclose(answer["sum"], LEFT.sum(axis=1))


@pytest.mark.parametrize("kind", ["onnx", "torch-export", "torchscript"])
def test_an_input_may_be_a_read_only_or_a_strided_view(artefacts: dict[str, Path], kind: str) -> None:
    view = np.frombuffer(LEFT.tobytes(), dtype=np.float32).reshape(2, 3)
    assert not view.flags.writeable
    strided = np.repeat(RIGHT, 2, axis=1)[:, ::2]
    answer = load(artefacts, kind).infer({"left": view, "right": strided})
    np.testing.assert_allclose(answer["difference"], LEFT - 2)


@pytest.mark.parametrize("kind", ["onnx", "torch-export", "torchscript"])
def test_a_single_row_works_where_the_rows_are_dynamic(artefacts: dict[str, Path], kind: str) -> None:
    assert load(artefacts, kind).infer({"left": LEFT[:1], "right": RIGHT[:1]})["difference"].shape == (1, 3)


@pytest.mark.parametrize("kind", ["onnx", "torch-export", "torchscript"])
def test_a_missing_input_is_an_engine_error_that_names_it(artefacts: dict[str, Path], kind: str) -> None:
    with pytest.raises(EngineError, match="right"):
        load(artefacts, kind).infer({"left": LEFT})


@pytest.mark.parametrize("kind", ["onnx", "torch-export", "torchscript"])
def test_shapes_that_do_not_fit_are_an_engine_error(artefacts: dict[str, Path], kind: str) -> None:
    engine = load(artefacts, kind)
    with pytest.raises(EngineError, match="cannot run it"):
        engine.infer({"left": LEFT, "right": np.ones((5, 2), dtype=np.float32)})
    assert engine.infer({"left": LEFT, "right": RIGHT})["sum"].shape == (2,)


@pytest.mark.parametrize("kind", ["onnx", "torch-export", "torchscript"])
def test_a_file_that_is_no_model_is_an_engine_error_that_names_it(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "broken.bin"
    path.write_bytes(b"not a model")
    with pytest.raises(EngineError, match=r"broken\.bin"):
        load_engine(kind, path, outputs=("x",))
    with pytest.raises(EngineError, match=r"gone\.bin: there is no such artefact"):
        load_engine(kind, tmp_path / "gone.bin", outputs=("x",))


def test_a_program_with_other_outputs_than_the_manifest_is_found(artefacts: dict[str, Path]) -> None:
    engine = load(artefacts, "torch-export", outputs=("difference",))
    with pytest.raises(EngineError, match="does not return one tensor for each of difference"):
        engine.infer({"left": LEFT, "right": RIGHT})


def test_bfloat16_travels_as_its_bits(artefacts: dict[str, Path]) -> None:
    engine = load_engine("torch-export", artefacts["bf16"], outputs=("difference", "sum"))
    bits = {name: (array.view("<u4") >> 16).astype("<u2") for name, array in (("left", LEFT), ("right", RIGHT))}
    answer = engine.infer(bits)["difference"]
    assert answer.dtype == np.uint16
    np.testing.assert_array_equal((answer.astype("<u4") << 16).view("<f4"), LEFT - 2)


@pytest.mark.parametrize(
    ("kind", "device"), [("onnx", "abacus"), ("torch-export", "abacus"), ("torchscript", "abacus")]
)
def test_an_unknown_device_is_named(artefacts: dict[str, Path], kind: Any, device: str) -> None:
    with pytest.raises(EngineError, match="'abacus'"):
        load_engine(kind, artefacts[kind], outputs=(), device=device)


@pytest.mark.parametrize(
    ("kind", "blocked", "extra"), [("onnx", "onnxruntime", "edge"), ("torch-export", "torch", "cloud")]
)
def test_a_missing_runtime_says_what_to_install(kind: str, blocked: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{blocked!r}] = None\n"
        "from pathlib import Path\n"
        "from tidegate.engines.engine import EngineError, load_engine\n"
        f"try: load_engine({kind!r}, Path('m'), outputs=())\n"
        "except EngineError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"pip install 'tidegate[{extra}]'" in done.stdout


def test_engines_say_what_they_run_and_where(artefacts: dict[str, Path]) -> None:
    assert repr(load(artefacts, "onnx")) == "<OnnxEngine m.onnx on CPU>"
    assert repr(load(artefacts, "torch-export")) == "<TorchEngine m.torch-export on cpu>"


def test_a_program_may_be_compiled_and_without_a_compiler_runs_as_it_is(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    engine = load_engine("torch-export", artefacts["torch-export"], outputs=("difference", "sum"), compile=True)
    assert "m.torch-export is not compiled: there is no C++ compiler here" in caplog.text
    np.testing.assert_allclose(engine.infer({"left": LEFT, "right": RIGHT})["difference"], LEFT - 2)


def test_a_compiler_that_fails_is_told_of_once_and_the_program_runs_as_it_is(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    def broken(*_: Any) -> Any:
        raise OSError("the compiler is broken")

    monkeypatch.setattr(torch, "compile", lambda function, **_: broken)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    engine = load_engine("torch-export", artefacts["torch-export"], outputs=("difference", "sum"), compile=True)
    for _ in range(2):
        np.testing.assert_allclose(engine.infer({"left": LEFT, "right": RIGHT})["difference"], LEFT - 2)
    said = [one.getMessage() for one in caplog.records if "compiled" in one.getMessage()]
    assert said == ["m.torch-export is not compiled: OSError: the compiler is broken"]


def test_a_cpu_without_bf16_says_that_fp32_is_faster(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from tidegate.engines import torch_device

    monkeypatch.setattr(torch_device, "has_bf16", lambda device: False)
    torch_device.say_if_emulated("m.pt2", torch.bfloat16, torch.device("cpu"))
    torch_device.say_if_emulated("m.pt2", torch.float32, torch.device("cpu"))
    assert [one.getMessage() for one in caplog.records] == [
        "m.pt2: this cpu has no instructions for bf16 and emulates it; fp32 is faster here"
    ]


def test_an_engine_file_of_tensorrt_is_refused_with_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="engine files of TensorRT are not run: serve the ONNX file that"):
        load_engine("tensorrt", tmp_path / "m.engine", outputs=())

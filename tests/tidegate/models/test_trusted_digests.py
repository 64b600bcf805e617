"""Files that can run code are loaded where their digest is on the repository's trust list, and nowhere else."""

from __future__ import annotations

import stat
import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.models.trusted import trust_file
from tidegate.engines.engine import load_engine
from tidegate.engines.errors import EngineError
from tidegate.models.digest import sha256_of
from tidegate.models.repository import RepositoryError
from tidegate.models.trusted_digests import FILE_NAME, TrustedDigests, digest_in
from tidegate.tools.build.cli import model

A, B = "a" * 64, "b" * 64


def run(*words: Any) -> Result:
    return CliRunner().invoke(model, [str(word) for word in words])


def test_what_was_added_is_trusted_until_it_is_removed(tmp_path: Path) -> None:
    trusted = TrustedDigests(tmp_path / "models")
    assert A not in trusted
    trusted.add({A: "one\nof ours", B: ""})
    trusted.add({A: "said again"})
    assert trusted.entries() == {A: "one of ours", B: ""}
    assert trusted.remove(A)
    assert not trusted.remove(A)
    assert trusted.entries() == {B: ""}
    assert stat.S_IMODE(trusted.path.stat().st_mode) == 0o640


@pytest.mark.parametrize(("content", "mode", "words"), [
    (f"sha256:{A}\nsha256:{B[:9]}\n", 0o640, "line 2"),
    (f"sha256:{A}\n", 0o666, "every account may write it"),
    (f"sha256:{A}\n" + "#" * (4 * 2**20), 0o640, "bytes"),
])  # fmt: skip
def test_a_list_that_cannot_be_relied_on_trusts_nothing(tmp_path: Path, content: str, mode: int, words: str) -> None:
    trusted = TrustedDigests(tmp_path)
    trusted.path.write_text(content)
    trusted.path.chmod(mode)
    with pytest.raises(RepositoryError, match=words):
        assert A in trusted


@pytest.mark.parametrize(("text", "digest"), [
    (A, A), (A.upper(), A), (f"sha256:{A}", A), (A[1:], None), (f"{A}0", None), ("g" * 64, None), (f"{A}\n", None),
])  # fmt: skip
def test_a_digest_is_told_from_other_words(text: str, digest: str | None) -> None:
    assert digest_in(text) == digest


def test_an_operator_trusts_a_file_or_a_digest_and_takes_it_back(tmp_path: Path) -> None:
    path, at = tmp_path / "m.pt2", ("--repository", tmp_path / "models")
    path.write_bytes(b"not even a program: it is not loaded")
    assert run("trust", path, A, *at).exit_code == 0
    assert f"sha256:{sha256_of(path)}  by an operator: m.pt2" in run("trust", "--list", *at).output
    assert run("trust", "--remove", A, *at).exit_code == 0
    assert list(TrustedDigests(tmp_path / "models").entries()) == [sha256_of(path)]
    for words, problem in (
        ((), "give a file"), (("gone.pt2",), "no such file"), (("--remove", A), "is not on the list"),
    ):  # fmt: skip
        done = run("trust", *words, *at)
        assert done.exit_code == 1 and problem in done.output
    assert "digest-no-longer-trusted" in (tmp_path / "models" / "audit.jsonl").read_text()


@pytest.mark.parametrize("suffix", [".pt2", ".pt"])
def test_model_add_does_not_load_what_is_not_trusted(tmp_path: Path, suffix: str) -> None:
    """Not even to look at it: torch is not asked, which would say that it is no model."""
    path, at = tmp_path / f"m{suffix}", ("--repository", tmp_path / "models")
    path.write_bytes(b"a program of somebody's")
    pytest.importorskip("torch")
    onnx = _identity(tmp_path / "m.onnx")
    done = run("add", "m", "--edge", onnx, "--pool", path, *at)
    assert done.exit_code == 1
    assert f"tidegate model trust {sha256_of(path)} --repository {tmp_path / 'models'}" in done.output
    done = run("add", "m", "--edge", onnx, "--pool", path, "--trust", *at)
    assert done.exit_code == 1 and "not trusted" not in done.output, "now torch has looked at it"


def _identity(path: Path) -> Path:
    onnx = pytest.importorskip("onnx")
    floats = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 2]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "m", floats[:1], floats[1:])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch-export", "torchscript"])
def test_a_program_is_loaded_only_where_its_digest_is_trusted(tmp_path: Path, engine: Any) -> None:
    torch = pytest.importorskip("torch")

    class Double(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    (folder := tmp_path / "double" / "1").mkdir(parents=True)
    path = folder / "m.bin"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if engine == "torch-export":
            with path.open("wb") as file:
                torch.export.save(torch.export.export(Double(), (torch.ones(2),)), file)
        else:
            torch.jit.script(Double()).save(str(path))

    with pytest.raises(EngineError, match=f"not trusted here: sha256:{sha256_of(path)}"):
        load_engine(engine, path, outputs=("y",))
    trusted = trust_file(path)
    assert trusted.path == tmp_path / FILE_NAME
    assert load_engine(engine, path, outputs=("y",)) is not None

    trusted.remove(sha256_of(path))
    with pytest.raises(EngineError, match="not trusted here"):
        load_engine(engine, path, outputs=("y",))

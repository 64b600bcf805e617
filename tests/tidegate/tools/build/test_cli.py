"""`tidegate model` as a user meets it: fast help, tables, one-line errors, progress for people and for parents."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tidegate.models.digest import sha256_of
from tidegate.models.manifest import Axis, Cost, Manifest, Quality, TensorSpec, Variant
from tidegate.models.repository import Repository
from tidegate.tools.build.cli import model
from tidegate.tools.build.demo import demo_models
from tidegate.tools.build.progress import Progress, part_of
from tidegate.types import Datatype


def recipe(name: str, version: str) -> Any:
    """A recipe that takes no time, in place of the real ones; everything around it is real."""

    def build(folder: Path, progress: Progress) -> Manifest:
        for done in range(100):
            progress("training", done / 200)
        progress("measuring", 0.9)
        path = folder / "m.onnx"
        path.write_bytes(b"weights")
        return Manifest(
            name=name,
            version=version,
            inputs=(TensorSpec("x", Datatype.FP32, ("batch",)),),
            outputs=(TensorSpec("y", Datatype.FP32, ("batch",)),),
            variants=(
                Variant(
                    name="int8",
                    artefact="m.onnx",
                    engine="onnx",
                    precision="int8",
                    where=("edge",),
                    sha256=sha256_of(path),
                    size_bytes=7,
                    quality=Quality("top1", 0.5, 2),
                    max_batch=4,
                    max_tokens=9,
                ),
            ),
            cost=Cost("items", "x"),
            axes={"batch": Axis(1, 8)},
        )

    return types.SimpleNamespace(build=build)


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    modules = {one.module: recipe(name, one.version) for name, one in demo_models.RECIPES.items()}
    monkeypatch.setattr(demo_models.importlib, "import_module", modules.__getitem__)
    return tmp_path / "models"


def run(*words: Any) -> tuple[int, str]:
    result = CliRunner().invoke(model, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.output


def test_all_builds_all_and_a_second_time_keeps_them_with_a_word(repository: Path) -> None:
    code, output = run("build", "all", "--repository", repository)
    assert code == 0
    assert [one.name for one in Repository(repository).manifests()] == ["digits", "minilm"]
    assert f"minilm: built in {repository / 'minilm' / '2'}" in output
    assert "minilm: kept (whole, digests fit)" in run("build", "all", "--repository", repository)[1]
    assert "minilm: built" in run("build", "minilm", "--force", "--repository", repository)[1]


def test_progress_is_one_line_per_step_or_tenth_and_not_one_per_sample(repository: Path) -> None:
    lines = run("build", "digits", "--repository", repository)[1].splitlines()
    assert len([line for line in lines if "training" in line]) == 5
    assert "digits: measuring (90% done)" in lines


def test_a_parent_reads_progress_as_events(repository: Path) -> None:
    words = ["build", "digits", "--json-progress", "--repository", str(repository)]
    events = [json.loads(line) for line in CliRunner().invoke(model, words).stdout.splitlines()]
    assert {event["event"] for event in events} == {"progress"}
    assert events[0] == {"event": "progress", "what": "digits: training", "done_ratio": 0.0}
    ratios = [event["done_ratio"] for event in events]
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0


def test_models_are_listed_shown_and_verified(repository: Path) -> None:
    run("build", "digits", "--repository", repository)
    listed = run("list", "--repository", repository)[1]
    assert all(word in listed for word in ("digits", "int8", "edge", "top1 0.5000", "4 rows, 9 tokens a row"))
    assert run("show", "digits", "--repository", repository)[1].startswith("schema: 1\nname: digits\n")
    manifests = json.loads(run("list", "--json", "--repository", repository)[1])
    assert [(one["name"], one["version"]) for one in manifests] == [("digits", "2")]
    assert json.loads(run("show", "digits", "--json", "--repository", repository)[1]) == manifests[0]
    assert run("verify", "--repository", repository) == (0, f"ok    {repository / 'digits' / '2' / 'm.onnx'}\n")


def test_verifying_names_every_artefact_that_is_wrong_and_fails(repository: Path) -> None:
    run("build", "all", "--repository", repository)
    (repository / "digits" / "2" / "m.onnx").write_bytes(b"changed")
    (repository / "minilm" / "2" / "m.onnx").unlink()
    code, output = run("verify", "--repository", repository)
    assert code == 1
    assert "has sha256" in output
    assert "No such file" in output
    assert "Error: 2 problems were found" in output
    assert run("verify", "digits", "--repository", repository)[1].count("WRONG") == 1


def test_what_was_verified_is_told_as_json_with_the_same_exit_code(repository: Path) -> None:
    run("build", "all", "--repository", repository)
    (repository / "digits" / "2" / "m.onnx").write_bytes(b"changed")
    words = ["verify", "digits", "minilm", "--json", "--repository", str(repository)]
    done = CliRunner().invoke(model, words)
    assert done.exit_code == 1
    found = {(one["model"], one["result"]) for one in json.loads(done.stdout)}
    assert found >= {("digits", "wrong"), ("minilm", "ok")}
    assert "Error: 1 problem was found" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("show", "nope"), "Error: there is no model 'nope' (models: digits)"),
        (("show", "digits", "--version", "9"), "Error: model 'digits' has no version '9' (versions: 2)"),
        (("verify", "nope"), "Error: there is no model 'nope'"),
    ],
)
def test_an_unknown_model_is_a_line_and_not_a_traceback(repository: Path, words: tuple[str, ...], message: str) -> None:
    run("build", "digits", "--repository", repository)
    code, output = run(*words, "--repository", repository)
    assert code == 1
    assert message in output


def test_a_repository_that_is_not_there_is_a_line_that_says_how_to_make_one(tmp_path: Path) -> None:
    code, output = run("list", "--repository", tmp_path / "nowhere")
    assert code == 1
    assert "tidegate model build all" in output


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise ImportError(name="sklearn")

    monkeypatch.setattr(demo_models.importlib, "import_module", missing)
    code, output = run("build", "digits", "--repository", tmp_path)
    assert code == 1
    assert "building digits needs sklearn: pip install 'tidegate[build]'" in output


@pytest.mark.parametrize("command", ["build", "quantize", "add", "calibrate", "list", "show", "verify"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    code, output = run(command, "--help")
    assert code == 0
    assert f"tidegate model {command}" in output


@pytest.mark.slow
def test_help_imports_no_runtime() -> None:
    program = (
        "import sys\n"
        "from tidegate.tools.build.cli import model\n"
        "[model([command, '--help'], standalone_mode=False) for command in ('add', 'calibrate')]\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'sklearn', 'transformers', 'numpy', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_a_part_of_a_build_reports_as_its_share_of_the_whole() -> None:
    seen: list[tuple[str, float]] = []
    part = part_of(lambda what, ratio: seen.append((what, ratio)), 0.5, 1.0)
    part("x", 0.0)
    part("y", 0.5)
    assert seen == [("x", 0.5), ("y", 0.75)]

"""Adding and quantizing a user's own models, through the command line as a user does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from tidegate.models.manifest import Axis, Bounds
from tidegate.models.repository import Repository
from tidegate.models.trusted_digests import TrustedDigests
from tidegate.tools.build.cli import model
from tidegate.tools.build.staging import model_lock

pytestmark = pytest.mark.slow

ROWS = {0: "rows"}
TEXT_AXES = {"ids": {0: "rows", 1: "length"}, "mask": {0: "rows", 1: "length"}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`text.onnx` and `text.pt2` are one small model of ids and mask; `dense.onnx` and `dense.pt` are another."""
    import torch

    from tidegate.tools.build.convert.export import export_onnx, export_program

    torch.manual_seed(0)

    class TextModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(50, 16)
            self.place = torch.nn.Embedding(40, 16)
            self.head = torch.nn.Linear(16, 8)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            keep = mask.to(torch.float32)[:, :, None]
            hidden = self.head(self.table(ids) + self.place.weight[: ids.shape[1]])
            return (hidden * keep).sum(1) / keep.sum(1).clamp(min=1)

    class Dense(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    folder = tmp_path_factory.mktemp("files")
    text, dense = TextModel().eval(), Dense().eval()
    example = {"ids": torch.ones(2, 5, dtype=torch.int64), "mask": torch.ones(2, 5, dtype=torch.int64)}
    export_program(text, example, TEXT_AXES, folder / "text.pt2", most={"length": 40})
    export_onnx(text, example, ["vector"], {**TEXT_AXES, "vector": ROWS}, folder / "text.onnx")
    x = {"x": torch.randn(2, 12)}
    export_onnx(dense, x, ["scores"], {"x": ROWS, "scores": ROWS}, folder / "dense.onnx")
    export_program(dense, x, {"x": ROWS}, folder / "dense.pt2", most={})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(dense).save(str(folder / "dense.pt"))
    random = np.random.default_rng(0)
    samples = random.standard_normal((40, 12)).astype(np.float32)
    with torch.inference_mode():
        labels = dense(torch.from_numpy(samples)).argmax(1).numpy()
    np.savez(folder / "x.npz", x=samples)
    np.savez(folder / "labelled.npz", x=samples, labels=labels)
    np.savez(folder / "other.npz", y=samples)
    np.savez(folder / "ragged.npz", x=samples, labels=labels[:3])
    return folder


def run(*words: Any) -> Result:
    return CliRunner().invoke(model, [str(word) for word in words], catch_exceptions=False)


def test_a_text_model_is_added_with_all_that_its_files_say(files: Path, tmp_path: Path) -> None:
    result = run(
        "add", "t", "--edge", files / "text.onnx", "--pool", files / "text.pt2", "--trust", "--repository", tmp_path
    )
    assert result.exit_code == 0, result.output
    repository = Repository(tmp_path)
    added = repository.manifest("t")
    assert [(spec.name, spec.shape, spec.bounds) for spec in added.inputs] == [
        ("ids", ("rows", "length"), Bounds(0, 49)),
        ("mask", ("rows", "length"), Bounds(0, 1)),
    ]
    assert added.axes == {"rows": Axis(1, 64), "length": Axis(1, 40)}
    assert (added.cost.feature, added.cost.input, added.batching.pad_axis) == ("tokens", "ids", "length")
    assert [(one.name, one.engine, one.where) for one in added.variants] == [
        ("fp32", "onnx", ("edge",)),
        ("fp32-pool", "torch-export", ("pool",)),
    ]
    for variant in added.variants:
        repository.verify(added, variant)
    assert "axis length: 1 to 40, by the artefacts" in result.output
    assert "a padded row was found to answer as it does alone" in result.output


def test_the_longest_length_is_found_by_running_where_no_file_says_it(files: Path, tmp_path: Path) -> None:
    result = run("add", "t", "--edge", files / "text.onnx", "--repository", tmp_path)
    assert result.exit_code == 0, result.output
    # 512, halved until the position table of 40 takes it
    assert Repository(tmp_path).manifest("t").axes["length"] == Axis(1, 32)


def test_torchscript_is_described_by_the_onnx_file_beside_it(files: Path, tmp_path: Path) -> None:
    result = run(
        "add", "d", "--edge", files / "dense.onnx", "--pool", files / "dense.pt", "--trust", "--repository", tmp_path
    )
    assert result.exit_code == 0, result.output
    assert [one.engine for one in Repository(tmp_path).manifest("d").variants] == ["onnx", "torchscript"]


def test_a_quality_is_written_only_if_it_was_measured_on_real_samples(files: Path, tmp_path: Path) -> None:
    pair = ("--edge", files / "dense.onnx", "--repository", tmp_path, "--pool", files / "dense.pt2", "--trust")
    assert "made-up inputs" in run("add", "a", *pair).output
    run("add", "b", *pair, "--samples", files / "x.npz")
    run("add", "c", *pair, "--samples", files / "labelled.npz", "--metric", "top1")
    run("add", "d", *pair[:4], "--samples", files / "labelled.npz", "--metric", "top1")
    qualities = {one.name: [variant.quality for variant in one.variants] for one in Repository(tmp_path).manifests()}
    assert qualities["a"] == [None, None]
    assert [(one.metric, one.value, one.samples) for one in qualities["b"] if one] == [("cosine", 1.0, 40)] * 2
    assert [(one.metric, one.value, one.samples) for one in qualities["c"] if one] == [("top1", 1.0, 40)] * 2
    assert [(one.metric, one.value, one.samples) for one in qualities["d"] if one] == [("top1", 1.0, 40)]


def test_what_the_user_says_is_taken(files: Path, tmp_path: Path) -> None:
    result = run(
        *("add", "d", "--edge", files / "dense.onnx", "--repository", tmp_path, "--version", "7"),
        *("--cost", "items:x", "--axis", "rows=1:9", "--bounds", "x=-1:1", "--budget-s", "0.5", "--edge-max-batch", 3),
    )
    assert result.exit_code == 0, result.output
    added = Repository(tmp_path).manifest("d", "7")
    assert (added.axes["rows"], added.inputs[0].bounds, added.default_budget_s) == (Axis(1, 9), Bounds(-1, 1), 0.5)
    assert added.variants[0].max_batch == 3


def test_a_version_that_exists_is_replaced_only_by_force(files: Path, tmp_path: Path) -> None:
    add = ("add", "d", "--edge", files / "dense.onnx", "--repository", tmp_path)
    assert run(*add).exit_code == 0
    again = run(*add)
    assert again.exit_code == 1
    assert "d/1 exists; give another --version, or --force" in again.output
    assert run(*add, "--force").exit_code == 0


def test_of_two_that_add_one_version_at_once_the_second_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def behind_another(root: Path, name: str) -> Iterator[None]:
        with model_lock(root, name):
            (root / name / "1").mkdir()  # by the first, which held the lock while this one began
            (root / name / "1" / "theirs").touch()
            yield

    monkeypatch.setattr("tidegate.tools.build.add.model_lock", behind_another)

    second = run("add", "d", "--pool", files / "dense.pt2", "--trust", "--repository", tmp_path)

    assert (second.exit_code, "d/1 exists; give another --version, or --force" in second.output) == (1, True)
    assert [path.name for path in (tmp_path / "d" / "1").iterdir()] == ["theirs"]
    assert TrustedDigests(tmp_path).entries() == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to add: give --edge, --pool or both"),
        (("--edge", "gone.onnx"), "gone.onnx: there is no such file"),
        (("--edge", "x.npz"), "unknown kind of artefact '.npz'"),
        (("--pool", "dense.pt"), "TorchScript does not say what it takes"),
        (("--edge", "text.onnx", "--pool", "dense.pt2"), "text.onnx takes ids, mask, but dense.pt2 takes x"),
        (("--edge", "text.onnx", "--pool", "dense.pt"), "the pool's artefact cannot be run"),
        (("--edge", "dense.onnx", "--output", "a", "--output", "b"), "--output: 2 names for 1 outputs"),
        (("--edge", "dense.onnx", "--output", "a"), "dense.onnx itself names its outputs scores"),
        (("--edge", "dense.onnx", "--axis", "rows"), "--axis 'rows': must look like NAME=MIN:MAX"),
        (("--edge", "dense.onnx", "--axis", "rows=0:0"), "--axis 'rows=0:0': lengths are whole numbers"),
        (("--edge", "dense.onnx", "--axis", "rows=4:1"), "--axis 'rows=4:1': lengths are whole numbers"),
        (("--edge", "dense.onnx", "--axis", "rows=1:2.5"), "--axis 'rows=1:2.5': lengths are whole numbers"),
        (("--edge", "dense.onnx", "--bounds", "x=a:b"), "--bounds 'x=a:b': must look like NAME=MIN:MAX"),
        (("--edge", "dense.onnx", "--cost", "tokens:y"), "'y' is not an input (inputs: x)"),
        (("--edge", "dense.onnx", "--tokenizer", "gone.json"), "gone.json: there is no such file"),
        (("--edge", "dense.onnx", "--pool", "dense.pt2", "--samples", "other.npz"), "lacks the input 'x'"),
        (("--edge", "dense.onnx", "--pool", "dense.pt2", "--samples", "ragged.npz"), "x 40, labels 3"),
        (("--edge", "dense.onnx", "--pool", "dense.pt2", "--samples", "gone.npz"), "gone.npz: No such file"),
        (("--edge", "dense.onnx", "--pool", "dense.pt2", "--samples", "dense.onnx"), "is not an .npz of plain arrays"),
        (("--edge", "dense.onnx", "--version", "a/b"), "'a/b' must be"),
    ],
)
def test_what_cannot_be_added_is_named_and_nothing_appears(
    files: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    paths = [str(files / word) if Path(word).suffix and "=" not in word else word for word in words]
    result = run("add", "m", *paths, "--trust", "--repository", tmp_path)
    assert result.exit_code == 1
    assert message in result.output
    assert Repository(tmp_path).manifests() == ()


def test_a_program_that_was_not_added_is_not_trusted_unless_it_was_before(files: Path, tmp_path: Path) -> None:
    trusted = TrustedDigests(tmp_path)
    wrong = ("--edge", files / "dense.onnx", "--pool", files / "text.pt2", "--trust", "--repository", tmp_path)
    assert "the artefacts disagree" in run("add", "m", *wrong).output
    assert trusted.entries() == {}

    assert run("trust", files / "text.pt2", "--repository", tmp_path).exit_code == 0
    before = trusted.entries()
    assert "the artefacts disagree" in run("add", "m", *wrong).output
    assert trusted.entries() == before != {}


@pytest.mark.parametrize("name", ["broken.onnx", "broken.pt2"])
def test_a_file_that_is_no_model_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x00not a model")
    result = run("add", "m", "--edge", tmp_path / name, "--trust", "--repository", tmp_path / "r")
    assert result.exit_code == 1
    assert f"{name}: is not an" in result.output


def test_weights_in_another_file_are_refused_with_the_way_out(files: Path, tmp_path: Path) -> None:
    import onnx

    loaded = onnx.load(files / "dense.onnx")
    onnx.save(loaded, tmp_path / "apart.onnx", save_as_external_data=True, size_threshold=0, location="weights.bin")
    (tmp_path / "weights.bin").rename(tmp_path / "elsewhere.bin")
    (tmp_path / "weights.bin").symlink_to(tmp_path / "elsewhere.bin")
    for command in (("add", "m", "--edge"), ("quantize",)):
        more = ("--repository", tmp_path / "r") if command[0] == "add" else (tmp_path / "int8.onnx",)
        result = run(*command, tmp_path / "apart.onnx", *more)
        assert result.exit_code == 1
        assert "keeps its weights in another file" in result.output


def test_quantizing_reports_size_latency_and_quality(files: Path, tmp_path: Path) -> None:
    target = tmp_path / "int8.onnx"
    result = run("quantize", files / "dense.onnx", target, "--evaluation", files / "x.npz")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.output.splitlines()] == ["size", "latency", "latency", "quality"]
    assert "on 40 samples of scores" in result.output
    assert float(result.output.rsplit("cosine to fp32 ", 1)[1].split()[0]) > 0.99
    assert sorted(path.name for path in tmp_path.iterdir()) == ["int8.onnx"]


def test_static_quantization_is_calibrated_and_measured_by_labels(files: Path, tmp_path: Path) -> None:
    result = run(
        *("quantize", files / "dense.onnx", tmp_path / "int8.onnx", "--static"),
        *("--calibration", files / "x.npz", "--evaluation", files / "labelled.npz", "--metric", "top1"),
    )
    assert result.exit_code == 0, result.output
    assert "quality  top-1 1.0000 → " in result.output
    assert "on 40 labelled samples" in result.output
    added = run("add", "q", "--edge", tmp_path / "int8.onnx", "--repository", tmp_path / "r")
    assert added.exit_code == 0, added.output
    assert Repository(tmp_path / "r").manifest("q").variants[0].precision == "int8"


def test_without_samples_the_quality_says_that_its_inputs_are_made_up(files: Path, tmp_path: Path) -> None:
    result = run("quantize", files / "text.onnx", tmp_path / "int8.onnx")
    assert result.exit_code == 0, result.output
    assert "made-up inputs" in result.output
    again = run("quantize", tmp_path / "int8.onnx", tmp_path / "again.onnx")
    assert again.exit_code == 1
    assert "is quantized already" in again.output


@pytest.mark.parametrize(
    ("source", "target", "more", "message"),
    [
        ("dense.onnx", "o.onnx", ("--static",), "--static needs --calibration"),
        ("dense.onnx", "dense.onnx", (), "cannot replace the model"),
        ("gone.onnx", "o.onnx", (), "gone.onnx: No such file"),
        ("x.npz", "o.onnx", (), "x.npz: is not an ONNX model"),
        ("dense.onnx", "nowhere/o.onnx", (), "o.onnx"),
    ],
)
def test_what_cannot_be_quantized_is_named(
    files: Path, source: str, target: str, more: tuple[str, ...], message: str
) -> None:
    result = run("quantize", files / source, files / target, *more)
    assert result.exit_code == 1
    assert message in result.output


def test_a_model_is_not_blamed_for_a_disk_that_is_full_or_a_folder_that_is_not_there(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidegate.tools.build.convert import quantize

    gone, full = tmp_path / "nowhere" / "o.onnx", tmp_path / "o.onnx"
    assert run("quantize", files / "dense.onnx", gone).output == f"Error: {gone}: No such file or directory\n"

    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantize, "quantize_dynamic", no_room)
    assert run("quantize", files / "dense.onnx", full).output == f"Error: {full}: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_a_model_that_the_system_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "trusted.digests"))

    monkeypatch.setattr(TrustedDigests, "entries", no_room)
    result = run("trust", "--list", "--repository", tmp_path)
    assert (result.exit_code, result.output) == (1, f"Error: {tmp_path / 'trusted.digests'}: No space left on device\n")


def graph_file(path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], **weights: Any) -> Path:
    """An ONNX file of these nodes; inputs and outputs are (type, shape) by name."""
    ports = [[helper.make_tensor_value_info(name, *of) for name, of in one.items()] for one in (inputs, outputs)]
    initial = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "m", ports[0], ports[1], initial)
    onnx.save(helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_requests_are_not_joined_where_the_first_axis_is_time(tmp_path: Path) -> None:
    sums = [helper.make_node("CumSum", ["x", "axis"], ["y"])]
    port = (TensorProto.FLOAT, ["time", 4])
    path = graph_file(tmp_path / "m.onnx", sums, {"x": port}, {"y": port}, axis=np.array(0))
    result = run("add", "m", "--pool", path, "--axis", "time=1:300", "--repository", tmp_path / "models")
    assert result.exit_code == 0, result.output
    assert "one request a call (policy: none), since rows along time answer otherwise beside" in result.output
    added = Repository(tmp_path / "models").manifest("m")
    assert (added.batching.policy, added.batching.max_batch_size) == ("none", 300)


def test_rows_that_answer_as_they_do_alone_are_joined_whatever_else_they_are(tmp_path: Path) -> None:
    same = [helper.make_node("Log", ["x"], ["y"]), helper.make_node("Identity", ["name"], ["it"])]
    numbers, texts = (TensorProto.FLOAT, ["rows", "n"]), (TensorProto.STRING, ["rows"])
    path = graph_file(tmp_path / "m.onnx", same, {"x": numbers, "name": texts}, {"it": texts, "y": numbers})
    result = run("add", "m", "--edge", path, "--pool", path, "--repository", tmp_path / "models")
    assert result.exit_code == 0, result.output
    assert Repository(tmp_path / "models").manifest("m").batching.policy == "deadline"


@pytest.mark.parametrize("answer", ["small vectors", "classes"])
def test_padding_is_not_harmless_because_answers_are_small_or_classes(tmp_path: Path, answer: str) -> None:
    table = np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32) * 1e-5
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows_of"]),
        helper.make_node(
            "ReduceMean", ["rows_of"], ["y" if answer == "small vectors" else "mean"], axes=[1], keepdims=0
        ),
        helper.make_node("ReduceMax", ["mask"], ["seen"], axes=[1], keepdims=0),
    ]
    outputs: dict[str, Any] = {"y": (TensorProto.FLOAT, ["b", 8]), "seen": (TensorProto.INT64, ["b"])}
    if answer == "classes":
        nodes.append(helper.make_node("ArgMax", ["mean"], ["y"], axis=1, keepdims=0))
        outputs["y"] = (TensorProto.INT64, ["b"])
    port = (TensorProto.INT64, ["b", "length"])
    path = graph_file(tmp_path / "m.onnx", nodes, {"ids": port, "mask": port}, outputs, table=table)
    result = run("add", "m", "--pool", path, "--repository", tmp_path / "models")
    assert result.exit_code == 0, result.output
    assert "only rows of equal length are joined, since padding changes the answer" in result.output


def test_the_labels_that_a_classifier_gives_first_are_not_taken_for_scores(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ArgMax", ["x"], ["label"], axis=1, keepdims=0),
        helper.make_node("Softmax", ["x"], ["p"]),
    ]
    scores, labels = (TensorProto.FLOAT, ["rows", 3]), (TensorProto.INT64, ["rows"])
    both = graph_file(tmp_path / "both.onnx", nodes, {"x": scores}, {"label": labels, "p": scores})
    alone = graph_file(tmp_path / "alone.onnx", nodes[:1], {"x": scores}, {"label": labels})
    x = np.random.default_rng(2).standard_normal((60, 3)).astype(np.float32)
    np.savez(tmp_path / "right.npz", x=x, labels=x.argmax(1)[:, None])
    np.savez(tmp_path / "wrong.npz", x=x, labels=x)
    for name, path in {"both": both, "alone": alone}.items():
        samples = ("--samples", tmp_path / "right.npz", "--metric", "top1", "--repository", tmp_path / "models")
        result = run("add", name, "--edge", path, "--pool", path, *samples)
        assert result.exit_code == 0, result.output
        qualities = [one.quality for one in Repository(tmp_path / "models").manifest(name).variants]
        assert [(one.metric, one.value) for one in qualities if one] == [("top1", 1.0)] * 2
    result = run("add", "bad", "--edge", both, "--samples", tmp_path / "wrong.npz", "--repository", tmp_path / "models")
    assert result.exit_code == 1
    assert "'labels' must be the number of the right class of each row" in result.output


def test_scores_in_bf16_are_compared_as_numbers(tmp_path: Path) -> None:
    import torch

    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scores": x * 1}

    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rows = {0: torch.export.Dim("rows", min=1, max=64)}
    torch.export.save(torch.export.export(Same(), (x,), dynamic_shapes={"x": rows}), tmp_path / "m.pt2")
    np.savez(tmp_path / "x.npz", x=x.view(torch.uint16).numpy(), labels=x.float().argmax(1).numpy())
    samples = ("--samples", tmp_path / "x.npz", "--metric", "top1", "--repository", tmp_path / "models")
    result = run("add", "m", "--pool", tmp_path / "m.pt2", "--trust", *samples)
    assert result.exit_code == 0, result.output
    quality = Repository(tmp_path / "models").manifest("m").variants[0].quality
    assert quality is not None
    assert quality.value == 1.0


def test_a_model_whose_requests_may_have_no_rows_is_compared_on_some(tmp_path: Path) -> None:
    twice = [helper.make_node("Add", ["x", "x"], ["y"])]
    port = (TensorProto.FLOAT, ["rows", 4])
    path = graph_file(tmp_path / "m.onnx", twice, {"x": port}, {"y": port})
    both = ("--edge", path, "--pool", path, "--axis", "rows=0:8", "--repository", tmp_path / "models")
    result = run("add", "m", *both)
    assert result.exit_code == 0, result.output
    assert "edge against pool on made-up inputs: cosine 1.0000" in result.output
    assert Repository(tmp_path / "models").manifest("m").axes["rows"].min == 0

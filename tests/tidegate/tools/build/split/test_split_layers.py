"""Cutting a residual network: where it can be cut, that both halves answer as the whole, and what is written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from tests.support.models.residual_cnn import ENDS, NAME, residual_graph, residual_repository
from tests.support.models.tiny_models import rounds_graph
from tidegate.engines.engine import load_engine
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Axis, Manifest, Pipeline, TensorSpec
from tidegate.models.repository import Repository, RepositoryError, save_manifest
from tidegate.models.split.layer_split import Activation, LayerSplit, SplitCut, SplitHalf
from tidegate.models.split_halves import whole_halves
from tidegate.models.steps import SoftmaxStep
from tidegate.models.validate import problems
from tidegate.tools.build.cli import model
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.evaluate.measure import cosines
from tidegate.tools.build.split.graph_cut import cut_tensors, head_of, tail_of
from tidegate.tools.build.split.layer_splitter import SplitOptions, split_layers
from tidegate.types import Datatype

QUIET = lambda _what, _ratio: None  # noqa: E731
FLOORS: dict[Activation, float] = {"fp32": 1.0 - 1e-9, "fp16": 0.9999, "int8": 0.99}


def test_a_residual_network_is_cut_between_its_blocks_and_never_inside_of_one() -> None:
    found = cut_tensors(residual_graph().graph, "image", Path("x.onnx"))
    inside = {name for name in found if name.endswith(("_relu", "_first", "_second", "_around"))}
    assert not inside
    assert set(ENDS) <= set(found)
    assert "scores" not in found  # an output: nothing would be left for the tail


def test_a_tensor_beside_which_the_input_goes_on_is_no_cut() -> None:
    graph = residual_graph().graph
    # The scores also take the image itself: nothing separates it from them any more.
    graph.node.append(onnx.helper.make_node("ReduceSum", ["image"], ["total"], keepdims=0))
    graph.node.append(onnx.helper.make_node("Add", ["scores", "total"], ["moved"]))
    del graph.output[:]
    graph.output.append(onnx.helper.make_tensor_value_info("moved", onnx.TensorProto.FLOAT, None))
    assert cut_tensors(graph, "image", Path("x.onnx")) == ()


def test_each_weight_is_in_one_half_and_the_tail_takes_no_image() -> None:
    whole = residual_graph(masked=True)
    head, tail = head_of(whole, ENDS[1]), tail_of(whole, ENDS[1])
    weights = [{one.name for one in part.graph.initializer} for part in (head, tail)]
    assert not weights[0] & weights[1]
    assert weights[0] | weights[1] == {one.name for one in whole.graph.initializer}
    assert [one.name for one in head.graph.input] == ["image"]
    assert [one.name for one in tail.graph.input] == [ENDS[1], "mask"]


def test_control_flow_is_refused_by_name() -> None:
    with pytest.raises(BuildError, match=r"control flow \(Loop\)"):
        cut_tensors(rounds_graph().graph, "rounds", Path("x.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["fp32", "fp16", "int8"])
def test_both_halves_answer_as_the_whole_however_the_activations_travel(tmp_path: Path, activation: Activation) -> None:
    repository = Repository(residual_repository(tmp_path, masked=True))
    found = split_layers(repository, NAME, SplitOptions(activation=activation, layers=ENDS[:2]), QUIET)
    written = Repository(tmp_path)
    whole = written.manifest(NAME)
    assert whole.split is not None
    assert [cut.layer for cut in whole.split.cuts] == list(ENDS[:2])
    for cut in whole.split.cuts:
        assert cut.cosine >= FLOORS[activation]
        head, tail = written.manifest(cut.head), written.manifest(cut.tail)
        for rows in (1, 3):
            feed = example_arrays(whole, {"batch": rows}, seed=9)
            answers, between = _through(written, head, tail, feed)
            wanted = _engine(written, whole).infer(feed)["scores"]
            assert cosines(wanted, answers).min() >= FLOORS[activation]
            assert between == cut.bytes_between(rows, float(feed["image"].size))
            # A row's answer does not depend on its batch-mates, also where scales are shared.
            alone, _ = _through(written, head, tail, {name: array[:1] for name, array in feed.items()})
            np.testing.assert_allclose(answers[:1], alone, rtol=1e-5, atol=1e-5)
    assert found.manifest == whole


@pytest.mark.slow
def test_the_smallest_way_to_travel_that_is_close_enough_is_chosen_and_none_where_none_is(tmp_path: Path) -> None:
    repository = Repository(residual_repository(tmp_path))
    usual = split_layers(repository, NAME, SplitOptions(layers=(ENDS[0],)), QUIET).cuts[0]
    assert usual.cut.activation == "int8"
    assert usual.cosines["fp16"] > usual.cosines["int8"]
    exacting = SplitOptions(layers=(ENDS[0],), least_cosine=0.9999999)
    assert split_layers(Repository(tmp_path), NAME, exacting, QUIET).cuts[0].cut.activation == "fp16"


@pytest.mark.slow
def test_the_command_writes_halves_that_verify_and_a_second_run_removes_those_that_it_does_not_make(
    tmp_path: Path,
) -> None:
    residual_repository(tmp_path)
    said = _run("split-layers", NAME, "--layer", ENDS[0], "--layer", ENDS[1], "--json", "--repository", str(tmp_path))
    assert [cut["layer"] for cut in said["cuts"]] == list(ENDS[:2])
    assert all(cut["measured"]["head_ms"] > 0.0 for cut in said["cuts"])
    assert {one.name for one in Repository(tmp_path).manifests()} == {
        NAME, f"{NAME}.head-1", f"{NAME}.tail-1", f"{NAME}.head-2", f"{NAME}.tail-2",
    }  # fmt: skip
    assert CliRunner().invoke(model, ["verify", "--repository", str(tmp_path)]).exit_code == 0
    said = _run("split-layers", NAME, "--layer", ENDS[2], "--json", "--repository", str(tmp_path))
    assert {one.name for one in Repository(tmp_path).manifests()} == {NAME, f"{NAME}.head-1", f"{NAME}.tail-1"}
    wrong = CliRunner().invoke(model, ["split-layers", NAME, "--layer", "block0_relu", "--repository", str(tmp_path)])
    assert wrong.exit_code == 1
    assert "--layer 'block0_relu': the model cannot be cut there (it can at" in wrong.output


@pytest.mark.slow
def test_halves_of_a_model_that_was_added_anew_are_removed_by_the_next_cut(tmp_path: Path) -> None:
    split_layers(Repository(residual_repository(tmp_path)), NAME, SplitOptions(layers=ENDS[:2]), QUIET)
    cut = Repository(tmp_path).manifest(NAME)
    save_manifest(tmp_path / NAME / "1", replace(cut, split=None))  # as `model add --force` leaves it
    split_layers(Repository(tmp_path), NAME, SplitOptions(layers=ENDS[:1]), QUIET)
    assert {one.name for one in Repository(tmp_path).manifests()} == {NAME, f"{NAME}.head-1", f"{NAME}.tail-1"}


@pytest.mark.slow
def test_a_model_whose_requests_may_have_no_rows_is_cut_on_some(tmp_path: Path) -> None:
    whole = Repository(residual_repository(tmp_path)).manifest(NAME)
    save_manifest(tmp_path / NAME / "1", replace(whole, axes={"batch": Axis(0, 8)}))
    found = split_layers(Repository(tmp_path), NAME, SplitOptions(layers=ENDS[:1]), QUIET)
    assert found.manifest.split is not None
    assert found.manifest.split.cuts[0].cosine > 0.99


def test_a_model_with_a_pipeline_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    whole = Repository(residual_repository(tmp_path)).manifest(NAME)
    shares = TensorSpec("shares", Datatype.FP32, ("batch", 10))
    after = (SoftmaxStep(inputs=("scores",), outputs=("shares",)),)
    steps = Pipeline(whole.inputs, whole.outputs, whole.cost, after=after)
    save_manifest(tmp_path / NAME / "1", replace(whole, outputs=(shares,), pipeline=steps))
    with pytest.raises(BuildError, match="a model with the key 'pipeline' is not cut"):
        split_layers(Repository(tmp_path), NAME, SplitOptions(layers=ENDS[:1]), QUIET)
    assert [one.name for one in Repository(tmp_path).manifests()] == [NAME]


@pytest.mark.slow
def test_halves_that_do_not_fit_their_whole_are_refused_by_key(tmp_path: Path) -> None:
    split_layers(Repository(residual_repository(tmp_path)), NAME, SplitOptions(layers=(ENDS[0],)), QUIET)
    tail = Repository(tmp_path).manifest(f"{NAME}.tail-1")
    # A tail that takes the image would be no reason to keep it on the edge.
    image = Repository(tmp_path).manifest(NAME).inputs[0]
    save_manifest(tmp_path / tail.name / "1", _with_input(tail, image))
    with pytest.raises(RepositoryError, match=r"split.cuts\[0\].tail: 'cnn.tail-1' takes 'image', the raw input"):
        Repository(tmp_path).manifests()


def _with_input(manifest: Manifest, spec: Any) -> Manifest:
    return replace(manifest, inputs=(*manifest.inputs, spec), axes={**manifest.axes})


def _engine(repository: Repository, manifest: Manifest) -> Any:
    (variant,) = manifest.variants
    return load_engine("onnx", repository.artefact(manifest, variant), outputs=())


def _through(repository: Repository, head: Manifest, tail: Manifest, feed: dict[str, Any]) -> tuple[Any, int]:
    """The answer by way of both halves, and the bytes between them."""
    given = _engine(repository, head).infer({spec.name: feed[spec.name] for spec in head.inputs})
    taken = {spec.name: {**feed, **given}[spec.name] for spec in tail.inputs}
    return _engine(repository, tail).infer(taken)["scores"], sum(array.nbytes for array in taken.values())


def _run(*words: str) -> Any:
    done = CliRunner().invoke(model, list(words))
    assert done.exit_code == 0, done.output
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"model"')))


@pytest.mark.slow
def test_a_half_of_another_model_is_no_half_of_this_one(tmp_path: Path) -> None:
    split_layers(Repository(residual_repository(tmp_path)), NAME, SplitOptions(layers=(ENDS[0],)), QUIET)
    tail = Repository(tmp_path).manifest(f"{NAME}.tail-1")
    whole, head = Repository(tmp_path).manifest(NAME), Repository(tmp_path).manifest(f"{NAME}.head-1")
    assert whole.split is not None
    assert whole_halves(whole, head, tail, whole.split.cuts[0]) is not None
    stranger = replace(tail, half=SplitHalf("other", "tail"))
    assert whole_halves(whole, head, stranger, whole.split.cuts[0]) is None
    save_manifest(tmp_path / tail.name / "1", stranger)
    with pytest.raises(RepositoryError, match="does not say in its key `half` that it is the tail of 'cnn'"):
        Repository(tmp_path).manifests()


@pytest.mark.parametrize(("changed", "said"), [
    ({"head": "cnn"}, "split.cuts[0].head: 'cnn' is another half's name, or the model's own"),
    ({"tail": "no/name"}, "split.cuts[0].tail: 'no/name' must be 1 to 128 letters"),
    ({"bytes_per_row": -1.0}, "split.cuts[0].bytes_per_row: -1 must not be negative"),
    ({"cosine": 2.0}, "split.cuts[0].cosine: 2 must be from -1 to 1"),
    ({"samples": 0}, "split.cuts[0].samples: 0 must be at least 1"),
])  # fmt: skip
def test_a_section_that_is_wrong_is_refused_by_key_and_value(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    whole = Repository(residual_repository(tmp_path)).manifest(NAME)
    cut = SplitCut("x", "a", "b", "int8", 1.0, bytes_per_unit=0.0, head_share=0.5, cosine=1.0, samples=1)
    assert problems(replace(whole, split=LayerSplit((cut,)))) == ()
    (problem,) = problems(replace(whole, split=LayerSplit((replace(cut, **changed),))))
    assert problem.startswith(said)

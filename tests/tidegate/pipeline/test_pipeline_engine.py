"""A pipeline around a model: what goes in, what comes out, and whose fault it is when it does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from tests.support.models.pipelines import LABELS, TABLE, weather_repository
from tidegate.engines.errors import EngineError
from tidegate.models.manifest import Axis, Cost, Manifest, Pipeline, TensorSpec
from tidegate.models.steps import PoolingStep, SoftmaxStep
from tidegate.pipeline.config import default_steps
from tidegate.pipeline.pipeline_engine import PipelineEngine
from tidegate.pipeline.plan import Part, StepPlan, plan_of
from tidegate.pipeline.refusal import StepRefused
from tidegate.types import Datatype

Arrays = Mapping[str, NDArray[Any]]


class TableModel:
    """An engine that looks its scores up, or gives what it is told to."""

    def __init__(self, **gives: NDArray[Any]) -> None:
        self.gives = gives
        self.took: Arrays = {}

    def infer(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        self.took = inputs
        mask = inputs["attention_mask"][:, :, None].astype(np.float32)
        return self.gives or {"token_scores": TABLE[inputs["input_ids"]] * mask}

    def __repr__(self) -> str:
        return "<TableModel>"


def without_modules(manifest: Manifest) -> Manifest:
    """The model of the tests without its two WebAssembly steps: these tests need no wasmtime."""
    pipeline = manifest.pipeline
    assert pipeline is not None
    tokenize = replace(pipeline.before[1], inputs=("text",))
    softmax = SoftmaxStep(("scores",), ("probabilities",))
    after = (pipeline.after[0], softmax, *pipeline.after[3:])
    return replace(manifest, pipeline=replace(pipeline, before=(tokenize,), after=after))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Path]:
    root = tmp_path_factory.mktemp("models")
    found = weather_repository(root, {"redact": b"\0asm one", "clip": b"\0asm another"})
    return without_modules(found), root / "weather" / "1"


def plan(of: tuple[Manifest, Path], part: Part = "all", **keys: Any) -> StepPlan:
    manifest, folder = of
    assert manifest.pipeline is not None
    changed = replace(manifest, pipeline=replace(manifest.pipeline, **keys))
    found = plan_of(changed, str(folder), default_steps().limits, part)
    assert found is not None
    return found


def texts(*words: str | bytes) -> dict[str, NDArray[Any]]:
    array = np.empty(len(words), object)
    array[:] = [word if isinstance(word, bytes) else word.encode() for word in words]
    return {"text": array}


def test_a_text_becomes_the_name_of_a_class(manifest: tuple[Manifest, Path]) -> None:
    model = TableModel()
    found = PipelineEngine(plan(manifest), model).infer(texts("calm the tide", "storm"))
    assert list(found) == ["label", "best", "probabilities"]
    assert found["label"].tolist() == [[b"smooth"], [b"rough"]]
    assert model.took["input_ids"].tolist() == [[1, 4, 3], [2, 0, 0]]
    assert model.took["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_its_two_sides_give_what_the_whole_gives(manifest: tuple[Manifest, Path]) -> None:
    model = TableModel()
    whole = PipelineEngine(plan(manifest), model).infer(texts("calm", "the storm tide"))
    before = PipelineEngine(plan(manifest, "before")).infer(texts("calm", "the storm tide"))
    assert list(before) == ["input_ids", "attention_mask"]
    kept = {name: before[name] for name in plan(manifest).kept}
    assert list(kept) == ["attention_mask"]
    after = PipelineEngine(plan(manifest, "after")).infer({**model.infer(before), **kept})
    for name, array in whole.items():
        np.testing.assert_array_equal(after[name], array)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=40), min_size=0, max_size=10))
def test_whatever_is_sent_both_ends_are_as_declared_or_it_is_refused(
    manifest: tuple[Manifest, Path], words: list[bytes]
) -> None:
    engine, axes = PipelineEngine(plan(manifest), model := TableModel()), manifest[0].axes
    try:
        found = engine.infer(texts(*words))
    except StepRefused:
        assert not 1 <= len(words) <= axes["batch"].max or any(not _is_utf8(word) for word in words)
        return
    ids = model.took["input_ids"]
    assert ids.shape[0] == len(words)
    assert axes["sequence"].min <= ids.shape[1] <= axes["sequence"].max
    assert found["probabilities"].shape == (len(words), len(LABELS))
    assert found["probabilities"].dtype == np.float32
    np.testing.assert_allclose(found["probabilities"].sum(axis=1), 1.0, rtol=1e-5)
    assert set(found["label"].ravel().tolist()) <= {label.encode() for label in LABELS}


def _is_utf8(word: bytes) -> bool:
    try:
        word.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_long_text_is_cut_where_the_step_says(manifest: tuple[Manifest, Path]) -> None:
    PipelineEngine(plan(manifest), model := TableModel()).infer(texts("calm " * 5000))
    assert model.took["input_ids"].shape == (1, 32)


def test_too_much_text_is_refused_before_it_is_read(manifest: tuple[Manifest, Path]) -> None:
    with pytest.raises(StepRefused, match="the texts have 524289 bytes, and at most 524288 of a request are read"):
        PipelineEngine(plan(manifest), TableModel()).infer(texts(b" " * 524_289))


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        ({"token_scores": np.zeros((1, 1), np.float32)}, "output 'token_scores' has 2 dimensions"),
        ({"token_scores": np.zeros((1, 9, 3), np.float32)}, "axis 'sequence' is 9, but 1 in another tensor"),
        ({"logits": np.zeros((1, 1, 3), np.float32)}, r"gave no output 'token_scores' \(it gave logits\)"),
    ],
)
def test_what_the_model_does_wrong_is_the_engines_fault(
    manifest: tuple[Manifest, Path], gives: dict[str, NDArray[Any]], words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        PipelineEngine(plan(manifest), TableModel(**gives)).infer(texts("calm"))


def test_what_no_step_may_give_to_the_model_does_not_reach_it(manifest: tuple[Manifest, Path]) -> None:
    """Ids beyond the model's table kill its worker; a tokenizer of more words than it has would give them."""
    pipeline = manifest[0].pipeline
    assert pipeline is not None
    bounds = pipeline.inputs[0].bounds
    assert bounds is not None
    ids = replace(pipeline.inputs[0], bounds=replace(bounds, max=2.0))
    engine = PipelineEngine(plan(manifest, inputs=(ids, pipeline.inputs[1])), model := TableModel())
    with pytest.raises(StepRefused, match=r"step tokenize .*'input_ids' has values outside of 0 to 2"):
        engine.infer(texts("calm tide"))
    assert model.took == {}


def test_a_step_says_which_one_it_is(manifest: tuple[Manifest, Path]) -> None:
    engine = PipelineEngine(plan(manifest), TableModel())
    with pytest.raises(StepRefused, match=r"^step tokenize \(tokenizer.json\): text 1 is not UTF-8"):
        engine.infer(texts("calm", b"\xc3"))
    with pytest.raises(StepRefused, match="there is no tensor 'words' in this pipeline"):
        engine.infer({"words": np.zeros(1)})


def test_steps_that_cannot_be_made_are_told_when_the_engine_is_loaded(
    manifest: tuple[Manifest, Path], tmp_path: Path
) -> None:
    pipeline = manifest[0].pipeline
    assert pipeline is not None
    for name, words in (("gone.json", "No such file"), ("labels.txt", "is no tokenizer")):
        tokenize = replace(pipeline.before[0], file=name)
        with pytest.raises(EngineError, match=rf"step tokenize \({name}\): .*{words}"):
            PipelineEngine(plan(manifest, before=(tokenize,)), TableModel())


def test_a_pipeline_of_the_models_outputs_alone_needs_no_step_before_it() -> None:
    hidden = TensorSpec("hidden", Datatype.FP32, ("batch", "length", 2))
    x = TensorSpec("x", Datatype.FP32, ("batch", "length"))
    vector = TensorSpec("vector", Datatype.FP32, ("batch", 2))
    pipeline = Pipeline((x,), (hidden,), Cost("items", "x"), after=(PoolingStep(("hidden",), ("vector",)),))
    axes = {"batch": Axis(1, 4), "length": Axis(1, 4)}
    of = StepPlan(pipeline, (x,), (vector,), axes=axes, folder="", limits=default_steps().limits)

    class Pairs:
        def infer(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
            return {"hidden": np.stack([inputs["x"], -inputs["x"]], axis=2)}

    found = PipelineEngine(of, Pairs()).infer({"x": np.array([[1.0, 3.0]], np.float32)})
    assert found["vector"].tolist() == [[2.0, -2.0]]

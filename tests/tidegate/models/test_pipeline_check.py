"""What a manifest's pipeline must be, and which mistakes are told by their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.models.pipelines import weather_repository
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Cost, Manifest, TensorSpec
from tidegate.models.repository import (
    Repository,
    RepositoryError,
    load_manifest,
    manifest_text,
    parse_manifest,
    save_manifest,
)
from tidegate.models.steps import ImageDecodeStep, NormaliseStep, ResizeStep, SoftmaxStep, TopKStep, WasmStep
from tidegate.models.validate import problems
from tidegate.models.work import Work, work_of, work_of_arrays
from tidegate.oip.check import check
from tidegate.outcome import InvalidRequest
from tidegate.pipeline.image_decode import ImageDecoder
from tidegate.tools.delivery.files import files_of
from tidegate.types import Datatype, InferRequest, Tensor

ANY_MODULES = {"redact": b"\0asm one", "clip": b"\0asm another"}
FP32, BYTES = Datatype.FP32, Datatype.BYTES


@pytest.fixture
def weather(tmp_path: Path) -> Manifest:
    return weather_repository(tmp_path, ANY_MODULES)


def changed(manifest: Manifest, **keys: Any) -> Manifest:
    assert manifest.pipeline is not None
    return replace(manifest, pipeline=replace(manifest.pipeline, **keys))


def test_a_pipeline_reads_as_it_was_written(tmp_path: Path, weather: Manifest) -> None:
    assert load_manifest(tmp_path / "weather" / "1") == weather
    assert parse_manifest(manifest_text(weather), tmp_path) == weather


def test_its_artefacts_are_seen_with_their_own_ends(weather: Manifest) -> None:
    inner = weather.of_model
    assert [spec.name for spec in inner.inputs] == ["input_ids", "attention_mask"]
    assert [spec.name for spec in inner.outputs] == ["token_scores"]
    assert (inner.cost, inner.pipeline) == (Cost("tokens", "input_ids"), None)
    assert inner.of_model is inner


def test_other_steps_around_one_artefact_are_another_digest(weather: Manifest) -> None:
    (variant, _), pipeline = weather.variants, weather.pipeline
    assert pipeline is not None
    assert weather.of_model.digest_of(variant) == variant.sha256
    redact, tokenize = pipeline.before
    other = changed(weather, before=(replace(redact, sha256="0" * 64), tokenize))
    assert len({variant.sha256, weather.digest_of(variant), other.digest_of(variant)}) == 3


def test_callers_are_checked_against_the_pipelines_ends(weather: Manifest) -> None:
    raw = b"\4\0\0\0calm"
    check(InferRequest("weather", (Tensor("text", BYTES, (1,), raw),)), weather)
    with pytest.raises(InvalidRequest, match="unknown input 'input_ids'; model 'weather' takes: text"):
        check(InferRequest("weather", (Tensor("input_ids", Datatype.INT64, (1, 1), bytes(8)),)), weather)


@pytest.mark.parametrize(
    ("text_bytes", "rows", "work"),
    [(4, 1, Work(1, 1, 1)), (41, 1, Work(11, 1, 11)), (80, 2, Work(20, 2, 10)), (10**6, 2, Work(64, 2, 32))],
)
def test_a_text_is_priced_by_its_bytes_up_to_the_tokens_that_are_read(
    weather: Manifest, text_bytes: int, rows: int, work: Work
) -> None:
    tensor = Tensor("text", BYTES, (rows,), bytes(text_bytes + 4 * rows))
    assert work_of(weather, InferRequest("weather", (tensor,))) == work


def test_examples_of_text_are_as_long_as_their_tokens(weather: Manifest) -> None:
    for length in (1, 7, 32):
        inputs = example_arrays(weather, {"sequence": length, "batch": 2})
        assert work_of_arrays(weather, inputs).units == 2 * length


def test_devices_get_the_files_of_the_steps(tmp_path: Path, weather: Manifest) -> None:
    names = [one.artefact.path for one in files_of(Repository(tmp_path), weather)]
    assert names == ["model.yaml", "model.onnx", "redact.wasm", "tokenizer.json", "clip.wasm", "labels.txt"]
    (tmp_path / "weather" / "1" / "clip.wasm").write_bytes(b"\0asm ANOTHER")
    with pytest.raises(RepositoryError, match=r"clip\.wasm: has sha256"):
        files_of(Repository(tmp_path), weather)


def test_each_mistake_is_told_by_its_key(tmp_path: Path, weather: Manifest) -> None:
    pipeline = weather.pipeline
    assert pipeline is not None
    pool, clip, softmax, top_k, labels = pipeline.after
    redact, tokenize = pipeline.before
    spec = TensorSpec("scores", FP32, ("batch", 3))
    wrong: list[tuple[Manifest, str]] = [
        (changed(weather, before=(), after=()), "pipeline: has no steps"),
        (changed(weather, before=(tokenize, redact)), "pipeline.before[0] (tokenize).inputs: there is no 'clean' yet"),
        (changed(weather, before=(redact,)), "pipeline.inputs: nothing gives 'input_ids'"),
        (changed(weather, after=(pool, clip, softmax, top_k)), "outputs: nothing gives 'label'"),
        (changed(weather, after=(pool, pool, *pipeline.after[1:])), "outputs: 'scores' is there already"),
        (changed(weather, tensors=pipeline.tensors[1:]), "'clean' is not declared; say its datatype and shape"),
        (changed(weather, tensors=(*pipeline.tensors, replace(spec, name="label"))), "'label' is declared twice"),
        (changed(weather, after=(pool, clip, softmax, replace(top_k, k=9), labels)), "k: 9 must be from 1 to 3"),
        (changed(weather, after=(pool, SoftmaxStep(("scores", "scores"), ("clipped",)))), "inputs: 2 tensors, but"),
        (changed(weather, before=(redact, replace(tokenize, max_tokens=0))), "max_tokens: 0 must be at least 1"),
        (changed(weather, before=(redact, replace(tokenize, file="../x"))), "'../x' must be a plain file name"),
        (changed(weather, before=(redact, replace(tokenize, sha256="x"))), "sha256 'x' must be 64"),
        (changed(weather, before=(redact, replace(tokenize, file="model.onnx"))), "'model.onnx' is an artefact"),
        (changed(weather, cost=Cost("tokens", "text")), "pipeline.cost.input: 'text' is not an input"),
        (replace(weather, warmup=("a.npz",)), "pipeline: does not go with the section 'warmup'"),
        (replace(weather, batching=replace(weather.batching, pad_axis="words")), "batching.pad_axis: 'words'"),
        (changed(weather, after=(*pipeline.after, WasmStep((), ("x",), "m.wasm", "0" * 64, 1))), "at least one tensor"),
    ]
    for manifest, words in wrong:
        found = problems(manifest)
        assert any(words in one for one in found), (words, found)
        with pytest.raises(RepositoryError):
            save_manifest(tmp_path / "refused", manifest)


def test_images_are_checked_by_their_channels_and_sizes(weather: Manifest) -> None:
    image = TensorSpec("image", Datatype.UINT8, ("batch", 8, 8, 3))
    resized = TensorSpec("resized", FP32, ("batch", 4, 5, 3))
    x = TensorSpec("x", FP32, ("batch", 3, 4, 5))
    y = TensorSpec("y", FP32, ("batch", 2))
    steps = (
        ResizeStep(("image",), ("resized",), height=4, width=5),
        NormaliseStep(("resized",), ("x",), mean=(0.5,), std=(0.2, 0.2, 0.2), layout="nchw"),
    )
    assert weather.pipeline is not None
    pipeline = replace(
        weather.pipeline,
        before=steps,
        inputs=(x,),
        outputs=(y,),
        after=(),
        tensors=(resized,),
        cost=Cost("pixels", "x"),
    )
    good = replace(
        weather,
        inputs=(image,),
        outputs=(y,),
        cost=Cost("pixels", "image"),
        batching=replace(weather.batching, pad_axis=None),
        pipeline=pipeline,
    )
    assert problems(good) == ()
    for before, words in (
        ((replace(steps[0], height=6), steps[1]), "images become 6 x 5"),
        ((steps[0], replace(steps[1], std=(0.2, 0.2))), "std: 2 values for 3 channels"),
        ((steps[0], replace(steps[1], std=(0.0,))), "and not 0"),
        ((TopKStep(("image",), ("resized",), k=1), steps[1]), "'image' is UINT8"),
    ):
        assert any(words in one for one in problems(changed(good, before=before))), words
    assert np.prod(example_arrays(good, {"batch": 2})["image"].shape) == 2 * 8 * 8 * 3


def test_files_of_images_are_checked_priced_and_made_up_by_what_the_model_gets(weather: Manifest) -> None:
    file = TensorSpec("file", BYTES, ("batch",))
    pixels = TensorSpec("pixels", FP32, ("batch", 3, 4, 5))
    y = TensorSpec("y", FP32, ("batch", 2))
    step = ImageDecodeStep(("file",), ("pixels",), height=4, width=5, layout="nchw", mean=(0.5, 0.5, 0.5))
    assert weather.pipeline is not None
    cost = Cost("pixels", "pixels")
    pipeline = replace(
        weather.pipeline, before=(step,), inputs=(pixels,), outputs=(y,), after=(), tensors=(), cost=cost
    )
    good = replace(
        weather,
        inputs=(file,),
        outputs=(y,),
        cost=Cost("pixels", "file"),
        batching=replace(weather.batching, pad_axis=None),
        pipeline=pipeline,
    )
    assert problems(good) == ()
    bytes_out = replace(pixels, datatype=Datatype.UINT8)
    for keys, words in (
        ({"height": 6}, "'pixels' has shape ['batch', 3, 4, 5], but each image becomes [3, 6, 5] (nchw)"),
        ({"layout": "nhwc"}, "but each image becomes [4, 5, 3] (nhwc)"),
        ({"channels": "L", "mean": (0.0,)}, "but each image becomes [1, 4, 5] (nchw)"),
        ({"std": (0.2, 0.2)}, "std: 2 values for 3 channels"),
        ({"std": (0.0,)}, "and not 0"),
        ({"width": 0}, "width: 0 must be from 1 to"),
        ({"max_pixels": 2**26 + 1}, "max_pixels: 67108865 must be from 1 to 67108864"),
        ({"max_bytes": 0}, "max_bytes: 0 must be from 1 to"),
        ({"max_pixels": 159}, "max_pixels: 159 are fewer than 8 images of 4 x 5 have, which is the largest batch"),
    ):
        found = problems(changed(good, before=(replace(step, **keys),)))
        assert any(words in one for one in found), (words, found)
    for found in (
        problems(changed(good, inputs=(bytes_out,))),
        problems(replace(good, inputs=(replace(file, datatype=FP32),))),
    ):
        assert any(
            "UINT8, and what is scaled" in one or "'file' is FP32; files of images are BYTES" in one for one in found
        )

    inputs = example_arrays(good, {"batch": 3})
    assert inputs["file"].shape == (3,) and work_of_arrays(good, inputs) == Work(3 * 4 * 5, 3, 5)
    decoder = ImageDecoder(step, pixels)
    assert decoder.of(inputs["file"], budget_s=9.0).shape == (3, 3, 4, 5)
    few = changed(good, before=(replace(step, max_pixels=60),))
    assert (
        ImageDecoder(replace(step, max_pixels=60), pixels)
        .of(example_arrays(few, {"batch": 3})["file"], budget_s=9.0)
        .size
    )

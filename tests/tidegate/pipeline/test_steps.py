"""What the steps compute, held to other implementations of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tidegate.models.steps import LabelsStep, NormaliseStep, PoolingStep, ResizeStep, TopKStep
from tidegate.pipeline.image import normalise, resize
from tidegate.pipeline.refusal import StepRefused
from tidegate.pipeline.scores import Labels, pool, softmax, top_k

ENDS = (("a",), ("b",))


def resized_by_onnx(images: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    rows, _, _, channels = images.shape
    node = helper.make_node(
        "Resize",
        ["x", "", "", "sizes"],
        ["y"],
        mode="linear",
        coordinate_transformation_mode="half_pixel",
        antialias=0,
    )
    graph = helper.make_graph(
        [node],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "c", "h", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "c", "i", "j"])],
        [helper.make_tensor("sizes", TensorProto.INT64, [4], [rows, channels, height, width])],
    )
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 18)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": images.astype(np.float32).transpose(0, 3, 1, 2)})
    return np.asarray(found).transpose(0, 2, 3, 1)


@pytest.mark.parametrize("size", [(5, 9), (16, 12), (1, 1), (31, 7)])
def test_images_are_resized_as_onnx_does_it(size: tuple[int, int]) -> None:
    images = np.random.default_rng(1).integers(0, 256, (2, 16, 12, 3)).astype(np.uint8)
    ours = resize(ResizeStep(*ENDS, height=size[0], width=size[1]), images)
    np.testing.assert_allclose(ours, resized_by_onnx(images, *size), atol=1e-3)


def test_pixels_are_scaled_by_channel_and_laid_out_anew() -> None:
    images = np.array([[[[0, 51, 255]]]], np.uint8)
    step = NormaliseStep(*ENDS, mean=(0.5, 0.2, 0.0), std=(0.5, 0.1, 2.0), scale=1 / 255, layout="nchw")
    found = normalise(step, images)
    np.testing.assert_allclose(found, np.array([-1.0, 0.0, 0.5]).reshape(1, 3, 1, 1), atol=1e-6)


def test_token_vectors_become_one_without_what_is_padding() -> None:
    vectors = np.array([[[1, 5], [3, -2], [99, 99]], [[4, 4], [9, 9], [9, 9]]], np.float32)
    mask = np.array([[1, 1, 0], [0, 0, 0]])
    np.testing.assert_allclose(pool(PoolingStep(*ENDS), vectors, mask), [[2, 1.5], [0, 0]])
    np.testing.assert_allclose(pool(PoolingStep(*ENDS, how="max"), vectors, mask), [[3, 5], [0, 0]])
    np.testing.assert_allclose(pool(PoolingStep(*ENDS, how="first"), vectors, mask), [[1, 5], [4, 4]])
    unit = pool(PoolingStep(*ENDS, unit_length=True), vectors)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), [1, 1], rtol=1e-6)


def test_probabilities_are_finite_for_scores_of_any_size() -> None:
    found = softmax(np.array([[1e4, 0.0, -1e4], [1.0, 1.0, 1.0]], np.float32))
    np.testing.assert_allclose(found, [[1, 0, 0], [1 / 3, 1 / 3, 1 / 3]], atol=1e-6)


def test_the_best_come_first_and_of_equal_ones_the_first_and_nan_last() -> None:
    values, places = top_k(TopKStep(*ENDS, k=3), np.array([[1.0, 7.0, 7.0, np.nan]], np.float32))
    assert places.tolist() == [[1, 2, 0]]
    assert values.tolist() == [[7.0, 7.0, 1.0]]
    with pytest.raises(StepRefused, match="there are 2 scores, fewer than k = 3"):
        top_k(TopKStep(*ENDS, k=3), np.zeros((1, 2), np.float32))


@pytest.mark.parametrize("content", [
    b"a\n\x0c\n\xe2\x80\xa8\n\xc2\x85\n", b"\xef\xbb\xbfa\r\n\x0c\r\n\xe2\x80\xa8\r\n\xc2\x85",
])  # fmt: skip
def test_a_name_may_be_a_character_that_ends_lines_elsewhere(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "l.txt").write_bytes(content)
    labels = Labels(LabelsStep(*ENDS, "l.txt", "0" * 64, 1), tmp_path / "l.txt")
    assert labels.of(np.arange(4)).tolist() == [b"a", b"\x0c", "\u2028".encode(), "\x85".encode()]
    assert len(labels) == 4


def test_places_have_the_names_of_their_lines(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("sand\nwasser – süß\n", encoding="utf-8")
    labels = Labels(LabelsStep(*ENDS, "l.txt", "0" * 64, 1), tmp_path / "l.txt")
    assert labels.of(np.array([[1, 0]])).tolist() == [["wasser – süß".encode(), b"sand"]]
    for place in (-1, 2):
        with pytest.raises(StepRefused, match=f"place {place} has no name: 'l.txt' has 2 lines"):
            labels.of(np.array([[0, place]]))

"""Padding joins unequal requests into one batch, and splits its outputs by caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.batching.padding import Arrays, BatchLayout, Extent, WrongResults
from tests.cloud_pool.models import manifest_of
from tidegate.models.manifest import Axis, Batching, Cost, Manifest, TensorSpec
from tidegate.types import Datatype

TEXT = manifest_of(
    inputs=(
        TensorSpec("input_ids", Datatype.INT64, ("batch", "sequence")),
        TensorSpec("attention_mask", Datatype.INT64, ("batch", "sequence")),
    ),
    outputs=(
        TensorSpec("embedding", Datatype.FP32, ("batch", 2)),
        TensorSpec("states", Datatype.FP32, ("batch", "sequence", 2)),
    ),
    axes={"batch": Axis(), "sequence": Axis(1, 64)},
    batching=Batching(max_batch_size=4, pad_axis="sequence"),
)
IMAGE = manifest_of(
    inputs=(TensorSpec("image", Datatype.FP32, ("batch", 1, "height", "width")),),
    outputs=(TensorSpec("top", Datatype.FP32, ("batch", 3)),),
    cost=Cost("pixels", "image"),
    axes={"batch": Axis(), "height": Axis(), "width": Axis()},
)


def text(length: int, rows: int = 1, fill: int = 1) -> dict[str, NDArray[Any]]:
    return {
        "input_ids": np.full((rows, length), fill, np.int64),
        "attention_mask": np.ones((rows, length), np.int64),
    }


def image(height: int, width: int, rows: int = 1) -> dict[str, NDArray[Any]]:
    return {"image": np.ones((rows, 1, height, width), np.float32)}


def answer(stacked: Arrays) -> dict[str, NDArray[Any]]:
    """A model that gives each row the sum of its ids, and each token itself."""
    ids = stacked["input_ids"].astype(np.float32)
    return {"embedding": np.stack([ids.sum(1)] * 2, 1), "states": np.stack([ids] * 2, 2)}


def test_rows_are_stacked_and_filled_up_with_zeros_and_the_mask_says_so() -> None:
    stacked = BatchLayout(TEXT).stack([text(2, fill=7), text(3, rows=2, fill=9)])
    assert stacked["input_ids"].tolist() == [[7, 7, 0], [9, 9, 9], [9, 9, 9]]
    assert stacked["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert stacked["input_ids"].dtype == np.int64


def test_a_single_request_is_not_copied() -> None:
    arrays = text(5)
    assert BatchLayout(TEXT).stack([arrays]) is arrays


def test_each_caller_gets_its_own_rows_cut_to_its_own_length() -> None:
    layout = BatchLayout(TEXT)
    members = [text(2, fill=7), text(3, rows=2, fill=9)]
    first, second = layout.split(answer(layout.stack(members)), [layout.extent(member) for member in members])
    assert first["embedding"].tolist() == [[14, 14]]
    assert first["states"].shape == (1, 2, 2)
    assert second["embedding"].tolist() == [[27, 27], [27, 27]]
    assert second["states"].shape == (2, 3, 2)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 5), st.integers(1, 999)), min_size=1, max_size=8))
def test_results_are_never_crossed_between_callers(wanted: list[tuple[int, int, int]]) -> None:
    layout = BatchLayout(TEXT)
    members = [text(length, rows, fill) for length, rows, fill in wanted]
    outputs = layout.split(answer(layout.stack(members)), [layout.extent(member) for member in members])
    for (length, rows, fill), own in zip(wanted, outputs, strict=True):
        assert own["embedding"].tolist() == [[length * fill] * 2] * rows
        assert own["states"].shape == (rows, length, 2)
        assert (own["states"] == fill).all()


@pytest.mark.parametrize(
    "outputs",
    [
        {"embedding": np.zeros((2, 2)), "states": np.zeros((3, 4, 2))},
        {"embedding": np.zeros((4, 2)), "states": np.zeros((3, 4, 2))},
        {"embedding": np.zeros(()), "states": np.zeros((3, 4, 2))},
        {"embedding": np.zeros((3, 2))},
    ],
    ids=["a row too few", "a row too many", "no rows", "an output missing"],
)
def test_a_wrong_number_of_results_is_found_before_anyone_is_answered(outputs: Arrays) -> None:
    with pytest.raises(WrongResults):
        BatchLayout(TEXT).split(outputs, [Extent(1, 4), Extent(2, 3)])


def test_texts_of_any_length_are_of_one_kind() -> None:
    layout = BatchLayout(TEXT)
    assert layout.kind(text(3)) == layout.kind(text(60, rows=4))


def test_requests_whose_other_axes_or_types_differ_are_of_different_kinds() -> None:
    layout = BatchLayout(IMAGE)
    assert layout.kind(image(8, 8)) == layout.kind(image(8, 8, rows=3))
    assert layout.kind(image(8, 8)) != layout.kind(image(8, 9))
    halves = {"image": image(8, 8)["image"].astype(np.float16)}
    assert layout.kind(image(8, 8)) != layout.kind(halves)


def test_requests_with_and_without_an_optional_input_are_of_different_kinds() -> None:
    layout = BatchLayout(TEXT)
    without = {"input_ids": text(3)["input_ids"]}
    assert layout.kind(text(3)) != layout.kind(without)


def test_text_elements_are_filled_up_with_nothing() -> None:
    words = manifest_of(
        inputs=(TensorSpec("words", Datatype.BYTES, ("batch", "n")),),
        outputs=(TensorSpec("top", Datatype.FP32, ("batch", 1)),),
        axes={"batch": Axis(), "n": Axis()},
        cost=Cost("items", "words"),
        batching=Batching(pad_axis="n"),
    )
    members = [{"words": np.array([[b"a"]], object)}, {"words": np.array([[b"b", b"c"]], object)}]
    assert BatchLayout(words).stack(members)["words"].tolist() == [[b"a", b""], [b"b", b"c"]]


def test_a_model_whose_tensors_do_not_share_a_first_axis_runs_one_request_at_a_time() -> None:
    scalar = manifest_of(
        inputs=(TensorSpec("x", Datatype.FP32, ("n",)),),
        outputs=(TensorSpec("sum", Datatype.FP32, ()),),
        axes={"n": Axis()},
        cost=Cost("items", "x"),
    )
    layout, arrays = BatchLayout(scalar), {"x": np.ones(50, np.float32)}
    outputs: dict[str, NDArray[Any]] = {"sum": np.float32(50.0).reshape(())}
    assert not layout.joins_rows
    assert layout.extent(arrays) == Extent(1, 1)
    assert layout.split_rows(arrays, 4) == [arrays]
    assert layout.split(outputs, [Extent(1, 1)]) == [outputs]
    lane = ModelInstance("k", scalar, scalar.variants[0], [(1.0, 0.01)])
    assert lane.pieces(arrays, 50.0)[0].kind != lane.pieces(arrays, 50.0)[0].kind


def test_a_request_larger_than_a_batch_goes_in_parts_and_comes_back_whole() -> None:
    layout = BatchLayout(TEXT)
    whole = text(3, rows=10)
    whole["input_ids"][:, 0] = range(10)
    parts = layout.split_rows(whole, 4)
    assert [layout.extent(part).rows for part in parts] == [4, 4, 2]
    joined = layout.join_rows([answer(part) for part in parts])
    assert joined["embedding"].tolist() == answer(whole)["embedding"].tolist()


class TestLane:
    def lane(self, manifest: Manifest = TEXT) -> ModelInstance:
        return ModelInstance("text:1/fp32", manifest, manifest.variants[0], [(1.0, 0.01), (100.0, 0.02)])

    def test_a_piece_knows_its_rows_length_and_work(self) -> None:
        (piece,) = self.lane().pieces(text(10, rows=3), 30.0)
        assert (piece.shape.rows, piece.shape.length, piece.shape.units) == (3, 10, 30.0)
        assert piece.extent == Extent(3, 10)

    def test_parts_are_as_large_as_rows_and_work_of_a_batch_allow(self) -> None:
        by_rows = self.lane().pieces(text(10, rows=9), 90.0)
        assert [piece.shape.rows for piece in by_rows] == [4, 4, 1]
        limited = manifest_of(TEXT, batching=Batching(max_batch_size=4, max_work=25, pad_axis="sequence"))
        assert [piece.shape.rows for piece in self.lane(limited).pieces(text(10, rows=3), 30.0)] == [2, 1]
        assert [piece.shape.rows for piece in self.lane(limited).pieces(text(60, rows=2), 120.0)] == [1, 1]

    def test_where_work_counts_items_padding_costs_nothing(self) -> None:
        items = manifest_of(TEXT, cost=Cost("items", "input_ids"))
        (piece,) = self.lane(items).pieces(text(10, rows=3), 3.0)
        assert (piece.shape.length, piece.shape.cells) == (1, 3.0)

    def test_a_lane_shows_who_waits_and_what_it_costs(self) -> None:
        assert repr(self.lane()).startswith("<ModelInstance text:1/fp32 <Batcher 0/256 waiting")


def test_a_request_that_fits_comes_back_as_it_is() -> None:
    outputs = answer(text(3))
    assert BatchLayout(TEXT).join_rows([outputs]) is outputs


def test_a_layout_shows_what_it_pads() -> None:
    assert repr(BatchLayout(TEXT)) == "<BatchLayout joins rows, pads {'input_ids': (1,), 'attention_mask': (1,)}>"

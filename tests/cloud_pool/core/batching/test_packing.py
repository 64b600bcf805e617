"""Packing joins unequal requests into one batch without padding, and splits its outputs by caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from cloud_pool.core.batching.model_instance import ModelInstance
from cloud_pool.core.batching.packing import PackedLayout, layout_of
from cloud_pool.core.batching.padding import Arrays, WrongResults
from tests.cloud_pool.models import manifest_of
from tidegate.engines.errors import EngineError
from tidegate.engines.packed import PackingEngine
from tidegate.models.manifest import Axis, Batching, Manifest, Packed, TensorSpec, Variant
from tidegate.models.packing import packing_of
from tidegate.models.validate import problems
from tidegate.types import Datatype

PACKED = Packed("sequence", mask="attention_mask")
VARIANT = Variant("packed", "m.onnx", "onnx", "fp32", ("pool",), "0" * 64, 1, packed=PACKED)
TEXT = manifest_of(
    inputs=(
        TensorSpec("input_ids", Datatype.INT64, ("batch", "sequence")),
        TensorSpec("attention_mask", Datatype.INT64, ("batch", "sequence")),
        TensorSpec("scale", Datatype.FP32, ("batch", 1), optional=True),
    ),
    outputs=(
        TensorSpec("embedding", Datatype.FP32, ("batch", 1)),
        TensorSpec("states", Datatype.FP32, ("batch", "sequence", 2)),
    ),
    axes={"batch": Axis(), "sequence": Axis(1, 64)},
    batching=Batching(max_batch_size=8, pad_axis="sequence"),
    variants=(VARIANT,),
)
PACKING = packing_of(TEXT, PACKED)


def packer() -> PackedLayout:
    layout = layout_of(TEXT, VARIANT)
    assert isinstance(layout, PackedLayout)
    return layout


def text(ids: list[list[int]], mask: list[list[int]] | None = None) -> dict[str, NDArray[Any]]:
    array = np.array(ids, np.int64)
    return {
        "input_ids": array,
        "attention_mask": np.ones_like(array) if mask is None else np.array(mask, np.int64),
    }


def answer(batch: Arrays) -> dict[str, NDArray[Any]]:
    """A packed model that gives each row the sum of its real ids, and each token itself."""
    ids = (batch["input_ids"] * batch["attention_mask"]).astype(np.float32)
    starts = np.cumsum(batch["lengths"]) - batch["lengths"]
    return {"embedding": np.add.reduceat(ids, starts)[:, None], "states": np.stack([ids] * 2, 1)}


def run(*members: dict[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
    layout = packer()
    return layout.split(answer(layout.stack(members)), [layout.extent(member) for member in members])


def test_rows_come_one_after_another_with_their_lengths_beside_them() -> None:
    batch = packer().stack([text([[7, 7]]), text([[9, 9, 9], [8, 8, 8]])])
    assert batch["input_ids"].tolist() == [7, 7, 9, 9, 9, 8, 8, 8]
    assert batch["lengths"].tolist() == [2, 3, 3]
    assert batch["lengths"].dtype == np.int64


def test_what_a_caller_has_padded_is_left_out_and_a_gap_inside_of_a_row_is_not() -> None:
    batch = packer().stack([text([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 1, 0, 0], [1, 0, 1, 0]])])
    assert batch["input_ids"].tolist() == [1, 2, 5, 6, 7]
    assert batch["attention_mask"].tolist() == [1, 1, 1, 0, 1]
    assert batch["lengths"].tolist() == [2, 3]


def test_a_row_without_any_token_keeps_one_so_that_no_row_is_empty() -> None:
    batch = packer().stack([text([[4, 5], [6, 7]], [[0, 0], [1, 1]])])
    assert batch["lengths"].tolist() == [1, 2]
    assert batch["attention_mask"].tolist() == [0, 1, 1]


def test_inputs_without_the_axis_are_joined_by_rows() -> None:
    members = [text([[1]]) | {"scale": np.array([[2.0]], np.float32)} for _ in range(2)]
    assert packer().stack(members)["scale"].shape == (2, 1)


def test_each_member_gets_its_own_rows_and_zeros_where_it_had_padded() -> None:
    first, second = run(text([[1, 2, 3], [4, 5, 6]], [[1, 1, 0], [1, 1, 1]]), text([[7]]))
    assert first["embedding"].tolist() == [[3.0], [15.0]]
    assert first["states"][..., 0].tolist() == [[1.0, 2.0, 0.0], [4.0, 5.0, 6.0]]
    assert second["states"].tolist() == [[[7.0, 7.0]]]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 9)).flatmap(
            lambda shape: st.lists(
                st.lists(st.integers(0, 9), min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
            )
        ),
        min_size=1,
        max_size=6,
    )
)
def test_company_changes_nobodys_answer(batch: list[list[list[int]]]) -> None:
    members = [text(ids, [[int(one > 2) for one in row] for row in ids]) for ids in batch]
    for together, member in zip(run(*members), members, strict=True):
        (alone,) = run(member)
        for name, array in alone.items():
            np.testing.assert_array_equal(together[name], array)


@pytest.mark.parametrize(
    ("name", "shape", "words"), [("embedding", (2, 1), "for 1 rows"), ("states", (1, 2), "for 2 rows")]
)
def test_another_number_of_rows_or_tokens_is_noticed(name: str, shape: tuple[int, ...], words: str) -> None:
    layout, member = packer(), text([[1, 2]])
    outputs = answer(layout.stack([member])) | {name: np.zeros(shape, np.float32)}
    with pytest.raises(WrongResults, match=words):
        layout.split(outputs, [layout.extent(member)])


def test_all_lengths_may_share_and_weigh_what_is_real_of_them() -> None:
    lane = ModelInstance("m", TEXT, VARIANT, ((1.0, 0.001), (64.0, 0.064)))
    (short,) = lane.pieces(text([[1, 2, 3, 4]], [[1, 0, 0, 0]]), 4.0)
    (long,) = lane.pieces(text([[1] * 60]), 60.0)
    assert short.kind == long.kind
    assert (short.shape.units, long.shape.units) == (1.0, 60.0)
    assert short.shape.length == long.shape.length  # so no group is stretched


class Inner:
    """The packed model, as an engine that notes what came."""

    def __init__(self) -> None:
        self.calls: list[Arrays] = []

    def infer(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        self.calls.append(inputs)
        return answer(inputs)


def test_an_engine_packs_a_plain_batch_itself_and_leaves_a_packed_one() -> None:
    assert PACKING is not None
    inner = Inner()
    engine = PackingEngine(inner, PACKING)
    plain = text([[1, 2], [3, 4]], [[1, 1], [1, 0]])
    outputs = engine.infer(plain)
    assert outputs["embedding"].tolist() == [[3.0], [3.0]]
    assert outputs["states"][..., 0].tolist() == [[1.0, 2.0], [3.0, 0.0]]
    packed = packer().stack([plain])
    engine.infer(packed)
    assert inner.calls[1] is packed


def test_an_engine_that_gets_nothing_to_pack_says_what_it_takes() -> None:
    assert PACKING is not None
    with pytest.raises(EngineError, match="it packs input_ids, attention_mask, but image came"):
        PackingEngine(Inner(), PACKING).infer({"image": np.zeros((1, 2))})


def test_a_variant_that_does_not_pack_has_the_padded_layout() -> None:
    assert not isinstance(layout_of(TEXT, replace(VARIANT, packed=None)), PackedLayout)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (TEXT, None),
        (replace(TEXT, variants=(replace(VARIANT, packed=Packed("width")),)), "packed.axis: 'width' is not an axis"),
        (
            replace(TEXT, variants=(replace(VARIANT, packed=Packed("sequence", mask="scale")),)),
            "packed.mask: 'scale' is not an input",
        ),
        (
            replace(TEXT, variants=(replace(VARIANT, packed=Packed("sequence", "input_ids")),)),
            "packed.lengths: 'input_ids' must be the name of an input that the model does not have",
        ),
        (
            replace(TEXT, outputs=(TensorSpec("turned", Datatype.FP32, ("batch", 2, "sequence")),)),
            "must be the second axis of turned",
        ),
        (
            replace(TEXT, outputs=(TensorSpec("one", Datatype.FP32, (1,)),)),
            "packed: the first axis of every input and output",
        ),
        (replace(TEXT, variants=(replace(VARIANT, engine="torch-packed", packed=None),)), "say which axis is packed"),
        (replace(TEXT, variants=(replace(VARIANT, compile=True),)), "compile: the engine onnx does not compile"),
    ],
)
def test_a_manifest_that_cannot_be_packed_says_why(manifest: Manifest, words: str | None) -> None:
    found = [problem for problem in problems(manifest) if "packed" in problem or "compile" in problem]
    assert (words is None and not found) or any(words is not None and words in problem for problem in found)

"""Made-up inputs are inputs that the manifest allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.models.example import example_arrays
from tidegate.models.manifest import Axis, Bounds, Cost, Manifest, TensorSpec
from tidegate.types import Datatype


def manifest_of(*inputs: TensorSpec) -> Manifest:
    return Manifest(
        name="m",
        version="1",
        inputs=inputs,
        outputs=(),
        variants=(),
        cost=Cost("tokens", inputs[0].name),
        axes={"batch": Axis(1, 64), "sequence": Axis(2, 256)},
    )


def one(datatype: Datatype, bounds: Bounds | None = None, shape: tuple[int | str, ...] = ("batch", 3)) -> Any:
    return example_arrays(manifest_of(TensorSpec("x", datatype, shape, bounds=bounds)), {"batch": 4})["x"]


def test_axes_have_the_lengths_asked_for_and_others_their_smallest() -> None:
    manifest = manifest_of(TensorSpec("x", Datatype.INT64, ("batch", "sequence", 5)))
    assert example_arrays(manifest, {"batch": 7})["x"].shape == (7, 2, 5)


def test_the_same_seed_gives_the_same_values_and_another_seed_others() -> None:
    manifest = manifest_of(TensorSpec("x", Datatype.FP32, ("batch", 8)))
    first, again, other = (example_arrays(manifest, {"batch": 4}, seed)["x"] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_mask_is_all_ones() -> None:
    assert one(Datatype.INT64, Bounds(0, 1)).min() == 1
    assert one(Datatype.BOOL).all()


def test_integers_without_bounds_are_zero_since_any_table_has_a_first_entry() -> None:
    assert not one(Datatype.INT32).any()


def test_optional_inputs_are_left_out() -> None:
    manifest = manifest_of(TensorSpec("x", Datatype.FP32, ()), TensorSpec("y", Datatype.FP32, (), optional=True))
    assert list(example_arrays(manifest, {})) == ["x"]


def test_bytes_are_arrays_of_bytes() -> None:
    array = one(Datatype.BYTES)
    assert array.dtype == object
    assert array[0, 0] == b"example"


def test_bf16_values_are_the_upper_halves_of_floats() -> None:
    bits = one(Datatype.BF16, Bounds(0, 1)).astype("<u4") << 16
    values = bits.view("<f4")
    assert values.min() >= 0
    assert 0 < values.max() <= 1


@pytest.mark.parametrize("datatype", [one for one in Datatype if one is not Datatype.BYTES])
def test_arrays_have_the_datatype_of_their_tensor(datatype: Datatype) -> None:
    assert one(datatype).dtype == np.dtype(datatype.numpy_name)


@given(low=st.integers(-(2**63), 2**63 - 1), span=st.integers(0, 2**63))
def test_integers_are_within_their_bounds(low: int, span: int) -> None:
    bounds = Bounds(float(max(low, -(2**53))), float(min(low + span, 2**53)))
    if bounds.min > bounds.max:
        return
    values = one(Datatype.INT64, bounds)
    assert values.min() >= bounds.min
    assert values.max() <= bounds.max


@given(low=st.floats(-1e38, 1e38), high=st.floats(-1e38, 1e38))
def test_floats_are_within_their_bounds(low: float, high: float) -> None:
    bounds = Bounds(min(low, high), max(low, high))
    values = one(Datatype.FP64, bounds)
    assert values.min() >= bounds.min
    assert values.max() <= bounds.max


def test_bounds_of_the_widest_integers_still_have_an_example() -> None:
    assert one(Datatype.UINT64, Bounds(0, 2**64 - 1)).dtype == np.uint64


@pytest.mark.parametrize(
    ("lengths", "message"), [({"width": 3}, "no axis 'width'"), ({"sequence": 1}, "from 2 to 256, not to 1")]
)
def test_lengths_that_the_manifest_does_not_allow_are_refused(lengths: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example_arrays(manifest_of(TensorSpec("x", Datatype.FP32, ("sequence",))), lengths)

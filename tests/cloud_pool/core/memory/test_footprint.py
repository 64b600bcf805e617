"""A footprint predicts the memory of a batch from measured peaks."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.core.memory.footprint import EXTRAPOLATION, Footprint, expected_bytes_per_unit
from tests.cloud_pool.models import TEXT, manifest_of
from tidegate.models.manifest import Cost, TensorSpec
from tidegate.types import Datatype

sizes = st.floats(min_value=1.0, max_value=1e6)
peaks = st.floats(min_value=0.0, max_value=1e12)


def test_before_anything_is_measured_the_prior_counts() -> None:
    subject = Footprint(1000.0)
    assert (subject.predict_bytes(5.0), subject.most_units(7000.0), subject.measured) == (5000.0, 7.0, False)
    assert repr(subject) == "<Footprint expected: 1.0 kB a unit>"


def test_measured_peaks_replace_it_with_a_line_through_them() -> None:
    subject = Footprint(1000.0)
    subject.record(10.0, 1_000_000.0)
    subject.record(100.0, 1_900_000.0)
    assert subject.predict_bytes(1.0) == subject.predict_bytes(10.0) == 1_000_000.0
    assert subject.predict_bytes(55.0) == pytest.approx(1_450_000.0)
    assert subject.measured
    assert repr(subject) == "<Footprint measured: 1.9 MB for 100 units>"
    subject.record(40.0, 1_600_000.0)
    assert subject.predict_bytes(25.0) == pytest.approx(1_300_000.0)
    assert subject.predict_bytes(40.0) == pytest.approx(1_600_000.0)
    assert subject.predict_bytes(100.0) == pytest.approx(1_900_000.0)


def test_a_batch_of_no_rows_may_be_measured_first() -> None:
    subject = Footprint(1000.0)
    subject.record(0.0, 2e6)
    assert subject.predict_bytes(10.0) == pytest.approx(2e6 + EXTRAPOLATION * 10_000.0)
    subject.record(4.0, 6e6)
    assert subject.predict_bytes(8.0) == pytest.approx(6e6 + EXTRAPOLATION * 4e6)


def test_a_batch_is_expected_to_take_what_a_smaller_one_took() -> None:
    subject = Footprint(1000.0)
    subject.record(10.0, 5e6)
    subject.record(100.0, 1e6)
    assert subject.predict_bytes(100.0) == subject.predict_bytes(30.0) == 5e6


def test_a_chance_between_two_sizes_that_are_close_says_nothing_of_those_far_beyond() -> None:
    subject = Footprint(100_000.0)
    for units, peak in ((1.0, 7e6), (64.0, 14e6), (256.0, 32e6)):
        subject.record(units, peak)
    subject.record(2.9, 150e6)
    assert subject.predict_bytes(256.0) == 150e6
    few = Footprint(100_000.0)
    few.record(5.0, 7e6)
    few.record(6.0, 19e6)
    assert few.predict_bytes(256.0) == pytest.approx(19e6 + EXTRAPOLATION * 250.0 * 100_000.0)


def test_beyond_the_largest_it_goes_on_more_steeply() -> None:
    subject = Footprint(1000.0)
    subject.record(10.0, 0.0)
    subject.record(110.0, 100.0)
    assert subject.predict_bytes(210.0) == pytest.approx(100.0 + EXTRAPOLATION * 100.0)


def test_one_measured_size_keeps_the_priors_slope() -> None:
    subject = Footprint(1000.0)
    subject.record(10.0, 50.0)
    assert subject.predict_bytes(20.0) == pytest.approx(50.0 + EXTRAPOLATION * 10_000.0)


def test_less_for_the_same_size_is_luck_and_forgotten() -> None:
    subject = Footprint(1000.0)
    for peak in (5e6, 1e6, 3e6):
        subject.record(64.0, peak)
    assert subject.predict_bytes(64.0) == 5e6


def test_the_largest_batch_for_some_room() -> None:
    subject = Footprint(1.0)
    subject.record(10.0, 1000.0)
    subject.record(110.0, 2000.0)
    assert subject.most_units(999.0) == 0.0
    assert subject.most_units(1500.0) == pytest.approx(60.0)
    assert subject.most_units(2000.0 + EXTRAPOLATION * 1000.0) == pytest.approx(210.0)
    flat = Footprint(1.0)
    flat.record(1.0, 500.0)
    flat.record(64.0, 500.0)
    assert (flat.most_units(500.0), flat.most_units(0.0)) == (inf, 0.0)


@pytest.mark.parametrize("bytes_per_unit", [0.0, -1.0, inf])
def test_work_that_takes_no_memory_is_no_prior(bytes_per_unit: float) -> None:
    with pytest.raises(ValueError, match="some memory"):
        Footprint(bytes_per_unit)


@given(st.lists(st.tuples(sizes, peaks), max_size=30), sizes)
def test_no_measured_peak_is_ever_above_the_prediction(measured: list[tuple[float, float]], units: float) -> None:
    subject = Footprint(100.0)
    for size, peak in measured:
        subject.record(size, peak)
    if measured:
        least = min(size for size, _ in measured)
        for size, peak in measured:
            # Within a size class only the largest peak is kept, at the size at which it came.
            assert subject.predict_bytes(max(size * 2.0, least)) >= peak * (1.0 - 1e-9)
    assert subject.predict_bytes(units) <= subject.predict_bytes(units * 1.5) * (1 + 1e-9)


@given(st.lists(st.tuples(sizes, peaks), max_size=30), st.floats(min_value=0.0, max_value=1e13))
def test_the_most_that_fits_does_fit(measured: list[tuple[float, float]], room: float) -> None:
    subject = Footprint(100.0)
    for size, peak in measured:
        subject.record(size, peak)
    most = subject.most_units(room)
    assert most == inf or most == 0.0 or subject.predict_bytes(most) <= room * (1 + 1e-6) + 1.0


def test_the_formula_counts_weights_and_what_goes_through() -> None:
    small = msgspec.structs.replace(TEXT.variants[0], size_bytes=1_000_000)
    # 4 · √1e6, and for each token two INT64 and, at most, two outputs
    assert expected_bytes_per_unit(TEXT, small) == pytest.approx(4000.0 + 8 + 8 + 4 + 8)
    pixels = manifest_of(
        inputs=(TensorSpec("image", Datatype.FP32, ("batch", 8, 8)),),
        outputs=(TensorSpec("label", Datatype.BYTES, ("batch",)),),
        cost=Cost("pixels", "image"),
    )
    assert expected_bytes_per_unit(pixels, small) == pytest.approx(4000.0 + (64 * 4 + 64) / 64)
    items = msgspec.structs.replace(pixels, cost=Cost("items", "image"))
    assert expected_bytes_per_unit(items, small) == pytest.approx(4000.0 + 64 * 4 + 64)

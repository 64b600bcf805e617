"""Warm-up: which sizes are run, and what is made of their times."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cloud_pool.models import TEXT, manifest_of
from tests.support.loop import on_virtual_time
from tidegate import clock
from tidegate.estimate.cost_table import CostTable
from tidegate.models.manifest import Axis, Batching, Cost, Manifest, TensorSpec, Variant
from tidegate.types import Datatype
from tidegate.workers.process import ComputeResult
from tidegate.workers.warmup import length_axis, measure, row_axis, sizes, warm

ANY = TEXT.variants[0]
EDGE = Variant("int8", "a.onnx", "onnx", "int8", ("edge",), "", 1, max_batch=4, max_tokens=128)
IMAGE = manifest_of(
    inputs=(TensorSpec("image", Datatype.FP32, ("batch", 1, 8, 8)),),
    cost=Cost("pixels", "image"),
    axes={"batch": Axis()},
    batching=Batching(max_batch_size=10),
)
VECTOR = manifest_of(
    inputs=(TensorSpec("x", Datatype.FP32, (3,)),), cost=Cost("items", "x"), axes={}, batching=Batching()
)


class Device:
    """Computes nothing, in the time that its table says."""

    def __init__(self, *, first_s: float = 5.0, per_unit_s: float = 0.001) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._first_s, self._per_unit_s = first_s, per_unit_s

    async def infer(self, key: str, inputs: Any) -> ComputeResult:
        (array, *_) = inputs.values()
        cold = array.shape not in self.calls
        self.calls.append(array.shape)
        await clock.sleep((self._first_s if cold else 0.0) + self._per_unit_s * array.size)
        return ComputeResult({}, 0.0)


def test_sizes_grow_in_length_and_then_in_rows_within_the_limits() -> None:
    assert [(size["batch"], size["sequence"]) for size in sizes(TEXT, ANY)] == [
        (1, 1), (1, 4), (1, 16), (1, 64), (1, 256), (4, 64), (8, 64),
    ]  # fmt: skip
    assert [(size["batch"], size["sequence"]) for size in sizes(TEXT, EDGE)] == [
        (1, 1), (1, 4), (1, 16), (1, 64), (1, 128), (4, 64),
    ]  # fmt: skip


def test_work_is_within_the_batchs_limit() -> None:
    limited = manifest_of(batching=Batching(max_batch_size=64, max_work=300, pad_axis="sequence"))
    assert max(size["batch"] for size in sizes(limited, ANY)) == 4


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [(IMAGE, [{"batch": 1}, {"batch": 4}, {"batch": 10}]), (VECTOR, [{}])],
    ids=["rows only", "no axes"],
)
def test_a_model_without_a_length_is_run_with_growing_rows(manifest: Manifest, expected: list[dict[str, int]]) -> None:
    assert sizes(manifest, ANY) == expected


def test_an_axis_without_a_bound_is_measured_up_to_a_usual_length() -> None:
    unbounded = manifest_of(axes={"batch": Axis(), "sequence": Axis()})
    assert max(size["sequence"] for size in sizes(unbounded, ANY)) == 256
    long = manifest_of(axes={"batch": Axis(0), "sequence": Axis(2000, 4000)})
    assert {size["sequence"] for size in sizes(long, ANY)} == {2000}


def test_the_axes_of_rows_and_lengths_are_read_from_the_cost_input() -> None:
    assert (row_axis(TEXT), length_axis(TEXT)) == ("batch", "sequence")
    unpadded = manifest_of(batching=Batching())
    assert length_axis(unpadded) == "sequence"
    assert (row_axis(VECTOR), length_axis(VECTOR)) == (None, None)
    nowhere = manifest_of(cost=Cost("tokens", "nothing"), batching=Batching())
    assert (row_axis(nowhere), length_axis(nowhere)) == (None, None)


@on_virtual_time
async def test_points_are_the_warm_times_by_work() -> None:
    device, seen = Device(), list[float]()
    points = await measure(device, "k", TEXT, ANY, budget_s=1e6, on_point=lambda units, _: seen.append(units))
    assert dict(points) == {units: pytest.approx(0.001 * units) for units in (1, 4, 16, 64, 256, 512)}
    assert seen == [1, 4, 16, 64, 256, 256, 512]


@on_virtual_time
async def test_long_runs_are_repeated_less() -> None:
    device = Device(per_unit_s=0.01)
    await measure(device, "k", TEXT, ANY, budget_s=1e6)
    assert device.calls.count((1, 1)) == 1 + 3
    assert device.calls.count((8, 64)) == 1 + 1


@on_virtual_time
async def test_when_the_time_is_spent_the_largest_sizes_are_left_out_but_never_all() -> None:
    points = await measure(Device(first_s=1.0), "k", TEXT, ANY, budget_s=4.5)
    assert [units for units, _ in points] == [1, 4, 16, 64]
    # One point would say that all work costs the same.
    assert len(await measure(Device(first_s=60.0), "k", TEXT, ANY, budget_s=10.0)) == 2


@on_virtual_time
async def test_a_model_whose_cost_input_is_left_out_counts_as_one_unit() -> None:
    optional = manifest_of(
        inputs=(TEXT.inputs[0], TensorSpec("extra", Datatype.FP32, ("batch",), optional=True)),
        cost=Cost("items", "extra"),
    )
    assert [units for units, _ in await measure(Device(), "k", optional, ANY, budget_s=1e6)] == [1.0]


@on_virtual_time
async def test_a_known_model_is_only_warmed() -> None:
    device = Device()
    await warm(device, "k", TEXT, ANY)
    assert device.calls == [(1, 1), (8, 64)]


@on_virtual_time
async def test_a_warm_up_does_not_hold_a_worker_that_is_slow_now_for_its_largest_size() -> None:
    known = CostTable([(1.0, 0.001), (512.0, 0.512)])
    well, slow = Device(), Device(per_unit_s=0.060)
    await warm(well, "k", TEXT, ANY, known)
    assert well.calls == [(1, 1), (1, 1), (8, 64)], "its first call is slow for reasons that never come back"
    began_at = clock.now()
    await warm(slow, "k", TEXT, ANY, known)
    assert slow.calls == [(1, 1), (1, 1)]
    assert clock.now() - began_at < 10.0


class StarvedDevice(Device):
    """Waits for a core as well, for two thirds of each call."""

    starved_s = 0.0

    async def infer(self, key: str, inputs: Any) -> ComputeResult:
        began_at = clock.now()
        result = await super().infer(key, inputs)
        waits_s = 2.0 * (clock.now() - began_at)
        await clock.sleep(waits_s)
        self.starved_s += waits_s
        return result


@on_virtual_time
async def test_the_time_for_which_the_worker_got_no_core_is_no_cost_of_the_model() -> None:
    device = StarvedDevice()
    points = await measure(device, "m", TEXT, ANY, budget_s=1000.0, starved_s=lambda: device.starved_s)
    assert dict(points) == pytest.approx(dict(await measure(Device(), "m", TEXT, ANY, budget_s=1000.0)))


@on_virtual_time
async def test_a_warm_up_that_only_waits_for_a_core_is_not_cut_short() -> None:
    known = CostTable(((1.0, 0.1), (512.0, 51.2)))
    device = StarvedDevice(per_unit_s=0.3)  # three times as slow as is known, and nine times with its waits
    await warm(device, "m", TEXT, ANY, known, starved_s=lambda: device.starved_s)
    assert device.calls[-1] == (8, 64)

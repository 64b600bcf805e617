"""Device memory accounts for held and reserved bytes, and learns caps from failures."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_pool.core.memory.device_memory import (
    STEPS,
    DeviceMemory,
    LaneMemory,
    MemoryNeed,
    WorkCap,
    human_size,
    needed_bytes,
    shortfall,
)
from cloud_pool.core.memory.footprint import Footprint

GIB, MIB = float(1 << 30), float(1 << 20)


# The cap


def test_a_failure_halves_the_cap_at_once() -> None:
    cap = WorkCap()
    assert (cap.units, repr(cap)) == (inf, "<WorkCap none>")
    cap.failed(640.0)
    assert cap.units == 320.0
    cap.failed(300.0)
    assert (cap.units, repr(cap)) == (150.0, "<WorkCap 150 after 300 failed>")


def test_a_request_over_the_cap_that_fails_lowers_it_from_where_it_was() -> None:
    cap = WorkCap()
    cap.failed(100.0)
    cap.failed(4000.0)
    assert cap.units == 25.0


def test_the_cap_comes_back_by_small_steps_and_ends() -> None:
    cap = WorkCap()
    cap.failed(640.0)
    batches = 0
    while cap.units < 640.0:
        cap.passed(cap.units)
        batches += 1
    assert batches == STEPS / 2
    while cap.units < inf:
        cap.passed(cap.units)
        batches += 1
    assert batches == pytest.approx(1.5 * STEPS, abs=1)


def test_small_batches_say_nothing_of_large_ones() -> None:
    cap = WorkCap()
    cap.passed(5.0)
    cap.failed(640.0)
    cap.passed(100.0)
    assert cap.units == 320.0


def test_there_is_always_room_for_one_unit() -> None:
    cap = WorkCap()
    for _ in range(100):
        cap.failed(cap.units if cap.units < inf else 8.0)
    assert cap.units == 1.0


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.floats(min_value=1.0, max_value=1e6)), max_size=200))
def test_what_failed_is_not_allowed_again_at_once(events: list[tuple[bool, float]]) -> None:
    cap = WorkCap()
    for fails, units in events:
        if fails and units <= cap.units:
            cap.failed(units)
            assert cap.units <= max(1.0, units / 2)
        elif not fails and units <= cap.units:
            before = cap.units
            cap.passed(units)
            assert cap.units >= before
        assert cap.units >= 1.0


# The device


def test_batches_share_what_the_workers_do_not_hold() -> None:
    memory = DeviceMemory(10 * GIB)
    memory.hold("0.1", 3 * GIB)
    memory.hold("1.1", 3 * GIB)
    assert memory.room_bytes == 4 * GIB
    assert memory.reserve("0.1", 1, 3 * GIB)
    assert not memory.reserve("1.1", 2, 2 * GIB)
    assert repr(memory) == "<DeviceMemory 6 GiB held, 3 GiB reserved of 10 GiB>"
    assert memory.used_ratio == pytest.approx(0.9)
    memory.release("0.1", 1)
    assert memory.reserve("1.1", 2, 2 * GIB)


def test_two_batches_of_one_worker_run_one_after_the_other() -> None:
    memory = DeviceMemory(4 * GIB)
    assert memory.reserve("0.1", 1, 3 * GIB)
    assert memory.reserve("0.1", 2, 2 * GIB)
    assert (memory.free_bytes("0.1"), memory.free_bytes("1.1")) == (4 * GIB, 1 * GIB)
    memory.release("0.1", 1)
    assert memory.free_bytes("1.1") == 2 * GIB
    memory.release("0.1", 2)
    memory.release("0.1", 2)
    assert memory.free_bytes("1.1") == 4 * GIB


def test_a_worker_that_dies_leaves_all_that_it_had() -> None:
    memory = DeviceMemory(4 * GIB)
    memory.hold("0.1", 3 * GIB)
    assert memory.reserve("0.1", 1, 1 * GIB)
    memory.leave("0.1")
    memory.release("0.1", 1)
    assert memory.room_bytes == 4 * GIB
    assert memory.reserve("0.2", 2, 4 * GIB)


def test_held_over_the_limit_leaves_no_room_and_not_less() -> None:
    memory = DeviceMemory(1 * GIB)
    memory.hold("0.1", 2 * GIB)
    assert (memory.room_bytes, memory.reserve("0.1", 1, 1.0)) == (0.0, False)


def test_where_the_limit_is_unknown_everything_fits() -> None:
    memory = DeviceMemory()
    assert memory.reserve("0.1", 1, 1e18)
    assert memory.used_ratio == 0.0


def test_a_models_batches_are_as_large_as_room_and_experience_allow() -> None:
    memory, lane = DeviceMemory(10 * MIB), LaneMemory(Footprint(MIB))
    assert lane.most_units(memory) == 10.0
    assert memory.reserve("0.1", 1, 7 * MIB)
    assert (lane.most_units(memory), lane.fitting_units(memory, "1.1")) == (10.0, 3.0)
    lane.cap.failed(8.0)
    assert (lane.most_units(memory), lane.fitting_units(memory, "0.1")) == (4.0, 4.0)
    lane.passed(1.0, MIB / 2)
    lane.passed(5.0, None)
    assert lane.footprint.predict_bytes(1.0) == MIB / 2
    assert lane.cap.units == 4.0 + 8.0 / STEPS
    assert "LaneMemory <Footprint measured" in repr(lane)


# The start

TEXTS = MemoryNeed("text/fp32", "torch-export", 100 * MIB, 10 * MIB)
SCRIPT = MemoryNeed("scripted/fp32", "torchscript", 500 * MIB, 50 * MIB)
IMAGES = MemoryNeed("digits/int8", "onnx", 1 * MIB, 1 * MIB)


def test_what_fits_is_no_shortfall() -> None:
    assert needed_bytes([TEXTS], 1) == 410 * MIB
    assert shortfall([TEXTS], workers=1, limit_bytes=410 * MIB, device="cpu") is None


def test_torch_is_counted_once_and_each_worker_has_its_own() -> None:
    assert needed_bytes([TEXTS, SCRIPT, IMAGES], 2) == 2 * (100 + 500 + 1 + 300 + 80 + 50) * MIB
    assert needed_bytes([], 1) == 0.0


def test_a_shortfall_is_told_as_a_sum_with_names_and_the_way_out() -> None:
    assert shortfall([TEXTS, SCRIPT], workers=1, limit_bytes=512 * MIB, device="cpu") == (
        "what is to be served needs 950 MiB of memory on cpu (runtime 300 MiB + scripted/fp32 500 MiB + "
        "text/fp32 100 MiB + the smallest batch 50 MiB), but 512 MiB may be used: serve fewer models (key 'models') "
        "or smaller variants (key 'precision'), or allow more (key 'memory_limit_bytes')"
    )
    several = shortfall([TEXTS], workers=2, limit_bytes=512 * MIB, device="cuda:0")
    assert several is not None
    assert "needs 820 MiB of memory on cuda:0" in several
    assert "for each of 2 workers), but" in several
    assert "fewer workers (key 'workers')" in several


@pytest.mark.parametrize(
    ("size", "words"),
    [(inf, "unlimited"), (3.5 * GIB, "3.5 GiB"), (90 * MIB, "90 MiB"), (2048.0, "2 KiB"), (12.0, "12 bytes")],
)
def test_sizes_in_words(size: float, words: str) -> None:
    assert human_size(size) == words

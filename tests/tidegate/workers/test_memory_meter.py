"""What a call takes at its peak, on Linux' /proc or on a device's own word."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidegate.engines.engine import Arrays
from tidegate.workers.memory_meter import EVERY, Meter, device_meter_of

PAGE = os.sysconf("SC_PAGE_SIZE")
KEY = "m"


class Process:
    """A folder like /proc/self of a process that takes memory as it is told."""

    def __init__(self, folder: Path, resident_pages: int = 100) -> None:
        self.folder = folder
        self.show(resident_pages, resident_pages)

    def show(self, resident_pages: int, peak_pages: int) -> None:
        (self.folder / "statm").write_text(f"9000 {resident_pages} 0 0 0 0 0\n")
        (self.folder / "status").write_text(f"Name:\tx\nVmHWM:\t {peak_pages * PAGE // 1024} kB\nVmRSS:\t 1 kB\n")
        (self.folder / "clear_refs").touch()


class Engine:
    """Takes `peak` pages at its next calls and leaves `left` of them resident."""

    def __init__(self, process: Process, calls: list[tuple[int, int]]) -> None:
        self.process, self.resident, self.calls = process, 100, iter(calls)

    def infer(self, inputs: Arrays) -> dict[str, Any]:
        peak, left = next(self.calls)
        self.process.show(self.resident + left, self.resident + peak)
        self.resident += left
        return {"y": np.ones(1)}


def sized(count: int) -> dict[str, Any]:
    return {"x": np.zeros(count, np.uint8)}


def peaks(meter: Meter, engine: Any, sizes: list[int]) -> Iterator[int | None]:
    for size in sizes:
        outputs, compute_s, peak = meter.run(KEY, engine, sized(size))
        assert list(outputs) == ["y"]
        assert compute_s >= 0.0
        yield peak


def test_a_call_took_what_its_process_held_more_at_its_peak(tmp_path: Path) -> None:
    engine = Engine(Process(tmp_path), [(30, 0), (60, 0)])
    assert list(peaks(Meter(tmp_path), engine, [1, 2])) == [30 * PAGE, 60 * PAGE]


def test_what_an_allocator_keeps_counts_for_the_next_call(tmp_path: Path) -> None:
    # The second call needs 60 pages and finds 30 of them already there.
    engine = Engine(Process(tmp_path), [(30, 30), (30, 30), (0, -60), (80, 0)])
    assert list(peaks(Meter(tmp_path), engine, [1, 2, 3, 4])) == [30 * PAGE, 60 * PAGE, 60 * PAGE, 80 * PAGE]


def test_a_small_call_is_not_charged_with_what_a_large_one_left(tmp_path: Path) -> None:
    engine = Engine(Process(tmp_path), [(500, 500)] + [(0, 0)] * (EVERY - 2) + [(3, 0), (100, 0)])
    *_, small, larger = peaks(Meter(tmp_path), engine, [9] + [1] * (EVERY - 1) + [10])
    assert (small, larger) == (3 * PAGE, 600 * PAGE)


def test_what_was_given_back_between_two_calls_is_not_counted_twice(tmp_path: Path) -> None:
    process = Process(tmp_path)
    meter = Meter(tmp_path)
    for size in range(1, 20):
        process.show(100, 100)  # the allocator has given all back
        assert list(peaks(meter, Engine(process, [(50, 50)]), [size])) == [50 * PAGE]


def test_what_an_engine_holds_that_came_later_is_not_what_a_call_left(tmp_path: Path) -> None:
    process = Process(tmp_path)
    meter = Meter(tmp_path)
    assert list(peaks(meter, Engine(process, [(50, 50)]), [1])) == [50 * PAGE]
    engine = Engine(process, [(50, 0)])
    engine.resident = 1000  # the 50 were given back, and 900 are another engine's weights
    process.show(1000, 1000)
    meter.loaded()
    assert list(peaks(meter, engine, [2])) == [50 * PAGE]


def test_only_larger_calls_and_a_few_others_are_measured(tmp_path: Path) -> None:
    engine = Engine(Process(tmp_path), [(1, 0)] * (EVERY + 1))
    found = list(peaks(Meter(tmp_path), engine, [5] * EVERY + [6]))
    assert [index for index, peak in enumerate(found) if peak is not None] == [0, EVERY - 1, EVERY]


@pytest.mark.parametrize("missing", ["clear_refs", "statm", "status"])
def test_without_procs_word_nothing_is_claimed(tmp_path: Path, missing: str) -> None:
    process = Process(tmp_path)
    engine = Engine(process, [(1, 0)])
    meter = Meter(tmp_path)
    (tmp_path / missing).unlink()
    (tmp_path / missing).mkdir()
    process.show = lambda *_: None  # type: ignore[method-assign, assignment]
    assert list(peaks(meter, engine, [1])) == [None]


def test_a_device_with_memory_of_its_own_is_asked_itself(tmp_path: Path) -> None:
    class Device:
        held_bytes, device_bytes = 7, 100

        def __init__(self) -> None:
            self.begun = 0

        def begin(self) -> None:
            self.begun += 1

        def peak_bytes(self) -> int:
            return 42 * self.begun

    engine = Engine(Process(tmp_path), [(1, 0)] * 2)
    assert device_meter_of(engine) is None
    engine.device_meter = Device()  # type: ignore[attr-defined]
    meter = Meter(tmp_path)
    assert list(peaks(meter, engine, [1, 1])) == [42, None]
    assert engine.device_meter.begun == 1  # type: ignore[attr-defined]
    assert repr(meter) == "<Meter of 1 engines>"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' /proc")
def test_this_very_process_is_measured() -> None:
    class Filling:
        def infer(self, inputs: Arrays) -> dict[str, Any]:
            return {"y": np.ones(inputs["x"].size * 8)[:1]}

    meter = Meter()
    held = meter.resident_bytes()
    assert held is not None and held > 2**20
    _, _, peak = meter.run(KEY, Filling(), sized(4_000_000))
    assert peak == pytest.approx(8 * 8 * 4_000_000, rel=0.05)

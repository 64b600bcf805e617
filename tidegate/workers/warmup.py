"""Warm-up that measures: run a model over the sizes it will meet, and keep what each size cost on this very device.

A first run is slow for reasons that never come back (memory pools, kernel choice, lazy weights), so a target says
ready only after its warm-up; and since the runs happen anyway, their times become the cost points that the gateway
predicts with.

The sizes are few and spread by factors of four, because cost is nearly affine in work between them (`CostTable`):
one row of growing length, then more rows of a middle length, within the limits of the variant, the axes and the
batch. Each size runs once to warm it and then `repeats` times, of which the fastest counts: whatever else runs on the
machine only ever adds time, and what it adds every day the residual learns from real calls. Two sizes of equal work
keep the slower time. When the time for warming up is spent, the largest sizes are left out, but never all: the table
goes on with its last slope.

A model that generates is warmed and measured by generating (`generation/warmup.py`).

It can be wrong when something else uses the device meanwhile; `ServiceTime` corrects that from real calls. What is
known of it at once is left out: the time for which the worker was ready to run and got no core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import structlog
from numpy.typing import NDArray

from tidegate import clock
from tidegate.estimate.cost_table import CostTable
from tidegate.models.example import example_arrays
from tidegate.models.manifest import Manifest, TensorSpec, Variant
from tidegate.models.work import work_of_arrays
from tidegate.workers.generation.warmup import SequenceComputer, measure_generation, warm_generation
from tidegate.workers.process import ComputeResult

log = structlog.get_logger(__name__)

CostPoints = tuple[tuple[float, float], ...]

_STEP = 4
_FEWEST_POINTS = 2
_SLOW_TIMES = 4.0  # a warm call of a healthy worker on a busy machine takes less
_SLOW_SLACK_S = 0.05
_LONG_ENOUGH_S = 0.25
_MIDDLE_LENGTH = 64
_MOST_STARVED = 0.95  # of a call's time: it took some
_LONG = 1024  # an axis that may be longer counts as unbounded, and is measured up to _UNBOUNDED
_UNBOUNDED = 256


class Computer(SequenceComputer, Protocol):
    """The part of a WorkerProcess that is needed here."""

    async def infer(self, key: str, inputs: Mapping[str, NDArray[Any]]) -> ComputeResult: ...


async def measure(
    worker: Computer,
    key: str,
    manifest: Manifest,
    variant: Variant,
    *,
    repeats: int = 3,
    budget_s: float = 10.0,
    on_point: Callable[[float, float], None] | None = None,
    on_peak: Callable[[float, int], None] | None = None,
    starved_s: Callable[[], float] = lambda: 0.0,
) -> CostPoints:
    """Warm the engine under `key` and return (work units, seconds) points, by work, for `VariantOffer.cost`.

    Args:
        repeats: timed runs of each size at most, after one that is not timed.
        budget_s: seconds that the whole may take.
        on_point: told each measured (work units, seconds), for progress.
        on_peak: told each measured (work units, bytes at the peak), where the worker knows them.
        starved_s: seconds for which the worker got no core so far.

    Raises:
        ServeError: whatever the worker raised.
    """
    if manifest.generative is not None:
        return await measure_generation(worker, key, manifest, budget_s=budget_s)
    done_by = clock.now() + budget_s
    points: dict[float, float] = {}
    seconds = 0.0
    for lengths in sizes(manifest, variant):
        # The next size is up to a step larger, and runs at least twice.
        if len(points) >= _FEWEST_POINTS and clock.now() + 2 * _STEP * seconds > done_by:
            break
        inputs = example_arrays(manifest, lengths)
        units = work_of_arrays(manifest, inputs).units
        first = await worker.infer(key, inputs)
        seconds = await _fastest_s(worker, key, inputs, repeats, starved_s)
        if on_peak is not None and first.peak_bytes is not None:
            on_peak(units, first.peak_bytes)
        points[units] = max(seconds, points.get(units, 0.0))
        if on_point is not None:
            on_point(units, seconds)
    return tuple(sorted(points.items()))


async def warm(
    worker: Computer,
    key: str,
    manifest: Manifest,
    variant: Variant,
    known: CostTable | None = None,
    starved_s: Callable[[], float] = lambda: 0.0,
) -> None:
    """Run the smallest and the largest size: enough for a restarted worker whose costs are known.

    Where the smallest takes far longer than is `known` even when it is warm, the device is slow just now, and the
    largest could hold the worker for minutes: it is left out, since a worker that serves slowly is better than none.
    """
    if manifest.generative is not None:
        await warm_generation(worker, key, manifest)
        return
    planned = sizes(manifest, variant)
    smallest = example_arrays(manifest, planned[0])
    await worker.infer(key, smallest)
    if known is not None:
        usual_s = known.seconds_for(work_of_arrays(manifest, smallest).units)
        took_s = await _timed_s(worker, key, smallest, starved_s)
        if took_s > _SLOW_TIMES * usual_s + _SLOW_SLACK_S:
            log.warning("warm-up cut short: the device is slow now", key=key, took_s=took_s, usual_s=usual_s)
            return
    await worker.infer(key, example_arrays(manifest, planned[-1]))


def sizes(manifest: Manifest, variant: Variant) -> list[dict[str, int]]:
    """The axis lengths to run, from little work to much: one row of growing length, then growing numbers of rows.

    A text has no axis along which it is long: it is as long as the tokens that a pipeline makes of it.
    """
    if manifest.pipeline is not None and manifest.pipeline.tokenizing(manifest.cost.input) is not None:
        manifest = manifest.of_model
    rows, length = row_axis(manifest), length_axis(manifest)
    lengths = [] if length is None else list(_ladder(*_length_range(manifest, variant, length)))
    one_row: list[dict[str, int]] = [{length: n} for n in lengths] if length is not None else [{}]
    if rows is None:
        return one_row
    low, high = _row_range(manifest, variant, rows)
    middle = max((n for n in lengths if n <= _MIDDLE_LENGTH), default=lengths[0] if lengths else 1)
    across = {} if length is None else {length: middle}
    many = [{**across, rows: n} for n in _ladder(low, high) if n > low and _within_work(manifest, n * middle)]
    return [{**size, rows: low} for size in one_row] + many


def row_axis(manifest: Manifest) -> str | None:
    """The axis that counts rows: the first one of the cost input, where it has a name."""
    spec = _cost_input(manifest)
    first = spec.shape[0] if spec is not None and spec.shape else None
    return first if isinstance(first, str) else None


def length_axis(manifest: Manifest) -> str | None:
    """The axis along which a row may be long: the one that requests are padded along, else the cost input's last."""
    if manifest.batching.pad_axis is not None:
        return manifest.batching.pad_axis
    spec = _cost_input(manifest)
    last = spec.shape[-1] if spec is not None and len(spec.shape) > 1 else None
    return last if isinstance(last, str) else None


def _cost_input(manifest: Manifest) -> TensorSpec | None:
    return next((spec for spec in manifest.inputs if spec.name == manifest.cost.input), None)


def _length_range(manifest: Manifest, variant: Variant, name: str) -> tuple[int, int]:
    axis = manifest.axes[name]
    high = axis.max if axis.max <= _LONG else _UNBOUNDED
    if variant.max_tokens is not None:
        high = min(axis.max, variant.max_tokens, _LONG)
    return axis.min, max(axis.min, high)


def _row_range(manifest: Manifest, variant: Variant, name: str) -> tuple[int, int]:
    axis, limit = manifest.axes[name], manifest.batching.max_batch_size
    high = min(axis.max, limit if variant.max_batch is None else min(limit, variant.max_batch))
    return axis.min, max(axis.min, high)


def _within_work(manifest: Manifest, units: float) -> bool:
    return manifest.batching.max_work is None or units <= manifest.batching.max_work


def _ladder(low: int, high: int) -> Iterator[int]:
    """`low`, then by factors of four, then `high`."""
    n = low
    while n < high:
        yield n
        n = max(n + 1, n * _STEP)
    yield high


async def _fastest_s(
    worker: Computer, key: str, inputs: Mapping[str, NDArray[Any]], repeats: int, starved_s: Callable[[], float]
) -> float:
    times_s = [await _timed_s(worker, key, inputs, starved_s)]
    while len(times_s) < repeats and sum(times_s) < _LONG_ENOUGH_S:
        times_s.append(await _timed_s(worker, key, inputs, starved_s))
    return min(times_s)


async def _timed_s(
    worker: Computer, key: str, inputs: Mapping[str, NDArray[Any]], starved_s: Callable[[], float]
) -> float:
    """Seconds as the parent sees them: the way to the worker and back is part of what a call costs."""
    starved_before_s, began_at = starved_s(), clock.now()
    await worker.infer(key, inputs)
    took_s = clock.now() - began_at
    return took_s - min(starved_s() - starved_before_s, _MOST_STARVED * took_s)

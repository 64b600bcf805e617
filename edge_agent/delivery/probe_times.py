"""Probe times compares how long a new generation takes with the plan's bounds, and with the running generation.

The two take turns, call by call, so that whatever else the device does slows both; what is compared is the time inside
the worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from edge_agent.core.soak import p95_s
from edge_agent.delivery.failures import WorkerExited, WorkFailed
from tidegate.models.manifest import Variant
from tidegate.outcome import ServeError, Unreachable
from tidegate.rollout.plan import Probe

T = TypeVar("T")


class HasVariants(Protocol):
    """The part of a `Runner` that is needed here."""

    @property
    def variants(self) -> tuple[Variant, ...]: ...


R = TypeVar("R", bound=HasVariants)
TimedCall = Callable[[R, str], Awaitable[float]]  # of a runner and its variant; the seconds that count


def has_time_bounds(rules: Probe) -> bool:
    return rules.p95_max_s is not None or rules.p95_ratio_max is not None


async def compare_times(rules: Probe, calls: Sequence[TimedCall[R]], new: R, old: R | None) -> None:
    """Raises WorkFailed with the bound that the new generation breaks, WorkerExited when its worker exits."""
    variant = new.variants[0].name
    beside = _same_variant(old, variant)
    new_s: list[float] = []
    old_s: list[float] = []
    for _ in range(rules.repeats):
        for call in calls:
            new_s.append(await of_new(call(new, variant)))
            if old is not None and beside:
                try:
                    old_s.append(await call(old, beside))
                except ServeError:  # the old one takes other inputs, or is gone: there is nothing to compare with
                    beside = ""
    found_s = p95_s(new_s)
    if rules.p95_max_s is not None and found_s > rules.p95_max_s:
        raise WorkFailed(f"probe_slow: p95 is {found_s:.4g} s, at most {rules.p95_max_s:g} s is allowed")
    if rules.p95_ratio_max is not None and len(old_s) == len(new_s):
        ratio = found_s / p95_s(old_s)
        if ratio > rules.p95_ratio_max:
            words = f"p95 is {ratio:.2f} times the running generation's, at most {rules.p95_ratio_max:g} is allowed"
            raise WorkFailed(f"probe_slow: {words}")


async def of_new(work: Awaitable[T]) -> T:
    """What the new generation answers. Raises WorkerExited, WorkFailed for its failures."""
    try:
        return await work
    except Unreachable as error:
        raise WorkerExited(error.message) from error
    except ServeError as error:
        raise WorkFailed(f"probe_error: {error.message}") from error


def _same_variant(old: HasVariants | None, name: str) -> str:
    names = [variant.name for variant in old.variants] if old is not None else []
    return name if name in names else (names[0] if names else "")

"""Where a model computes: on its processor, or on a device beside it that was tried and is both right and faster.

A trial has the same calls on both, in turn, a few times for each of some sizes. A device is taken where its answers are
the processor's, as far as its arithmetic allows, and where it is faster over the sizes by enough to be no chance; of
several the fastest. Whatever went wrong with one, it is left out, and the reason is kept for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PROCESSOR: Final = "cpu"
LEAST_AGREEMENT: Final = 0.999
LEAST_GAIN: Final = 1.1  # a device costs memory and start time, so it has to be worth something

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class DeviceTrial:
    """What came of one device.

    Args:
        failed: why there is nothing to compare; "" where there is.
        processor_s, device_s: seconds of the same calls on either, for each size.
        agreement: the least over all answers, from 0 to 1 (`agreement`).
    """

    device: str
    failed: str = ""
    processor_s: tuple[tuple[float, ...], ...] = ()
    device_s: tuple[tuple[float, ...], ...] = ()
    agreement: float = 0.0

    @property
    def gain(self) -> float:
        """How many times as fast as the processor: the geometric mean over the sizes, of medians; 0 if it failed."""
        if self.failed or not self.device_s:
            return 0.0
        pairs = zip(self.processor_s, self.device_s, strict=True)
        return exp(sum(log(median(here) / median(there)) for here, there in pairs) / len(self.device_s))


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where a model computes, and a line about each device that was tried."""

    device: str = PROCESSOR
    reasons: tuple[str, ...] = ()


def choose_device(trials: Sequence[DeviceTrial]) -> DeviceChoice:
    """The fastest that is right and worth it, else the processor."""
    fit = [one for one in trials if not _against(one)]
    best = max(fit, key=lambda one: one.gain, default=None)
    reasons = tuple(f"{one.device}: {_against(one) or _for(one, taken=one is best)}" for one in trials)
    return DeviceChoice(best.device if best else PROCESSOR, reasons)


def agreement(here: Arrays, there: Arrays) -> float:
    """From 0 to 1: the least over the outputs of the cosine of real numbers, and of the share of equal others.

    Numbers that are not finite on one side, other shapes and missing outputs are 0.
    """
    if set(here) != set(there) or any(here[name].shape != there[name].shape for name in here):
        return 0.0
    return min([1.0, *(_alike(array, there[name]) for name, array in here.items())])


def _alike(here: NDArray[Any], there: NDArray[Any]) -> float:
    if here.dtype.kind != "f" or there.dtype.kind != "f":
        return float(np.mean(here == there)) if here.size else 1.0
    one, other = here.astype(np.float64).ravel(), there.astype(np.float64).ravel()
    lengths = float(np.linalg.norm(one)), float(np.linalg.norm(other))
    if not all(map(isfinite, lengths)):
        return 0.0
    if not all(lengths):
        return 1.0 if lengths[0] == lengths[1] else 0.0
    # A cosine does not see that all is twice as much.
    return max(0.0, float(one @ other) / (lengths[0] * lengths[1])) * min(lengths) / max(lengths)


def _against(trial: DeviceTrial) -> str:
    if trial.failed:
        return f"left out: {trial.failed}"
    if not trial.agreement >= LEAST_AGREEMENT:
        return f"left out: its answers are others than the processor's ({trial.agreement:.4f} for {LEAST_AGREEMENT})"
    if trial.gain < LEAST_GAIN:
        return f"left out: {trial.gain:.2f} times as fast as the processor, for at least {LEAST_GAIN}"
    return ""


def _for(trial: DeviceTrial, *, taken: bool) -> str:
    told = f"{trial.gain:.2f} times as fast as the processor, answers agree to {trial.agreement:.5f}"
    return f"taken: {told}" if taken else f"left out for a faster one: {told}"

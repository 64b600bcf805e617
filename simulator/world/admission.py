"""Admission to a simulated gateway: Tidegate's own for its own policies, a plain limit for baselines.

A baseline neither suffers from our shedding nor profits by it: its authors admit every request up to a number.
"""

from __future__ import annotations

from typing import Protocol

from gateway.core.admission.admission import AdmissionRequest
from simulator.world.limit import ConcurrencyLimit
from tidegate.outcome import Overloaded


class AdmissionControl(Protocol):
    """`gateway.core.admission.admission.Admission`, or what stands in for it."""

    @property
    def in_flight(self) -> int: ...
    def enter(self, who: AdmissionRequest, now: float) -> Overloaded | None: ...
    def leave(self, tenant: str, stayed_s: float) -> None: ...
    def weight_of(self, tenant: str) -> float: ...
    def overloaded(self) -> bool: ...


class FixedLimitAdmission:
    """Admits as many requests as there is room for. Mutable."""

    def __init__(self, max_in_flight: int) -> None:
        self._limit = ConcurrencyLimit(max_in_flight)

    @property
    def in_flight(self) -> int:
        return self._limit.in_flight

    def enter(self, who: AdmissionRequest, now: float) -> Overloaded | None:
        return None if self._limit.try_acquire() else Overloaded("full", retry_after_s=self._limit.retry_after_s)

    def leave(self, tenant: str, stayed_s: float) -> None:
        self._limit.release(stayed_s)

    def weight_of(self, tenant: str) -> float:
        return 1.0

    def overloaded(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<FixedLimitAdmission {self._limit!r}>"

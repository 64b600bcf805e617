"""Row 25: minutes of requests, and nothing is left of them.

Memory is judged by its slope over the second half, when caches and memories are full, per 100,000 requests: a leak is
by the request, not by the hour. The gateway is a new one that remembers few decisions, or what it remembers for the
other rows would be all that grows. This row has ten thousand requests, so what fills up once looks like a slope: a
million real ones through one gateway are `tests/bench/soak.py`, on virtual time `tests/bench/big_fleet.py`.
"""

from __future__ import annotations

import time
from typing import Final

import psutil

from tests.bench.fault_rows.trial import Check, Trial
from tests.support.faults.matrix import Act, Matrix, Row
from tests.support.faults.matrix_seen import Seen

_DURING_S: Final = 150.0
_LOOK_EVERY_S: Final = 5.0
_REMEMBER: Final = 64
_PARTS: Final = ("gateway", "pool", "device-1")


class _Soak:
    """What each part uses, looked at now and then."""

    def __init__(self) -> None:
        self._matrix: Matrix | None = None
        self._usual = 0
        self._rss_mib: dict[str, list[float]] = {}
        self._fds: dict[str, list[int]] = {}

    def acts(self, matrix: Matrix) -> list[tuple[float, Act]]:
        self._matrix = matrix
        self._usual = matrix.fleet.gateway.config["remember_decisions"]
        matrix.fleet.restart_gateway(remember_decisions=_REMEMBER)
        self._rss_mib, self._fds = {name: [] for name in _PARTS}, {name: [] for name in _PARTS}
        return [(n * _LOOK_EVERY_S, self._look) for n in range(int(_DURING_S / _LOOK_EVERY_S))]

    def checks(self, seen: Seen) -> list[Check]:
        half = len(seen.during) / 2.0
        slopes = {name: 1e5 * _growth(found) / half for name, found in self._rss_mib.items()}
        checks = [Check(f"{name}_mib_in_100k", round(slope, 2), "<=", 20.0) for name, slope in slopes.items()]
        for name, counts in self._fds.items():
            half_way = len(counts) // 2
            checks.append(Check(f"{name}_more_fds", max(counts[half_way:]) - max(counts[:half_way]), "<=", 8))
        checks.append(Check("in_flight_at_idle", self._under_way(), "<=", 0))
        assert self._matrix is not None
        self._matrix.fleet.restart_gateway(remember_decisions=self._usual)
        return checks

    def _look(self) -> None:
        assert self._matrix is not None
        for name in _PARTS:
            process = psutil.Process(self._matrix.fleet.part(name).pid)
            self._rss_mib[name].append(process.memory_info().rss / 2**20)
            self._fds[name].append(process.num_fds())

    def _under_way(self) -> int:
        assert self._matrix is not None
        time.sleep(1.0)  # the last answers' frames
        return sum(one["in_flight"] for one in self._matrix.fleet.targets().values())


def _growth(found: list[float]) -> float:
    """From the second to the last quarter, by their medians: one look may see a garbage collection's wake."""
    quarter = max(1, len(found) // 4)
    second, last = sorted(found[quarter : 2 * quarter]), sorted(found[-quarter:])
    return last[len(last) // 2] - second[len(second) // 2]


_SOAK: Final = _Soak()
TRIALS: Final = (
    Trial(Row("25", "minutes of load, nothing broken", _SOAK.acts, during_s=_DURING_S), _SOAK.checks, quick=False),
)

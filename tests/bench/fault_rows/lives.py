"""Rows 22, 23, 24 and 27: placement fails, parts restart under load, several things break at once."""

from __future__ import annotations

import signal
import time
from typing import Final

from tests.bench.fault_rows.callers import back_after_s
from tests.bench.fault_rows.trial import Check, Trial, points
from tests.support.faults.matrix import WAN, Act, Matrix, Row
from tests.support.faults.matrix_seen import Seen

_TURN_S: Final = 8.0  # from one device's restart to the next
_RESTARTED: Final = 2


def _misled(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, lambda: matrix.fleet.gateway.signal(signal.SIGUSR1))]


def _led(matrix: Matrix) -> None:
    matrix.fleet.gateway.signal(signal.SIGUSR1)


def _checks_misled(seen: Seen) -> list[Check]:
    told = [line for line in seen.logs["gateway"].splitlines() if "placement" in line and "event=" in line]
    return [
        Check("answered_percent", points(_answered(seen)), ">=", 90.0),
        Check("internal_errors", sum(one.status == 500 for one in seen.answers), "<=", 0),
        Check("lines_in_the_log", len(told), "<=", 2),
        Check("back_after_s", back_after_s(seen), "<=", 2.0),
    ]


def _answered(seen: Seen) -> float:
    return sum(one.status == 200 for one in seen.during.answers) / max(1, len(seen.during))


def _rolling(matrix: Matrix) -> list[tuple[float, Act]]:
    def restart(name: str) -> Act:
        def act() -> None:
            part = matrix.fleet.part(name)
            part.stop()
            part.start()
            part.wait_ready()

        return act

    return [(_TURN_S * place, restart(name)) for place, name in enumerate(matrix.edges[:_RESTARTED])]


def _checks_rolling(seen: Seen) -> list[Check]:
    lost = [one for one in seen.during.answers if one.status not in (200, 429, 504)]
    return [Check("lost_points", points(seen.loss()), "<=", 0.5), Check("failed", len(lost), "<=", 0)]


def _everything(matrix: Matrix) -> list[tuple[float, Act]]:
    bad = {"every_s": 5, "for_s": 2, "periodic": True, "delay_times": 4}

    def kill() -> None:
        part = matrix.fleet.part("device-1")
        part.signal_all(signal.SIGKILL)
        part.kill()

    return [(0.0, lambda: matrix.links["pool"].apply(**WAN, bad=bad)), (2.0, kill)]


def _nothing_more(matrix: Matrix) -> None:
    matrix.usual("pool")
    matrix.fleet.part("device-1").start()


def _checks_everything(seen: Seen) -> list[Check]:
    return [
        Check("critical_in_time_percent", points(seen.during.of("interactive").attainment()), ">=", 90.0),
        Check("back_after_s", back_after_s(seen), "<=", 10.0),
    ]


def _drain(matrix: Matrix) -> list[tuple[float, Act]]:
    def restart() -> None:
        began_at = time.perf_counter()
        matrix.fleet.gateway.stop()
        _RESTART.stopped_s = time.perf_counter() - began_at
        matrix.fleet.gateway.start()
        matrix.fleet.gateway.wait_ready()

    return [(0.0, restart)]


def _killed(matrix: Matrix) -> list[tuple[float, Act]]:
    def restart() -> None:
        matrix.fleet.gateway.kill()
        matrix.fleet.gateway.start()
        matrix.fleet.gateway.wait_ready()

    return [(0.0, restart)]


class _Restart:
    """How long the last stop took."""

    stopped_s = 0.0


def under_way(seen: Seen) -> list[int]:
    """How those ended that were under way when the fault began."""
    return [
        one.status
        for one in seen.answers
        if one.at < seen.broken_at - 0.02 and one.at + one.latency_s > seen.broken_at + 0.005
    ]


def _checks_drain(seen: Seen) -> list[Check]:
    found = under_way(seen)
    return [
        Check("under_way", len(found), ">=", 1),
        Check("failed_under_way", sum(status != 200 for status in found), "<=", 0),
        Check("stopped_s", round(_RESTART.stopped_s, 2), "<=", 3.0),
        Check("back_after_s", back_after_s(seen), "<=", 5.0),
    ]


def _checks_killed(seen: Seen) -> list[Check]:
    cut = [one for one in seen.answers if one.status == 0 and one.at < seen.broken_at]
    told_after_s = [one.at + one.latency_s - seen.broken_at for one in cut]
    return [
        Check("told_after_s", round(max(told_after_s, default=0.0), 3), "<=", 0.1),
        Check("back_after_s", back_after_s(seen), "<=", 5.0),
    ]


_RESTART: Final = _Restart()
TRIALS: Final = (
    Trial(Row("22", "placement raises", _misled, _led, during_s=5.0), _checks_misled),
    Trial(
        Row("24", "two devices restarted in turn", _rolling, during_s=_TURN_S * _RESTARTED, changes=2),
        _checks_rolling,
    ),
    Trial(
        Row(
            "27", "cloud link jitters, an edge is killed, twice the requests", _everything, _nothing_more,
            during_s=10.0, after_s=12.0, recover_s=8.0, step=2.0, changes=4,
        ),
        _checks_everything,
    ),
    # The last: connections that break with their gateway are no baseline for others.
    Trial(Row("23a", "gateway restarted (SIGTERM)", _drain, during_s=4.0, recover_s=3.0), _checks_drain, own=True),
    Trial(Row("23b", "gateway killed, started again", _killed, during_s=4.0, recover_s=3.0), _checks_killed, own=True),
)  # fmt: skip

"""Rows 1 to 6: the way to the pool, and to the edges, gets slow, jitters, stalls, goes silent or breaks."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from tests.bench.fault_rows.trial import Check, Trial, milliseconds, points
from tests.support.faults.matrix import WAN, Act, Matrix, Row
from tests.support.faults.matrix_seen import Seen
from tidegate.testing.links import SimLink

POOL: Final = "pool/pool"
CLOUD_ELIGIBLE: Final = ("document", "bulk")  # the pool is the better place for them, or the only one
CHEAP: Final = "interactive"
_HALF_OPEN_BYTES: Final = 25_000  # what a new connection to the pool says in a second or two


def _pool(matrix: Matrix) -> SimLink:
    return matrix.links["pool"]


def _slower(matrix: Matrix) -> list[tuple[float, Act]]:
    jitter = {"dist": "normal", "ms": 75, "shape": 50}
    return [(0.0, lambda: _pool(matrix).toxic("slower", "from", delay_ms=0, jitter=jitter))]


def _checks_slower(seen: Seen) -> list[Check]:
    return [
        Check("cloud_eligible_lost_points", points(seen.loss(*CLOUD_ELIGIBLE)), "<=", 3.0),
        Check("cheap_lost_points", points(seen.loss(CHEAP)), "<=", 0.5),
    ]


def _jittering(matrix: Matrix) -> list[tuple[float, Act]]:
    bad = {"every_s": 5, "for_s": 2, "periodic": True, "delay_times": 4}
    return [(0.0, lambda: _pool(matrix).apply(**WAN, bad=bad))]


def _checks_jittering(seen: Seen) -> list[Check]:
    return [
        Check("lost_points", points(seen.loss()), "<=", 3.0),
        Check("hedged_percent", points(seen.during.hedged_share()), "<=", 5.0),
    ]


def _stalling(matrix: Matrix) -> list[tuple[float, Act]]:
    jitter = {"dist": "empirical", "samples_ms": [0, 0, 0, 0, 200]}
    return [(0.0, lambda: _pool(matrix).toxic("stalls", "both", delay_ms=0, jitter=jitter))]


def _checks_stalling(seen: Seen) -> list[Check]:
    return [Check("missed_percent", points(1.0 - seen.during.attainment()), "<=", 8.0)]


def _gone(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, _pool(matrix).partition)]


def _back(matrix: Matrix) -> None:
    _pool(matrix).heal()


def _checks_gone(seen: Seen) -> list[Check]:
    return [
        Check("noticed_ms", milliseconds(seen.noticed_after(POOL)), "<=", 1e3 * seen.patience_s(POOL)),
        Check("edge_feasible_percent", points(seen.during.of(CHEAP).attainment()), ">=", 95.0),
        Check("used_again_s", seen.served_again_after(POOL), "<=", 2.0),
    ]


def _edge_gone(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, matrix.links["device-1"].partition)]


def _edge_back(matrix: Matrix) -> None:
    matrix.links["device-1"].heal()


def _checks_edge_gone(seen: Seen) -> list[Check]:
    edge = "edge/device-1"
    return [
        Check("noticed_ms", milliseconds(seen.noticed_after(edge)), "<=", 1e3 * seen.patience_s(edge)),
        Check("lost_points", points(seen.loss()), "<=", 1.5),
        Check("used_again_s", seen.served_again_after(edge), "<=", 2.0),
    ]


def _resets(matrix: Matrix) -> list[tuple[float, Act]]:
    def all_at_once() -> None:
        for name, link in matrix.links.items():
            if name != "broker":
                link.hang_up("reset")

    return [(at_s, all_at_once) for at_s in (0.0, 2.5, 5.0)]


def _checks_resets(seen: Seen) -> list[Check]:
    # Late ones are not lost: whoever had no time to be computed twice shows in the points.
    lost = [one for one in seen.during.answers if one.status not in (200, 429, 504)]
    return [Check("lost", len(lost), "<=", 0), Check("lost_points", points(seen.loss()), "<=", 3.0)]


def _half_open(matrix: Matrix) -> list[tuple[float, Act]]:
    """A connection that goes mute after so many bytes; those that are made later are whole."""
    link = _pool(matrix)

    def replace_by_one_that_will_go_mute() -> None:
        link.toxic("mute", "from", delay_ms=0, limit={"bytes": _HALF_OPEN_BYTES, "then": "stall"})
        link.hang_up("reset")

    return [(0.0, replace_by_one_that_will_go_mute), (1.0, lambda: link.remove("mute"))]


def _checks_half_open(seen: Seen) -> list[Check]:
    heard = seen.heard(POOL)
    gaps = [later - earlier for earlier, later in pairwise(heard) if earlier >= seen.broken_at]
    return [Check("replaced_s", max(gaps, default=None), "<=", 5.0)]


TRIALS: Final = (
    Trial(Row("1", "cloud link 75±50 ms slower", _slower), _checks_slower, quick=False),
    Trial(Row("2", "cloud link jitters fourfold", _jittering, during_s=10.0), _checks_jittering, quick=False),
    Trial(Row("3", "a fifth of the messages 200 ms late", _stalling), _checks_stalling, quick=False),
    Trial(Row("4a", "cloud link silent for 3 s", _gone, _back, during_s=3.0), _checks_gone),
    Trial(Row("4b", "cloud link silent for 30 s", _gone, _back, during_s=30.0, after_s=8.0), _checks_gone, quick=False),
    Trial(Row("4c", "an edge's link silent for 3 s", _edge_gone, _edge_back, during_s=3.0), _checks_edge_gone),
    Trial(Row("5", "every connection reset, thrice", _resets, changes=3), _checks_resets),
    Trial(Row("6", "the pool's connection half open", _half_open, changes=2), _checks_half_open),
)

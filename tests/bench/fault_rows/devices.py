"""Rows 7 to 10 and 15: an edge is killed, stands still, gets slow or fails at once; a clock steps."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from statistics import median
from typing import Final

from tests.bench.fault_rows.trial import Check, Trial, milliseconds, points
from tests.support.faults.matrix import Act, Matrix, Row
from tests.support.faults.matrix_seen import Flight, Seen
from tests.support.gateway.casts import EDGES

FAILING: Final = "device-2"
MODULES: Final = {
    **{f"device-{number + 1}": "tests.support.edge.odd_edge" for number in range(EDGES)},
    "gateway": "tests.support.gateway.odd_gateway",
}


def _killed(count: int) -> Row:
    def acts(matrix: Matrix) -> list[tuple[float, Act]]:
        def kill() -> None:
            parts = [matrix.fleet.part(name) for name in matrix.edges[:count]]
            for part in parts:  # all of them first: `kill` waits until each has gone
                part.signal_all(signal.SIGKILL)
            for part in parts:
                part.kill()

        return [(0.0, kill)]

    words = "an edge killed" if count == 1 else f"{count} edges of 8 killed"
    return Row("7a" if count == 1 else "7b", words, acts, during_s=6.0)


def _checks_killed(count: int, lost_points: float) -> Trial:
    def checks(seen: Seen) -> list[Check]:
        killed = [f"edge/device-{number + 1}" for number in range(count)]
        late = [one.at - seen.broken_at for target in killed for one in seen.launches(target, seen.broken_at)]
        return [
            Check("replaced_ms", milliseconds(_replaced_s(seen.flights, killed, seen.broken_at)), "<=", 100.0),
            Check("last_asked_s", max([one for one in late if one < 4.0], default=0.0), "<=", 1.0),
            Check("lost_points", points(seen.loss()), "<=", lost_points),
        ]

    # They are started again when the load is over: eight processes that start take the machine's cores from the rest.
    return Trial(_killed(count), checks, quick=count == 1, after_lost_points=max(2.0, lost_points))


def _replaced_s(flights: Sequence[Flight], targets: list[str], at: float) -> float:
    """How long at most until a request that was under way there had somebody else, or its answer."""
    longest_s = 0.0
    for flight in flights:
        under_way = {one.attempt for one in flight.steps if one.what == "launched" and one.target in targets}
        under_way = {one.attempt for one in flight.steps if one.attempt in under_way and one.at < at}
        ended = {one.attempt for one in flight.steps if one.what in ("answered", "cancelled") and one.at < at}
        if flight.at < at and under_way - ended:
            since = [one.at for one in flight.steps if one.at >= at and one.what == "launched"]
            longest_s = max(longest_s, min([*since, flight.at + flight.elapsed_s]) - at)
    return longest_s


def _stopped(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, lambda: matrix.fleet.part("device-1").signal_all(signal.SIGSTOP))]


def _continued(matrix: Matrix) -> None:
    matrix.fleet.part("device-1").signal_all(signal.SIGCONT)


def _checks_stopped(seen: Seen) -> list[Check]:
    edge = "edge/device-1"
    return [
        Check("noticed_ms", milliseconds(seen.noticed_after(edge)), "<=", 300.0),
        Check(
            "traffic_after_1s_percent",
            points(seen.launch_share(edge, seen.broken_at + 1.0, seen.healed_at)), "<=", 1.0,
        ),
        Check("lost_points", points(seen.loss()), "<=", 2.0),
        Check("used_again_s", seen.served_again_after(edge), "<=", 5.0),
    ]  # fmt: skip


def _hot(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, lambda: matrix.fleet.part(FAILING).signal(signal.SIGURG))]


def _cooled(matrix: Matrix) -> None:
    matrix.fleet.part(FAILING).signal(signal.SIGURG)


def _checks_thermal(seen: Seen) -> list[Check]:
    edge = f"edge/{FAILING}"
    off = [
        one.compute_s / one.expected_s[edge]
        for one in seen.flights
        if one.served_by == edge and one.compute_s and seen.broken_at <= one.at < seen.healed_at
    ]
    return [
        Check("times_slower", median(off[:5]) if off else None, ">=", 1.8),
        Check("samples_to_learn", _learned_after(off), "<=", 60),
        Check("lost_points", points(seen.loss()), "<=", 2.0),
    ]


def _learned_after(off: Sequence[float], window: int = 5) -> float | None:
    """After how many answers what was expected has been right for some in a row."""
    for place in range(len(off) - window + 1):
        if median(off[place : place + window]) <= 1.3:
            return place
    return None if off else 0.0


def _failing(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, lambda: matrix.fleet.part(FAILING).signal(signal.SIGUSR1))]


def _mended(matrix: Matrix) -> None:
    matrix.fleet.part(FAILING).signal(signal.SIGUSR1)


def _checks_failing(seen: Seen) -> list[Check]:
    edge, from_s = f"edge/{FAILING}", seen.broken_at
    lost = [one for one in seen.during.answers if one.status not in (200, 429)]
    failed = [one for one in seen.steps("failed") if one.target == edge]
    return [
        Check("failed_there_at_first", sum(one.at < from_s + 2.0 for one in failed), "<=", 10),
        Check("lost", len(lost), "<=", 10),
        Check("traffic_after_2s_percent", points(seen.launch_share(edge, from_s + 2.0, seen.healed_at)), "<=", 1.0),
        Check("lost_points", points(seen.loss()), "<=", 2.0),
    ]


def _clocks(matrix: Matrix) -> list[tuple[float, Act]]:
    def step() -> None:
        for name in ("device-3", "gateway"):
            matrix.fleet.part(name).signal(signal.SIGUSR2)

    return [(0.0, step), (3.0, step), (5.0, step)]  # an hour ahead, an hour behind, right


def _checks_clocks(seen: Seen) -> list[Check]:
    states = {state for look in seen.looks if look.at > seen.broken_at for state, _ in look.states.values()}
    return [
        Check("lost_points", points(seen.loss()), "<=", 1.0),
        Check("targets_doubted", len(states - {"ready"}), "<=", 0),
    ]


TRIALS: Final = (
    _checks_killed(1, 1.0),
    _checks_killed(4, 6.0),
    Trial(Row("8", "an edge stands still for 5 s", _stopped, _continued, during_s=5.0), _checks_stopped),
    Trial(
        Row("9", "an edge three times slower", _hot, _cooled, during_s=15.0),
        _checks_thermal,
        quick=False,
    ),
    Trial(Row("10", "an edge fails at once", _failing, _mended, changes=4), _checks_failing),
    Trial(Row("15", "clocks step by an hour", _clocks), _checks_clocks, quick=False),
)

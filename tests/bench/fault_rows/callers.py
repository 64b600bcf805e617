"""Rows 16 to 18: callers come all at once, ask again and again, dawdle or leave."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from statistics import quantiles
from typing import Final

from tests.bench.fault_rows.trial import Check, Trial, milliseconds, points
from tests.bench.open_loop import LEFT
from tests.support.faults.matrix import Act, Matrix, Row
from tests.support.faults.matrix_seen import Phase, Seen
from tests.support.pool.far_queue import freed_after_s
from tests.support.pool.work_done import computed

_WINDOW_S: Final = 4.0
_BACK_POINTS: Final = 5.0
_LOITERERS: Final = 40
_FREED_S: Final = 0.05  # a place in a far queue, at the latest


def _nothing(_matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, lambda: None)]


def goodput(phase: Phase, seconds: float) -> float:
    """Answers in time per second."""
    return phase.attainment() * len(phase) / seconds


def peak_goodput(seen: Seen) -> float:
    """The most that any few seconds of the run gave."""
    last = max(one.at for one in seen.answers)
    starts = [seen.phases[0] + n for n in range(int(last - seen.phases[0] - _WINDOW_S) + 1)]
    return max(goodput(seen.between(at, at + _WINDOW_S), _WINDOW_S) for at in starts)


def back_after_s(seen: Seen) -> float | None:
    """From the end of the fault until a second begins in which as many are in time as usual, but for some points."""
    wanted = seen.usual.attainment() - _BACK_POINTS / 100.0
    for tenth in range(100):
        at = seen.healed_at + tenth / 10.0
        if seen.between(at, at + 1.0).attainment() >= wanted:
            return tenth / 10.0
    return None


def _refusals_ms(seen: Seen) -> tuple[float | None, float | None]:
    """How long a refusal for want of room took: its median and its 95th percentile."""
    taken = [one.latency_s for one in seen.during.answers if one.status in (429, 503)]
    if len(taken) < 20:
        return 0.0, 0.0
    cuts = quantiles(taken, n=20)
    return milliseconds(cuts[9]), milliseconds(cuts[18])


def amplification(seen: Seen) -> float:
    """Attempts at targets for each request that anybody meant."""
    sent = sum(seen.broken_at <= one.at < seen.healed_at for one in seen.steps("launched"))
    return sent / max(1, len(seen.during))


def _step(times: float, share: float, load: float) -> Trial:
    def checks(seen: Seen) -> list[Check]:
        median_ms, p95_ms = _refusals_ms(seen)
        good = goodput(seen.during, seen.healed_at - seen.broken_at)
        return [
            Check("goodput_of_peak_percent", points(good / peak_goodput(seen)), ">=", share),
            Check("critical_in_time_percent", points(seen.during.of("interactive").attainment()), ">=", 95.0),
            Check("refusal_median_ms", median_ms, "<=", 10.0),
            Check("refusal_p95_ms", p95_ms, "<=", 10.0),
            Check("back_after_s", back_after_s(seen), "<=", 5.0),
        ]

    name = "16a" if times == 2.0 else "16b"
    words = f"{times:g} times as many requests for 10 s"
    row = Row(name, words, _nothing, during_s=10.0, after_s=9.0, recover_s=5.0, load=load, step=times, changes=4)
    return Trial(row, checks, quick=times == 2.0)


def _checks_storm(seen: Seen) -> list[Check]:
    return [
        Check("amplification", round(amplification(seen), 3), "<=", 1.2),
        Check("tries_for_each_request", round(_tries(seen), 3), ">=", 1.05),  # else there was no storm
        Check("critical_in_time_percent", points(seen.during.of("interactive").attainment()), ">=", 95.0),
        Check("back_after_s", back_after_s(seen), "<=", 5.0),
    ]


def _tries(seen: Seen) -> float:
    return sum(one.tries for one in seen.during.answers) / max(1, len(seen.during))


class Loiterers:
    """Callers who send a byte of their request now and then, and never a whole one; from the start until `leave`."""

    def __init__(self, port: int, count: int) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._dawdle, name="loiterers", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        self._over.set()
        self._thread.join()
        for one in self._sockets:
            one.close()

    def _dawdle(self) -> None:
        words = b"POST /v2/models/encoder/infer HTTP/1.1\r\nHost: loiterer\r\nContent-Length: 1000\r\n\r\n" + b"x" * 900
        for place in range(len(words)):
            if self._over.wait(0.25):
                return
            for one in self._sockets:
                with suppress(OSError):  # shown the door
                    one.send(words[place : place + 1])

    def __repr__(self) -> str:
        return f"<Loiterers {len(self._sockets)}>"


class _Rude:
    """Row 18: a fifth of the callers leave before their answer, and others loiter."""

    def __init__(self) -> None:
        self._loiterers: Loiterers | None = None
        self._matrix: Matrix | None = None
        self._computed = 0

    def acts(self, matrix: Matrix) -> list[tuple[float, Act]]:
        self._matrix, self._computed = matrix, computed(matrix.fleet)
        port = int(matrix.fleet.http.rpartition(":")[2])

        def come() -> None:
            self._loiterers = Loiterers(port, _LOITERERS)

        return [(0.0, come)]

    def end(self, _matrix: Matrix) -> None:
        assert self._loiterers is not None
        self._loiterers.leave()

    def _freed_s(self) -> float:
        assert self._matrix is not None
        fleet = self._matrix.fleet
        address = fleet.part("pool").addresses["grpc"]
        return asyncio.run(freed_after_s(int(fleet.http.rpartition(":")[2]), address, self._matrix.cast.model))

    def checks(self, seen: Seen) -> list[Check]:
        assert self._matrix is not None
        left = [one for one in seen.answers if one.status == LEFT]
        done = computed(self._matrix.fleet) - self._computed
        answered = sum(one.status == 200 for one in seen.answers)
        # Whoever left while it was computed cannot be freed: an engine does not stop. All others that were computed
        # for nobody are waste; hedges that lost are in it.
        wasted = max(0, done - answered - _left_in_compute(seen))
        return [
            Check("freed_ms", milliseconds(self._freed_s()), "<=", 1e3 * _FREED_S),
            Check("left", len(left), ">=", 50),
            Check("wasted_percent", points(wasted / max(1, done)), "<=", 2.0),
            Check("stayers_lost_points", points(seen.before.attainment() - seen.during.attainment()), "<=", 2.0),
            Check("in_flight_at_idle", sum(one["in_flight"] for one in self._matrix.fleet.targets().values()), "<=", 0),
        ]


def _left_in_compute(seen: Seen) -> int:
    """Callers who left when their turn had come, or was to come within 50 ms."""
    left = {one.number: one.at + one.latency_s for one in seen.answers if one.status == LEFT}
    return sum(
        1
        for flight in seen.flights
        for step in flight.steps
        if step.what == "accepted"
        and flight.number in left
        and step.at + step.promised_s - flight.expected_s.get(step.target, 0.0) - _FREED_S <= left[flight.number]
    )


_RUDE: Final = _Rude()
TRIALS: Final = (
    _step(2.0, 90.0, 0.6),
    _step(5.0, 80.0, 0.3),  # more than 1.5 of the knee is more than the gateway gets of two shared cores
    Trial(
        Row(
            "17", "twice the requests, and whoever gets no answer asks thrice more at once", _nothing,
            during_s=10.0, after_s=9.0, recover_s=5.0, step=2.0, retries=3, changes=4,
        ),
        _checks_storm,
    ),
    Trial(Row("18", "a fifth leave, some loiter", _RUDE.acts, _RUDE.end, load=0.8, leaving=0.2), _RUDE.checks),
)  # fmt: skip

"""Rows 12 and 14: the broker goes down and comes back empty; somebody floods it.

A decision is one piece on the gateway's loop: nothing that MQTT brings can come between its begin and its end. What it
takes is judged by its thread's CPU time, since by the clock it lasts as well while the flooder, the broker or whoever
shares the cores has its core; that is told beside it, before the flood and during it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from math import inf
from pathlib import Path
from statistics import quantiles
from typing import Final

import psutil

from tests.bench.fault_rows.trial import Check, Trial, milliseconds, points
from tests.support.faults.matrix import ROOT, Act, Matrix, Row
from tests.support.faults.matrix_seen import Phase, Seen
from tests.support.gateway.odd_gateway import decisions_of
from tests.support.mqtt.gossip import Gossip
from tidegate import clock

_RATE: Final = 10_000.0
_BEFORE_S: Final = 3.0


def _down(matrix: Matrix) -> list[tuple[float, Act]]:
    return [(0.0, matrix.fleet.broker.kill)]


def _up(matrix: Matrix) -> None:
    matrix.fleet.broker.start()


def _checks_down(seen: Seen) -> list[Check]:
    looks = [look for look in seen.looks if look.at > seen.broken_at]
    unready = {id for look in looks for id, (state, _) in look.states.items() if state != "ready"}
    return [
        Check("lost_points", points(seen.loss()), "<=", 1.0),
        Check("targets_taken_for_gone", len(unready), "<=", 0),
        Check("targets_known_at_the_end", len(looks[-1].states), ">=", len(looks[0].states)),
    ]


def _broker(name: str, during_s: float, *, quick: bool) -> Trial:
    words = f"broker down for {during_s:g} s, back with nothing retained"
    return Trial(Row(name, words, _down, _up, during_s=during_s), _checks_down, quick=quick)


class _Flood:
    """Row 14's fault: what the devices said, 10,000 times a second, and among it what no device says."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._gossip: Gossip | None = None
        self._process: subprocess.Popen[str] | None = None
        self._gateway: psutil.Process | None = None
        self._grown_mib = 0.0
        self._cpu_s = 0.0
        self._sent = 0
        self._decisions = Path()
        self._began_at = self._ended_at = 0.0

    def acts(self, matrix: Matrix) -> list[tuple[float, Act]]:
        self._gossip = Gossip(matrix.fleet.broker.port)
        self._gossip.listen("tidegate/v1/+/up/#")
        self._gateway = psutil.Process(matrix.fleet.gateway.pid)
        self._decisions = decisions_of(matrix.fleet.gateway.config_path)

        def begin() -> None:
            assert self._gateway is not None and self._gossip is not None
            self._gossip.close()  # it would hear ten thousand messages a second as well, in this process
            self._grown_mib, self._cpu_s = -_rss_mib(self._gateway), -_cpu_s(self._gateway)
            self._process = self._start(matrix.fleet.broker.port)
            self._began_at = clock.now()

        return [(0.0, begin)]

    def end(self, _matrix: Matrix) -> None:
        assert self._process is not None and self._gateway is not None
        self._ended_at = clock.now()
        words, _ = self._process.communicate(timeout=30.0)
        self._sent = int(words)
        self._grown_mib += _rss_mib(self._gateway)
        self._cpu_s += _cpu_s(self._gateway)

    def checks(self, seen: Seen) -> list[Check]:
        states = {state for look in seen.looks if look.at > seen.broken_at for state, _ in look.states.values()}
        return [
            Check("messages_a_second", round(self._sent / self._seconds), ">=", 0.9 * _RATE),
            Check("lost_points", points(seen.loss()), "<=", 1.0),
            Check("decision_p99_ms", self._decided_p99_ms(self._began_at, self._ended_at), "<=", 1.0),
            Check(
                "decision_p99_before_ms", self._decided_p99_ms(self._began_at - _BEFORE_S, self._began_at), "<=", 1.0
            ),
            Check("decision_by_the_clock_p99_ms", decision_p99_ms(seen.during), "<=", inf),
            Check("decision_by_the_clock_p99_before_ms", decision_p99_ms(seen.before), "<=", inf),
            Check("gateway_cores", round(self._cpu_s / self._seconds, 2), "<=", 1.0),
            Check("memory_grown_mib", round(self._grown_mib, 1), "<=", 16.0),
            Check("targets_doubted", len(states - {"ready"}), "<=", 0),
            Check("targets_that_are_not", len(_ghosts(seen)), "<=", 0),
        ]

    def _decided_p99_ms(self, from_s: float, to_s: float) -> float | None:
        """In CPU time, of the decisions between these two instants."""
        rows = [line.split() for line in self._decisions.read_text().splitlines()]
        took_s = [float(cpu_s) for at, cpu_s in rows if from_s <= float(at) < to_s]
        return milliseconds(quantiles(took_s, n=100)[98]) if len(took_s) > 1 else None

    def _start(self, port: int) -> subprocess.Popen[str]:
        assert self._gossip is not None
        heard = list(self._gossip.heard)
        lines = [json.dumps([one.topic, one.payload.decode()]) for one in heard]
        lines += [json.dumps([one.topic, one.payload.decode()[:-7]]) for one in heard[:20]]  # cut off
        lines += [json.dumps([f"tidegate/v1/home/up/x{n}/hb", "{}"]) for n in range(20)]
        path = Path(tempfile.mkdtemp(prefix="tidegate-flood-")) / "messages"
        path.write_text("\n".join(lines))
        command = [
            sys.executable,
            "-m",
            "tests.support.serving.flood",
            str(port),
            str(_RATE),
            str(self._seconds),
            str(path),
        ]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def decision_p99_ms(phase: Phase) -> float | None:
    """By what the gateway says of each answer: what placing it took, by the clock."""
    decided = [one.decided_s for one in phase.answers if one.status == 200]
    return milliseconds(quantiles(decided, n=100)[98]) if len(decided) > 1 else None


def _ghosts(seen: Seen) -> set[str]:
    known = set(seen.looks[0].states)
    return {target for look in seen.looks for target in look.states if target not in known}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _rss_mib(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def flood(seconds: float) -> Trial:
    fault = _Flood(seconds)
    return Trial(Row("14", "10,000 MQTT messages a second", fault.acts, fault.end, during_s=seconds), fault.checks)


TRIALS: Final = (
    _broker("12a", 10.0, quick=True),
    _broker("12b", 60.0, quick=False),
    flood(8.0),
)

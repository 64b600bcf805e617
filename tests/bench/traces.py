"""Recorded cellular links: how many requests are in time with Tidegate, and with a static threshold and plain retries.

One fleet of processes (`tests/support/faults/matrix.py`), its way to the pool shaped by a recording's capacity in both
directions beside 20 ms of delay. For each recording the same requests are sent twice over the same seconds of it: to a
gateway of Tidegate's, and to the same stack with a deployer's rule in its place
(`tests/support/gateway/plain_gateway.py`). The two follow each other, recording by recording, and each gateway is a new
one that first learns for some seconds.

It needs the recordings (TIDEGATE_TRACES, or ../shared/traces); without them it is skipped. Figures are of paced models
on loopback: they compare rules, not machines.

    python -m tests.bench.traces [--quick] [--seconds 25] [--repeats 1]
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from tests.bench.harness import ROOT, Goal, Report, parser, table
from tests.support.faults.matrix import WAN, Act, Matrix, Row
from tests.support.faults.matrix_seen import Phase, Seen
from tests.support.gateway.plain_gateway import NAME
from tidegate.netsim.links.trace import CapacityTrace
from tidegate.testing.traces import TraceFinder, TraceMissing, folders

RECORDINGS: Final = {
    "Verizon LTE": "Verizon-LTE-short",
    "AT&T LTE, driving": "ATT-LTE-driving-2016",
    "T-Mobile UMTS, driving": "TMobile-UMTS-driving",
}
RULES: Final[dict[str, dict[str, Any]]] = {
    "static": {"name": NAME, "shed": False, "adaptive_limit": False},
    "tidegate": {"name": "gateway", "shed": True, "adaptive_limit": True},
}
_LEARN_S: Final = 5.0
_KINDS: Final = ("interactive", "document", "bulk")


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--load", type=float, default=0.6, help="of the fleet's knee")
    chosen = options.parse_args()
    seconds = chosen.seconds or (8.0 if chosen.quick else 25.0)
    report = Report("traces", {"seconds": seconds, "load": chosen.load, "repeats": chosen.repeats or 1})
    try:
        recordings = {name: _both_ways(file) for name, file in RECORDINGS.items()}
    except TraceMissing as missing:
        report.goal(Goal("traces_misses_avoided_percent", None, 25.0, why=str(missing)))
        report.write()
        return
    if chosen.quick:
        recordings = dict([*recordings.items()][-1:])
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        modules = {"gateway": "tests.support.gateway.plain_gateway"}
        with Matrix(Path(scratch), gateway={"policy": "value"}, modules=modules) as matrix:
            found = _run(matrix, recordings, seconds, chosen.load, chosen.repeats or 1)
    _tell(found, report)
    report.write()


def _both_ways(file: str) -> tuple[CapacityTrace, CapacityTrace]:
    """Towards the pool and back."""
    find = TraceFinder(folders(str(ROOT / ".." / "shared" / "traces")))
    return find(f"{file}.up"), find(f"{file}.down")


Found = dict[tuple[str, str], list[Seen]]


def _run(
    matrix: Matrix,
    recordings: dict[str, tuple[CapacityTrace, CapacityTrace]],
    seconds: float,
    load: float,
    repeats: int,
) -> Found:
    found: Found = {}
    for repeat in range(repeats):
        for name, traces in recordings.items():
            for rule, keys in RULES.items():
                matrix.fleet.restart_gateway(**keys)
                offset_s = 10.0 + repeat * seconds
                row = _row(name, traces, offset_s, seconds, load)
                found.setdefault((name, rule), []).append(matrix.run(row, seed=repeat + 1))
    return found


def _row(name: str, traces: tuple[CapacityTrace, CapacityTrace], offset_s: float, seconds: float, load: float) -> Row:
    def acts(matrix: Matrix) -> list[tuple[float, Act]]:
        profile = {**WAN, "recording": {"offset_s": offset_s}}
        return [(0.0, lambda: matrix.links["pool"].apply(traces=traces, **profile))]

    return Row(
        name, name, acts, lambda matrix: matrix.usual("pool"),
        before_s=_LEARN_S, during_s=seconds, after_s=0.5, load=load,
    )  # fmt: skip


def _tell(found: Found, report: Report) -> None:
    rows = []
    for (name, rule), runs in found.items():
        phase = Phase([one for seen in runs for one in seen.during.answers])
        by_kind = [f"{100 * phase.of(kind).attainment():.1f}" for kind in _KINDS]
        rows.append((name, rule, len(phase), f"{100 * phase.attainment():.1f}", *by_kind, _statuses(phase)))
        report.figures[f"{name} {rule}"] = {
            "attainment": phase.attainment(),
            "statuses": {str(status): count for status, count in phase.statuses().items()},
        }
    table(("link to the pool", "rule", "requests", "in time %", *_KINDS, "statuses"), sorted(rows))
    for name in dict.fromkeys(name for name, _ in found):
        ours, plain = (report.figures[f"{name} {rule}"]["attainment"] for rule in ("tidegate", "static"))
        goal = f"traces_{RECORDINGS[name].lower().replace('-', '_')}_misses_avoided_percent"
        avoided = 100.0 * (ours - plain) / max(1.0 - plain, 1e-9)
        report.goal(Goal(goal, avoided, 25.0, why=f"{100 * ours:.1f} % in time beside {100 * plain:.1f} %"))
    unaccounted = sum(abs(seen.unaccounted) for runs in found.values() for seen in runs)
    report.goal(Goal("traces_arrivals_unaccounted", float(unaccounted), 0.0, "<="))


def _statuses(phase: Phase) -> str:
    return " ".join(f"{status}x{count}" for status, count in sorted(phase.statuses().items()))


if __name__ == "__main__":
    main()

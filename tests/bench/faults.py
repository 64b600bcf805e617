"""The fault matrix: what Tidegate holds while links, devices, brokers and callers fail.

Source: docs/design/faults.md, "Fault matrix".

One fleet of real processes (`tests/support/faults/matrix.py`: 8 edges and a pool that only take their time, Mosquitto,
a gateway, every link simulated) plays row after row under an open loop at 0.6 of its knee. Each row prints one goal:
how many of its acceptance numbers it missed, and all of them in words. What is stricter than a row's own numbers and
holds for all stands in `fault_rows/trial.py`: every request ends once, in time or at its deadline, with a documented
status.

It can be wrong where the machine is busy: a process that does not get the CPU for 50 ms answers late by so much, and
this bench cannot tell. `sent late` says how late the load itself was; repeat what looks odd.

    python -m tests.bench.faults [--quick] [--rows 4a,7a] [--policy value|cheapest] [--repeats 3]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

from tests.bench.fault_rows import broker, callers, devices, links, lives, rumours, soak, stalls, workers
from tests.bench.fault_rows.trial import Check, Trial
from tests.bench.harness import Goal, Report, parser, table
from tests.support.faults.matrix import Matrix
from tests.support.faults.matrix_seen import Seen

TRIALS: Final = (
    *links.TRIALS, *devices.TRIALS, *workers.TRIALS, *broker.TRIALS, *rumours.TRIALS, *callers.TRIALS, *soak.TRIALS,
    *lives.TRIALS, *stalls.TRIALS,
)  # fmt: skip
BRIEFER_S: Final = 1.0
BETWEEN_S: Final = 1.5  # from one row's end to the next one's begin
FLEET_S: Final = 25.0  # to start a fleet and let it learn
MODULES: Final = {**devices.MODULES, **workers.MODULES}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rows", help="numbers of rows, with commas; without it, all (with --quick, some)")
    options.add_argument("--policy", choices=("value", "cheapest"), default="value")
    options.add_argument("--keep", type=Path, help="folder for configurations and logs, kept")
    chosen = options.parse_args()
    trials = wanted(chosen.rows, quick=chosen.quick)
    repeats = chosen.repeats or 1
    report = Report("faults", {"policy": chosen.policy, "rows": [one.row.number for one in trials], "repeats": repeats})
    with ExitStack() as stack:
        folder = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        for foreign, of_fleet in groupby(sorted(trials, key=_is_foreign), _is_foreign):
            place = folder / ("foreign" if foreign else "ours")
            with Matrix(place, gateway={"policy": chosen.policy}, modules=MODULES, foreign=foreign) as matrix:
                matrix.warm_up()
                for trial in of_fleet:
                    runs = [matrix.run(trial.row, seed=seed + 1) for seed in range(repeats)]
                    tell(trial, runs, report)
    report.write()


def _is_foreign(trial: Trial) -> bool:
    return trial.foreign


def wanted(numbers: str | None, *, quick: bool) -> list[Trial]:
    """The trials of these rows: "4" is all sizes of row 4, "4a" one."""
    if numbers is None:
        return [_brief(one) for one in TRIALS if one.quick] if quick else list(TRIALS)
    names = [name.strip() for name in numbers.split(",")]
    found = [one for one in TRIALS if one.row.number in names or one.row.number.rstrip(ascii_lowercase) in names]
    if not found:
        raise SystemExit(f"there is no row {numbers}; there are {', '.join(one.row.number for one in TRIALS)}")
    return [_brief(one) for one in found] if quick else found


def _brief(trial: Trial) -> Trial:
    """The same with less around the fault: what is usual is known of all rows before, too."""
    row = trial.row
    return replace(trial, row=replace(row, before_s=row.before_s - BRIEFER_S, after_s=row.after_s - BRIEFER_S))


def least_wall_s(trials: Sequence[Trial]) -> float:
    """How long these rows take by their lengths, with rough figures for fleets and mending; load adds to it."""
    rows = sum(one.row.before_s + one.row.during_s + one.row.after_s + BETWEEN_S for one in trials)
    return rows + FLEET_S * len({one.foreign for one in trials})


def tell(trial: Trial, runs: Sequence[Seen], report: Report) -> None:
    """One goal line: of several runs the one that missed the fewest numbers but one is not picked: the median is."""
    judged = sorted((trial.judge(seen) for seen in runs), key=_missed)
    checks = judged[len(judged) // 2]
    show(trial, runs[0])
    report.figures[trial.row.number] = {check.name: check.figure for check in checks} | _attained(runs[0])
    why = f"{trial.row.title}; {'; '.join(str(check) for check in checks)}"
    report.goal(Goal(f"faults_{trial.row.number}_numbers_missed", float(_missed(checks)), 0, "<=", why=why))


def show(trial: Trial, seen: Seen) -> None:
    """The three phases, and what the gateway wrote meanwhile."""
    phases = (("usual", seen.usual), ("before", seen.before), ("during", seen.during), ("after", seen.after))
    kinds = ("interactive", "document", "bulk")
    rows = []
    for name, phase in phases:
        by_kind = " / ".join(f"{100 * phase.of(kind).attainment():.1f}" for kind in kinds)
        statuses = " ".join(f"{status}x{count}" for status, count in sorted(phase.statuses().items()))
        hedged = f"{100 * phase.hedged_share():.1f}"
        rows.append((name, len(phase), f"{100 * phase.attainment():.1f}", by_kind, hedged, statuses))
    print(f"\nrow {trial.row.number}: {trial.row.title} (load sent late: p99 {1e3 * seen.sent_late_p99_s:.0f} ms)")
    table(("", "requests", "in time %", "by class %", "hedged %", "statuses"), rows)
    for line in seen.logs["gateway"].splitlines()[:24]:
        print(f"  {line[:220]}")


def _missed(checks: Sequence[Check]) -> int:
    return sum(not check.holds for check in checks)


def _attained(seen: Seen) -> dict[str, Any]:
    phases = {"usual": seen.usual, "before": seen.before, "during": seen.during, "after": seen.after}
    return {f"attained_{name}": phase.attainment() for name, phase in phases.items()}


if __name__ == "__main__":
    main()

"""The rows of the fault matrix in which answers have begun: what their callers see when a target or a link fails then.

Rows 33 to 37 of docs/design/faults.md; what each must hold is in `fault_rows/streams.py`. They are played on a stage of
their own, since what matters is every token of a few answers, and not which of many requests are in time.

    python -m tests.bench.stream_faults [--quick] [--rows 33,35a] [--hits 10]
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Final

from tests.bench.fault_rows.streams import SLOW_READER, SLOW_READER_TITLE, STREAM_ROWS, StreamStage
from tests.bench.fault_rows.trial import Check
from tests.bench.harness import Goal, Report, parser

NUMBERS: Final = (*(one.number for one in STREAM_ROWS), SLOW_READER)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rows", help="numbers of rows, with commas; without it, all")
    options.add_argument("--hits", type=int, help="faults of each row")
    options.add_argument("--keep", type=Path, help="folder for configurations and logs, kept")
    chosen = options.parse_args()
    numbers = wanted(chosen.rows)
    report = Report("stream_faults", {"rows": numbers, "hits": chosen.hits})
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        asyncio.run(play(numbers, chosen.keep or Path(scratch), report, hits=chosen.hits, quick=chosen.quick))
    report.write()


async def play(numbers: Sequence[str], folder: Path, report: Report, *, hits: int | None, quick: bool) -> None:
    """The rows of these numbers, one after another on one stage."""
    async with StreamStage(folder) as stage:
        for row in STREAM_ROWS:
            if row.number in numbers:
                found = await stage.run(row, hits or (row.quick_hits if quick else row.hits))
                tell(row.number, row.title, found, report)
        if SLOW_READER in numbers:
            tell(SLOW_READER, SLOW_READER_TITLE, await stage.read_slowly(), report)


def wanted(numbers: str | None) -> list[str]:
    """The rows of these numbers: "35" is all sizes of row 35, "35a" one. Raises SystemExit where there is none."""
    if numbers is None:
        return list(NUMBERS)
    names = [name.strip() for name in numbers.split(",")]
    found = [one for one in NUMBERS if one in names or one.rstrip(ascii_lowercase) in names]
    if not found:
        raise SystemExit(f"there is no row {numbers}; there are {', '.join(NUMBERS)}")
    return found


def tell(number: str, title: str, checks: Sequence[Check], report: Report) -> None:
    """One goal line."""
    report.figures[f"row_{number}"] = {check.name: check.figure for check in checks}
    missed = sum(not check.holds for check in checks)
    why = f"{title}; {'; '.join(str(check) for check in checks)}"
    report.goal(Goal(f"faults_{number}_numbers_missed", float(missed), 0, "<=", why=why))


if __name__ == "__main__":
    main()

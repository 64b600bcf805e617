"""The history of a few figures over the commits: `history.csv` keeps it, charts show it.

`figures.toml` says in `[[chart]]` which figures are kept and which file draws them. A line belongs to a commit, a
figure and a machine: measured again, it is replaced. Its date is the commit's, so that older commits can be measured
later.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

from tests.bench import provenance
from tests.bench.provenance import ROOT, SHORT
from tests.bench.svg_chart import Point, Series, SvgChart

HISTORY: Final = Path(__file__).parent / "history.csv"


@dataclass(frozen=True)
class Line:
    """One figure of one commit on one machine."""

    date: str  # of the commit
    commit: str
    bench: str
    figure: str
    median: float
    low: float
    high: float
    machine: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.commit, self.bench, self.figure, self.machine)

    @property
    def name(self) -> str:
        return f"{self.bench}.{self.figure}"


def kept() -> list[tuple[str, str]]:
    """Benches and figures whose history is kept."""
    names = (name for chart in provenance.config()["chart"] for name in chart["figures"])
    return [(bench, figure) for bench, _, figure in (name.partition(".") for name in names)]


def read(path: Path = HISTORY) -> list[Line]:
    """All lines, oldest commit first."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Line(
                date=row["date"],
                commit=row["commit"],
                bench=row["bench"],
                figure=row["figure"],
                median=float(row["median"]),
                low=float(row["low"]),
                high=float(row["high"]),
                machine=row["machine"],
            )
            for row in csv.DictReader(file)
        ]


def add(lines: Iterable[Line], path: Path = HISTORY) -> bool:
    """Take in new lines; whether the file changed."""
    before = read(path)
    merged = {line.key: line for line in (*before, *lines)}
    after = sorted(merged.values(), key=lambda line: (line.date, line.commit, line.bench, line.figure))
    if after == before:
        return False
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(Line)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**asdict(line), **_rounded(line)} for line in after)
    return True


def commit_date(commit: str) -> str | None:
    """When a commit was made, in UTC."""
    found = provenance.git("log", "-1", "--format=%cd", "--date=format-local:%Y-%m-%dT%H:%M", commit)
    return found.strip() if found else None


def charts(lines: Sequence[Line] | None = None) -> dict[Path, str]:
    """Every chart of `figures.toml`, by its file."""
    found = read() if lines is None else lines
    return {
        ROOT / chart["file"]: drawn(chart["title"], found, chart["figures"], chart.get("labels", {}))
        for chart in provenance.config()["chart"]
    }


def drawn(title: str, lines: Sequence[Line], names: Sequence[str], labels: Mapping[str, str]) -> str:
    """Return an SVG: commits from left to right, a curve a figure, a stroke from a point's lowest to its highest."""
    chosen = sorted((line for line in lines if line.name in names), key=lambda line: line.date)
    series = [Series(labels.get(name, name), [_point(line) for line in chosen if line.name == name]) for name in names]
    commits = list(dict.fromkeys(line.commit[:SHORT] for line in chosen))
    return SvgChart(title, series, commits, x="commits, oldest first", turned=True).drawn()


def _point(line: Line) -> Point:
    return Point(line.commit[:SHORT], line.median, line.low, line.high, note=line.commit[:SHORT])


def _rounded(line: Line) -> dict[str, str]:
    return {name: f"{getattr(line, name):.4g}" for name in ("median", "low", "high")}

"""The history of a few figures over the commits: `history.csv` keeps it, charts show it.

`figures.toml` says in `[[chart]]` which figures are kept and which file draws them. A line belongs to a commit, a
figure and a machine: measured again, it is replaced. Its date is the commit's, so that older commits can be measured
later.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path
from typing import Final

from tests.bench import provenance
from tests.bench.provenance import ROOT, SHORT

HISTORY: Final = Path(__file__).parent / "history.csv"
# Colours that differ also for readers who see few of them (Okabe and Ito, "Color Universal Design", 2008).
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_LEFT, _TOP, _WIDTH, _HEIGHT, _STEP = 48, 34, 720, 260, 5


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
    """An SVG: commits from left to right, a curve a figure, a stroke from each point's lowest to its highest."""
    chosen = [line for line in lines if line.name in names]
    commits = list(dict.fromkeys(line.commit for line in sorted(chosen, key=lambda line: line.date)))
    top = _ceiling(max((line.high for line in chosen), default=1.0))
    step = _WIDTH / max(len(commits), 1)

    def x(commit: str) -> float:
        return _LEFT + step * (commits.index(commit) + 0.5)

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (1.0 - value / top)

    parts = [f'<text x="{_LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>']
    for number in range(_STEP + 1):
        value = top * number / _STEP
        parts += [
            f'<line x1="{_LEFT}" y1="{y(value):.1f}" x2="{_LEFT + _WIDTH}" y2="{y(value):.1f}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>',
        ]
    for commit in commits:
        at = f'x="{x(commit):.1f}" y="{_TOP + _HEIGHT + 14}"'
        turn = f'transform="rotate(-40 {x(commit):.1f} {_TOP + _HEIGHT + 14})"'
        parts.append(f'<text {at} {turn} text-anchor="end" font-family="monospace">{escape(commit[:SHORT])}</text>')
    for number, name in enumerate(names):
        points = sorted((line for line in chosen if line.name == name), key=lambda line: line.date)
        colour = _COLOURS[number % len(_COLOURS)]
        curve = " ".join(f"{x(line.commit):.1f},{y(line.median):.1f}" for line in points)
        parts.append(f'<polyline points="{curve}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for line in points:
            across = f"{x(line.commit):.1f}"
            parts += [
                f'<line x1="{across}" y1="{y(line.low):.1f}" x2="{across}" y2="{y(line.high):.1f}" stroke="{colour}"/>',
                f'<circle cx="{across}" cy="{y(line.median):.1f}" r="3" fill="{colour}">'
                f"<title>{line.commit[:SHORT]}: {line.median:.3g} ({line.low:.3g} to {line.high:.3g})</title></circle>",
            ]
        below = _TOP + _HEIGHT + 78 + 16 * number
        parts += [
            f'<rect x="{_LEFT}" y="{below - 9}" width="12" height="10" fill="{colour}"/>',
            f'<text x="{_LEFT + 18}" y="{below}">{escape(labels.get(name, name))}</text>',
        ]
    height = _TOP + _HEIGHT + 84 + 16 * len(names)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" font-family="sans-serif"'
    )
    return "\n".join(
        [f'{head} font-size="11" fill="#222">', '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""]
    )


def _ceiling(value: float) -> float:
    """The next round number for the top of a scale."""
    unit = 10.0 ** (len(str(int(value))) - 1)
    return next(unit * times for times in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0) if unit * times >= value)


def _rounded(line: Line) -> dict[str, str]:
    return {name: f"{getattr(line, name):.4g}" for name in ("median", "low", "high")}

"""Every measured figure on a page comes from a file of results, and none is typed.

A page names the figure in a comment, which code hosts do not show, and this module writes what stands between:

    <!-- figure: gateway_overhead.link_over_floor.throughput_c64 as .2f -->0.57 (0.55 to 0.72)<!-- /figure -->
    <!-- measured: gateway_overhead -->f535e4a, stale since c2a07f1<!-- /measured -->

The first word is the bench, the rest the figure's full name in `tests/bench/results/BENCH.json`: of `figures`, or else
of `goals`. `as` gives the format: one of Python's (`.2f`, `.1%`), with a factor before it where the unit is another
(`as 1e6 * .0f`); without it three digits. Where the results hold a spread, lowest and highest follow.

A figure whose code changed since the measurement (`provenance.py`) reads "stale since COMMIT". The words stand in
`measured` where its section (from heading to heading) has one of that bench, and else behind the figure. Where git
cannot tell, they stay as they are. A figure without results reads "not measured yet".

    python -m tests.bench.figures      write pages, history and charts: `make figures`
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tests.bench import history, provenance
from tests.bench.provenance import ROOT, SHORT
from tests.bench.svg_chart import Point, Series, SvgChart

RESULTS: Final = Path(__file__).parent / "results"
UNMEASURED: Final = "not measured yet"
MARKER: Final = re.compile(
    r"(?P<begin><!-- (?P<kind>figure|measured|runs): *(?P<words>[^\n]*?) -->)(?P<text>.*?)(?P<end><!-- /(?P=kind) -->)",
    re.DOTALL,
)
_STALE: Final = re.compile(r"(?:, | \[)stale since [0-9a-f]+\]?")
_HEADING: Final = re.compile(r"^#{1,6} ", re.MULTILINE)
_FENCED: Final = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


class NoSuchFigure(Exception):
    """A marker names a bench or a figure that does not exist."""


@dataclass(frozen=True)
class Shown:
    """A figure as the results hold it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Results:
    """One file of results."""

    found: Mapping[str, Any]

    @property
    def measured(self) -> Mapping[str, Any]:
        at: Mapping[str, Any] = self.found.get("measured", {})
        return at

    @property
    def machine(self) -> str:
        cpu, cores = self.found["machine"].get("cpu", "unknown"), self.found["machine"].get("cores")
        return f"{cpu}, {cores} cores" if cores else str(cpu)

    def shown(self, name: str) -> Shown | None:
        """A figure by its full name; None where it could not be measured."""
        if name in self._spreads:
            return self._spreads[name]
        if name in self.found["figures"]:
            value = float(self.found["figures"][name])
            return Shown(value, value, value)
        for goal in self.found["goals"]:
            if goal["name"] == name:
                value = goal["figure"]
                return None if value is None else Shown(float(value), float(value), float(value))
        raise NoSuchFigure(f"the results of {self.found['name']} have no figure {name}")

    @cached_property
    def _spreads(self) -> dict[str, Shown]:
        return dict(_spreads(self.found["detail"]))


class Sources:
    """All results there are, each with the commit since which it is stale ("" while it is not, None: unknown)."""

    def __init__(
        self,
        folder: Path = RESULTS,
        stale_since: Callable[[str, Mapping[str, Any]], str | None] = provenance.stale_since,
        benches: Iterable[str] | None = None,
    ) -> None:
        self._folder = folder
        self._stale_since = stale_since
        self._benches = set(provenance.config()["paths"] if benches is None else benches)
        self._read: dict[str, Results | None] = {}
        self._stale: dict[str, str | None] = {}

    @property
    def measured(self) -> list[str]:
        """Benches with results, by name."""
        return sorted(path.stem for path in self._folder.glob("*.json"))

    @property
    def benches(self) -> list[str]:
        return sorted(self._benches)

    def of(self, bench: str) -> Results | None:
        """The results of a bench; None where there are none yet."""
        if bench not in self._benches:
            raise NoSuchFigure(f"{provenance.CONFIG.name} has no bench {bench}")
        if bench not in self._read:
            path = self._folder / f"{bench}.json"
            self._read[bench] = Results(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
        return self._read[bench]

    def stale(self, bench: str) -> str | None:
        if bench not in self._stale:
            found = self.of(bench)
            self._stale[bench] = self._stale_since(bench, found.measured) if found else ""
        return self._stale[bench]


# what stands between the markers


def rewritten(text: str, sources: Sources) -> str:
    """A page with every figure as the results have it."""
    told = [(section.start, section.end, section.told) for section in _sections(text)]

    def written(found: re.Match[str]) -> str:
        kind, words, old = found["kind"], found["words"], found["text"]
        if any(at <= found.start() < end for at, end in _fences(text)):
            return found[0]
        new = old
        if kind == "figure":
            section = next(benches for start, end, benches in told if start <= found.start() < end)
            new = _figure(words, old, sources, inline=words.partition(".")[0] not in section)
        elif kind == "measured":
            new = _measured(words, old, sources)
        elif kind == "runs":
            new = f"\n{_runs(old, sources)}\n"
        return f"{found['begin']}{new}{found['end']}"

    return MARKER.sub(written, text)


def without_stale(picture: str) -> str:
    """A plot as it would be if no figure were stale."""
    return _STALE.sub("", picture)


def without_marks(text: str) -> str:
    """A page as it would be if no figure were stale."""
    return MARKER.sub(lambda found: f"{found['begin']}{_STALE.sub('', found['text'])}{found['end']}", text)


def without_markers(text: str) -> str:
    """What somebody typed: a page without its markers and what they hold, line by line."""
    return MARKER.sub(lambda found: "\n" * found[0].count("\n"), text)


def stated(shown: Shown, spec: str) -> str:
    """The figure in this format, with its spread."""
    factor, times, form = spec.rpartition("*")
    scale = float(factor) if times else 1.0
    form = form.strip() or ".3g"
    unit = ""
    if form.endswith("%"):
        form, scale, unit = f"{form[:-1]}f", 100.0 * scale, " %"
    value, low, high = (f"{scale * one:z{form}}" for one in (shown.value, shown.low, shown.high))
    return f"{value}{unit}" if low == high else f"{value} ({low} to {high}){unit}"


def _figure(words: str, old: str, sources: Sources, *, inline: bool) -> str:
    name, _, spec = words.partition(" as ")
    bench, _, figure = name.strip().partition(".")
    results = sources.of(bench)
    shown = results and results.shown(figure)
    if not shown:
        return UNMEASURED
    return stated(shown, spec) + (_mark(sources.stale(bench), old, " [{}]") if inline else "")


def _measured(words: str, old: str, sources: Sources) -> str:
    results = sources.of(words.strip())
    if not results:
        return UNMEASURED
    at = results.measured
    commit = str(at.get("commit") or "an unknown commit")[:SHORT]
    return f"{commit}{_mark(sources.stale(words.strip()), old, ', {}')}"


def _mark(stale: str | None, old: str, form: str) -> str:
    if stale is None:
        kept = _STALE.search(old)
        return kept[0] if kept else ""
    return form.format(f"stale since {stale}") if stale else ""


def _runs(old: str, sources: Sources) -> str:
    """A line for each bench: when, where, and how many of its goals were met."""
    before = {line.split("`")[1]: line for line in old.splitlines() if line.startswith("| `")}
    lines = ["| bench | measured at | on | goals met |", "|---|---|---|---|"]
    for bench in sources.benches:
        results = sources.of(bench)
        if results is None:
            lines.append(f"| `{bench}` | {UNMEASURED} | | |")
            continue
        at, verdicts = results.measured, [goal["verdict"] for goal in results.found["goals"]]
        judged = len(verdicts) - verdicts.count("skipped")
        told = f"{verdicts.count('met')} of {judged}" if judged else ""
        commit = _measured(bench, before.get(bench, ""), sources)
        origin = "; taken over from the README of that commit" if at.get("taken_over") else ""
        lines.append(f"| `{bench}` | {commit}, {at.get('date')}{origin} | {results.machine} | {told} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Section:
    start: int
    end: int
    told: frozenset[str]  # benches of which it says when they were measured


def _sections(text: str) -> list[_Section]:
    fences = _fences(text)
    starts = [
        found.start() for found in _HEADING.finditer(text) if not any(at < found.start() < end for at, end in fences)
    ]
    bounds = (0, *starts, len(text) + 1)
    return [
        _Section(
            start,
            end,
            frozenset(found["words"] for found in MARKER.finditer(text[start:end]) if found["kind"] == "measured"),
        )
        for start, end in pairwise(bounds)
    ]


def _fences(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in _FENCED.finditer(text)]


def _spreads(detail: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Shown]]:
    """Every median or mean with its spread, by the full name that `harness.numbers` gives it."""
    for name, value in detail.items():
        if not isinstance(value, Mapping):
            continue
        middle = value.get("median", value.get("mean"))
        if middle is not None and {"low", "high"} <= value.keys():
            yield prefix + name, Shown(middle, value["low"], value["high"])
        else:
            yield from _spreads(value, f"{prefix}{name}.")


# pictures


def plots(sources: Sources, was: Callable[[Path], str] | None = None) -> dict[Path, str]:
    """Every `[[plot]]` of `figures.toml`, by its file.

    Args:
        was: what a file holds now; where git cannot tell whether a figure is stale, its words stay.
    """
    read = was or (lambda path: path.read_text(encoding="utf-8") if path.is_file() else "")
    return {
        ROOT / plot["file"]: drawn_plot(plot, sources, read(ROOT / plot["file"]))
        for plot in provenance.config()["plot"]
    }


def drawn_plot(plot: Mapping[str, Any], sources: Sources, was: str = "") -> str:
    """Return one plot: in each of `series` the figures of `places`, whose names stand where it says `{}`.

    Raises:
        NoSuchFigure: its bench is not known, or its results lack a figure, and `unmeasured` does not name the series.
    """
    bench = plot["bench"]
    results = sources.of(bench)
    places: Mapping[str, str] = plot["places"]
    missing = plot.get("unmeasured", ())
    series = [
        Series(label, [] if label in missing else _points(name, places, results, plot.get("factor", 1.0)))
        for label, name in plot["series"].items()
    ]
    notes = [f"{bench}: {UNMEASURED}"]
    if results and any(one.points for one in series):
        notes = [f"{bench}, measured at {_measured(bench, was, sources)}", results.machine]
    return SvgChart(
        plot["title"],
        series,
        list(places.values()),
        x=plot.get("x", ""),
        y=plot.get("y", ""),
        form=plot.get("form", ".3g"),
        kind=plot.get("kind", "curves"),
        least=plot.get("least", 0.0),
        most=plot.get("most"),
        notes=notes,
    ).drawn()


def _points(name: str, places: Mapping[str, str], results: Results | None, factor: float) -> list[Point]:
    shown = {place: results.shown(name.replace("{}", key)) for key, place in places.items()} if results else {}
    return [
        Point(place, factor * one.value, factor * one.low, factor * one.high) for place, one in shown.items() if one
    ]


def pages() -> list[Path]:
    """README and all of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    """Write what changed, and say so."""
    sources = Sources()
    if history.add(_lines(sources)):
        print(f"wrote {history.HISTORY.relative_to(ROOT)}")
    for path, text in (history.charts() | plots(sources)).items():
        _write(path, text)
    for path in pages():
        _write(path, rewritten(path.read_text(encoding="utf-8"), sources))


def _lines(sources: Sources) -> Iterable[history.Line]:
    for bench, figure in history.kept():
        results = sources.of(bench) if bench in sources.benches else None  # the guard adds its own
        commit = results and results.measured.get("commit")
        if not results or not commit or results.measured.get("uncommitted") or results.measured.get("taken_over"):
            continue
        try:
            shown = results.shown(figure)
        except NoSuchFigure:
            continue  # these results are older than the figure
        if shown:
            yield history.Line(
                date=history.commit_date(commit) or str(results.measured["date"]),
                commit=str(commit)[:SHORT],
                bench=bench,
                figure=figure,
                median=shown.value,
                low=shown.low,
                high=shown.high,
                machine=results.machine,
            )


def _write(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

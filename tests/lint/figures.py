"""Figures on pages are the ones of `tests/bench/results`: none is typed, none names a bench that is not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Final

from tests.bench import history, provenance
from tests.bench.figures import (
    MARKER,
    NoSuchFigure,
    Sources,
    pages,
    plots,
    rewritten,
    without_markers,
    without_marks,
    without_stale,
)
from tests.lint.tree import ROOT, Source, Violation

# Where tables hold nothing but measured figures.
MEASURED: Final = {"README.md": "## Measured", "docs/benchmarks.md": "# Benchmarks"}
_CONFIG: Final = "tests/bench/figures.toml"
_RULE: Final = re.compile(r"^\|[-|: ]+\|$")


def outdated_figures(read: Mapping[str, str], sources: Sources) -> list[Violation]:
    """Pages with figures that differ from the results. That a figure is stale is no violation."""
    found = []
    for path, text in read.items():
        try:
            right = without_marks(rewritten(text, sources))
        except NoSuchFigure as why:
            found.append(Violation(path, 1, str(why)))
            continue
        wrong = zip_longest(without_marks(text).splitlines(), right.splitlines())
        found += [
            Violation(path, line, "a figure differs from its results: make figures")
            for line, (is_now, is_right) in enumerate(wrong, start=1)
            if is_now != is_right
        ]
    return found


def typed_figures(read: Mapping[str, str]) -> list[Violation]:
    """Tables of measured figures with a number that no marker holds."""
    return [violation for path, text in read.items() if path in MEASURED for violation in _typed(path, text)]


def _typed(path: str, text: str) -> Iterable[Violation]:
    lines = without_markers(text).splitlines()
    inside, heading = False, MEASURED[path]
    level = heading.partition(" ")[0]
    for number, line in enumerate(lines):
        if line.startswith("#") and line.partition(" ")[0].count("#") <= len(level):
            inside = line == heading
        is_row = line.startswith("|") and not _RULE.match(line)
        is_head = number + 1 < len(lines) and _RULE.match(lines[number + 1])
        if inside and is_row and not is_head:
            cells = line.strip("|").split("|")[1:]
            if any(re.search(r"\d", cell) for cell in cells):
                yield Violation(path, number + 1, "a typed figure: name it by a marker (tests/bench/figures.py)")


def unlisted_benches(sources: Iterable[Source], listed: Mapping[str, list[str]]) -> list[Violation]:
    """Benches without a list of the paths that their figures depend on, and lists with a path that is gone."""
    found = [
        Violation(source.path, line, f"{_CONFIG} has no list of paths for {bench}")
        for source in sources
        if source.folder.startswith("tests/bench") and "/test_" not in source.path
        for line, bench in _reports(source)
        if bench not in listed
    ]
    return found + [
        Violation(_CONFIG, 1, f"{bench} depends on {path}, which is not there")
        for bench, paths in listed.items()
        for path in provenance.missing(paths)
    ]


def _reports(source: Source) -> Iterable[tuple[int, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Report" and node.args:
            for name in ast.walk(node.args[0]):
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield node.lineno, name.value


def outdated_charts(charts: Mapping[Path, str]) -> list[Violation]:
    """Charts and plots that do not show history or results as they are. That a figure is stale is no violation."""
    return [
        Violation(str(path.relative_to(ROOT)), 1, "the picture differs from what was measured: make figures")
        for path, text in charts.items()
        if not path.is_file() or without_stale(path.read_text(encoding="utf-8")) != without_stale(text)
    ]


def stale(read: Mapping[str, str], sources: Sources) -> str:
    """One line about the figures whose code has changed since; empty where there are none, or where git cannot tell."""
    shown = {
        found["words"].partition(".")[0].strip()
        for text in read.values()
        for found in MARKER.finditer(text)
        if found["kind"] != "runs"
    }
    since = {bench: sources.stale(bench) for bench in sorted(shown & set(sources.benches))}
    told = ", ".join(f"{bench} ({commit})" for bench, commit in since.items() if commit)
    return f"stale figures, by the bench to run again and the commit since which: {told}" if told else ""


def read_pages() -> dict[str, str]:
    """README and docs by their paths."""
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in pages()}


def figure_violations(sources: Iterable[Source]) -> tuple[list[Violation], str]:
    """All of the above over this checkout, and the line about stale figures."""
    read, results = read_pages(), Sources()
    found = [
        *outdated_figures(read, results),
        *typed_figures(read),
        *unlisted_benches(sources, provenance.config()["paths"]),
        *outdated_charts(history.charts() | plots(results)),
    ]
    return found, stale(read, results)

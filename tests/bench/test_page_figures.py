"""Figures of pages are taken from results, with spread and staleness, and nothing else of a page changes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.bench import harness, history, provenance
from tests.bench.figures import NoSuchFigure, Sources, drawn_plot, rewritten, without_marks, without_stale
from tests.bench.harness import Goal, Report, Spread
from tests.bench.history import Line
from tests.bench.svg_chart import Point, Series, SvgChart, ceiling

FIGURE = "<!-- figure: {} -->{}<!-- /figure -->"
OF = "{http://www.w3.org/2000/svg}"
MEASURED = "<!-- measured: hop -->{}<!-- /measured -->"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """What a bench "hop" wrote."""
    report = Report(
        "hop",
        {},
        {
            "link": {"us": Spread.of([80e-6, 60e-6, 70e-6])},
            "share": 0.9712,
            "who": "us",
            "grown": Spread.of([-0.2, 3.0, 41.0]),
        },
    )
    report.goals.append(Goal("hop_ratio", 0.5, 1.0, "<="))
    report.goals.append(Goal("heat", None, 1.0, why="no GPU"))
    report.measured = {"commit": "abcdef0123456789", "date": "2026-01-02", "uncommitted": []}
    report.write(tmp_path)
    return tmp_path


def sources(results: Path, stale: str | None = "") -> Sources:
    return Sources(results, stale_since=lambda _bench, _measured: stale, benches=("hop", "other"))


@pytest.mark.parametrize(
    ("words", "stated"),
    [
        ("hop.link.us as 1e6 * .0f", "70 (60 to 80)"),
        ("hop.link.us as 1e6 * .1f", "70.0 (60.0 to 80.0)"),
        ("hop.share as .1%", "97.1 %"),
        ("hop.share", "0.971"),
        ("hop.hop_ratio as .2f", "0.50"),
        ("hop.heat as .2f", "not measured yet"),
        ("hop.grown as .0f", "3 (0 to 41)"),  # and not from -0
        ("other.link.us as .0f", "not measured yet"),
    ],
)
def test_a_figure_is_written_as_the_results_have_it(results: Path, words: str, stated: str) -> None:
    page = f"# It\n\nA hop takes {FIGURE.format(words, '3')} µs.\n"
    after = rewritten(page, sources(results))
    assert after == page.replace("-->3<!--", f"-->{stated}<!--")
    assert rewritten(after, sources(results)) == after


@pytest.mark.parametrize("words", ["hop.link.p50", "hop.who", "nobody.link.us"])
def test_a_figure_that_no_bench_has_is_an_error(results: Path, words: str) -> None:
    with pytest.raises(NoSuchFigure):
        rewritten(FIGURE.format(words, ""), sources(results))


def test_a_stale_figure_says_since_when_where_its_section_does_not(results: Path) -> None:
    figure = FIGURE.format("hop.share as .1f", "")
    page = f"# Told\n{figure} at {MEASURED.format('')}\n## Untold\n{figure}\n"
    after = rewritten(page, sources(results, "1234567"))
    assert "-->1.0<!-- /figure --> at" in after
    assert "-->abcdef0, stale since 1234567<!-- /measured -->" in after
    assert "-->1.0 [stale since 1234567]<!-- /figure -->" in after
    assert without_marks(after) == rewritten(page, sources(results))


def test_where_git_cannot_tell_what_a_page_says_of_staleness_stays(results: Path) -> None:
    page = f"{FIGURE.format('hop.share as .1f', '1.0 [stale since 1234567]')}\n"
    assert rewritten(page, sources(results, None)) == page
    assert "stale" not in rewritten(page, sources(results, ""))
    table = rewritten("<!-- runs: all --><!-- /runs -->", sources(results, "1234567"))
    assert rewritten(table, sources(results, None)) == table


def test_an_example_in_a_block_of_code_is_no_figure(results: Path) -> None:
    page = f"```\n# no heading\n{FIGURE.format('nobody.x', '1')}\n```\n"
    assert rewritten(page, sources(results)) == page


def test_the_table_of_runs_says_of_each_bench_when_it_was_measured_and_what_of_its_goals_was_met(results: Path) -> None:
    after = rewritten("<!-- runs: all -->\n<!-- /runs -->\n", sources(results, "1234567"))
    assert "| `hop` | abcdef0, stale since 1234567, 2026-01-02 |" in after
    assert "| 1 of 1 |" in after
    assert "| `other` | not measured yet | | |" in after


# which commit


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose bench "hop" depends on a folder, but not on one file of it."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "t")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "t@example.org")
    monkeypatch.setattr(provenance, "config", lambda: {"paths": {"hop": ["code", "!code/aside.py"]}, "chart": []})
    root = tmp_path / "checkout"
    (root / "code").mkdir(parents=True)
    run(root, "init", "-q")
    return root


def run(root: Path, *words: str) -> str:
    return subprocess.run(("git", *words), cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path, **files: str) -> str:
    for name, text in files.items():
        (root / "code" / f"{name}.py").write_text(text)
    run(root, "add", ".")
    run(root, "commit", "-q", "--allow-empty", "-m", "x")
    return run(root, "rev-parse", "HEAD")


@pytest.mark.slow
def test_a_figure_is_stale_since_the_first_commit_that_changed_what_it_depends_on(checkout: Path) -> None:
    measured = {"commit": commit(checkout, one="1"), "uncommitted": []}
    commit(checkout, aside="1")
    assert provenance.stale_since("hop", measured, checkout) == ""
    first = commit(checkout, one="2")
    commit(checkout, two="1")
    assert provenance.stale_since("hop", measured, checkout) == first[:7]
    commit(checkout, one="1", two="")
    run(checkout, "rm", "-q", "code/two.py")
    commit(checkout)
    assert provenance.stale_since("hop", measured, checkout) == "", "as it was when it was measured"


def test_what_was_measured_with_uncommitted_changes_is_stale_from_the_start(checkout: Path) -> None:
    at = commit(checkout, one="1")
    assert provenance.stale_since("hop", {"commit": at, "uncommitted": ["code/one.py"]}, checkout) == at[:7]


@pytest.mark.parametrize("measured", [{}, {"commit": None}, {"commit": "0" * 40}])
def test_an_unknown_commit_makes_no_figure_stale(checkout: Path, measured: Mapping[str, Any]) -> None:
    commit(checkout, one="1")
    assert provenance.stale_since("hop", measured, checkout) is None


def test_a_commit_that_history_no_longer_has_is_as_old_as_its_result(checkout: Path) -> None:
    gone = {"commit": "0" * 40, "uncommitted": []}
    (checkout / "tests/bench/results").mkdir(parents=True)
    (checkout / "tests/bench/results/hop.json").write_text("{}")
    commit(checkout, one="1")
    assert provenance.stale_since("hop", gone, checkout) == ""
    changed = commit(checkout, one="2")
    assert provenance.stale_since("hop", gone, checkout) == changed[:7]


def test_a_shallow_clone_and_an_export_without_git_know_of_no_staleness(checkout: Path, tmp_path: Path) -> None:
    measured = {"commit": commit(checkout, one="1"), "uncommitted": []}
    commit(checkout, one="2")
    run(tmp_path, "clone", "-q", "--depth", "1", f"file://{checkout}", "shallow")
    (tmp_path / "export").mkdir()
    assert provenance.stale_since("hop", measured, tmp_path / "shallow") is None
    assert provenance.stale_since("hop", measured, tmp_path / "export") is None


def test_results_tell_their_commit_and_quick_ones_stay_out_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["bench", "--quick"])
    assert Report("hop", {}).write() == tmp_path / "quick" / "hop.json"
    monkeypatch.setattr("sys.argv", ["bench"])
    found = json.loads(Report("hop", {}).write().read_text())
    assert set(found["measured"]) == {"commit", "date", "uncommitted"}
    assert [path.name for path in tmp_path.glob("*.json")] == ["hop.json"]


# history


def line(commit: str, date: str, median: float, figure: str = "cpu") -> Line:
    return Line(date, commit, "hop", figure, median, median - 0.1, median + 0.1, machine="here")  # positional: a row


def test_history_has_one_line_for_a_commits_figure_and_is_in_the_order_of_commits(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    assert history.add([line("b", "2026-01-02", 2.0), line("a", "2026-01-01", 1.0)], path)
    assert history.add([line("b", "2026-01-02", 3.0)], path)
    assert not history.add([line("b", "2026-01-02", 3.0)], path)
    assert [(one.commit, one.median) for one in history.read(path)] == [("a", 1.0), ("b", 3.0)]


def test_a_chart_has_a_point_for_every_commit_and_a_curve_for_every_figure() -> None:
    lines = [line("a", "2026-01-01", 1.0), line("b", "2026-01-02", 2.0), line("b", "2026-01-02", 1.5, "wait")]
    drawn = ElementTree.fromstring(history.drawn("Hops & more", lines, ["hop.cpu", "hop.wait"], {}))
    first, second = (one.attrib["points"].split() for one in drawn.findall(f"{OF}polyline"))
    assert (len(first), len(second)) == (2, 1)
    assert float(first[0].split(",")[1]) > float(first[1].split(",")[1]), "more is higher up"
    assert first[1].split(",")[0] == second[0].split(",")[0], "one commit is one place"


# plots

PLOT: dict[str, Any] = {
    "file": "docs/hops.svg",
    "title": "Hops & more",
    "bench": "hop",
    "factor": 1e6,
    "form": ".0f",
    "places": {"link": "over the link", "unary": "unary"},
    "series": {"hop": "{}.us"},
}


@pytest.fixture
def both(tmp_path: Path) -> Path:
    report = Report("hop", {}, {"link": {"us": Spread.of([80e-6, 60e-6, 70e-6])}, "unary": {"us": 9e-5}})
    report.measured = {"commit": "abcdef0123456789", "date": "2026-01-02", "uncommitted": []}
    report.write(tmp_path)
    return tmp_path


def described(picture: str) -> str:
    drawn = ElementTree.fromstring(picture)
    names = [drawn.find(f"{OF}{name}") for name in ("title", "desc")]
    assert [one.attrib["id"] for one in names if one is not None] == drawn.attrib["aria-labelledby"].split()
    return "".join(str(one.text) for one in names if one is not None)


def test_a_plot_shows_the_figures_of_the_results_and_tells_all_of_them_and_where_they_are_from(both: Path) -> None:
    picture = drawn_plot(PLOT, sources(both))
    told = described(picture)
    assert "hop: over the link: 70 (60 to 80), unary: 90." in told
    assert "hop, measured at abcdef0." in told
    [curve] = ElementTree.fromstring(picture).findall(f"{OF}polyline")
    link, unary = (float(one.split(",")[1]) for one in curve.attrib["points"].split())
    assert link > unary, "more is higher up"
    assert picture == drawn_plot(PLOT, sources(both))


def test_a_stale_plot_says_since_when_and_keeps_that_where_git_cannot_tell(both: Path) -> None:
    stale = drawn_plot(PLOT, sources(both, "1234567"))
    assert "measured at abcdef0, stale since 1234567" in stale
    assert drawn_plot(PLOT, sources(both, None), stale) == stale
    assert without_stale(stale) == drawn_plot(PLOT, sources(both))


def test_a_plot_without_results_says_that_it_is_not_measured(both: Path) -> None:
    for plot in (PLOT | {"bench": "other"}, PLOT | {"unmeasured": ["hop"]}):
        picture = drawn_plot(plot, sources(both))
        assert "hop: not measured yet." in described(picture)
        assert "abcdef0" not in picture
    with pytest.raises(NoSuchFigure):
        drawn_plot(PLOT | {"series": {"hop": "{}.p50"}}, sources(both))


def test_bars_are_as_high_as_their_figures(both: Path) -> None:
    picture = ElementTree.fromstring(drawn_plot(PLOT | {"kind": "bars", "most": 180.0}, sources(both)))
    link, unary = (one for one in picture.findall(f"{OF}rect") if one.find(f"{OF}title") is not None)
    assert float(link.attrib["height"]) / float(unary.attrib["height"]) == pytest.approx(70 / 90, abs=0.01)
    assert [one.text for one in (link[0], unary[0])] == ["hop, over the link: 70 (60 to 80)", "hop, unary: 90"]


def test_what_is_no_series_has_no_marks_and_names_are_never_markup() -> None:
    point = Point("<b>", 1.0, 1.0, 1.0)
    picture = SvgChart("<script>", [Series("a & b", [point]), Series("none", [])], ["<b>"]).drawn()
    drawn = ElementTree.fromstring(picture)
    assert "<script>" not in picture
    assert len(drawn.findall(f"{OF}circle")) == 2, "of the point and of the legend"
    assert "none: not measured yet." in described(picture)


@pytest.mark.parametrize(
    ("value", "top"), [(0.0, 1.0), (0.21, 0.25), (1.0, 1.0), (2.1, 2.5), (35.4, 40.0), (980, 1000)]
)
def test_a_scale_ends_at_a_round_number(value: float, top: float) -> None:
    assert ceiling(value) == pytest.approx(top)


def test_every_committed_plot_and_chart_is_legible_in_the_dark_and_described() -> None:
    files = sorted((provenance.ROOT / "docs/benchmarks").glob("*.svg"))
    assert {provenance.ROOT / plot["file"] for plot in provenance.config()["plot"]} <= set(files)
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert described(text), file
        assert "prefers-color-scheme:dark" in text, file

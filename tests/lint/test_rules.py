"""Each rule finds what is planted for it, and lets pass what is right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.bench.figures import Sources
from tests.lint.citations import dead_citations
from tests.lint.class_names import repeated_class_names
from tests.lint.construction import positional_construction
from tests.lint.docstrings import first_sentence, riddles
from tests.lint.figures import outdated_charts, outdated_figures, stale, typed_figures, unlisted_benches
from tests.lint.folders import MOST_MODULES, crowded_folders
from tests.lint.tree import ROOT, Source, listed
from tests.lint.wiring import wired_from_outside


def file(text: str, path: str = "gateway/core/one.py") -> Source:
    return Source(path, text)


def test_the_twenty_first_module_of_a_folder_is_found() -> None:
    room = [file("", f"gateway/core/module_{number}.py") for number in range(MOST_MODULES)]
    assert crowded_folders(room) == []
    assert [one.path for one in crowded_folders([*room, file("")])] == ["gateway/core"]


def test_benches_are_entry_points_and_may_be_many() -> None:
    assert crowded_folders([file("", f"tests/bench/bench_{number}.py") for number in range(50)]) == []


def test_a_class_name_that_two_modules_define_is_found_at_both() -> None:
    twice = [file("class Route: ..."), file("x = 1\nclass Route: ...", "tidegate/types.py")]
    assert [(one.path, one.line) for one in repeated_class_names(twice)] == [
        ("gateway/core/one.py", 1),
        ("tidegate/types.py", 2),
    ]
    assert repeated_class_names([twice[0], file("class Route: ...", "tests/support/one.py")]) == []


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("Route(1, 2, 3, 4, 5, 6)", False),
        ("Route(1, 2, 3, 4, 5, 6, 7)", True),
        ("types.Route(1, 2, 3, 4, 5, 6, 7)", True),
        ("Route(1, 2, 3, 4, 5, 6, reason=7)", False),
        ("Route(1, 2, 3, 4, 5, 6, 7)  # positional: hot path", False),
        ("Table(1, 2, 3, 4, 5, 6, 7)", False),  # a library's
        ("route(1, 2, 3, 4, 5, 6, 7)", False),
    ],
)
def test_more_than_six_positional_values_are_found(call: str, is_found: bool) -> None:
    assert bool(positional_construction([file(f"class Route: ...\n{call}\n")])) is is_found


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("fleet.on_health = self._log_health", True),
        ("fleet.on_health = lambda _: None", True),
        ("metrics.timeline_of = timelines.get", True),
        ("forwarder.uplink = sync", True),
        ("dialled_in.on_in, dialled_in.on_left = self._log_health, 3", True),
        ("self.on_health = self._log_health", False),
        ("part.began_at = now", False),
        ("view.busy_s = slot.busy_s", False),
    ],
)
def test_a_collaborator_that_is_set_from_outside_is_found(line: str, is_found: bool) -> None:
    rest = (
        "class Forwarder:\n"
        "    def __init__(self):\n"
        "        self.uplink: Uplink | None = None\n"
        "    def send(self):\n"
        "        self.uplink.publish()\n"
        "    def _log_health(self): ...\n"
        "    @property\n"
        "    def busy_s(self): ...\n"
    )
    assert bool(wired_from_outside([file(f"{line}\n{rest}")])) is is_found
    assert wired_from_outside([file(f"{line}\n{rest}", "gateway/app.py")]) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Keeps the newest report of each device.", ""),
        ("", "no docstring"),
        ("Decides who is let in.", "'who'"),
        ("Keeps a report. It is for whoever asks.", ""),
        ("One " + "word " * 25, "26 words"),
    ],
)
def test_a_first_sentence_that_is_long_or_makes_a_person_of_a_thing_is_found(text: str, fault: str) -> None:
    found = riddles([file(f'"""{text}"""')] if text else [file("x = 1")])
    assert [fault in str(one) for one in found] == ([True] if fault else [])


def test_the_first_sentence_ends_at_its_full_stop_or_with_its_paragraph() -> None:
    assert first_sentence("Power of two choices: look\nat two. Then more.\n\nAnd more.") == "Power of two choices:"
    assert first_sentence("No full stop\n\nAnd more.") == "No full stop"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"""As docs/design/routing.md, "Hedging", has it."""', ""),
        ('"""As docs/design/routing.md, "No such heading", has it."""', "no heading"),
        ('"""As docs/design/no_such_page.md has it."""', "not in this repository"),
        ("x = 1  # as in gateway/core/no_such_module.py", "not in this repository"),
        ("x = 1  # as in gateway/app.py", ""),
        ('"""As\n    docs/design/routing.md, "Hedging\n    budget", has it."""', "no heading"),
    ],
)
def test_a_citation_of_what_is_not_there_is_found(text: str, fault: str) -> None:
    found = dead_citations([file(text)])
    assert [fault in str(one) for one in found] == ([True] if fault else [])


FIGURE = "<!-- figure: hop.ratio as .1f -->0.5<!-- /figure -->"


def results(folder: Path, since: str | None = "") -> Sources:
    found = {"name": "hop", "measured": {"commit": "1234567"}, "figures": {"ratio": 0.5}, "detail": {}, "goals": []}
    (folder / "hop.json").write_text(json.dumps(found))
    return Sources(folder, stale_since=lambda _bench, _measured: since, benches=("hop",))


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"It is {FIGURE}.", []),
        (f"It\nis {FIGURE.replace('0.5<', '0.6<')}.", [2]),
        (f"It is {FIGURE.replace('0.5<', '0.5 [stale since 7654321]<')}.", []),
        (f"It is {FIGURE.replace('hop.ratio', 'hop.time')}.", [1]),
        (f"It is {FIGURE.replace('hop.ratio', 'leap.ratio')}.", [1]),
    ],
)
def test_a_figure_that_differs_from_its_results_is_found(tmp_path: Path, text: str, lines: list[int]) -> None:
    assert [one.line for one in outdated_figures({"README.md": text}, results(tmp_path))] == lines


@pytest.mark.parametrize(
    ("row", "is_found"),
    [
        (f"| 64 at once | {FIGURE} |", False),
        ("| 64 at once | 0.5 |", True),
        (f"| 64 at once | {FIGURE} of 9 |", True),
        ("| 64 at once | none |", False),
    ],
)
def test_a_typed_figure_in_a_table_of_measurements_is_found(row: str, is_found: bool) -> None:
    page = (
        f"# It\n\n| 1 | 2 |\n|---|---|\n| a | 7 |\n\n## Measured\n\n| what | at 0.3 |\n|---|---|\n{row}\n\n## Limits\n"
    )
    found = typed_figures({"README.md": page, "docs/pool.md": page})
    assert [(one.path, one.line) for one in found] == ([("README.md", 11)] if is_found else [])


@pytest.mark.parametrize(
    ("listed", "whats"),
    [
        ({"hop": ["gateway/app.py", "!gateway/commands"]}, []),
        ({"hop": ["gateway/no_such_room"]}, ["depends on gateway/no_such_room"]),
        ({}, ["no list of paths for hop"]),
    ],
)
def test_a_bench_that_does_not_say_what_it_depends_on_is_found(
    listed: Mapping[str, list[str]], whats: list[str]
) -> None:
    bench = file('report = Report("hop", {})', "tests/bench/hop.py")
    found = unlisted_benches([bench, file('Report("leap", {})', "gateway/core/one.py")], listed)
    assert len(found) == len(whats) and all(what in str(one) for what, one in zip(whats, found, strict=True))


def test_a_chart_that_does_not_show_its_history_is_found() -> None:
    path = ROOT / "docs" / "benchmarks" / "cpu.svg"
    assert outdated_charts({path: path.read_text(encoding="utf-8")}) == []
    assert [one.path for one in outdated_charts({path: "<svg/>"})] == ["docs/benchmarks/cpu.svg"]


@pytest.mark.parametrize(("since", "told"), [("7654321", "hop (7654321)"), ("", ""), (None, "")])
def test_stale_figures_are_told_and_break_no_rule(tmp_path: Path, since: str | None, told: str) -> None:
    read = {"README.md": f"It is {FIGURE}."}
    assert outdated_figures(read, results(tmp_path, since)) == []
    assert stale(read, results(tmp_path, since)).endswith(told)
    assert bool(told) is bool(stale(read, results(tmp_path, since)))


def test_an_export_without_git_is_read_without_what_is_hidden_or_compiled(tmp_path: Path) -> None:
    for path in ("a/b.py", ".venv/c.py", "a/__pycache__/d.pyc"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert listed(tmp_path) == ["a/b.py"]

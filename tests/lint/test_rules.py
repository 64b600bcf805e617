"""Each rule finds what is planted for it, and lets pass what is right."""

from __future__ import annotations

import pytest

from tests.lint.citations import dead_citations
from tests.lint.class_names import repeated_class_names
from tests.lint.construction import positional_construction
from tests.lint.docstrings import first_sentence, riddles
from tests.lint.folders import MOST_MODULES, crowded_folders
from tests.lint.tree import Source
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

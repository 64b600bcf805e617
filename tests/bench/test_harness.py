"""The harness says what was measured, and never more than that."""

from __future__ import annotations

import pytest

from tests.bench.harness import Goal, Spread, numbers, ratios


@pytest.mark.parametrize(
    ("goal", "line"),
    [
        (Goal("speed", 0.85, 0.8), "goal speed: 0.85 (aim >= 0.8): met"),
        (Goal("speed", 0.8, 0.8), "goal speed: 0.8 (aim >= 0.8): met"),
        (Goal("speed", 0.79, 0.8), "goal speed: 0.79 (aim >= 0.8): short"),
        (Goal("wait", 1.3, 1.2, "<="), "goal wait: 1.3 (aim <= 1.2): short"),
        (Goal("wait", 1.1, 1.2, "<="), "goal wait: 1.1 (aim <= 1.2): met"),
        (Goal("heat", None, 5.0, why="no GPU"), "goal heat: - (aim >= 5): skipped (no GPU)"),
    ],
)
def test_a_goal_is_one_line_with_its_figure_its_aim_and_the_verdict(goal: Goal, line: str) -> None:
    assert str(goal) == line


def test_a_spread_keeps_the_middle_and_both_ends() -> None:
    assert f"{Spread.of([3.0, 1.0, 2.0]):.1f}" == "2.0 (1.0..3.0)"


def test_ratios_are_taken_within_a_repeat() -> None:
    assert ratios([2.0, 9.0], [1.0, 3.0]).samples == (2.0, 3.0)


def test_figures_are_plain_numbers_by_their_full_names() -> None:
    measured = {
        "link": {"c64": Spread.of([1.0, 3.0, 2.0]), "deep": {"us": 7}},
        "ratio": 0.5,
        "who": "nginx",
        "on": True,
    }

    assert numbers(measured) == {"link.c64": 2.0, "link.deep.us": 7, "ratio": 0.5}

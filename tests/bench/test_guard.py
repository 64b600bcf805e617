"""The guard finds a growth by a quarter, and takes no single bad round for one."""

from __future__ import annotations

import asyncio
import tomllib

import pytest

from tests.bench import guard
from tests.bench.guard import BUDGET, GUARDED, Ratios, held, told, with_budgets


@pytest.mark.parametrize(
    ("samples", "verdict", "status"),
    [
        ([1.0, 1.0, 1.0], "kept", 0),
        ([1.0, 9.0, 1.0], "kept", 0),
        ([1.25, 1.25, 1.25], "over", 1),
        ([1.0, 1.25, 1.25], "over", 1),
        ([0.8, 0.8, 0.8], "lower it", 0),
    ],
)
def test_a_ratio_is_held_against_its_budget(
    samples: list[float], verdict: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(held("gateway", {"link": samples}, {"link": 1.12})) == status
    printed = capsys.readouterr().out
    assert verdict in printed
    assert ("gateway.link: " in printed) is (verdict != "kept"), "says the way out"


@pytest.mark.parametrize(
    ("looks", "median", "is_over", "left"),
    [
        ([[1.0, 1.0]], 1.0, False, 0),
        ([[1.3, 1.3], [1.0, 1.0, 1.0]], 1.0, False, 0),
        ([[1.3, 1.3], [1.3, 1.2]], 1.3, True, 0),
        ([[1.0, 1.0], [9.0]], 1.0, False, 1),  # what is kept is not measured again
    ],
)
def test_what_is_over_its_budget_is_measured_again_before_it_fails(
    looks: list[list[float]], median: float, is_over: bool, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look() -> Ratios:
        return {"link": looks.pop(0)}

    monkeypatch.setattr(guard, "GUARDED", {"gateway": look})
    (one,) = asyncio.run(guard.guarded("gateway", 1, {"link": 1.12}))
    assert (one.ratio.median, one.is_over, len(looks)) == (median, is_over, left)


def test_new_budgets_leave_slack_and_every_other_line_alone() -> None:
    text = "# why\n[pool]\nlink = 9.00\n\n[gateway]\nlink = 3.00  # old\nunary = 4.00\n"
    after = with_budgets(text, held("gateway", {"link": [1.0]}, {}))
    assert after == "# why\n[pool]\nlink = 9.00\n\n[gateway]\nlink = 1.12\nunary = 4.00\n"


def test_every_part_under_guard_has_a_budget_and_every_budget_a_part() -> None:
    assert set(tomllib.loads(BUDGET.read_text())) == {*GUARDED, "calls"}  # which calls.py holds

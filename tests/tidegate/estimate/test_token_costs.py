"""What a prompt and a step cost alone, read back from a warm-up's points."""

from __future__ import annotations

import pytest

from tidegate.estimate.token_costs import STEPS, token_costs
from tidegate.workers.generation.warmup import _SHORT as SHORT
from tidegate.workers.generation.warmup import _TOKENS as TOKENS

WARM_UP = {"prompt": SHORT, "long": 128}


def measured(weight: float, prefill_s: float, step_s: float) -> list[tuple[float, float]]:
    """The points of a warm-up, where the manifest counts a token of a prompt as `weight`."""
    return [
        (1.0 + weight * SHORT, prefill_s * SHORT),
        (TOKENS + weight * SHORT, prefill_s * SHORT + STEPS * step_s),
        (1.0 + weight * 128, prefill_s * 128),
    ]


def test_the_steps_between_two_points_are_those_of_the_warm_up() -> None:
    assert TOKENS - 1 == STEPS


@pytest.mark.parametrize(("weight", "prefill_s", "step_s"), [
    (0.32, 0.0029, 0.009),  # a device, as the manifest has it
    (0.32, 0.0001, 0.012),  # a pool: prompts are hundreds of times as fast as the manifest's weight says
    (0.02, 0.004, 0.009),
])  # fmt: skip
def test_prompt_and_step_are_told_apart_whatever_the_weight_is(weight: float, prefill_s: float, step_s: float) -> None:
    costs = token_costs(measured(weight, prefill_s, step_s))
    assert costs.step_s == pytest.approx(step_s)
    for prompt in (8, 60, 1000):
        assert costs.prompt_takes_s(1.0 + weight * prompt) == pytest.approx(prefill_s * prompt)


@pytest.mark.parametrize("points", [[(1.0, 0.01)], [(1.0, 0.010), (512.0, 0.500)], [(0.0, 0.1)]])
def test_other_points_are_one_line(points: list[tuple[float, float]]) -> None:
    costs = token_costs(points)
    assert costs.step_s == costs.prompt_s
    assert costs.step_s > 0.0
    assert costs.prompt_takes_s(points[-1][0]) == pytest.approx(points[-1][1])


def test_without_a_longer_prompt_a_token_of_it_costs_a_step() -> None:
    costs = token_costs(measured(0.3, 0.002, 0.01)[:2])
    assert costs.prompt_s == pytest.approx(0.01)
    assert costs.step_s == pytest.approx(0.01)


def test_a_longer_prompt_that_was_faster_costs_nothing_more() -> None:
    costs = token_costs([(3.0, 0.02), (18.0, 0.17), (40.0, 0.01)])
    assert costs.prompt_s == 0.0
    assert costs.prompt_takes_s(1000.0) == pytest.approx(0.02)

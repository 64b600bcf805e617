"""What a model's answers and batches may take where nothing is configured."""

from __future__ import annotations

from math import inf

import pytest

from cloud_pool.config import ControlConfig, RecyclingConfig
from cloud_pool.core.batching.latency_targets import answer_target_s, batch_limit_s


@pytest.mark.parametrize(
    ("default_budget_s", "least_batch_s", "target_s"),
    [(2.0, 0.004, 1.0), (1.0, 0.1, 0.5), (1.0, 0.4, 1.2)],
)
def test_answers_have_half_of_the_budget_and_time_for_the_least_batch(
    default_budget_s: float, least_batch_s: float, target_s: float
) -> None:
    points = [(1.0, least_batch_s), (64.0, 8 * least_batch_s)]
    assert answer_target_s(default_budget_s, points) == pytest.approx(target_s)


def test_a_batch_that_is_long_by_its_work_has_thrice_what_was_measured() -> None:
    assert batch_limit_s(1.0, 0.1) == 1.0
    assert batch_limit_s(1.0, 2.0) == 6.0


def test_none_means_each_models_own_and_nought_means_none() -> None:
    assert ControlConfig.model_validate({}).target_s is None
    assert ControlConfig.model_validate({"latency_target_s": 0.2}).target_s == 0.2
    assert ControlConfig.model_validate({"latency_target_s": 0}).target_s == inf
    assert ControlConfig.model_validate({"enabled": False, "latency_target_s": 0.2}).target_s == inf
    assert RecyclingConfig.model_validate({}).limits.p99_s is None
    assert RecyclingConfig.model_validate({"p99_limit_s": 0}).limits.p99_s == inf
    assert RecyclingConfig.model_validate({"p99_limit_s": 0.2}).limits.p99_s == 0.2

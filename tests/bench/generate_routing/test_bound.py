"""The bound of the comparison: what nobody can keep is not in it, and what anybody can is."""

from __future__ import annotations

import pytest

from tests.bench.generate_routing.bench import link_kinds
from tests.bench.generate_routing.bound import most_kept
from tests.bench.generate_routing.fleet import LinkKind
from tests.bench.generate_routing.schedule import Asked
from tests.bench.generate_routing.workload import talk

pytest.importorskip("scipy")
QUIET = link_kinds(("quiet",))[0][0]


def asked(number: int, at: float, **changes: float) -> Asked:
    words = {"ttft_s": 0.5, "tpot_s": 0.09, "budget_s": 8.0, **changes}
    return Asked(number, at, "talk", (3,) * 40, 24, 64, **words)


def bound(*requests: Asked, link: LinkKind = QUIET) -> float:
    return most_kept(talk().scenario, requests, link, 1, from_s=0.0, to_s=10.0)


def test_what_any_target_keeps_is_in_the_bound() -> None:
    assert bound(*[asked(number, 0.5 * number) for number in range(10)]) == pytest.approx(1.0)


@pytest.mark.parametrize("changes", [{"ttft_s": 0.02}, {"tpot_s": 0.01}])
def test_what_no_target_can_keep_is_not(changes: dict[str, float]) -> None:
    assert bound(asked(1, 0.5), asked(2, 0.5, **changes)) == pytest.approx(0.5)


def test_at_one_instant_no_more_is_kept_than_the_engines_have_time_for() -> None:
    crowd = [asked(number, 0.5) for number in range(200)]
    assert bound(*crowd) < 0.5


@pytest.mark.slow
def test_weather_is_the_same_for_all_rules_and_known_to_the_bound() -> None:
    (jitter,), _ = link_kinds(("jitter",))
    assert jitter.changes(30.0, 1) == jitter.changes(30.0, 1) != jitter.changes(30.0, 2)
    assert jitter.changes(12.0, 1) == [one for one in jitter.changes(30.0, 1) if one in jitter.changes(12.0, 1)]
    crowd = [asked(number, 0.02 * number, ttft_s=0.3) for number in range(300)]
    assert bound(*crowd, link=jitter) < bound(*crowd)

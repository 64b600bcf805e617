"""Three chances, each with what teaches it: only attempts in which the budgets before it were kept."""

from __future__ import annotations

from random import Random

import pytest

from gateway.core.estimate.calibration import TargetBias
from gateway.core.estimate.token_calibration import (
    GenerationBudget,
    TokenCalibration,
    TokenChances,
    TokenClaim,
    TokenTimes,
)

ALL = GenerationBudget(first_by=1.0, next_s=0.05, whole_by=10.0)


def claim(calibration: TokenCalibration, budget: GenerationBudget = ALL) -> TokenClaim:
    raw = TokenChances(0.9, 0.8, 0.7)
    claims = calibration.claims(raw, budget)
    return TokenClaim(raw, claims, claims.all, budget, calibration, TargetBias())


def taught(calibration: TokenCalibration) -> tuple[int, int, int]:
    """How many outcomes each of the three has seen."""
    return tuple(  # type: ignore[return-value]
        round(sum(weight for _, _, weight in one.raw.bins()))
        for one in (calibration.first, calibration.next, calibration.whole)
    )


@pytest.mark.parametrize(("first_at", "last_at", "made", "now", "counts"), [
    (0.5, 4.5, 101, 4.6, (1, 1, 1)),
    (1.5, 4.5, 101, 4.6, (1, 0, 0)),  # the first was late: of the others nothing is known
    (0.5, 9.5, 101, 9.6, (1, 1, 0)),
    (0.5, 0.5, 1, 0.6, (1, 1, 1)),  # one token keeps the second
])  # fmt: skip
def test_each_chance_learns_where_those_before_it_were_kept(
    first_at: float, last_at: float, made: int, now: float, counts: tuple[int, int, int]
) -> None:
    calibration = TokenCalibration()
    claim(calibration).answered(now, TokenTimes(made, first_at, last_at))
    assert taught(calibration) == counts


def test_a_budget_that_a_request_does_not_have_is_kept_and_teaches_nothing() -> None:
    calibration = TokenCalibration()
    free = claim(calibration, GenerationBudget(None, None, 10.0))
    assert free.claims.first == free.claims.next == 1.0
    free.answered(4.0, TokenTimes(10, 3.0, 4.0))
    assert taught(calibration) == (0, 0, 1)


def test_an_answer_in_one_piece_is_judged_by_its_deadline() -> None:
    calibration = TokenCalibration()
    claim(calibration).answered(4.0, None)
    assert taught(calibration) == (0, 0, 1)


@pytest.mark.parametrize(("at", "first_at", "counts"), [
    (0.5, None, (0, 0, 0)),  # nothing was due yet
    (1.2, None, (1, 0, 0)),  # the first token was
    (0.8, 0.6, (1, 0, 0)),  # it had come
    (10.0, None, (1, 0, 0)),
])  # fmt: skip
def test_of_an_attempt_that_is_given_up_only_what_was_due_counts(
    at: float, first_at: float | None, counts: tuple[int, int, int]
) -> None:
    calibration = TokenCalibration()
    claim(calibration).given_up(at, first_at=first_at)
    assert taught(calibration) == counts


def test_a_failure_is_a_miss_of_the_first_token_or_of_the_whole() -> None:
    calibration = TokenCalibration()
    claim(calibration).failed(0.3)
    claim(calibration, GenerationBudget(None, None, 10.0)).failed(0.3)
    assert taught(calibration) == (1, 0, 1)
    claim(calibration).failed(0.3, is_fault=True)  # a stall is the target's own
    assert taught(calibration) == (1, 0, 1)
    claim(calibration).failed(10.0, first_at=0.5)  # at its deadline: the first was in time, and the whole is not
    assert taught(calibration) == (2, 0, 2)


def test_a_target_that_is_lost_in_the_middle_teaches_its_own_account_and_nothing_of_the_whole() -> None:
    calibration, bias = TokenCalibration(), TargetBias()
    for _ in range(10):
        claim(calibration)._replace(bias=bias).failed(5.0, first_at=0.5)  # another goes on with the answer
    assert taught(calibration) == (10, 0, 0)
    assert bias.shift < -0.03


@pytest.mark.slow
def test_the_product_of_the_claims_is_the_chance_of_all_three_though_they_go_together() -> None:
    """A slow target misses all of them, a fast one none: independence would claim half of what comes."""
    calibration, draw, kept = TokenCalibration(), Random(5), 0
    for _ in range(4000):
        one = claim(calibration)
        fast = draw.random() < 0.6
        times = TokenTimes(101, 0.5, 4.5) if fast else TokenTimes(101, 2.0, 40.0)
        one.answered(times.last_at, times)
        kept += fast
    assert calibration.claims(TokenChances(0.9, 0.8, 0.7), ALL).all == pytest.approx(0.6, abs=0.06)


def test_no_claim_is_above_the_surest() -> None:
    calibration = TokenCalibration()
    for _ in range(200):
        claim(calibration).answered(4.0, TokenTimes(10, 0.5, 0.9))
        claim(calibration).failed(0.5)
    for budget in (ALL, GenerationBudget(None, 0.1, 9.0), GenerationBudget(1.0, None, 9.0)):
        for chance in (0.0, 0.3, 0.9, 1.0):
            raw = TokenChances(chance, chance, chance)
            assert calibration.claims(raw, budget).all <= calibration.surest(budget) + 1e-9


def test_a_lost_race_counts_by_the_chance_that_was_left() -> None:
    calibration = TokenCalibration()
    claim(calibration).given_up(0.5, left=0.25)
    ((said, came, weight),) = calibration.first.raw.bins()
    assert (said, came, weight) == (pytest.approx(0.9), pytest.approx(0.25), 1.0)
    claim(calibration).given_up(0.5, left=0.25, is_fault=True)
    claim(calibration).given_up(0.8, first_at=0.6, left=0.25)  # its token had come
    ((_, came, weight),) = calibration.first.raw.bins()
    assert (came * weight, weight) == (pytest.approx(0.997 * 0.25 + 1.0), pytest.approx(1.997))

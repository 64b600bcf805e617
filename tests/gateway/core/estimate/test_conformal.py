"""Promises that are kept: how wide they become, and what an attempt's end says of them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.conformal import LEAST, MISSES, MOST, IntervalWidth, crowding_class
from gateway.core.placement.interval import p95_s
from gateway.core.placement.placer import Candidate, estimate
from gateway.core.request.attempt import AttemptTelemetry
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tidegate.outcome import BadAnswer, DeadlineExceeded, InvalidRequest, Overloaded, Unreachable


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=300))
def test_a_width_stays_in_its_bounds_and_a_late_answer_never_narrows_it(ends: list[tuple[int, bool]]) -> None:
    interval_width = IntervalWidth()
    for crowding, late in ends:
        before = list(interval_width.widths)
        interval_width.record(crowding, late=late)
        assert LEAST <= interval_width.widths[crowding] <= MOST
        assert (interval_width.widths[crowding] >= before[crowding]) is late or interval_width.widths[crowding] in (
            LEAST,
            MOST,
        )
        assert [one for place, one in enumerate(interval_width.widths) if place != crowding] == [
            one for place, one in enumerate(before) if place != crowding
        ]


@pytest.mark.parametrize(
    "outcome",
    [
        pytest.param(lambda draw: draw.gauss(0.0, 1.0), id="normal"),
        pytest.param(lambda draw: draw.gauss(0.0, 1.6), id="a spread that is too small by far"),
        pytest.param(lambda draw: draw.lognormvariate(0.0, 0.5) - 1.0, id="a long tail"),
        pytest.param(lambda draw: draw.gauss(1.5 if draw.random() < 0.1 else 0.0, 1.0), id="slow at times"),
    ],
)
def test_ninety_five_in_a_hundred_come_within_the_margin_whatever_the_errors_are(
    outcome: Callable[[Random], float],
) -> None:
    interval_width, draw, late = IntervalWidth(), Random(7), 0
    for _ in range(5000):
        is_late = outcome(draw) > interval_width.widths[0]
        interval_width.record(0, late=is_late)
        late += is_late
    assert late / 5000 == pytest.approx(MISSES, abs=0.012)


def test_an_outage_is_forgotten_within_a_few_hundred_answers() -> None:
    interval_width = IntervalWidth()
    for _ in range(1000):
        interval_width.record(2, late=True)
    assert interval_width.widths[2] == MOST
    for _ in range(400):
        interval_width.record(2, late=False)
    assert interval_width.widths[2] == pytest.approx(2.0)
    assert repr(interval_width) == f"<IntervalWidth 2.33 2.33 {interval_width.widths[2]:.2f}>"


@pytest.mark.parametrize(
    ("wait_s", "compute_s", "crowding"),
    [(0.0, 0.01, 0), (0.049, 0.1, 0), (0.051, 0.1, 1), (0.199, 0.1, 1), (0.201, 0.1, 2), (9.0, 0.001, 2)],
)
def test_crowding_is_the_third_in_which_the_share_of_waiting_lies(
    wait_s: float, compute_s: float, crowding: int
) -> None:
    assert crowding_class(wait_s, compute_s) == crowding


def launched() -> tuple[Candidate, AttemptTelemetry, IntervalWidth]:
    fleet = fleet_of(edge_a=variant(), edge_b=variant(), pool_main=variant())
    assert fleet.targets["edge/a"].interval_width is fleet.targets["edge/b"].interval_width
    assert fleet.targets["edge/a"].interval_width is not fleet.targets["pool/main"].interval_width
    candidate = estimate(fleet.offered("minilm", "1")[0], ask().units, NOW)
    return candidate, AttemptTelemetry(candidate, 1, 16.0, NOW), candidate.target.interval_width


@pytest.mark.parametrize(
    ("end", "wider"),
    [
        (lambda attempt, due: attempt.answered({}, None, due - 0.001), False),
        (lambda attempt, due: attempt.answered({}, None, due + 0.001), True),
        (lambda attempt, due: attempt.cancelled(due - 0.001), None),
        (lambda attempt, due: attempt.cancelled(due + 0.001), True),
        (lambda attempt, due: attempt.cancelled(due - 0.001, hopeless=True), None),
        (lambda attempt, due: attempt.failed(DeadlineExceeded("late"), due - 0.001, 0.5), True),
        (lambda attempt, due: attempt.failed(Unreachable("gone"), due - 0.001, 0.5), True),
        (lambda attempt, due: attempt.failed(Overloaded("full"), due - 0.001, 0.5), None),
        (lambda attempt, due: attempt.failed(BadAnswer("garbage"), due - 0.001, 0.5), None),
        (lambda attempt, due: attempt.failed(InvalidRequest("yours"), due - 0.001, 0.5), None),
    ],
)
def test_an_end_widens_or_narrows_margins_or_says_nothing_of_them(
    end: Callable[[AttemptTelemetry, float], None], wider: bool | None
) -> None:
    candidate, attempt, interval_width = launched()
    before = list(interval_width.widths)

    end(attempt, NOW + p95_s(candidate))

    if wider is None:
        assert interval_width.widths == before
    else:
        assert (interval_width.widths[0] > before[0]) is wider
        assert interval_width.widths[1:] == before[1:]


def test_a_promise_is_as_wide_as_what_was_learned_and_rules_keep_their_margin() -> None:
    offered = fleet_of(edge_a=variant()).offered("minilm", "1")[0]
    before = estimate(offered, ask().units, NOW)
    first_s = p95_s(before)
    for _ in range(100):
        offered.target.interval_width.record(0, late=True)
    after = estimate(offered, ask().units, NOW)
    assert after == before
    assert first_s == pytest.approx(before.finish_s + 2.33 / 1.645 * before.margin_s)
    assert p95_s(after) == pytest.approx(before.finish_s + MOST / 1.645 * before.margin_s)

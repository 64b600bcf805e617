"""Lengths of answers: learned from whole and cut ones, backed off where little is known, and bounded always."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.output_length import MOST_GROUPS, QUANTILES, OutputLengths, certain_length

lengths = st.integers(0, 2**25)
answers = st.lists(
    st.tuples(st.sampled_from(["", "acme", "zeta"]), st.integers(1, 2**20), lengths, st.booleans()), max_size=60
)


def learned(count: int = 1500, *, cap: int = 4096, left_after: float | None = None, seed: int = 3) -> OutputLengths:
    """What was learned of log-normal answers (median 100 tokens), some of whose callers left."""
    draw, known = Random(seed), OutputLengths()
    for _ in range(count):
        length = max(1, int(draw.lognormvariate(4.6, 1.0)))
        seen = min(length, cap, int(draw.expovariate(1.0 / left_after)) + 1 if left_after else cap)
        known.record("m", "acme", cap, seen, ended=seen == length)
    return known


def true_quantiles(cap: int = 4096) -> list[float]:
    draw = Random(4)
    drawn = sorted(min(cap, max(1, int(draw.lognormvariate(4.6, 1.0)))) for _ in range(20_000))
    return [drawn[int((rank + 0.5) / QUANTILES * len(drawn))] for rank in range(QUANTILES)]


@given(answers, st.integers(1, 2**22))
def test_a_forecast_rises_and_lies_between_one_token_and_the_most(
    seen: list[tuple[str, int, int, bool]], most: int
) -> None:
    known = OutputLengths()
    for tenant, cap, tokens, ended in seen:
        known.record("m", tenant, cap, tokens, ended=ended)
    for tenant in ("", "acme", "never seen"):
        forecast = known.forecast("m", tenant, most)
        assert len(forecast.lengths) == QUANTILES
        assert list(forecast.lengths) == sorted(forecast.lengths)
        assert forecast.lengths[0] >= 1.0
        assert forecast.lengths[-1] <= most
        assert 1.0 <= forecast.mean <= most


@given(answers)
def test_the_same_answers_give_the_same_forecast(seen: list[tuple[str, int, int, bool]]) -> None:
    one, other = OutputLengths(), OutputLengths()
    for known in (one, other):
        for tenant, cap, tokens, ended in seen:
            known.record("m", tenant, cap, tokens, ended=ended)
    assert one.forecast("m", "acme", 512) == other.forecast("m", "acme", 512)


def test_whole_answers_are_learned_to_within_a_fifth() -> None:
    forecast = learned().forecast("m", "acme", 4096)
    assert forecast.lengths == pytest.approx(true_quantiles(), rel=0.2)


@pytest.mark.parametrize(("cap", "left_after"), [(256, None), (4096, 300.0), (256, 300.0)])
def test_answers_that_were_cut_do_not_make_others_look_short_or_long(cap: int, left_after: float | None) -> None:
    forecast = learned(cap=cap, left_after=left_after).forecast("m", "acme", cap)
    assert forecast.lengths == pytest.approx([min(cap, one) for one in true_quantiles()], rel=0.25)


def test_counting_only_what_ended_would_be_wrong() -> None:
    """The check above can fail: without those that were cut, the long half is missing."""
    draw, known = Random(3), OutputLengths()
    for _ in range(1500):
        length, left = max(1, int(draw.lognormvariate(4.6, 1.0))), int(draw.expovariate(1.0 / 300.0)) + 1
        if length <= left:
            known.record("m", "acme", 4096, length, ended=True)
    assert known.forecast("m", "acme", 4096).lengths[-2] < 0.75 * true_quantiles()[-2]


def test_a_tenant_that_was_never_seen_gets_what_the_model_has_shown() -> None:
    known = learned()
    assert known.forecast("m", "new", 4096).lengths == pytest.approx(true_quantiles(), rel=0.25)
    assert known.forecast("other model", "acme", 4096).mean > 1.5 * known.forecast("m", "new", 4096).mean


def test_a_tenant_of_its_own_length_is_told_from_the_others() -> None:
    known = learned()
    for _ in range(40):
        known.record("m", "terse", 4096, 5, ended=True)
    assert known.forecast("m", "terse", 4096).lengths[4] < 10.0
    assert known.forecast("m", "acme", 4096).lengths[4] > 60.0


def test_the_latest_answers_count_most() -> None:
    known = learned()
    for _ in range(1500):
        known.record("m", "acme", 4096, 10, ended=True)
    assert known.forecast("m", "acme", 4096).lengths[-1] < 20.0


def test_an_answer_that_nothing_ends_has_one_length() -> None:
    assert certain_length(64).lengths == (64.0,)
    assert certain_length(64).mean == 64.0


def test_tenants_are_bounded() -> None:
    known = OutputLengths()
    for tenant in range(3 * MOST_GROUPS):
        known.record("m", str(tenant), 256, 20, ended=True)
    assert len(known) <= MOST_GROUPS
    assert known.forecast("m", "one more", 256).lengths[4] < 30.0  # the model's own group was used, and stayed

"""What the next round trip is like after the last one, by links with and without weather."""

from __future__ import annotations

from math import log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.link_estimate import LinkEstimate
from gateway.core.estimate.link_weather import RttWeather
from tests.support.gateway.fleets import NOW

_EVERY_S = 0.1
_SLOW_S = 0.5


def _jitters(chance: Random) -> float:
    return 0.040 + 0.040 * chance.lognormvariate(0.0, 0.8)


def _in_spells(chance: Random, count: int, *, slow: int = 20, of: int = 60) -> list[float]:
    """Round trips of a link that is half a second slower for `slow` of each `of`, and jitters."""
    return [_jitters(chance) + (_SLOW_S if number % of < slow else 0.0) for number in range(count)]


def _weather(rtts_s: list[float]) -> tuple[RttWeather, float]:
    weather, now = RttWeather(), NOW
    for rtt_s in rtts_s:
        now += _EVERY_S
        weather.record(rtt_s, now)
    return weather, now


def _slow_share(weather: RttWeather, now: float, silence_s: float = 0.0) -> float:
    values_s, shares = weather.sample(now, silence_s)
    return sum(share for value_s, share in zip(values_s, shares, strict=True) if value_s >= _SLOW_S)


def test_in_a_spell_the_next_one_is_slow_and_after_it_quick() -> None:
    chance = Random(1)
    weather, now = _weather([*_in_spells(chance, 300), *_in_spells(chance, 1)])  # the second slow one begins a spell
    assert weather.tells
    assert _slow_share(weather, now) > 0.75
    for _ in range(2):
        now += _EVERY_S
        weather.record(_jitters(chance), now)
    assert _slow_share(weather, now) < 0.25


def test_slow_ones_that_come_one_by_one_say_nothing_of_the_next() -> None:
    chance = Random(2)
    blips = [_jitters(chance) + (_SLOW_S if chance.random() < 0.1 else 0.0) for _ in range(400)]
    weather, now = _weather(blips)
    now += _EVERY_S
    weather.record(_jitters(chance) + _SLOW_S, now)
    assert not weather.tells or _slow_share(weather, now) < 0.3


@pytest.mark.parametrize("seed", range(12))
def test_jitter_alone_is_no_weather(seed: int) -> None:
    chance = Random(seed)
    weather, now, told = RttWeather(), NOW, 0
    for _ in range(500):
        now += _EVERY_S
        weather.record(_jitters(chance), now)
        told += weather.tells
    assert told < 50


def test_a_silence_makes_a_spell_likely_before_a_slow_one_is_here() -> None:
    chance = Random(4)
    weather, now = _weather(_in_spells(chance, 300)[:-40])
    while _slow_share(weather, now) > 0.2:
        now += _EVERY_S
        weather.record(_jitters(chance), now)
    before = _slow_share(weather, now)
    after = [_slow_share(weather, now, silence_s) for silence_s in (0.05, 0.2, 0.4)]
    assert [before, *after] == sorted([before, *after])
    assert after[-1] > 0.5


def test_what_was_last_seen_long_ago_fades_to_what_is_usual() -> None:
    chance = Random(5)
    weather, now = _weather([*_in_spells(chance, 240), *_in_spells(chance, 6)])
    assert _slow_share(weather, now) > 0.75
    assert _slow_share(weather, now + 60.0) == pytest.approx(86 / 246, abs=0.15)


def test_a_link_that_is_seldom_used_still_knows_what_bad_weather_looks_like() -> None:
    chance = Random(6)
    spell = [_jitters(chance) + _SLOW_S for _ in range(12)]
    weather, now = _weather([*[_jitters(chance) for _ in range(30)], *spell, *[_jitters(chance) for _ in range(100)]])
    now += _EVERY_S
    weather.record(spell[0], now)
    values_s, _ = weather.sample(now)
    assert sum(1 for value_s in values_s if value_s >= _SLOW_S) >= 4
    assert _slow_share(weather, now) > 0.3


def test_the_chain_is_asked_only_where_it_foretells_better() -> None:
    """`gain` is the mean of log P(next | last) − log P(next): above 0 where the weather hangs together."""
    chance = Random(7)
    spells, _ = _weather(_in_spells(chance, 600))
    mixed = _in_spells(chance, 600)
    chance.shuffle(mixed)
    shuffled, _ = _weather(mixed)
    assert spells.gain > 0.1
    assert shuffled.gain < 0.02
    # No chain can gain more than the entropy of its kinds.
    assert spells.gain < log(10)
    assert repr(shuffled).startswith("<RttWeather does not tell")


@given(
    st.lists(st.tuples(st.floats(0.0, 1e4), st.floats(0.0, 100.0)), min_size=1, max_size=120),
    st.floats(0.0, 100.0),
    st.floats(0.0, 10.0),
)
def test_a_sample_is_a_distribution_whatever_came(
    steps: list[tuple[float, float]], later_s: float, silence_s: float
) -> None:
    weather, now = RttWeather(), NOW
    for rtt_s, after_s in steps:
        now += after_s
        weather.record(rtt_s, now)
    values_s, shares = weather.sample(now + later_s, silence_s)
    assert values_s == sorted(values_s)
    assert 1 <= len(values_s) <= 40
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0.0


def test_after_very_many_round_trips_the_counts_are_still_those_of_the_newest() -> None:
    weather, now = _weather([0.010] * 6000)
    for _ in range(400):
        now += _EVERY_S
        weather.record(1.0, now)
    assert _slow_share(weather, now) > 0.85


def test_the_path_of_a_link_with_weather_is_what_comes_after_the_last_round_trip() -> None:
    chance = Random(8)
    link, now = LinkEstimate(), NOW
    for rtt_s in [*_in_spells(chance, 300), *_in_spells(chance, 2)]:
        now += _EVERY_S
        link.record(rtt_s, now)
    assert link.path(now).median_s > _SLOW_S, "two of the last 32 are slow, and the next one is as well"
    assert sum(link.path(now).weights) == pytest.approx(1.0)


def test_a_silent_path_is_looked_at_anew_while_it_is_silent() -> None:
    chance = Random(9)
    link, now = LinkEstimate(), NOW
    for rtt_s in _in_spells(chance, 300, slow=10)[:-30]:
        now += _EVERY_S
        link.record(rtt_s, now)
    link.sent(1, now - 0.2)
    link.accepted(1, now)
    link.sent(2, now)
    medians = [link.path(now + silence_s).median_s for silence_s in (0.0, 0.15, 0.45)]
    assert medians[0] < 0.2
    assert medians[-1] > _SLOW_S

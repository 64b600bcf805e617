"""The last minute by key: rates of now, quantiles of the minute, and no more memory than that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.estimate.sliding_stats import MOST_KEYS, OTHERS, SLOT_S, SLOTS, SlidingStats

NOW = 1000.0


def test_what_ended_lately_is_counted_by_how_it_ended() -> None:
    seen: SlidingStats[str] = SlidingStats()
    for ending in ("in_time", "in_time", "late", "failed"):
        seen.record("minilm", ending, 0.020, NOW)  # type: ignore[arg-type]

    recent = seen.read("minilm", NOW + 1.0)

    assert (recent.in_time, recent.late, recent.failed, recent.asked) == (2, 1, 1, 4)
    assert (recent.rated, recent.late_share) == (4, 0.5)
    assert recent.in_time_per_s == 2.0
    assert recent.per_s == 4.0


def test_a_rate_is_of_the_last_seconds_and_quantiles_are_of_the_minute() -> None:
    seen: SlidingStats[str] = SlidingStats()
    for second in range(60):
        for _ in range(10 if second < 30 else 0):
            seen.record("minilm", "in_time", 0.100, NOW + second)

    recent = seen.read("minilm", NOW + 59.0)

    assert recent.in_time_per_s == 0.0
    assert recent.in_time >= 200
    assert recent.quantiles_s[0] == pytest.approx(0.100, rel=0.05)


def test_a_minute_later_nothing_is_left() -> None:
    seen: SlidingStats[str] = SlidingStats()
    seen.record("minilm", "in_time", 0.1, NOW)
    assert [key for key, _ in seen.items(NOW + 10.0)] == ["minilm"]
    assert list(seen.items(NOW + SLOT_S * (SLOTS + 1))) == []
    assert seen.read("minilm", NOW + SLOT_S * (SLOTS + 1)).asked == 0


def test_names_that_strangers_invent_share_one_key_beyond_a_bound() -> None:
    seen: SlidingStats[str] = SlidingStats()
    for number in range(2 * MOST_KEYS):
        seen.record(f"made-up-{number}", "failed", 0.1, NOW)

    kept = dict(seen.items(NOW))

    assert len(kept) <= MOST_KEYS + 1
    assert kept[OTHERS].failed == MOST_KEYS
    assert seen.total(NOW).failed == 2 * MOST_KEYS


def test_a_steady_load_reads_as_its_rate_wherever_in_a_slot_one_looks() -> None:
    seen: SlidingStats[str] = SlidingStats()
    for tick in range(3000):
        seen.record("minilm", "in_time", 0.01, NOW + tick / 50)
    for look in (55.0, 56.3, 59.9):
        recent_after: SlidingStats[str] = SlidingStats()
        for tick in range(int(look * 50)):
            recent_after.record("minilm", "in_time", 0.01, NOW + tick / 50)
        assert recent_after.read("minilm", NOW + look).in_time_per_s == pytest.approx(50.0, rel=0.02)


@pytest.mark.slow
@given(st.lists(st.floats(1e-4, 500.0), min_size=1, max_size=200))
def test_a_quantile_is_within_five_percent_of_a_value_that_was_recorded_in_its_rank(durations: list[float]) -> None:
    seen: SlidingStats[str] = SlidingStats()
    for took_s in durations:
        seen.record("x", "in_time", took_s, NOW)
    ordered = sorted(durations)
    for share, got in zip((0.5, 0.95, 0.99), seen.read("x", NOW).quantiles_s, strict=True):
        rank = next(i for i in range(len(ordered)) if i + 1 >= share * len(ordered))
        assert got == pytest.approx(ordered[rank], rel=0.05)


def test_rates_alone_are_those_that_reading_says() -> None:
    seen: SlidingStats[str] = SlidingStats()
    for tick in range(1000):
        seen.record("busy" if tick % 4 else "less", "in_time", 0.01, NOW + tick / 50)
    seen.record("long-ago", "in_time", 0.01, NOW - 40.0)
    now = NOW + 20.0
    assert seen.rates(now) == {name: pytest.approx(seen.read(name, now).per_s) for name in ("busy", "less")}

"""Links: what goes in comes out, in order, no earlier than physics allows, and no volume is invented."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.netsim.links.delay import Delay
from tidegate.netsim.links.direction import Direction, LinkStage
from tidegate.netsim.links.distributions import Constant, Distribution, LogNormal, Normal, Pareto, Uniform
from tidegate.netsim.links.loss import OutageStage, StallStage
from tidegate.netsim.links.profile import (
    Alternation,
    BadWeather,
    CapacityRecording,
    Jitter,
    LinkProfile,
    Partitions,
    build,
)
from tidegate.netsim.links.rate import Rate
from tidegate.netsim.links.regime import Either, Weather, Windows
from tidegate.netsim.links.trace import OPPORTUNITY_BYTES, CapacityTrace, TraceRate

SHARED_TRACES = Path(__file__).parents[5] / "shared" / "traces"

sendings = st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 20_000)), min_size=1, max_size=60)
times_ms = st.lists(st.integers(0, 400), min_size=1, max_size=80).map(sorted).filter(lambda times: times[-1] > 0)


def streams(seed: int) -> Callable[[str], Callable[[], float]]:
    return lambda name: Random(f"{seed}/{name}").random


def any_stage(kind: int, seed: int) -> LinkStage:
    draw = Random(seed).random
    weather = Weather(mean_on_s=0.2, mean_off_s=0.7, draw=Random(seed + 1).random)
    match kind:
        case 0:
            return Delay(0.01, jitter=LogNormal(0.005, 1.0), bad=weather, bad_scale=8.0, draw=draw)
        case 1:
            return Rate(200e3, queue_bytes=30e3, overflow="drop")
        case 2:
            return Rate(200e3)
        case 3:
            return StallStage(0.05, bad=weather, bad_chance=0.4, draw=draw)
        case 4:
            return OutageStage(weather)
        case _:
            return TraceRate(CapacityTrace([0.0, 0.003, 0.003, 0.2, 0.5]), offset_s=0.1, scale=2.0)


@pytest.mark.slow
@given(sendings, st.lists(st.integers(0, 5), max_size=4), st.integers(0, 99))
def test_bytes_come_out_in_order_all_of_them_and_never_before_they_went_in(
    sent: list[tuple[float, int]], kinds: list[int], seed: int
) -> None:
    direction = Direction([any_stage(kind, seed) for kind in kinds])
    now, last = 0.0, -inf
    for gap_s, size in sent:
        now += gap_s

        at = direction.delivered_at(size, now)

        assert now <= at < inf
        assert at >= last
        last = at
    assert direction.sent_bytes == sum(size for _, size in sent)


@pytest.mark.slow
@given(sendings, st.floats(1e3, 1e6))
def test_a_rate_never_delivers_more_than_it_has_time_for(sent: list[tuple[float, int]], bytes_per_s: float) -> None:
    rate, now = Rate(bytes_per_s), 0.0
    total = 0
    for gap_s, size in sent:
        now += gap_s
        total += size

        done_at = rate.leaves_at(size, now)

        assert done_at * bytes_per_s >= total * (1 - 1e-9)  # the link began at 0
        assert done_at >= now + size / bytes_per_s * (1 - 1e-9)


def test_a_saturated_rate_delivers_exactly_its_capacity() -> None:
    rate = Rate(1e6)
    assert [rate.leaves_at(100_000, 0.0) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert rate.queued_bytes(0.1) == pytest.approx(200_000)


def test_a_full_queue_says_how_much_room_is_left() -> None:
    rate = Rate(1e6, queue_bytes=50_000)
    rate.leaves_at(30_000, 0.0)
    assert rate.room_bytes(0.0) == pytest.approx(20_000)
    assert rate.room_bytes(1.0) == 50_000


def test_what_overflows_a_queue_is_sent_again_and_still_arrives() -> None:
    rate = Rate(1e6, queue_bytes=50_000, overflow="drop")
    rate.leaves_at(50_000, 0.0)

    again_at = rate.leaves_at(40_000, 0.0)

    assert rate.retransmissions == 1
    assert again_at == pytest.approx(0.2 + 0.04)


@pytest.mark.slow
@given(times_ms, st.floats(0.0, 1.0), st.sampled_from([0.25, 1.0, 3.0]), st.integers(1, 5_000))
def test_a_saturated_trace_delivers_exactly_the_recorded_volume(
    times: list[int], offset_s: float, scale: float, size: int
) -> None:
    trace = CapacityTrace([one / 1e3 for one in times])
    link, first = TraceRate(trace, offset_s=offset_s, scale=scale), trace.first_at_or_after(offset_s)
    for number in range(1, 200):
        at = link.leaves_at(size, 0.0)

        used = ceil(number * size / (OPPORTUNITY_BYTES * scale))  # not one opportunity more or less
        assert at == max(0.0, trace.time_of(first + used - 1) - offset_s)


@given(times_ms, st.floats(0.0, 3.0))
def test_the_first_opportunity_is_found_by_counting_as_by_search(times: list[int], at: float) -> None:
    trace = CapacityTrace([one / 1e3 for one in times])

    found = trace.first_at_or_after(at)

    assert trace.time_of(found) >= at - 1e-9
    assert found == 0 or trace.time_of(found - 1) < at


def test_opportunities_that_found_nothing_to_send_are_lost() -> None:
    link = TraceRate(CapacityTrace([0.1, 0.2, 0.3, 0.4]))
    assert link.leaves_at(1500, 0.25) == pytest.approx(0.3)
    assert link.leaves_at(3000, 0.25) == pytest.approx(0.5)  # 0.4 and, around the end, 0.5


def test_a_trace_file_is_read_and_a_bad_one_names_its_line() -> None:
    assert CapacityTrace.parse("1\n2\n\n10\n").times_s == [0.001, 0.002, 0.01]
    with pytest.raises(ValueError, match="line 2"):
        CapacityTrace.parse("1\nnope\n")
    with pytest.raises(ValueError, match="at least one time"):
        CapacityTrace.parse("")
    with pytest.raises(ValueError, match="not decrease"):
        CapacityTrace.parse("5\n3\n")
    with pytest.raises(ValueError, match="last longer than 0"):
        CapacityTrace.parse("0\n")


@pytest.mark.parametrize("bad", [{"scale": 0.0}, {"offset_s": -1.0}])
def test_a_trace_cannot_be_scaled_to_nothing_or_begun_before_it_begins(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        TraceRate(CapacityTrace([0.1]), **bad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Verizon-LTE-short.down", "ATT-LTE-driving-2016.up", "TMobile-UMTS-driving.down"])
def test_a_recorded_link_delivers_what_was_recorded(name: str) -> None:
    path = SHARED_TRACES / name
    if not path.exists():
        pytest.skip(f"no recording at {path}: recordings are not part of the repository")
    trace = CapacityTrace.parse(path.read_text())
    link = TraceRate(trace)
    delivered = 0
    while link.leaves_at(1500, 0.0) <= trace.period_s:
        delivered += 1500
    again = trace.times_s.count(0.0)  # those at 0 come again when the recording begins anew, at its end
    assert delivered == (len(trace.times_s) + again) * 1500


def distribution_cases() -> list[tuple[Distribution, float]]:
    return [
        (Constant(0.01), 0.01),
        (Uniform(0.0, 0.02), 0.01),
        (Normal(0.01, 0.002), 0.01),
        (LogNormal(0.01, 1.0), 0.01),
        (Pareto(0.01, 1.5), 0.01),
    ]


@pytest.mark.parametrize(("distribution", "median_s"), distribution_cases(), ids=lambda case: type(case).__name__)
def test_a_distribution_has_the_median_that_it_was_given_and_is_never_negative(
    distribution: Distribution, median_s: float
) -> None:
    draw = Random(1).random
    samples = [distribution.sample_s(draw) for _ in range(4000)]
    assert min(samples) >= 0.0
    assert median(samples) == pytest.approx(median_s, rel=0.08)


def test_bad_weather_has_the_share_of_time_it_was_given() -> None:
    weather = Weather(mean_on_s=1.0, mean_off_s=3.0, draw=Random(3).random)
    bad = sum(weather.until(tick / 10) > tick / 10 for tick in range(100_000))
    assert bad / 100_000 == pytest.approx(0.25, abs=0.02)


def test_periodic_weather_repeats_exactly() -> None:
    weather = Weather(mean_on_s=1.0, mean_off_s=3.0, draw=Random(3).random, periodic=True)
    on = [weather.until(tick / 10 + 0.05) > tick / 10 + 0.05 for tick in range(400)]
    assert on[:360] == on[40:]
    assert sum(on) == 100


def test_the_weather_does_not_depend_on_which_queries_are_made_or_how_often() -> None:
    busy = Weather(mean_on_s=0.3, mean_off_s=0.5, draw=Random(5).random)
    quiet = Weather(mean_on_s=0.3, mean_off_s=0.5, draw=Random(5).random)
    for tick in range(10_000):
        busy.until(tick / 1000)
    assert [busy.until(10.0 + tick) for tick in range(20)] == [quiet.until(10.0 + tick) for tick in range(20)]


def test_stretches_must_take_time() -> None:
    with pytest.raises(ValueError, match="take time"):
        Weather(mean_on_s=0.0, mean_off_s=1.0, draw=Random(1).random)


def test_windows_that_touch_are_one_and_either_joins_overlapping_ones() -> None:
    windows = Windows([(1.0, 2.0), (2.0, 3.0), (5.0, 6.0)])
    assert [windows.until(at) for at in (0.5, 1.0, 2.5, 3.0, 5.5)] == [0.5, 3.0, 3.0, 3.0, 6.0]
    assert Either(windows, Windows([(2.5, 5.2)])).until(1.0) == 6.0


def test_an_outage_ends_with_the_next_retransmission_after_it() -> None:
    outage = OutageStage(Windows([(1.0, 2.0)]))
    assert outage.leaves_at(1, 0.9) == 0.9
    assert outage.leaves_at(1, 1.0) == pytest.approx(2.4)  # tries at 1.2, 1.6, 2.4
    assert outage.leaves_at(1, 1.9) == pytest.approx(2.1)
    assert OutageStage(Windows([(1.0, inf)])).leaves_at(1, 1.5) == inf


def test_healing_a_blackhole_lets_new_bytes_through() -> None:
    direction = Direction([OutageStage(Windows([(1.0, inf)]))])
    assert direction.delivered_at(10, 2.0) == inf

    direction.change([])

    assert direction.delivered_at(10, 3.0) == 3.0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Rate(0.0), "must be positive"),
        (lambda: Alternation(every_s=1.0, for_s=2.0), "below every_s"),
        (lambda: LinkProfile(to_mbit=-1.0), "to_mbit"),
        (lambda: LinkProfile(loss=1.0), "loss"),
        (lambda: LinkProfile(delay_ms=inf), "delay_ms must be a number"),
        (lambda: Jitter("uniform", ms=inf), "ms must be a number"),
        (lambda: Jitter("normal", ms=-1.0), "ms must be a number"),
        (lambda: Jitter("pareto", ms=8.0, shape=0.0), "shape of 'pareto' jitter must be from 0.1 to 1000, not 0.0"),
        (lambda: Jitter("lognormal", ms=8.0, shape=float("nan")), "shape of 'lognormal' jitter"),
        (lambda: LinkProfile(to_mbit=1.0, recording=CapacityRecording("a", "b")), "not both"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


def test_a_profile_builds_links_that_differ_by_their_chance_only() -> None:
    profile = LinkProfile(
        delay_ms=10.0,
        jitter=Jitter("lognormal", 2.0),
        bad=BadWeather(every_s=5.0, for_s=1.0, delay_times=5.0, loss=0.1),
        outages=Alternation(every_s=20.0, for_s=1.0),
        to_mbit=10.0,
        from_mbit=5.0,
    )

    def sent(seed: int, jitter_times: float = 1.0) -> list[float]:
        link = build(profile, streams(seed), jitter_times=jitter_times)
        return [link.to_target.delivered_at(1000, tick / 10) - tick / 10 for tick in range(600)]

    assert sent(1) == sent(1)
    assert sent(1) != sent(2)
    assert min(sent(1)) >= 0.0108  # 10 ms and 1000 bytes at 10 Mbit/s
    assert median(sent(1, jitter_times=4.0)) > median(sent(1))


def test_a_partition_cuts_one_direction_of_a_link() -> None:
    link = build(LinkProfile(delay_ms=5.0), streams(1), partitions=Partitions(from_target=((1.0, 2.0),)))
    assert link.to_target.delivered_at(1, 1.5) == pytest.approx(1.505)
    assert link.from_target.delivered_at(1, 1.5) >= 2.005


def test_a_recorded_link_starts_where_it_is_told() -> None:
    profile = LinkProfile(delay_ms=0.0, recording=CapacityRecording("a", "b", offset_s=0.15))
    link = build(profile, streams(1), traces=(CapacityTrace([0.1, 0.2, 0.3]), CapacityTrace([0.5])))
    assert link.to_target.delivered_at(1500, 0.0) == pytest.approx(0.05)
    assert link.from_target.delivered_at(1500, 0.0) == pytest.approx(0.35)


@pytest.mark.parametrize("dist", ["constant", "uniform", "normal", "lognormal", "pareto"])
def test_every_jitter_that_can_be_written_can_be_built(dist: str) -> None:
    jitter = Jitter(dist, 3.0, 2.0)  # type: ignore[arg-type]
    assert jitter.distribution(1.0).sample_s(lambda: 0.4) > 0.0


def test_a_new_connection_is_not_held_up_by_what_an_old_one_lost() -> None:
    old = Direction([OutageStage(Windows([(1.0, 2.0)])), Rate(1e6)])
    assert old.delivered_at(1000, 1.9) > 2.05
    assert old.delivered_at(1000, 2.01) > 2.05  # behind it

    assert Direction([OutageStage(Windows([(1.0, 2.0)]))]).connection().delivered_at(1000, 2.02) == 2.02


def test_steady_weather_has_one_length_and_random_gaps() -> None:
    weather = Weather(mean_on_s=2.0, mean_off_s=20.0, draw=Random(3).random, steady=True)
    starts = [at := 0.0]
    lengths = set()
    while len(starts) < 20:
        at = weather.next_on(at)
        lengths.add(round(weather.until(at) - at, 6))
        starts.append(at)
        at = weather.until(at)
    assert lengths == {2.0}
    assert len({round(later - earlier, 3) for earlier, later in pairwise(starts[1:])}) > 10

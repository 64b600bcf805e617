"""What streams of bytes need of links: gates and room, layers, weather with states, measured jitter, limits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.scenarios.scenario_file import ScenarioError, load
from tidegate.netsim.links.distributions import (
    Constant,
    Correlated,
    Distribution,
    Draw,
    Empirical,
    LogNormal,
    Normal,
    Pareto,
    Uniform,
)
from tidegate.netsim.links.limit import ByteLimit
from tidegate.netsim.links.nat import NatBinding
from tidegate.netsim.links.profile import (
    Alternation,
    BadWeather,
    CapacityRecording,
    Jitter,
    LinkProfile,
    States,
    build,
    with_files,
)
from tidegate.netsim.links.rate import Rate
from tidegate.netsim.links.regime import Chain, Since, Windows
from tidegate.netsim.links.stream import LimitSpec, LinkLayer, StreamProfile, limit_of, nat_idle_s
from tidegate.netsim.links.stream import StreamPath as Way
from tidegate.netsim.links.trace import CapacityTrace, TraceRate


def draws(seed: int = 1) -> Callable[..., Draw]:
    return lambda *names: Random(f"{seed}/{names}").random


def layer(profile: StreamProfile, direction: str = "both", **options: object) -> LinkLayer:
    return LinkLayer.build("base", profile, direction=direction, draw=draws(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "shape", [Constant(0.01), Uniform(0.0, 0.02), Normal(0.01, 0.002), LogNormal(0.01, 1.0), Pareto(0.01, 1.5),
              Empirical([0.005, 0.01, 0.03])], ids=lambda shape: type(shape).__name__,
)  # fmt: skip
def test_correlated_samples_keep_their_shape_and_resemble_their_neighbours(shape: Distribution) -> None:
    draw, correlated = Random(4).random, Correlated(shape, 0.8)
    samples = [correlated.sample_s(draw) for _ in range(20_000)]
    assert median(samples) == pytest.approx(0.01, rel=0.12)
    if not isinstance(shape, Constant):
        middle = median(samples)
        same_side = mean((a > middle) == (b > middle) for a, b in pairwise(samples))
        assert same_side > 0.7  # independent samples: 0.5


def test_measured_samples_come_back_with_straight_lines_between() -> None:
    measured = Empirical([0.03, 0.01, 0.02])
    assert [measured.quantile_s(chance) for chance in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.01, 0.015, 0.02, 0.03])
    assert "3 samples" in repr(measured)
    with pytest.raises(ValueError, match="at least one"):
        Empirical([])
    with pytest.raises(ValueError, match="correlation"):
        Correlated(measured, 1.0)


def test_jitter_that_was_measured_is_read_from_its_file() -> None:
    profile = LinkProfile(delay_ms=0.0, jitter=Jitter("empirical", file="wifi.txt"))
    read = with_files(profile, {"wifi.txt": "1.5\n2.5\n"}.__getitem__)
    assert read.jitter is not None
    assert read.jitter.distribution(2.0).quantile_s(1.0) == pytest.approx(0.005)
    assert with_files(LinkProfile(), str) == LinkProfile()
    with pytest.raises(ValueError, match="empirical"):
        Jitter("empirical")
    with pytest.raises(ValueError, match="empirical"):
        Jitter("pareto", 1.0, file="wifi.txt")
    with pytest.raises(ValueError, match="correlation"):
        Jitter("pareto", 1.0, correlation=-0.1)


def test_a_fleet_s_link_may_have_measured_jitter_and_a_csv_recording(tmp_path: Path) -> None:
    text = Path(load("office_wifi").source).read_text()
    links = "links:\n  wan: {delay_ms: 15}\n  wifi:\n    jitter: {dist: empirical, file: jitter.txt}\n"
    links += "    recording: {to_target: up.csv, from_target: up.csv, offset_s: 0}\n"
    head, _, rest = text.partition("links:")
    scenario = tmp_path / "mine.yaml"
    scenario.write_text(head + links + rest[rest.index("\nedges:") :])
    with pytest.raises(ScenarioError, match=r"links\.wifi\.jitter\.file"):
        load(str(scenario))
    (tmp_path / "jitter.txt").write_text("1\n2\n3\n")
    (tmp_path / "up.csv").write_text("s,mbit\n0,1.2\n10,\n")
    loaded = load(str(scenario))
    with pytest.raises(ScenarioError, match="line 3: not numbers"):
        _ = loaded.traces
    (tmp_path / "up.csv").write_text("s,mbit\n0,1.2\n10,0\n")
    assert load(str(scenario)).traces["wifi"][0].mean_bytes_per_s == pytest.approx(150e3)


def test_a_csv_of_rates_gives_its_volume_and_its_silence() -> None:
    trace = CapacityTrace.parse_csv("s,up,mbit\n5,9,1.2\n6,9,0\n8,9,2.4\n9,0,0\n")
    assert trace.period_s == 4.0
    assert len(trace.times_s) == 300
    assert sum(1.0 < at <= 3.0 for at in trace.times_s) == 0
    assert len(CapacityTrace.parse_csv("s,up,mbit\n5,9,1.2\n6,9,0\n", column="up").times_s) == 750


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has nothing"),
        ("t,mbit\n1,2\n", "it has t, mbit"),
        ("s,mbit\n0,fast\n", "line 2: not numbers: 0, fast"),
        ("s,mbit\n0,1\n", "at least two lines"),
        ("s,mbit\n0,1\n1,-1\n", "none below 0"),
        ("s,mbit\n5,1\n1,1\n", "must not decrease"),
        ("s,mbit\n0,1e9\n1000,1\n", "more than a recording can hold"),
    ],
)
def test_a_bad_csv_of_rates_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CapacityTrace.parse_csv(text)


def test_a_recording_that_does_not_loop_ends() -> None:
    link = TraceRate(CapacityTrace.parse("100\n200\n", loops=False))
    assert link.leaves_at(3000, 0.0) == pytest.approx(0.2)
    assert link.leaves_at(1, 0.0) == inf
    assert TraceRate(CapacityTrace([0.1], loops=False)).leaves_at(1, 5.0) == inf


def test_a_recording_begins_at_its_start_instant() -> None:
    link = TraceRate(CapacityTrace([0.1, 0.2, 0.3]), offset_s=0.15, starts_at=100.0)
    assert link.leaves_at(1500, 100.0) == pytest.approx(100.05)


def test_a_recorded_link_s_queue_has_an_end() -> None:
    link = TraceRate(CapacityTrace([0.1, 0.2, 0.3, 0.4]), queue_bytes=3000)
    assert link.enters_at(1500, 0.0) == 0.0
    link.leaves_at(1500, 0.0)
    link.leaves_at(1500, 0.0)
    assert (link.queued_bytes(0.0), link.room_bytes(0.0)) == (3000, 0)
    assert link.enters_at(1500, 0.0) == pytest.approx(0.1)
    assert link.enters_at(9000, 0.0) == pytest.approx(0.2)  # more than the whole queue: when that is empty
    assert link.room_bytes(0.15) == 1500


def test_what_overflows_a_recorded_link_s_queue_is_sent_again() -> None:
    link = TraceRate(CapacityTrace([0.1, 0.3, 0.5, 0.7]), queue_bytes=3000, overflow="drop")
    link.leaves_at(3000, 0.0)
    assert link.leaves_at(1500, 0.0) == pytest.approx(0.7)  # again at 0.2, and at 0.6 there is room
    assert link.retransmissions == 2


def test_a_rate_says_when_there_is_room() -> None:
    rate = Rate(1e6, queue_bytes=50_000)
    rate.leaves_at(50_000, 0.0)
    assert rate.enters_at(10_000, 0.0) == pytest.approx(0.01)
    assert rate.enters_at(10_000, 0.0101) == 0.0101
    assert rate.enters_at(90_000, 0.0) == pytest.approx(0.05)
    dropping = Rate(1e6, queue_bytes=50_000, overflow="drop")
    dropping.leaves_at(50_000, 0.0)
    assert dropping.enters_at(10_000, 0.0) == pytest.approx(0.2)


@pytest.mark.parametrize("stage", [Rate(1e5), TraceRate(CapacityTrace([0.01, 0.02]), queue_bytes=1e6)])
def test_a_capacity_that_begins_again_has_forgotten_what_was_queued(stage: Rate | TraceRate) -> None:
    stage.leaves_at(100_000, 0.0)
    stage.restart(0.1)
    assert stage.leaves_at(1500, 0.1) < 0.13


def test_a_link_dies_only_after_it_was_bad() -> None:
    chain = Chain((1.0, 0.5, 0.2), ((0, 1, 0), (0.5, 0, 0.5), (1, 0, 0)), Random(5).random)
    states, at = [], 0.0
    for _ in range(2000):
        states.append(next(number for number in range(3) if chain.during(number).until(at) > at))
        at = chain.until(at, states[-1])
    assert states[0] == 0
    assert set(states) == {0, 1, 2}
    assert all(later == 1 for earlier, later in pairwise(states) if earlier == 0)
    assert all(earlier == 1 for earlier, later in pairwise(states) if later == 2)


def test_a_chain_s_time_does_not_depend_on_the_queries() -> None:
    def chain() -> Chain:
        return Chain((0.3, 0.2), ((0, 1), (1, 0)), Random(5).random)

    busy, quiet = chain(), chain()
    for tick in range(50_000):
        busy.until(tick / 1000, 0)
    assert [busy.until(50.0 + tick, 1) for tick in range(9)] == [quiet.until(50.0 + tick, 1) for tick in range(9)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Chain((1.0,), ((0.5,),), Random(1).random), "sum 1"),
        (lambda: Chain((0.0, 1.0), ((0, 1), (1, 0)), Random(1).random), "take time"),
        (lambda: States(0.0, 1.0, 1.0), "above 0"),
        (lambda: States(1.0, 1.0, 1.0, loss=1.0), "loss"),
        (lambda: LinkProfile(states=States(1, 1, 1), bad=BadWeather(every_s=2, for_s=1)), "not both"),
        (lambda: LinkProfile(delay_ms=-1.0), "delay_ms"),
        (lambda: LinkProfile(queue_kbyte=0.0), "queue_kbyte"),
        (lambda: CapacityRecording("a", "b", scale=0.0), "scale"),
        (lambda: CapacityRecording("a", "b", offset_s=-1.0), "offset_s"),
        (lambda: StreamProfile(nat_idle_s=0.0), "nat_idle_s"),
        (lambda: LimitSpec(-1), "bytes"),
    ],
)
def test_links_that_make_no_sense_are_refused(wrong: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


def test_states_of_a_fleet_s_link_are_its_bad_weather_and_its_outages() -> None:
    profile = LinkProfile(delay_ms=10.0, states=States(1.0, 0.5, 0.5, delay_times=5.0, loss=0.1))
    link = build(profile, lambda name: Random(name).random)
    took = [link.to_target.connection().delivered_at(100, tick / 10) - tick / 10 for tick in range(2000)]
    assert median(took) == pytest.approx(0.01)
    assert max(took) > 0.2


def test_stretches_can_be_counted_from_an_instant() -> None:
    later = Since(Windows([(1.0, 2.0)]), 100.0)
    assert later.until(100.5) == 100.5
    assert later.until(101.5) == 102.0


def test_a_gate_is_shut_while_the_link_is_gone_and_opens_with_the_next_retransmission() -> None:
    gone = layer(StreamProfile(delay_ms=1.0, outages=Alternation(every_s=10.0, for_s=2.0, periodic=True)))
    way = Way([gone], 0, 1)
    assert gone.air.gone is not None
    shut_at = next(tick / 100 for tick in range(2000) if gone.air.gone.until(tick / 100) > tick / 100)
    asked = way.enters_at(1500, shut_at)
    assert asked >= gone.air.gone.until(shut_at)
    assert way.enters_at(1500, asked) == asked


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 0.1), st.integers(1, 3000)), min_size=1, max_size=50), st.integers(0, 9))
def test_segments_leave_in_order_and_arrive_in_order(sent: list[tuple[float, int]], seed: int) -> None:
    profile = StreamProfile(delay_ms=5.0, jitter=Jitter("pareto", 5.0, 1.5), loss=0.1, to_mbit=1.0)
    way = Way([LinkLayer.build("base", profile, direction="both", draw=draws(seed))], 0, 1)
    now = last = 0.0
    for gap_s, size in sent:
        now += gap_s
        left_at, delivered_at = way.send(size, now)
        assert now <= left_at <= delivered_at
        assert delivered_at >= last
        last = delivered_at


def test_a_layer_on_one_direction_is_not_in_the_other() -> None:
    slow = layer(StreamProfile(delay_ms=500.0), "to")
    assert Way([slow], 0, 1).send(1, 0.0).delivered_at == pytest.approx(0.5)
    assert Way([slow], 1, 1).send(1, 0.0).delivered_at == 0.0


def test_a_layer_that_stays_goes_on_with_its_chance_when_others_change() -> None:
    steady = layer(StreamProfile(delay_ms=0.0, jitter=Jitter("uniform", 100.0)))
    changed, untouched = Way([steady], 0, 1), Way([steady], 0, 1)
    took = []
    for tick in range(10):
        changed.change([steady, layer(StreamProfile(delay_ms=0.0))], on_its_way_until=0.0)
        took.append((changed.send(1, float(tick)), untouched.send(1, float(tick))))
    assert all(one == other for one, other in took)
    assert "Delay" in repr(changed)


def test_a_stream_is_cut_as_finely_as_its_slowest_stage_needs() -> None:
    assert Way([], 0, 1).segment == 65536
    assert Way([layer(StreamProfile(to_mbit=80.0))], 0, 1).segment == 10_000
    assert Way([layer(StreamProfile(to_mbit=0.1))], 0, 1).segment == 1500
    assert Way([layer(StreamProfile(loss=0.1))], 0, 1).segment == 1500
    traced = StreamProfile(recording=CapacityRecording("a", "b", scale=2.0, offset_s=0.0))
    assert Way([layer(traced, traces=(CapacityTrace([1.0]), CapacityTrace([1.0])))], 0, 1).segment == 3000


def test_a_nat_keeps_active_connections_and_forgets_silent_ones_for_good() -> None:
    binding = NatBinding(60.0, now=0.0)
    assert [binding.passes(at) for at in (60.0, 119.0, 180.0, 180.1)] == [True, True, False, False]
    assert "forgotten" in repr(binding)


def test_a_limit_passes_exactly_its_bytes() -> None:
    limit = ByteLimit(10, "close")
    assert [limit.take(size) for size in (4, 4, 4, 4)] == [4, 4, 2, 0]


def test_the_tightest_limit_and_the_most_forgetful_nat_count() -> None:
    layers = [
        layer(StreamProfile(limit=LimitSpec(100), nat_idle_s=60.0)),
        layer(StreamProfile(limit=LimitSpec(50, "stall"), nat_idle_s=90.0), "to"),
    ]
    tightest = limit_of(layers, 0)
    assert tightest is not None
    assert (tightest.left_bytes, tightest.then) == (50, "stall")
    assert limit_of(layers, 1).left_bytes == 100  # type: ignore[union-attr]
    assert nat_idle_s(layers) == 60.0
    assert limit_of([], 0) is None
    assert nat_idle_s([]) is None

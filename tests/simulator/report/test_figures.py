"""Figures and intervals."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist

import pytest
from click.testing import CliRunner

from simulator.cli import simulate as command
from simulator.report.figures import MeanInterval, difference, figures, miss_ratio, rows, tier_share
from simulator.report.plot import smoothed
from simulator.simulation import simulate
from simulator.sweep import knee, sweep
from simulator.world.histograms import Latencies, ReliabilityTally
from simulator.world.tally import OutcomeTally, RequestEnd
from tests.simulator.worlds import SMALL, edited
from tidegate.outcome import Outcome


def test_percentiles_are_right_to_a_twentieth() -> None:
    latencies = Latencies()
    for number in range(1, 1001):
        latencies.add(number / 1000)
    assert latencies.quantile_s(0.5) == pytest.approx(0.5, rel=0.05)
    assert latencies.quantile_s(0.99) == pytest.approx(0.99, rel=0.05)
    assert Latencies().quantile_s(0.5) == 0.0


def test_calibration_error_is_the_gap_between_promise_and_fact() -> None:
    honest, boastful = ReliabilityTally(), ReliabilityTally()
    for number in range(100):
        honest.add(0.9, number < 90)
        boastful.add(1.0, number < 60)
    assert honest.error == pytest.approx(0.0)
    assert boastful.error == pytest.approx(0.4)
    assert ReliabilityTally().error == 0.0


def test_a_request_that_is_lost_is_noticed() -> None:
    tally = OutcomeTally(counts_from=0.0)
    tally.begin()
    with pytest.raises(AssertionError, match="1 requests arrived, 0 ended"):
        tally.check()
    tally.end(RequestEnd("short", 1, 0.0, 0.1, Outcome.OK, in_time=True, served_by="edge/a", attempts=1))
    tally.check()


def test_an_interval_narrows_with_more_seeds_and_pairs_by_seed() -> None:
    noise = [NormalDist(0.0, 1.0).inv_cdf((n + 0.5) / 20) for n in range(20)]
    few, many = MeanInterval.of(noise[::4]), MeanInterval.of(noise * 5)
    assert many.high - many.low < few.high - few.low
    shifted = difference([sample + 0.1 for sample in noise], noise)
    assert (shifted.low, shifted.high) == pytest.approx((0.1, 0.1))
    assert f"{MeanInterval.of([0.5]):.2f}" == "0.50 [0.50, 0.50]"


@pytest.mark.slow
def test_a_sweep_has_figures_for_every_policy_and_load_in_order() -> None:
    told: list[tuple[int, int]] = []
    loaded = edited(("duration_s: 6", "duration_s: 3"))

    found = sweep(
        loaded, ["tidegate", "random"], [0.5, 1.0], [1, 2], knee_rps=40.0, on_run=lambda *done: told.append(done)
    )

    assert [(one.policy, one.load, one.rate) for one in found] == [
        ("tidegate", 0.5, 20.0), ("tidegate", 1.0, 40.0), ("random", 0.5, 20.0), ("random", 1.0, 40.0),
    ]  # fmt: skip
    assert told[-1] == (8, 8)
    assert len(rows(found)) == 5
    assert tier_share(found[0], "edge") + tier_share(found[0], "pool") == pytest.approx(1.0)
    assert json.loads(json.dumps(found[0].plain()))["policy"] == "tidegate"


@pytest.fixture
def new_processes() -> Iterator[None]:
    """Processes of a pool begin anew. In a fork of this one, a channel of gRPC's that other tests left to the collector
    waits for ever, while it is collected, for a thread that forks have not."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
@pytest.mark.usefixtures("new_processes")
def test_processes_find_what_one_process_finds() -> None:
    loaded = edited(("duration_s: 6", "duration_s: 2"))
    alone = sweep(loaded, ["tidegate"], [1.0], [1, 2], knee_rps=40.0)
    shared = sweep(loaded, ["tidegate"], [1.0], [1, 2], knee_rps=40.0, processes=2)
    assert alone == shared


@pytest.mark.slow
def test_the_knee_is_where_a_plain_policy_begins_to_fail() -> None:
    loaded = edited(("duration_s: 6", "duration_s: 3"))
    rate = knee(loaded, seeds=(1,))
    for factor, fails in ((0.5, False), (2.0, True)):
        run = simulate(loaded.replaced(loaded.scenario.with_rate(rate * factor)), "static+ledger", 1)
        assert (run.tally.all.attainment < 0.9) is fails
    assert knee(edited(extra="knee_rps: 123")) == 123.0  # its own word


@pytest.mark.slow
def test_twice_the_misses_is_a_ratio_of_two() -> None:
    run = simulate(edited(("duration_s: 6", "duration_s: 2")), "random", 1)
    one = figures([run], load=1.0, rate=60.0)
    assert miss_ratio(one, one) == 1.0


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL.replace("duration_s: 6", "duration_s: 2").replace("warmup_s: 1", "warmup_s: 0.2"))
    return str(path)


@pytest.mark.slow
def test_the_command_prints_a_table_or_json_and_nothing_else_on_stdout(scenario: str) -> None:
    table = CliRunner().invoke(command, [scenario, "--policy", "tidegate,static", "--seeds", "1"])
    assert table.exit_code == 0, table.output
    assert "tidegate" in table.stdout and "static" in table.stdout
    assert "load 1 is 60/s" in table.stdout

    plain = CliRunner().invoke(command, [scenario, "--seeds", "1", "--json"])
    assert json.loads(plain.stdout)["figures"][0]["policy"] == "tidegate"


@pytest.mark.slow
def test_loads_are_fractions_of_the_knee(scenario: str) -> None:
    found = CliRunner().invoke(command, [scenario, "--seeds", "1", "--load", "0.5,1.0", "--seconds", "1", "--json"])
    rates = [one["rate"] for one in json.loads(found.stdout)["figures"]]
    assert rates[1] == pytest.approx(2 * rates[0])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nope"], "there is no scenario 'nope'"),
        (["office_wifi", "--policy", "wishful"], "there is no 'wishful'"),
        (["office_wifi", "--load", "a,b"], "numbers above 0"),
        (["office_wifi", "--load", "-1"], "numbers above 0"),
        (["office_wifi", "--seeds", "0"], "x>=1"),
    ],
)
def test_what_cannot_be_simulated_is_an_error_in_a_sentence(words: list[str], told: str) -> None:
    found = CliRunner().invoke(command, words)
    assert found.exit_code != 0
    assert told in found.output
    assert "Traceback" not in found.output


@pytest.mark.slow
def test_scenarios_and_policies_are_listed() -> None:
    found = CliRunner().invoke(command, ["--list"])
    assert found.exit_code == 0
    assert "office_wifi" in found.output and "policies: tidegate" in found.output


def test_without_the_package_for_plots_nothing_is_simulated_first(
    scenario: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for option in ("--plot", "--timeline"):
        found = CliRunner().invoke(command, [scenario, option, str(tmp_path / "picture.png")])
        assert found.exit_code == 1
        assert found.output == (
            "Error: plots need matplotlib, which is not installed: pip install 'tidegate[simulate]'\n"
        )


@pytest.mark.slow
def test_pictures_are_written_or_their_absence_is_explained(scenario: str, tmp_path: Path) -> None:
    loads, timeline = tmp_path / "loads.png", tmp_path / "timeline.png"
    found = CliRunner().invoke(
        command, [scenario, "--seeds", "1", "--load", "0.5,1", "--plot", str(loads), "--timeline", str(timeline)]
    )
    if find_spec("matplotlib") is None:
        assert found.exit_code == 1
        assert "plots need matplotlib, which is not installed" in found.output
    else:
        assert found.exit_code == 0, found.output
        for picture in (loads, timeline):
            assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_timeline_is_of_the_last_second_and_on_the_scenarios_clock() -> None:
    one = figures([simulate(edited(), "cheapest", 1)], load=1.0, rate=60.0)
    points = smoothed(one)
    assert points[0][0] == pytest.approx(one.timeline[0][0] - 1.0)  # a run's clock starts a second early
    last_four = one.timeline[-4:]
    assert points[-1][1] == sum(in_time for _, _, in_time in last_four) / sum(arrived for _, arrived, _ in last_four)

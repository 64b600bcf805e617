"""Scenarios: an error names the key that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.scenarios.scenario import target_names
from simulator.scenarios.scenario_file import LoadedScenario, ScenarioError, load, names, parse
from tests.simulator.worlds import SMALL, edited


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("summary: two devices and a pool", "", "key 'summary' is missing"),
        ("duration_s: 6", "duration: 6", "key 'duration': there is no such key"),
        ("count: 2", "count: many", "key 'edges[0].count': Expected `int`, got `str`"),
        ("count: 2", "count: 0", "key 'edges[0]': count must be at least 1"),
        ("slow: [1.0, 2.0]", "slow: [2.0, 1.0]", "the smaller first"),
        ("link: lan}", "link: lam}", "key 'edges[0].link': there is no 'lam' (there are: lan, wan)"),
        ("{name: gpu, link: wan}", "{name: gpu, link: x}", "key 'pools[0].link'"),
        ("count: 2,", "count: 2, models: [x],", "key 'edges[0].models'"),
        ("count: 2,", "count: 2, edge_ms: {x: [[1, 2]]},", "key 'edges[0].edge_ms': there is no 'x'"),
        ("count: 2,", "count: 2, edge_ms: {m: [[1, -2]]},", "key 'edges[0]"),
        ("count: 2,", "count: 2, background: {share: 0.1, class: x},", "key 'edges[0].background.class'"),
        ("model: m, length: {median: 20", "model: n, length: {median: 20", "key 'classes[0].model'"),
        ("budget_ms: 500", "budget_ms: 500, rows: 99", "key 'classes[1].rows': 99 are more"),
        ("median: 300", "median: 3000", "min <= median <= max does not hold"),
        ("rate: 60", "rate: 0", "rate must be above 0"),
        ("rate: 60", "rate: 60, burst_for_s: 9", "burst_for_s must be above 0"),
        ("rate: 60", "rate: 60, burst_times: 9", "nothing is left between bursts"),
        ("rate: 60", "rate: 60, process: pareto, alpha: 1", "alpha must be above 1"),
        ("warmup_s: 1", "warmup_s: 6", "key 'warmup_s'"),
        ("warmup_s: 1", "warmup_s: 1\nmax_in_flight: 0", "key 'max_in_flight': must be at least 1, not 0"),
        ("edge_ms: [[1, 4], [100, 40]]", "edge_ms: []", "at least one point"),
        ("    edge_ms: [[1, 4], [100, 40]]\n    pool_ms: [[1, 8], [100, 9], [3200, 60]]\n", "", "runs nowhere"),
        ("share: 3", "share: -1", "a share above 0 is needed"),
        ("{delay_ms: 10,", "{delay_ms: 10, outages: {every_s: 1, for_s: 2},", "below every_s"),
    ],
)
def test_an_error_names_the_key_and_what_would_be_right(old: str, new: str, words: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        edited((old, new), ("share: 1,", "share: 0,")) if "-1" in new else edited((old, new))
    assert words in str(caught.value)
    assert str(caught.value).startswith("test: ")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("{kind: slow, at_s: 1, for_s: 1, target: edge/nobody-1}", "there is no 'edge/nobody-1'"),
        ("{kind: broker, at_s: 1, for_s: 1, target: pool/gpu}", "has the target 'mqtt'"),
        ("{kind: crash, at_s: 1, for_s: 1, target: mqtt}", "has the target 'mqtt'"),
    ],
)
def test_a_fault_must_have_a_target_that_there_is(fault: str, words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        edited(extra=f"faults: [{fault}]")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "- x"])
def test_what_is_no_scenario_at_all_is_refused(text: str) -> None:
    with pytest.raises(ScenarioError, match="test: "):
        parse(text, "test")


def test_two_groups_of_one_name_and_an_empty_fleet_are_refused() -> None:
    with pytest.raises(ScenarioError, match="two groups"):
        edited(("pools:", "  - {name: device, count: 1, link: lan}\npools:"))
    with pytest.raises(ScenarioError, match="needs an edge or a pool"):
        edited(
            ("edges:\n  - {name: device, count: 2, slow: [1.0, 2.0], link: lan}\n", ""),
            ("pools:\n  - {name: gpu, link: wan}\n", ""),
        )


@pytest.mark.parametrize("name", names())
def test_every_scenario_that_comes_along_can_be_loaded(name: str) -> None:
    scenario = load(name).scenario
    assert scenario.summary.endswith(".")
    assert target_names(scenario)


def test_an_unknown_scenario_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match=r"no scenario 'nope'.*office_wifi"):
        load("nope")


def test_a_scenario_of_ones_own_is_a_file_and_its_recordings_lie_beside_it(tmp_path: Path) -> None:
    recorded = SMALL.replace(
        "{delay_ms: 1, jitter: {dist: lognormal, ms: 0.3}}",
        "{delay_ms: 1, recording: {to_target: a.down, from_target: a.up}}",
    )
    path = tmp_path / "mine.yaml"
    path.write_text(recorded)
    (tmp_path / "a.down").write_text("1\n5\n")

    loaded = load(str(path))

    with pytest.raises(ScenarioError, match=r"links.lan.recording.from_target.*a\.up"):
        _ = loaded.traces
    (tmp_path / "a.up").write_text("7\n")
    assert load(str(path)).traces["lan"][0].times_s == [0.001, 0.005]


def test_a_longer_run_warms_up_for_the_same_share_of_it() -> None:
    loaded = edited()
    assert loaded.scenario.lasting(60.0).warmup_s == pytest.approx(10.0)
    assert isinstance(loaded.replaced(loaded.scenario.with_jitter(4.0)), LoadedScenario)


def test_a_recording_in_a_scenarios_place_is_named_with_the_option_for_it(tmp_path: Path) -> None:
    recording = tmp_path / "monday.tgz"
    recording.write_bytes(b"\x1f\x8b\x08\xff")
    with pytest.raises(ScenarioError, match=rf"{recording}: is no text.* --replay {recording}"):
        load(str(recording))

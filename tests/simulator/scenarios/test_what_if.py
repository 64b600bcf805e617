"""What-if changes: one thing of a scenario changes, and each key of a scenario has an effect."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from simulator.cli import simulate as command
from simulator.scenarios.scenario import target_names
from simulator.scenarios.scenario_file import LoadedScenario, ScenarioError
from simulator.scenarios.what_if import with_link, with_more_devices
from simulator.simulation import simulate
from tests.simulator.worlds import SMALL, edited


def test_the_folder_that_the_manual_copies_a_scenario_from_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    manual = (Path(__file__).parents[3] / "docs" / "simulator.md").read_text(encoding="utf-8")
    found = re.search(r"python -c '([^']+)'\)/(\w+\.yaml)", manual)
    assert found is not None

    exec(found[1], {})

    assert (Path(capsys.readouterr().out.strip()) / found[2]).is_file()


def test_more_devices_join_a_group() -> None:
    scenario = edited().scenario
    assert target_names(with_more_devices(scenario, "3"))[4] == "edge/device-5"
    assert with_more_devices(scenario, "device=3") == with_more_devices(scenario, "3")


@pytest.mark.parametrize(
    ("words", "said"),
    [("nobody=3", "there are: device"), ("device=many", "'many' is not a whole number"), ("-3", "-3")],
)
def test_devices_that_cannot_be_added_are_told(words: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        with_more_devices(edited().scenario, words)


def test_a_link_is_exchanged_for_a_named_one() -> None:
    changed = with_link(edited(), "lan=lte_driving").scenario
    assert changed.links["lan"].delay_ms > 20.0
    assert changed.links["wan"] == edited().scenario.links["wan"]


@pytest.mark.slow
def test_a_recording_gives_capacity_and_leaves_the_delay(tmp_path: Path) -> None:
    for name in ("up", "down"):
        (tmp_path / name).write_text("1\n400\n")  # 3,000 bytes in 400 ms
    changed = with_link(edited(), f"wan={tmp_path}/up,{tmp_path}/down")
    assert changed.traces["wan"][0].period_s == 0.4
    assert changed.scenario.links["wan"].delay_ms == 10
    calm, choked = simulate(edited(), "all-cloud", 1), simulate(changed, "all-cloud", 1)
    assert choked.tally.all.attainment < 0.8 * calm.tally.all.attainment
    # What does not come through in time is given up, and soon the pool is: edges answer in its place.
    assert choked.compute_s["pool"] < 0.1 * calm.compute_s["pool"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("wifi=good_wifi", "KIND of: lan, wan"),
        ("lan", "KIND=LINK is wanted"),
        ("lan=nowhere", "no link scenario 'nowhere'"),
        ("lan=partition_30s", "timeline, which a fleet's links do not have"),
        ("lan=/nowhere/a,/nowhere/b", "key 'links.lan.recording.to_target'"),
    ],
)
def test_a_link_that_cannot_be_had_is_told(words: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        with_link(edited(), words)


@pytest.mark.slow
def test_the_command_line_asks_what_if(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL.replace("duration_s: 6", "duration_s: 2"))
    words = [str(path), "--seeds", "1", "--more-devices", "2", "--rate", "80", "--link", "wan=good_wifi"]
    found = CliRunner().invoke(command, words)
    assert found.exit_code == 0, found.output
    assert "load 1 is 80/s" in found.output
    assert "no group 'x'" in CliRunner().invoke(command, [str(path), "--more-devices", "x=2"]).output


BUSY = ("rate: 60", "rate: 150")
SLOW_EDGES = ("slow: [1.0, 2.0]", "slow: [3.0, 4.0]")


def _without_and_with() -> dict[str, tuple[LoadedScenario, LoadedScenario]]:
    """By what acts: the same world without it and with it."""
    edge, plain = "link: lan}", edited(BUSY)

    def both(*edits: tuple[str, str], extra: str = "") -> tuple[LoadedScenario, LoadedScenario]:
        return plain, edited(BUSY, *edits, extra=extra)

    fault = "faults: [{{kind: {}, target: {}, at_s: 2, for_s: 2{}}}]"
    wan = "{delay_ms: 10,"
    # MQTT matters where nothing else tells of a device's own load, and where it comes late or not at all.
    local = (edge, "link: lan, background: {share: 0.3, class: short}}")
    return {
        "background": both(local),
        "thermal": both((edge, "link: lan, thermal: {every_s: 2, for_s: 1.5, slow: [3, 4]}}")),
        "mqtt delay": (edited(BUSY, local), edited(BUSY, local, extra="mqtt: {delay_ms: 900, jitter_ms: 0}")),
        "mqtt loss": (edited(BUSY, local), edited(BUSY, local, extra="mqtt: {loss: 0.9}")),
        "mqtt order": (
            edited(BUSY, local, extra="mqtt: {delay_ms: 20, jitter_ms: 0}"),
            edited(BUSY, local, extra="mqtt: {delay_ms: 20, jitter_ms: 800, interval_s: 0.2}"),
        ),
        "broker": (edited(BUSY, local), edited(BUSY, local, extra=fault.format("broker", "mqtt", ""))),
        "partition": both(extra=fault.format("partition", "pool/gpu", "")),
        "half partition": both(extra=fault.format("partition", "pool/gpu", ", direction: from")),
        "slow": both(extra=fault.format("slow", "pool/gpu", ", times: 9")),
        "stop": both(extra=fault.format("stop", "edge/device-1", "")),
        "crash": both(extra=fault.format("crash", "pool/gpu", "")),
        "bad weather": both((wan, wan + " bad: {every_s: 2, for_s: 1, delay_times: 9},")),
        "outages": both((wan, wan + " outages: {every_s: 2, for_s: 0.5},")),
        "loss": both((wan, wan + " loss: 0.1,")),
        "capacity": both((wan, wan + " to_mbit: 2, from_mbit: 2,")),
        "bursty": both(("rate: 150", "rate: 150, process: bursty")),
        "periodic": both(("rate: 150", "rate: 150, process: periodic")),
        "pareto": both(("rate: 150", "rate: 150, process: pareto")),
        "steps": both(("rate: 150", "rate: 150, steps: [{at_s: 2, for_s: 1, times: 3}]")),
        "gateways": both(("warmup_s: 1", "warmup_s: 1\ngateways: 3")),
        "gateways per edge": (
            edited(BUSY, ("warmup_s: 1", "warmup_s: 1\ngateways: 3")),
            edited(BUSY, ("warmup_s: 1", "warmup_s: 1\ngateways: 3\ngateways_per_edge: 1")),
        ),
    }


Outcome = tuple[dict[str, int], dict[str, int], float]


@pytest.fixture(scope="module")
def outcome_of() -> Callable[[LoadedScenario], Outcome]:
    """What a run ends with; a scenario that many cases begin with runs once."""
    known: dict[bytes, Outcome] = {}

    def outcome(loaded: LoadedScenario) -> Outcome:
        key = msgspec.json.encode(loaded.scenario)  # none of these has a recording
        if key not in known:
            run = simulate(loaded, "cheapest", 1)
            compute_s = round(sum(run.compute_s.values()), 6)
            known[key] = dict(run.tally.all.outcomes), dict(run.tally.served_by), compute_s
        return known[key]

    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("what", _without_and_with())
def test_what_a_scenario_says_acts(what: str, outcome_of: Callable[[LoadedScenario], Outcome]) -> None:
    without, with_it = _without_and_with()[what]
    assert outcome_of(without) != outcome_of(with_it)

"""A recording becomes a scenario: the same requests, on devices and links as they were."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from gateway.core.history.trace_format import (
    FORMAT,
    VERSION,
    RecordedAttempt,
    RecordedEnd,
    RecordedHeader,
    RecordedLine,
    RecordedLink,
    RecordedModel,
    RecordedRequest,
    RecordedTarget,
    RecordedVariant,
)
from simulator.cli import simulate as simulate_cli
from simulator.replay.replay import Replay, replay
from simulator.scenarios.scenario_file import ScenarioError
from simulator.simulation import simulate
from simulator.world.arrivals import requests
from simulator.world.conditions import SETTLING_S
from tidegate.netsim.links.recorded import RecordedDelay

SECONDS = 20.0
HEADER = RecordedHeader(
    FORMAT, VERSION, made_by="0.1.0", gateway="site-1", policy="value", began_utc_s=1.8e9, for_s=SECONDS
)


def target(
    id: str, seconds: float, *, precision: str = "int8", models: tuple[str, ...] = ("encoder",)
) -> RecordedTarget:
    cost = ((1.0, seconds), (512.0, 4.0 * seconds))
    variant = RecordedVariant(precision, precision, cost, quality=0.98)
    return RecordedTarget(0.1, id, id.partition("/")[0], tuple(RecordedModel(name, "1", (variant,)) for name in models))


def asked(at_s: float, to: str = "edge/kiosk", **more: Any) -> RecordedRequest:
    """One that was answered there, its call twice as long as the table says."""
    attempt = RecordedAttempt(
        to, "int8", "cheapest",
        at_s=0.001, took_s=0.052, end="answered", acked_s=0.004, queue_s=0.004, compute_s=0.040, link_s=0.008, batch=1,
    )  # fmt: skip
    fields = {"model": "encoder", "protocol": "oip-http", "outcome": "ok", "elapsed_s": 0.053, "budget_s": 0.5}
    work = {"gateway_s": 0.001, "version": "1", "units": 1.0, "served_by": to, "attempts": (attempt,)}
    return RecordedRequest(at_s=at_s, **fields | work | more)


def traffic(**more: Any) -> list[RecordedRequest]:
    draw = Random(7)
    return [asked(at_s, **more) for at_s in sorted(draw.random() * SECONDS for _ in range(200))]


def links(id: str, *, up: Iterable[bool] = (True,) * 20, rtt_s: float = 0.008) -> list[RecordedLink]:
    return [RecordedLink(float(second), id, is_up, rtt_s=rtt_s) for second, is_up in enumerate(up)]


FLEET = (target("edge/kiosk", 0.020), target("pool/main", 0.004, precision="fp32"))


def write(path: Path, told: Iterable[RecordedRequest], rows: Iterable[RecordedLink] = (), header: RecordedLine = HEADER,
          targets: Iterable[RecordedTarget] = FLEET) -> Path:  # fmt: skip
    members = {
        "header.jsonl": [header], "targets.jsonl": targets, "requests.jsonl": told,
        "links.jsonl": rows or [*links("edge/kiosk"), *links("pool/main")], "end.jsonl": [RecordedEnd(0, 0, SECONDS)],
    }  # fmt: skip
    with tarfile.open(path, "w:gz") as tar:
        for name, lines in members.items():
            body = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return path


def replayed(tmp_path: Path, *args: Any, **named: Any) -> Replay:
    return replay(write(tmp_path / "one.tgz", *args, **named))


def test_the_requests_come_at_their_instants_with_their_own_work_and_what_was_left_of_their_budgets(
    tmp_path: Path,
) -> None:
    told = [asked(1.0, units=16.0, rows=2, budget_s=0.3), asked(2.5, priority=1, body_bytes=160, units=20.0)]
    found = list(requests(replayed(tmp_path, told).loaded.scenario, seed=1))
    assert [(one.at, one.units, one.kind.rows, one.kind.priority) for one in found] == [
        (1.0, 16.0, 2, 0), (2.5, 20.0, 1, 1),
    ]  # fmt: skip
    assert [one.kind.budget_ms for one in found] == pytest.approx([299.0, 499.0])
    assert found[1].units * found[1].kind.bytes_per_unit == 160.0


@pytest.mark.parametrize(("times", "least", "most"), [(0.5, 70, 130), (1.0, 200, 200), (2.5, 430, 570)])
def test_at_another_rate_they_come_so_many_times_as_often_in_order(
    tmp_path: Path, times: float, least: int, most: int
) -> None:
    scenario = replayed(tmp_path, traffic()).loaded.scenario
    found = list(requests(scenario.with_rate(times * scenario.arrivals.rate), seed=1))
    assert least <= len(found) <= most
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert len({one.number for one in found}) == len(found)


def test_each_target_has_its_own_table_and_its_calls_take_as_long_as_they_did(tmp_path: Path) -> None:
    scenario = replayed(tmp_path, traffic()).loaded.scenario
    (edge,), (pool,) = scenario.edges, scenario.pools
    assert edge.edge_ms["encoder"][0] == (1.0, 20.0)
    assert scenario.models["encoder"].pool_ms == ((1.0, 4.0), (512.0, 16.0))
    assert (edge.name, pool.name) == ("kiosk", "main")
    slow = [fault.times for fault in scenario.faults if fault.kind == "slow" and fault.target == "edge/kiosk-1"]
    assert slow and slow == pytest.approx([2.0] * len(slow)), "twice its table"
    assert dict(edge.takes_ms["encoder"])[1.0] == pytest.approx(20.0), "at every size alike"
    assert scenario.models["encoder"].edge_quality == 0.98


def test_a_device_that_was_away_is_cut_off_for_that_time(tmp_path: Path) -> None:
    away = [True] * 8 + [False] * 5 + [True] * 7
    rows = [*links("edge/kiosk", up=away), *links("pool/main", up=[False] * 3 + [True] * 17)]
    faults = replayed(tmp_path, traffic(), rows).loaded.scenario.faults
    cut = {fault.target: (fault.at_s, fault.for_s) for fault in faults if fault.kind == "partition"}
    assert cut == {"edge/kiosk-1": (8.0, 5.0), "pool/main": (0.0, 3.0)}


def test_a_link_is_as_slow_as_it_was_at_that_time() -> None:
    at_s = [0.1 * place for place in range(200)]
    rtts_s = [0.200 if 8.0 <= at <= 12.0 else 0.004 for at in at_s]
    delay = RecordedDelay(at_s, rtts_s, draw=Random(1).random)
    calm, sick, after = ([delay.leaves_at(100, at) - at for _ in range(50)] for at in (2.0, 10.0, 99.0))
    assert max(calm) == pytest.approx(0.002) and min(sick) == pytest.approx(0.100)
    assert max(after) == pytest.approx(0.002), "beyond its end it is as at its end"


def test_more_jitter_leaves_the_least_round_trip_alone() -> None:
    delay = RecordedDelay([0.0, 1.0], [0.010, 0.020], draw=Random(1).random, jitter_times=3.0)
    assert {round(delay.leaves_at(1, 0.5) - 0.5, 6) for _ in range(50)} == {0.005, 0.020}


def test_requests_that_cannot_be_replayed_are_left_out_and_counted(tmp_path: Path) -> None:
    told = [*traffic(), asked(3.0, outcome="cancelled"), asked(4.0, variant="fp32"), asked(5.0, units=None)]
    found = replayed(tmp_path, told)
    assert len(found.loaded.scenario.arrivals.recorded) == 201
    assert found.words == (
        "1 that were cancelled are left out",
        "1 demanded a variant, a pin or attestation, which is not simulated",
    )
    assert (found.policy, found.attainment) == ("value", 1.0)


def test_two_versions_of_a_model_are_two_models_and_a_foreign_servers_answers_are_its_table(tmp_path: Path) -> None:
    foreign = RecordedTarget(
        0.1, "pool/triton", "pool", (RecordedModel("encoder", "2", (RecordedVariant("fp32", "fp32", ()),)),)
    )
    there = RecordedAttempt("pool/triton", "fp32", "only", 0.0, 0.050, "answered", link_s=0.010)
    told = [*traffic(), *(asked(at, version="2", attempts=(there,), served_by="pool/triton") for at in (3.0, 4.0))]
    scenario = replayed(tmp_path, sorted(told, key=lambda one: one.at_s), targets=[*FLEET, foreign]).loaded.scenario
    assert set(scenario.models) == {"encoder@1", "encoder@2"}
    assert scenario.models["encoder@2"].pool_ms == ((1.0, pytest.approx(40.0)),)


@pytest.mark.slow
def test_a_replay_runs_under_every_kind_of_policy_and_answers_as_many_as_came(tmp_path: Path) -> None:
    loaded = replayed(tmp_path, traffic()).loaded
    for policy in ("value", "cheapest", "least-request"):
        tally = simulate(loaded, policy, 1).tally
        assert tally.all.arrivals + tally.warmup.arrivals == 200
        assert tally.all.attainment > 0.9


@pytest.mark.slow
def test_what_if_questions_are_asked_on_the_command_line(tmp_path: Path) -> None:
    path = str(write(tmp_path / "one.tgz", traffic()))
    run = CliRunner().invoke
    plain = run(simulate_cli, ["--replay", path, "--seeds", "1"])
    changed = ["--more-devices", "kiosk=3", "--link", "edge/kiosk=lte_driving", "--rate", "20", "--json"]
    what_if = json.loads(run(simulate_cli, ["--replay", path, "--seeds", "1", *changed]).stdout)
    both = run(simulate_cli, ["office_wifi", "--replay", path])

    assert plain.exit_code == 0 and "recorded under value: 100.0% of" in plain.output
    assert what_if["recorded"]["attainment"] == 1.0
    assert what_if["figures"][0]["policy"] == "value"
    assert both.exit_code == 2 and "--replay brings its own scenario" in both.output


def test_a_file_that_is_no_recording_is_an_error_that_names_it(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.tgz"
    nothing.write_bytes(b"no gzip at all")
    with pytest.raises(ScenarioError, match=r"nothing\.tgz: not a recording"):
        replay(nothing)
    with pytest.raises(ScenarioError, match=r"tidegate-recording version 9, not tidegate-recording 1"):
        replayed(tmp_path, traffic(), header=msgspec.structs.replace(HEADER, version=9))
    with pytest.raises(ScenarioError, match="nothing in it can be replayed"):
        replayed(tmp_path, [asked(1.0, units=None)])
    with pytest.raises(ScenarioError, match=r"requests\.jsonl, line 1: "):
        replayed(tmp_path, links("edge/kiosk"))
    with pytest.raises(ScenarioError, match="there is nobody to replay on"):
        replayed(tmp_path, [asked(1.0, attempts=())], targets=[])


def test_the_clock_of_round_trips_is_that_of_the_run(tmp_path: Path) -> None:
    trips = replayed(tmp_path, [asked(1.0)]).loaded.scenario.links["edge/kiosk"].round_trips
    assert trips is not None
    told = dict(zip((round(at_s - SETTLING_S, 6) for at_s in trips.at_s), trips.rtt_ms, strict=True))
    assert told[1.001] == pytest.approx(4.0), "the acknowledgement's, when the request went out"
    assert told[1.047] == pytest.approx(12.0), "what is left is the answer's way back, twice: when it left"


def test_a_link_that_stood_still_while_an_answer_came_back_was_well_when_the_request_went_out(tmp_path: Path) -> None:
    # given one that was acknowledged in 4 ms and whose answer hung for the last half second of a second and a half
    attempt = RecordedAttempt(
        "edge/kiosk", "int8", "cheapest",
        at_s=0.0, took_s=1.5, end="answered", acked_s=0.004, queue_s=0.958, compute_s=0.040, link_s=0.502, batch=1,
    )  # fmt: skip
    told = [asked(4.0, attempts=(attempt,), elapsed_s=1.5)]
    trips = replayed(tmp_path, told, links("edge/kiosk")).loaded.scenario.links["edge/kiosk"].round_trips
    assert trips is not None
    slow = [at_s - SETTLING_S for at_s, rtt_ms in zip(trips.at_s, trips.rtt_ms, strict=True) if rtt_ms > 100.0]
    assert slow == pytest.approx([5.0])

"""The diagnosis judges the readings of a device: each odd machine is a row."""

from __future__ import annotations

from typing import Any

import pytest

from edge_agent.core import diagnosis
from edge_agent.core.device_conditions import Endurance
from edge_agent.core.diagnosis import DAY_S, DoctorFinding
from tidegate.fleet.conditions import DeviceConditions

NOW = 1_800_000_000.0
MB = 10**6
Row = tuple[DoctorFinding, str, str]

ROWS: list[Row] = [
    (diagnosis.clock(0.0, True, None), "failure", "never set"),
    (diagnosis.clock(NOW, False, None), "warning", "not synchronized"),
    (diagnosis.clock(NOW, True, 86_400.0), "warning", "86400 s ahead of a gateway's"),
    (diagnosis.clock(NOW, True, -61.0), "warning", "61 s behind"),
    (diagnosis.clock(NOW, True, 0.2), "ok", "synchronized"),
    (diagnosis.clock(NOW, None, None), "ok", "cannot be told"),
    (diagnosis.disk("/s", error="Read-only file system", free_bytes=0, fsync_s=0.0), "failure", "Read-only"),
    (diagnosis.disk("/s", error="No space left", full=True, free_bytes=0, fsync_s=0.0), "failure", "No space left"),
    (diagnosis.disk("/s", error="", free_bytes=MB, fsync_s=0.0), "failure", "only 1 MB free"),
    (diagnosis.disk("/s", error="", free_bytes=100 * MB, fsync_s=0.0), "warning", "only 100 MB free"),
    (diagnosis.disk("/s", error="", free_bytes=9000 * MB, fsync_s=0.4), "warning", "safe after 400.0 ms"),
    (diagnosis.disk("/s", error="", free_bytes=9000 * MB, fsync_s=0.004), "ok", "9000 MB free"),
    (diagnosis.memory(100 * MB, [23 * MB]), "failure", "226 MB needed"),
    (diagnosis.memory(300 * MB, [23 * MB]), "warning", "300 MB available"),
    (diagnosis.memory(900 * MB, [23 * MB]), "ok", "for 1 models"),
    (diagnosis.processor("x86_64", {"avx2", "avx512_vnni"}), "ok", "AVX-512 VNNI"),
    (diagnosis.processor("x86_64", {"avx2", "avx_vnni"}), "ok", "AVX-VNNI"),
    (diagnosis.processor("x86_64", {"avx2"}), "warning", "without instructions for int8"),
    (diagnosis.processor("x86_64", {"sse2"}), "warning", "without AVX2"),
    (diagnosis.processor("aarch64", {"asimd", "asimddp"}), "ok", "dot product"),
    (diagnosis.processor("aarch64", {"asimd", "asimddp", "i8mm"}), "ok", "i8mm, dot product"),
    (diagnosis.processor("aarch64", {"asimd"}), "warning", "without instructions for int8"),
    (diagnosis.processor("aarch64", {"asimd", "avx512_vnni"}), "warning", "without instructions for int8"),
    (diagnosis.processor("riscv64", ()), "warning", "not told"),
    (diagnosis.accelerator("cpu", found=(), problem="", untried=(), told=()), "ok", "on the processor"),
    (diagnosis.accelerator("cpu", found=("qnn",), problem="", untried=("qnn",), told=()), "ok", "qnn (never tried by"),
    (diagnosis.accelerator("qnn", found=(), problem="install onnxruntime-qnn", untried=(), told=()), "failure", "qnn"),
    (diagnosis.accelerator("auto", found=(), problem="", untried=(), told=()), "ok", "the processor alone"),
    (diagnosis.accelerator("auto", found=("cuda",), problem="", untried=(), told=()), "ok", "to be tried"),
    (diagnosis.accelerator("auto", found=("cuda",), problem="", untried=(), told=["m on cuda: left out: slow"]),
     "warning", "left out: slow"),
    (diagnosis.accelerator("auto", found=("cuda",), problem="", untried=(), told=["m on cuda: taken: 4 times"]),
     "ok", "taken: 4 times"),
    (diagnosis.certificate("edge/a", None), "ok", "nothing is encrypted"),
    (diagnosis.certificate("edge/a", None, error="key 'tls.cert': gone"), "failure", "tls.cert"),
    (diagnosis.certificate("edge/a", -1.0), "failure", "has ended"),
    (diagnosis.certificate("edge/a", 3 * DAY_S), "warning", "3 more days"),
    (diagnosis.certificate("edge/a", 60 * DAY_S), "ok", "60 more days"),
    (
        diagnosis.gateways({}, dial_out="auto", advertised="a:1", callers=(), unheard=True),
        "ok",
        "the running agent's log",
    ),
    (
        diagnosis.gateways({"g:1": "refused"}, dial_out="auto", advertised="a:1", callers=(), unheard=True),
        "warning",
        "none can be dialled: g:1",
    ),
    (diagnosis.certificate("edge/a", 60 * DAY_S, begins_in_s=-5.0), "ok", "60 more days"),
    (diagnosis.certificate("edge/a", 60 * DAY_S, begins_in_s=5 * 3600.0), "failure", "not valid for another 5.0 h"),
    (diagnosis.port("grpc_port", "h:1", free=True, ours=False), "ok", "free"),
    (diagnosis.port("grpc_port", "h:1", free=False, ours=True), "ok", "running agent"),
    (diagnosis.port("grpc_port", "h:1", free=False, ours=False), "failure", "taken by another"),
    (diagnosis.worker("m:1", state="ready"), "ok", "m:1 is ready"),
    (diagnosis.worker("m:1", state="ready", overdue_s=1.5), "warning", "m:1 hangs: silent for 1.5 s in one call"),
    (diagnosis.worker("m:1", state="ready", slowness=19.0), "warning", "19.0 times longer than at its warm-up"),
    (diagnosis.worker("m:1", state="loading", lost=2, lost_ago_s=3.0, reason="hung for 0.6 s"), "warning",
     "m:1 is loading; 2 lost since the agent's start, the last 3 s ago: hung for 0.6 s"),
    (diagnosis.worker("m:1", state="ready", lost=1, lost_ago_s=600.0, reason="died"), "warning", "10 min ago: died"),
    (diagnosis.worker("m:1", state="ready", lost=1, lost_ago_s=9e4, reason="died"), "ok", "1 lost since"),
    (diagnosis.worker("m:1", state="bad", lost=9, lost_ago_s=1.0, reason="died"), "failure", "does not come up again"),
    (diagnosis.mdns(looks=True, told=None), "ok", "on; what it finds the running agent says"),
    (diagnosis.mdns(looks=True, told={"trouble": "no interface has"}), "warning", "no interface has"),
    (diagnosis.mdns(looks=True, told={"announced": "10.0.0.2 port 9001", "found": {"b": "10.0.0.3:1", "a": "h:2"}}),
     "ok", "announced at 10.0.0.2 port 9001; found: a at h:2, b at 10.0.0.3:1"),
    (diagnosis.mdns(looks=True, told={"announced": "", "found": {}}), "warning", "not announced: it answers no"),
    (diagnosis.mdns(looks=True, told={"found": ["x"]}), "warning", "nobody was found who may be asked"),
    (diagnosis.mdns(looks=False, told={"announced": "10.0.0.2 port 9001", "found": {}}), "ok", "port 9001"),
    (diagnosis.broker("h:1", "refused", []), "failure", "h:1: refused"),
    (diagnosis.broker("h:1", "", [("info", "own"), ("info", "strangers")]), "ok", "own; strangers"),
    (diagnosis.broker("h:1", "", [("info", "own"), ("warning", "as any other")]), "warning", "as any other"),
    (diagnosis.broker("h:1", "", [("error", "not as a"), ("warning", "b")]), "failure", "not as a"),
]  # fmt: skip


@pytest.mark.parametrize(("finding", "verdict", "words"), ROWS, ids=[f"{row[0].check}: {row[2]}" for row in ROWS])
def test_a_finding_has_a_verdict_and_where_something_is_wrong_what_to_do(
    finding: DoctorFinding, verdict: str, words: str
) -> None:
    assert finding.verdict == verdict
    assert words in finding.words
    assert bool(finding.advice) == (verdict != "ok")


NEAR = {"neighbour": "edge/near", "helps": True, "why_not": "", "asked_first_for": ["digits", "minilm"]}
AWAY = {"neighbour": "edge/far", "helps": False, "why_not": "it answers no neighbours", "asked_first_for": []}


@pytest.mark.parametrize(
    ("told", "verdict", "words"),
    [
        (None, "ok", "neighbours: near, far"),
        (
            [NEAR],
            "ok",
            "can be asked now: edge/near (first for digits, minilm); not edge/far: no address of it is known",
        ),
        ([NEAR, AWAY], "ok", "not edge/far: it answers no neighbours"),
        ([AWAY], "warning", "nobody can be asked: edge/far: it answers no neighbours; edge/near: no address"),
    ],
)
def test_which_neighbours_would_be_asked_and_why_not(
    told: list[dict[str, object]] | None, verdict: str, words: str
) -> None:
    finding = diagnosis.asking_for_help(configured=True, reached={}, told=told, neighbours=("near", "far"))
    assert (finding.verdict, words in finding.words) == (verdict, True), finding
    assert ("answer_neighbours" in finding.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("reached", "dial_out", "advertised", "callers", "verdict", "words"),
    [
        ({}, "auto", "10.0.0.7:9001", ["gateway/main (direct)"], "ok", "served now: gateway/main (direct)"),
        ({"g:1": ""}, "auto", "10.0.0.7:9001", [], "ok", "can dial g:1 if they do not"),
        ({"g:1": ""}, "always", "", [], "ok", "no address to dial; this device can dial g:1"),
        ({"g:1": ""}, "never", "", [], "failure", "no address to dial"),
        ({"g:1": ""}, "never", "10.0.0.7:9001", [], "ok", "must be able to"),
        ({"g:1": "Connection refused"}, "auto", "10.0.0.7:9001", [], "warning", "g:1 (Connection refused)"),
        ({"g:1": "Connection refused"}, "auto", "", [], "failure", "none can be dialled"),
        ({}, "auto", "10.0.0.7:9001", [], "warning", "no gateway has told"),
    ],
)
def test_how_a_device_is_reached(
    reached: dict[str, str], dial_out: str, advertised: str, callers: list[str], verdict: str, words: str
) -> None:
    finding = diagnosis.gateways(reached, dial_out=dial_out, advertised=advertised, callers=callers)

    assert finding.verdict == verdict
    assert words in finding.words
    assert bool(finding.advice) == (verdict != "ok")


def test_a_device_without_a_fleet_is_no_fault() -> None:
    finding = diagnosis.gateways({}, dial_out="auto", advertised="", callers=(), fleet=False)

    assert (finding.verdict, finding.advice) == ("ok", "")


def test_a_hot_device_rests_until_it_has_cooled() -> None:
    endurance = Endurance(min_battery=0.2, max_temperature_c=90.0)

    def rests(temperature_c: float | None) -> bool:
        return bool(endurance.why_not(DeviceConditions(temperature_c=temperature_c)))

    assert [rests(one) for one in (60.0, 89.9, 90.0, 88.0, 85.0, 84.9, 88.0, 95.0, None, 88.0)] == [
        False, False, True, True, True, False, False, True, False, False,
    ]  # fmt: skip
    assert "max_temperature_c is 90" in Endurance(0.2, 90.0).why_not(DeviceConditions(temperature_c=93.0))
    assert Endurance(0.2, None).why_not(DeviceConditions(temperature_c=149.0)) == ""
    assert "battery" in Endurance(0.2, 90.0).why_not(DeviceConditions(battery=0.1, charging=False, temperature_c=20.0))


@pytest.mark.parametrize(("mode", "missing", "verdict"), [
    ("auto", (), "ok"), ("require", (), "ok"), ("auto", ("files",), "warning"), ("require", ("files",), "failure"),
    ("off", (), "warning"),
])  # fmt: skip
def test_a_sandbox_that_lacks_a_part_is_said(mode: str, missing: tuple[str, ...], verdict: str) -> None:
    assert diagnosis.sandbox(mode, missing).verdict == verdict


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"changed": {"nice": 3}}, [("settings", "ok", "nice=3")]),
        ({"changed": {"nice": 3}, "trying": True}, [("settings", "ok", "nice=3, on trial")]),
        ({"changed": {"slots": 2}, "at_start": ("slots",)}, [("settings", "warning", "slots for the agent's")]),
        ({"taken_back": ("old", "closed: hot")}, [("settings", "warning", "taken back: closed: hot")]),
        ({"file": "key 'mqtt'"}, [("device_file", "warning", "key 'mqtt'")]),
    ],
)  # fmt: skip
def test_settings_that_were_changed_from_outside_are_said(
    changes: dict[str, Any], found: list[tuple[str, str, str]]
) -> None:
    given: dict[str, Any] = {"changed": {}, "trying": False, "at_start": (), "taken_back": (), "file": ""}
    findings = diagnosis.settings(**(given | changes))
    assert [(one.check, one.verdict) for one in findings] == [(check, verdict) for check, verdict, _ in found]
    assert all(words in one.words for one, (_, _, words) in zip(findings, found, strict=True))
    assert all(one.advice for one in findings if one.verdict != "ok")


@pytest.mark.parametrize(
    ("configured", "reached", "told", "verdict", "words"),
    [
        (False, {}, None, "ok", "off"),
        (True, {"gw:1": ""}, None, "ok", "gw:1 can be dialled"),
        (True, {"gw:1": "refused"}, None, "warning", "no gateway's link port"),
        (True, {}, [{"gateway": "gateway/main", "helps": True, "why_not": ""}], "ok", "gateway/main"),
        (
            True,
            {},
            [{"gateway": "gw:1", "helps": False, "why_not": "it helps no devices"}],
            "warning",
            "helps no devices",
        ),
        (True, {}, [], "warning", "no gateway is known"),
    ],
)
def test_whether_help_can_be_had_and_why_not(
    configured: bool, reached: dict[str, str], told: list[dict[str, object]] | None, verdict: str, words: str
) -> None:
    finding = diagnosis.asking_for_help(configured=configured, reached=reached, told=told)
    assert finding.verdict == verdict
    assert words in finding.words
    assert bool(finding.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        ({}, []),
        ({"waiting": 7, "has_gateway": False}, []),  # as it shall be while it is alone
        ({"waiting": 7, "gateway": "main"}, []),
        ({"waiting": 7}, ["no gateway that is there takes them in"]),
        ({"unavailable": "disk I/O error", "dead": 2}, ["nothing can be kept: disk I/O error", "takes: 2"]),
    ],
)
def test_what_is_kept_is_said_where_it_does_not_get_away(reading: dict[str, Any], said: list[str]) -> None:
    told = {"unavailable": "", "waiting": 0, "dead": 0, "gateway": "", "has_gateway": True, **reading}
    found = diagnosis.store(**told)
    assert [one.verdict for one in found] == ["warning"] * len(said)
    assert all(words in one.words and one.advice for words, one in zip(said, found, strict=True))

"""Each alert fires for what it is named after and for nothing else, and links to its runbook entry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.observe.promql import NO_PROMTOOL, PROMTOOL, ROOT, RULES, Trial, judge, promtool, rules

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=NO_PROMTOOL)
G = 'instance="g:8002",job="tidegate-gateway"'
P = 'instance="p:8012",job="tidegate-pool"'
E = 'instance="e:8022",job="tidegate-edge"'
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}

Series = tuple[str, str]


def missed(per_step: float, met: float, slots: int) -> list[Series]:
    return [
        (f'tidegate_deadline_met_total{{{G},model="minilm"}}', f"0+{met}x{slots}"),
        (f'tidegate_deadline_missed_total{{{G},model="minilm",cause="queue"}}', f"0+{per_step}x{slots}"),
    ]


# Of each alert: how far values are apart, what is ill, and when it must be said.
SICK: dict[str, tuple[str, list[Series], str]] = {
    "TidegateDeadlineBurnFast": ("1m", missed(30, 70, 70), "1h"),
    "TidegateDeadlineBurnSteady": ("5m", missed(8, 92, 80), "6h"),
    "TidegateDeadlineBurnSlow": ("30m", missed(4, 96, 60), "1d"),
    "TidegateDeadlineBurnLong": ("30m", missed(2, 98, 160), "3d"),
    "TidegateProcessDown": ("15s", [(f"up{{{G}}}", "1 1 0x40")], "5m"),
    "TidegateCertificateEnds": (
        "1m",
        [
            (f"tidegate_certificate_not_before_timestamp_seconds{{{E}}}", "-7770000x40"),
            (f"tidegate_certificate_not_after_timestamp_seconds{{{E}}}", "1200000x40"),
        ],
        "15m",
    ),
    "TidegateNoTargetReady": ("15s", [(f'tidegate_targets{{{G},tier="edge",state="ready"}}', "2 0x40")], "2m"),
    "TidegateManyTargetsDown": (
        "15s",
        [
            (f'tidegate_targets{{{G},tier="edge",state="ready"}}', "3x40"),
            (f'tidegate_targets{{{G},tier="edge",state="down"}}', "2x40"),
        ],
        "5m",
    ),
    "TidegateTargetDown": ("15s", [(f'tidegate_target_up{{{G},target="edge/a"}}', "1 0x40")], "5m"),
    "TidegateBreakerOpen": ("15s", [(f'tidegate_breaker_state{{{G},target="edge/a"}}', "0 1 2 1 2 1x40")], "6m"),
    "TidegatePathBreakerOpen": ("15s", [(f'tidegate_path_breaker_state{{{G},target="edge/a"}}', "0 1x40")], "6m"),
    "TidegateEdgeStateStale": ("15s", [(f'tidegate_edge_state_age_seconds{{{G},agent="a"}}', "0+15x40")], "6m"),
    "TidegateCondition": ("15s", [(f'tidegate_condition{{{G},target="edge/a",condition="slow_drift"}}', "1x60")], "8m"),
    "TidegateLinkSick": ("15s", [(f'tidegate_link_state{{{G},target="edge/a"}}', "0x20 1 1 0 1 1 2 1 1x40")], "11m"),
    "TidegateLinkLossy": ("15s", [(f'tidegate_link_loss_ratio{{{G},target="edge/a"}}', "0 0.1x60")], "9m"),
    "TidegateLinkSlow": ("1m", [(f'tidegate_link_rtt_seconds{{{G},target="edge/a"}}', "0.005x240 0.1x60")], "4h20m"),
    "TidegateOverloaded": ("15s", [(f"tidegate_overloaded{{{G}}}", "0 1x40")], "5m"),
    "TidegateShedding": ("1m", [(f'tidegate_shed_total{{{G},reason="shed"}}', "0+30x120")], "20m"),
    "TidegateQueueBuildup": ("15s", [(f'tidegate_queue_wait_seconds{{{G},target="edge/a"}}', "0 0.8x40")], "6m"),
    "TidegatePoolQueueOld": ("15s", [(f'tidegate_pool_queue_oldest_age_seconds{{{P},lane="a"}}', "0 3x40")], "5m"),
    "TidegatePoolTooSmall": (
        "15s",
        [
            (f"tidegate_pool_demand_replicas{{{G}}}", "1x100"),
            (f"tidegate_pool_demand_variance{{{G}}}", "0.25x100"),
            (f"tidegate_pool_demand_backlog{{{G}}}", "0.3x100"),
            (f"up{{{P}}}", "1x100"),
        ],
        "20m",
    ),
    "TidegateInFlightAtLimit": (
        "15s",
        [(f"tidegate_in_flight{{{G}}}", "99x60"), (f"tidegate_in_flight_limit{{{G}}}", "100x60")],
        "9m",
    ),
    "TidegatePredictionsOff": (
        "1m",
        [
            (f'tidegate_prediction_promises_total{{{G},tier="edge",result="kept"}}', "0+10x120"),
            (f'tidegate_prediction_promises_total{{{G},tier="edge",result="broken"}}', "0+5x120"),
        ],
        "95m",
    ),
    "TidegateMemoryGrowing": (
        "5m",
        [
            (f"process_resident_memory_bytes{{{G}}}", "4e8+2e7x120"),
            (f"process_start_time_seconds{{{G}}}", "-100x120"),
        ],
        "9h",
    ),
    "TidegatePoolMemoryShort": ("15s", [(f"tidegate_pool_memory_ratio{{{P}}}", "0.99x80")], "15m"),
    "TidegatePoolWorkersHeldBack": ("15s", [(f"tidegate_pool_workers_held_back{{{P}}}", "1x60")], "9m"),
    "TidegatePoolWorkerDown": ("15s", [(f'tidegate_pool_worker_up{{{P},slot="cpu-0"}}', "1 0x40")], "5m"),
    "TidegatePoolRecycling": ("1m", [(f'tidegate_pool_recycles_total{{{P},reason="drift"}}', "0+1x60")], "30m"),
    "TidegateEdgeModelDown": ("15s", [(f'tidegate_edge_model_up{{{E},model="minilm"}}', "1 0x40")], "5m"),
    "TidegateEdgeCrashLoop": ("1m", [(f'tidegate_edge_worker_restarts_total{{{E},model="minilm"}}', "0+1x60")], "30m"),
    "TidegateEdgeThrottled": ("15s", [(f"tidegate_edge_throttled{{{E}}}", "1x80")], "15m"),
    "TidegateEdgeBatteryLow": (
        "15s",
        [(f"tidegate_edge_battery_ratio{{{E}}}", "0.1x60"), (f"tidegate_edge_on_battery{{{E}}}", "1x60")],
        "9m",
    ),
    "TidegateEdgeBrokerLost": ("15s", [(f"tidegate_edge_mqtt_connected{{{E}}}", "0x60")], "9m"),
    "TidegateFilesShort": (
        "15s",
        [(f"process_open_fds{{{G}}}", "900x60"), (f"process_max_fds{{{G}}}", "1024x60")],
        "9m",
    ),
}

# A night, a value a minute: nothing is ill, though something always happens (late requests, a probe, a foul minute).
HEALTHY: list[Series] = [
    *missed(0.2, 400, 480),
    *((f"up{{{one}}}", "1x480") for one in (G, P, E)),
    (f'tidegate_targets{{{G},tier="edge",state="ready"}}', "9x480"),
    (f'tidegate_targets{{{G},tier="edge",state="down"}}', "1x480"),
    (f'tidegate_target_up{{{G},target="edge/a"}}', "1x240 0 1x240"),
    (f'tidegate_breaker_state{{{G},target="edge/a"}}', "0x240 1 2 0x240"),
    (f'tidegate_path_breaker_state{{{G},target="edge/a"}}', "0x240 1 2 0x240"),
    (f'tidegate_edge_state_age_seconds{{{G},agent="a"}}', "1x480"),
    (f'tidegate_link_state{{{G},target="edge/a"}}', "0x240 1 4 0x240"),
    (f'tidegate_link_loss_ratio{{{G},target="edge/a"}}', "0.01x480"),
    (f'tidegate_link_rtt_seconds{{{G},target="edge/a"}}', "0.005x240 0.1 0.005x240"),
    (f"tidegate_overloaded{{{G}}}", "0x240 1 0x240"),
    (f'tidegate_shed_total{{{G},reason="shed"}}', "5x480"),
    (f'tidegate_queue_wait_seconds{{{G},target="edge/a"}}', "0x240 2 0x240"),
    (f'tidegate_pool_queue_oldest_age_seconds{{{P},lane="a"}}', "0.1x480"),
    (f"tidegate_pool_demand_replicas{{{G}}}", "0.5x240 1.5 0.5x240"),
    (f"tidegate_pool_demand_variance{{{G}}}", "0.04x480"),
    (f"tidegate_pool_demand_backlog{{{G}}}", "0.1x480"),
    (f"tidegate_in_flight{{{G}}}", "10x480"),
    (f"tidegate_in_flight_limit{{{G}}}", "100x480"),
    (f'tidegate_prediction_promises_total{{{G},tier="edge",result="kept"}}', "0+380x480"),
    (f'tidegate_prediction_promises_total{{{G},tier="edge",result="broken"}}', "0+20x480"),
    (f"process_resident_memory_bytes{{{G}}}", "6e8x480"),
    (f"process_start_time_seconds{{{G}}}", "-90000x480"),
    (f"process_open_fds{{{G}}}", "100x480"),
    (f"process_max_fds{{{G}}}", "1024x480"),
    (f"tidegate_pool_memory_ratio{{{P}}}", "0.6x480"),
    (f"tidegate_pool_workers_held_back{{{P}}}", "0x480"),
    (f'tidegate_pool_worker_up{{{P},slot="cpu-0"}}', "1x240 1x240"),
    (f'tidegate_pool_recycles_total{{{P},reason="drift"}}', "0x240 1x240"),
    (f'tidegate_edge_model_up{{{E},model="minilm"}}', "1x480"),
    (f'tidegate_edge_worker_restarts_total{{{E},model="minilm"}}', "0x240 1x240"),
    (f"tidegate_edge_throttled{{{E}}}", "0x480"),
    (f"tidegate_edge_battery_ratio{{{E}}}", "0.1x480"),
    (f"tidegate_edge_on_battery{{{E}}}", "0x480"),
    (f"tidegate_edge_mqtt_connected{{{E}}}", "1x480"),
]


def firing(alert: str) -> str:
    return f'ALERTS{{alertname="{alert}",alertstate="firing"}}'


def test_every_alert_has_its_sickness_here() -> None:
    assert SICK.keys() == ALERTS.keys()


@needs_promtool
@pytest.mark.slow
def test_the_rules_are_rules_and_stay_silent_on_an_ordinary_night(tmp_path: Path) -> None:
    promtool("check", "rules", str(RULES))
    moments = ("1h", "3h59m", "4h1m", "4h2m", "4h5m", "5h", "8h")
    judge(tmp_path, "1m", [Trial(HEALTHY, [('ALERTS{alertstate="firing"}', at, None) for at in moments])])


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize("step", sorted({step for step, *_ in SICK.values()}))
def test_an_alert_fires_for_what_it_is_named_after(step: str, tmp_path: Path) -> None:
    trials = [
        Trial(series, [(firing(alert), at, 1.0), (firing(alert), "0s", None)])
        for alert, (its_step, series, at) in SICK.items()
        if its_step == step
    ]
    judge(tmp_path, step, trials)


def test_every_alert_has_a_section_of_the_runbook_and_leads_to_it() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.+?)(?=\n#|\Z)", text, re.MULTILINE | re.DOTALL))
    assert sections.keys() == ALERTS.keys()
    for name, rule in ALERTS.items():
        assert len(sections[name].split()) >= 8, name
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]

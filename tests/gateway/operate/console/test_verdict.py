"""The console's verdict: it follows from the state that is shown below it, and each finding names its cause."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.estimate.sliding_stats import WindowSummary
from gateway.core.fleet.link_health import Health
from gateway.operate.console.verdict import (
    MOST_FINDINGS,
    ConsoleFinding,
    ConsoleVerdict,
    HealthFinding,
    console_verdict,
)

NOTHING = WindowSummary(
    in_time=0, late=0, failed=0, in_time_per_s=0.0, per_s=0.0, rated=0, late_share=0.0, quantiles_s=()
)


def recent(asked: int, late: int) -> WindowSummary:
    """So many in the rates' window, and so many of them late."""
    return WindowSummary(
        in_time=asked - late,
        late=late,
        failed=0,
        in_time_per_s=(asked - late) / 15,
        per_s=asked / 15,
        rated=asked,
        late_share=late / asked,
        quantiles_s=(0.01, 0.02, 0.03),
    )


def judged(**given: Any) -> ConsoleVerdict:
    usual: dict[str, Any] = {
        "targets": 4, "unhealthy": (), "total": recent(100, 0), "by_class": (), "unoffered": (), "overloaded": "",
        "panic": False, "refused_devices": (),
    }  # fmt: skip
    return console_verdict(**(usual | given))


def unhealthy(number: int, health: Health = "slow") -> HealthFinding:
    return HealthFinding(f"edge/e{number}", health, f"why {number}")


def test_nothing_against_it_is_well_also_when_nobody_asks() -> None:
    assert judged()[:2] == ("well", "All is well")
    assert judged(total=NOTHING)[:2] == ("well", "All is well: nobody is asking just now")
    assert judged(total=NOTHING, in_flight=1)[:2] == ("well", "All is well")


def test_a_sick_link_is_named_with_its_reason() -> None:
    said = judged(unhealthy=[unhealthy(2)])
    assert (said.state, said.sentence) == ("attention", "edge/e2 is on a slow link: why 2")
    assert said.findings[0].about == "edge/e2"


def test_many_ill_targets_are_counted_and_the_first_are_named() -> None:
    said = judged(targets=1000, unhealthy=[unhealthy(number) for number in range(40)])
    assert said.sentence == "40 of 1000 targets are on a slow link: edge/e0, edge/e1, edge/e2 and 37 more"


@pytest.mark.parametrize(
    ("given", "state", "words"),
    [
        ({"targets": 0}, "trouble", "No target is known"),
        ({"targets": 2, "unhealthy": [unhealthy(1, "down"), unhealthy(2, "down")]}, "trouble", "No target can be used"),
        ({"unhealthy": [unhealthy(1, "down")]}, "attention", "edge/e1 is down: why 1"),
        ({"unhealthy": [unhealthy(number, "down") for number in range(3)]}, "trouble", "3 of 4 targets are down"),
        ({"unoffered": ["minilm"]}, "trouble", "Nobody offers minilm just now"),
        ({"overloaded": "queues"}, "trouble", "Overloaded, the least important are shed: queues"),
        ({"panic": True}, "trouble", "Most targets fail"),
        ({"refused_devices": ["attic"]}, "attention", "attic is not dialled"),
        ({"others": [ConsoleFinding("attention", "edge/a has slow_drift")]}, "attention", "edge/a has slow_drift"),
        ({"total": recent(100, 5)}, "attention", "5.0% of requests are late or fail"),
        ({"total": recent(100, 50)}, "trouble", "50% of requests are late or fail"),
        ({"total": recent(9, 9)}, "well", "All is well"),
        ({"total": recent(20, 2)}, "well", "All is well"),
    ],
)
def test_what_speaks_against_it_and_how_much(given: dict[str, Any], state: str, words: str) -> None:
    said = judged(**given)
    assert said.state == state
    assert said.sentence.startswith(words)


def test_the_class_that_is_worst_off_is_named() -> None:
    said = judged(total=recent(200, 60), by_class=[("digits", recent(100, 0)), ("minilm", recent(100, 60))])
    assert said.sentence == "30% of requests are late or fail, most of them of minilm (60%)"


def test_trouble_comes_first_and_there_is_an_end_to_findings() -> None:
    many = [ConsoleFinding("attention", f"finding {number}") for number in range(50)]
    said = judged(others=many, unoffered=["minilm"])
    assert said.findings[0].level == "trouble"
    assert len(said.findings) == MOST_FINDINGS
    assert said.sentence == f"Nobody offers minilm just now, and {MOST_FINDINGS - 1} more"

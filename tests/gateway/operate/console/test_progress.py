"""Rollouts on the console: the progress and direction of each, and findings for those that need an operator."""

from __future__ import annotations

from gateway.core.versions.canary import CanaryRollout
from gateway.operate.console.progress import SHOWN, rollout_findings, rollout_rows
from tests.gateway.core.versions.test_canary import FORTY, begun, say


def test_a_rollout_under_way_says_its_wave_and_how_many_have_committed() -> None:
    waves = begun()
    say(waves, "committed", *FORTY[:2])

    (told,) = rollout_rows([waves])

    assert (told["phase"], told["wave"], told["waves"], told["devices"]) == ("running", 2, 3, 40)
    assert told["done_share"] == 0.05
    assert told["steps"] == {"waiting": 30, "asked": 8, "succeeded": 2}
    assert rollout_findings([waves]) == []


def test_a_rollout_that_returns_is_a_finding_with_its_reason_and_counts_returned_devices() -> None:
    waves = begun()
    say(waves, "committed", *FORTY[:2])
    say(waves, "failed", *FORTY[2:5], reason="golden cases differ")

    (told,), (finding,) = rollout_rows([waves]), rollout_findings([waves])

    assert told["phase"] == "returning"
    assert told["done_share"] == 0.0
    assert finding.words.startswith("The rollout of digits 2 is called back: ")
    assert waves.state.reason in finding.words


def test_what_is_under_way_is_shown_before_what_is_over_and_the_list_has_an_end() -> None:
    going, over = begun(), []
    for _ in range(2 * SHOWN):
        one: CanaryRollout = begun(waves=(1.0,))
        say(one, "committed", *FORTY)
        over.append(one)

    told = rollout_rows([going, *over])

    assert [one["phase"] for one in told] == ["running", *["succeeded"] * (SHOWN - 1)]

"""A rollout's waves: who is asked when, what makes it stop, and that it comes back by itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.versions.canary import (
    CanaryRollout,
    CanaryState,
    DeviceStep,
    DocumentRevisions,
    RolloutPhase,
    RolloutSpec,
)
from tidegate.fleet.reported import DocumentRefusal, ModelReport, Reported, RolloutState

FORTY = tuple(f"edge-{number:02}" for number in range(1, 41))


def spec(devices: tuple[str, ...] = FORTY, **changes: Any) -> RolloutSpec:
    revisions = {device: DocumentRevisions(7, 8) for device in devices}
    given = {"waves": (0.05, 0.25, 1.0), "success_ratio": 0.95, "max_errors": 2, "deadline_s": 100.0, **changes}
    return RolloutSpec("r-1", "digits", "2", devices, revisions, **given)


def report(device: str, state: str, *, revision: int = 7, reason: str = "", running: str = "1") -> Reported:
    scope = f"device/{device}"
    model = ModelReport(
        "digits", RolloutState(state), "2", reason=reason, scope=scope, revision=revision, running=running
    )
    return Reported(device, 1, 1, 0, accepted={scope: revision}, models=(model,))


def say(waves: CanaryRollout, state: str, *devices: str, **rest: Any) -> None:
    waves.hear({device: report(device, state, **rest) for device in devices})
    waves.advance(0.0)


def asked(waves: CanaryRollout) -> tuple[str, ...]:
    return tuple(waves.asks)


def begun(**changes: Any) -> CanaryRollout:
    waves = CanaryRollout(spec(**changes))
    waves.advance(0.0)
    return waves


def test_the_canaries_are_asked_first_and_the_next_wave_after_they_have_committed() -> None:
    waves = begun()
    assert asked(waves) == FORTY[:2]

    say(waves, "active", *FORTY[:2])
    assert asked(waves) == FORTY[:2]
    say(waves, "committed", *FORTY[:2])
    assert asked(waves) == FORTY[:10]
    say(waves, "committed", *FORTY[2:10])
    assert asked(waves) == FORTY
    say(waves, "committed", *FORTY[10:])

    assert waves.state.phase is RolloutPhase.SUCCEEDED and waves.state.reason == "40 of 40 devices have committed"


@pytest.mark.parametrize(
    ("shares", "devices", "sizes"),
    [
        ((0.05, 0.25, 1.0), 40, (2, 10, 40)),
        ((0.05, 0.25, 1.0), 3, (1, 3)),
        ((0.01, 1.0), 1, (1,)),
        ((0.1, 0.2, 0.3, 1.0), 10, (1, 2, 3, 10)),
        ((1.0,), 7, (7,)),
    ],
)
def test_each_wave_asks_at_least_one_more(shares: tuple[float, ...], devices: int, sizes: tuple[int, ...]) -> None:
    assert spec(FORTY[:devices], waves=shares).sizes == sizes


def test_silence_is_no_success_and_past_the_deadline_an_error() -> None:
    waves = begun(max_errors=2)

    waves.advance(99.0)
    assert waves.state.phase is RolloutPhase.RUNNING and waves.count(DeviceStep.ASKED) == 2
    waves.advance(2.0)

    assert waves.count(DeviceStep.OVERDUE) == 2 and waves.state.phase is RolloutPhase.PAUSED
    assert "0 of 2 devices have committed" in waves.state.reason
    assert "not said a word" in waves.state.parts["edge-01"].reason


def test_a_device_that_is_late_and_commits_after_all_is_a_success() -> None:
    waves = begun()
    waves.advance(101.0)
    say(waves, "downloading", "edge-01")
    assert waves.state.parts["edge-01"].step is DeviceStep.OVERDUE

    say(waves, "committed", "edge-01", "edge-02")
    waves.resume()
    waves.advance(0.0)

    assert asked(waves) == FORTY[:10]


def test_too_many_errors_call_back_everybody_who_was_asked_with_the_reason() -> None:
    waves = begun(max_errors=0)
    say(waves, "committed", "edge-01", running="2")
    say(waves, "rolled_back", "edge-02", reason="probe_accuracy: top-1 0.2")

    assert waves.state.phase is RolloutPhase.RETURNING
    assert waves.asks == {"edge-01": True, "edge-02": True}
    assert "edge-02: probe_accuracy" in waves.state.reason
    say(waves, "committed", "edge-01", "edge-02", revision=8)
    assert waves.state.phase is RolloutPhase.RETURNED and waves.count(DeviceStep.BACK) == 2
    assert "probe_accuracy" in waves.state.reason


def test_an_error_that_comes_after_the_commit_counts() -> None:
    waves = begun(max_errors=0)
    say(waves, "committed", *FORTY[:2])
    say(waves, "rolled_back", "edge-01", reason="crash_loop")

    assert waves.state.phase is RolloutPhase.RETURNING
    assert set(waves.asks.values()) == {True} and set(waves.asks) == set(FORTY[:10])


def test_a_document_that_a_device_refuses_is_an_error_with_its_reason() -> None:
    waves = begun(max_errors=5)
    refused = Reported("edge-01", 1, 1, 0, refused=(DocumentRefusal("device/edge-01", "signature", 7),))
    waves.hear({"edge-01": refused})

    part = waves.state.parts["edge-01"]
    assert (part.step, part.reason) == (DeviceStep.FAILED, "refused_signature")


def test_a_strangers_document_under_the_same_number_fails_no_device_that_has_the_right_one() -> None:
    waves = begun(max_errors=0)
    foreign = (DocumentRefusal("device/edge-01", "scope: it is for device/edge-02", 7),)
    waves.hear({"edge-01": msgspec.structs.replace(report("edge-01", "committed"), refused=foreign)})
    waves.advance(0.0)

    assert waves.state.parts["edge-01"].step is DeviceStep.SUCCEEDED and waves.state.phase is RolloutPhase.RUNNING


def test_reports_of_other_documents_say_nothing_about_this_one() -> None:
    waves = begun()
    say(waves, "committed", *FORTY[:2], revision=6)

    assert waves.count(DeviceStep.ASKED) == 2


def test_the_next_rollouts_document_fails_no_device_of_one_that_has_succeeded() -> None:
    waves = begun(waves=(1.0,))
    say(waves, "committed", *FORTY)
    notes = list(waves.state.notes)

    say(waves, "committed", "edge-01", revision=9)  # of settings, with the same model in it

    assert (waves.state.phase, waves.count(DeviceStep.SUCCEEDED)) == (RolloutPhase.SUCCEEDED, 40)
    assert waves.state.parts["edge-01"].reason == "" and waves.state.notes == notes


def test_another_document_while_the_rollout_runs_is_an_error() -> None:
    waves = begun(max_errors=5)
    say(waves, "committed", "edge-01", revision=9)

    part = waves.state.parts["edge-01"]
    assert (part.step, part.reason.partition(":")[0]) == (DeviceStep.FAILED, "superseded")


def test_a_wave_bakes_before_the_next_and_what_fails_meanwhile_counts() -> None:
    waves = begun(bake_s=30.0, max_errors=0)
    say(waves, "committed", *FORTY[:2])
    waves.advance(29.0)
    assert asked(waves) == FORTY[:2]
    say(waves, "rolled_back", "edge-02", reason="err_rate")

    assert waves.state.phase is RolloutPhase.RETURNING


def test_a_device_that_cannot_be_heard_does_not_hold_up_the_return_for_ever() -> None:
    waves = begun()
    waves.abort("operator")
    say(waves, "committed", "edge-01", revision=8)
    assert waves.state.phase is RolloutPhase.RETURNING
    waves.advance(101.0)

    assert waves.state.phase is RolloutPhase.RETURNED
    assert waves.state.notes[-1].words == "1 devices are back, 1 have not said so"
    say(waves, "committed", "edge-02", revision=8)
    assert waves.count(DeviceStep.BACK) == 2


def test_nothing_is_asked_while_paused_and_a_stall_that_is_taken_as_it_is_goes_on() -> None:
    waves = begun(devices=FORTY[:3], waves=(0.3, 1.0), max_errors=3, success_ratio=1.0)
    waves.pause("operator")
    say(waves, "committed", "edge-01")
    assert asked(waves) == ("edge-01",)
    waves.resume()
    waves.advance(0.0)
    say(waves, "failed", "edge-02", reason="disk_full")
    say(waves, "committed", "edge-03")
    assert waves.state.phase is RolloutPhase.PAUSED
    waves.resume()

    assert waves.state.phase is RolloutPhase.SUCCEEDED and "2 of 3" in waves.state.reason


@pytest.mark.parametrize(
    "wrong",
    [{"waves": (0.5,)}, {"waves": (0.5, 0.2, 1.0)}, {"waves": (0.5, 0.5, 1.0)}, {"devices": ("a", "a")}],
)
def test_an_order_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        spec(**wrong)


def test_the_way_back_has_the_greater_revision() -> None:
    with pytest.raises(ValueError):
        DocumentRevisions(7, 7)


DEVICES = FORTY[:6]
happening = st.one_of(
    st.tuples(
        st.just("say"), st.sampled_from(DEVICES), st.sampled_from([str(one) for one in RolloutState]),
        st.sampled_from([6, 7, 8]),
    ),
    st.tuples(st.just("advance"), st.floats(0, 80)),
    st.tuples(st.sampled_from(["pause", "resume", "abort", "restart"])),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(happening, max_size=40))
def test_whatever_happens_no_rule_is_broken(events: list[tuple[Any, ...]]) -> None:
    waves = CanaryRollout(spec(DEVICES, waves=(0.2, 0.5, 1.0), max_errors=1, success_ratio=0.8))
    called_back: set[str] = set()
    for event in events:
        match event:
            case ("say", device, state, revision):
                waves.hear({device: report(device, state, revision=revision)})
            case ("advance", seconds):
                waves.advance(seconds)
            case ("pause",):
                waves.pause("operator")
            case ("resume",):
                waves.resume()
            case ("abort",):
                waves.abort("operator")
            case ("restart",):
                raw = msgspec.json.encode(waves.state)
                waves = CanaryRollout(waves.spec, msgspec.json.decode(raw, type=CanaryState))
        asks = waves.asks
        # Who was called back is never asked forward again, and after that nobody is asked for the first time.
        assert all(asks[device] for device in called_back)
        if called_back:
            assert set(asks) == called_back
        called_back |= {device for device, back in asks.items() if back}
        # No more are asked than the waves so far allow, and a next one only after enough of the last have committed.
        assert len(asks) <= (0, *waves.spec.sizes)[waves.state.wave + 1]
        if waves.state.phase in (RolloutPhase.RETURNING, RolloutPhase.RETURNED):
            assert all(asks.values())

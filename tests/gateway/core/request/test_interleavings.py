"""Requests' lives in random order, by seeds and by Hypothesis. The long run: `python -m tests.bench.interleavings`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.admission.concurrency import AdaptiveLimit
from gateway.core.admission.placement_guard import TenantCharge
from gateway.core.health.breaker import blame
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.machine import Action, Cancel, RequestMachine
from gateway.core.request.token_budget import TokenBudget
from tests.support.interleave.draws import profile_of
from tests.support.interleave.script import HAPPENINGS, Lived, numbers_of, only, play, script_of, shrunk, spans
from tests.support.interleave.world import World
from tests.support.interpreted import interpreted_only
from tidegate.outcome import ServeError

FRACTION = st.floats(0.0, 1.0, exclude_max=True)


@pytest.fixture(scope="module")
def lived() -> Lived:
    """Some three thousand lives, of which none broke a rule."""
    lived = Lived()
    for seed in range(60):
        broken = play(script_of(seed), lived)
        assert broken is None, f"python -m tests.bench.interleavings --replay {seed}"
    return lived


@pytest.mark.slow
def test_random_lives_break_no_rule_and_go_through_everything(lived: Lived) -> None:
    assert lived.lives > 2000
    assert len(lived.orders) > 300, "a life's own events, whatever happened to the others meanwhile"
    went_through = [name for name, times in lived.counts.items() if times >= 3]
    assert {"hedges", "fallbacks", "placed again", "escalations", "provisional", "degraded"} <= set(went_through)
    assert {"moves", "cancelled attempts", "probes", "old news", "begun", "shown unsure"} <= set(went_through)
    assert {
        "end: answered",
        "end: left",
        "end: at the door",
        "overloaded",
        "end: deadline_exceeded",
        "end: overloaded",
    } <= set(went_through)
    assert {"by cheapest", "by faster", "by surer", "by only", "by hedge", "by fallback"} <= set(went_through)


@pytest.mark.slow
def test_the_same_seed_is_the_same_run() -> None:
    first, second = Lived(), Lived()
    assert play(script_of(7), first) is play(script_of(7), second) is None
    assert first == second
    assert script_of(7) == script_of(7) != script_of(8)


def _forgets_the_ledger(self: AttemptTelemetry, error: ServeError, now: float, draw: float) -> None:
    self._link.ended(self._key, now, heard=False)
    self._end(blame(error), now, draw)


def _takes_the_hopeless_for_any_other(self: AttemptTelemetry, now: float, *, hopeless: bool = False) -> None:
    _cancelled(self, now)


_cancelled = AttemptTelemetry.cancelled


def _orphans_one(self: RequestMachine) -> list[Action]:
    self.done = True
    return [Cancel(attempt) for attempt in sorted(self._pending)[1:]]


@interpreted_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "defect", "words"),
    [
        (AttemptTelemetry, "failed", _forgets_the_ledger, "under way"),
        (AttemptTelemetry, "cancelled", _takes_the_hopeless_for_any_other, "were settled"),
        (RequestMachine, "_finish", _orphans_one, "orphaned"),
        (TokenBudget, "spend", lambda self, share: True, "should have"),
        (TenantCharge, "failed", lambda self, now: None, "should have spent"),
        (AdaptiveLimit, "release", lambda self: None, "should have"),
    ],
)
def test_a_defect_is_found_and_shrunk_to_the_steps_that_show_it(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, defect: Callable[..., object], words: str
) -> None:
    monkeypatch.setattr(owner, name, defect)
    seed, broken = next((seed, broken) for seed in range(50) if (broken := play(script_of(seed))))
    assert words in broken.words

    steps = shrunk(script_of(seed), broken)

    assert len(steps) <= 12
    again = play(only(script_of(seed), numbers_of(spans(steps))))
    assert again is not None
    assert again.where == broken.where


def test_step_numbers_read_as_they_are_written() -> None:
    assert spans([0, 17, 18, 19, 30]) == "0,17-19,30"
    assert numbers_of("0,17-19,30") == [0, 17, 18, 19, 30]
    assert spans([]) == "" and numbers_of("") == []


class Interleavings(RuleBasedStateMachine):
    """The same world; here Hypothesis chooses what happens, and shrinks what breaks."""

    world: World

    @initialize(x=FRACTION, y=FRACTION, z=FRACTION)
    def a_world(self, x: float, y: float, z: float) -> None:
        self.world = World(profile_of(x, y, z))

    @rule(happening=st.sampled_from(list(HAPPENINGS)), x=FRACTION, y=FRACTION, z=FRACTION)
    def something_happens(self, happening: Callable[..., None], x: float, y: float, z: float) -> None:
        happening(self.world, x, y, z)

    @rule(x=FRACTION, y=FRACTION, z=FRACTION)
    def a_request_arrives(self, x: float, y: float, z: float) -> None:
        self.world.request_arrives(x, y, z)

    @invariant()
    def the_rules_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestInterleavings = pytest.mark.slow(Interleavings.TestCase)
TestInterleavings.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

"""Placement when the predictor fails: the request goes on in the same call, and the defect is told once."""

from __future__ import annotations

from collections.abc import Collection
from math import nan

import pytest

from gateway.core.estimate.service_cost import VariantCost
from gateway.core.fleet.fleet import Fleet
from gateway.core.placement.ask import Ask
from gateway.core.placement.fallback import HEALED, FallbackPlacer, PredictionFailed
from gateway.core.placement.placer import Decision, Placer
from gateway.core.placement.utility import UtilityPlacer
from tests.support.gateway.fleets import NOW, ask, fleet_of, variant
from tests.support.interpreted import interpreted_only
from tidegate.outcome import NothingAlive


class Predictor:
    """A placer that can be made to fail."""

    def __init__(self, fleet: Fleet) -> None:
        self._placer = Placer(fleet)
        self.error: Exception | None = None
        self.finish_s: float | None = None

    def decide(self, ask: Ask, now: float, exclude: Collection[str] = ()) -> Decision:
        if self.error is not None:
            raise self.error
        decision = self._placer.decide(ask, now, exclude)
        if self.finish_s is None or decision.chosen is None:
            return decision
        return decision._replace(chosen=decision.chosen._replace(finish_s=self.finish_s))


class Scene:
    def __init__(self) -> None:
        self.fleet = fleet_of(
            edge_a=variant(compute_s=0.03, max_tokens=64), edge_b=variant(compute_s=0.02), pool_main=variant(name="big")
        )
        self.predictor = Predictor(self.fleet)
        self.heard: list[Exception | None] = []
        self.subject = FallbackPlacer(self.predictor, self.fleet, on_change=self.heard.append)

    def decide(self, exclude: Collection[str] = (), **more: object) -> Decision:
        return self.subject.decide(ask(**more), NOW, exclude)  # type: ignore[arg-type]

    def load(self, target_id: str, attempts: int) -> None:
        target = self.fleet.targets[target_id]
        for key in range(attempts):
            target.queue_estimate.launch((hash(target_id) % 1000) * 1000 + key, 0.01, NOW)


def chosen(decision: Decision) -> tuple[str, str]:
    assert decision.chosen is not None
    return decision.chosen.target.id, decision.reason


def test_a_sound_decision_passes_as_it_is() -> None:
    scene = Scene()
    assert chosen(scene.decide()) == chosen(Placer(scene.fleet).decide(ask(), NOW))
    assert repr(scene.subject).startswith("<FallbackPlacer sound")
    assert scene.heard == []


@pytest.mark.parametrize("broken", ["raises", "nan"])
def test_when_the_predictor_fails_the_same_call_is_placed_by_least_request(broken: str) -> None:
    scene = Scene()
    scene.predictor.error = ZeroDivisionError("boom") if broken == "raises" else None
    scene.predictor.finish_s = nan
    scene.load("pool/main", 2)
    decision = scene.decide()
    assert chosen(decision) == ("edge/b", "least-request")  # 20 ms against 30 ms, and against three times 10 ms
    assert decision.best_other() is None
    assert "failing" in repr(scene.subject)


def test_load_is_weighed_by_speed() -> None:
    scene = Scene()
    scene.predictor.error = ZeroDivisionError("boom")
    assert chosen(scene.decide())[0] == "pool/main"
    scene.load("pool/main", 3)
    scene.load("edge/b", 1)
    assert chosen(scene.decide())[0] == "edge/a"


def test_what_does_not_fit_is_pinned_elsewhere_or_was_tried_is_not_asked() -> None:
    scene = Scene()
    scene.predictor.error = ZeroDivisionError("boom")
    assert chosen(scene.decide(exclude={"pool/main"}))[0] == "edge/b"
    assert chosen(scene.decide(pin="edge"))[0] == "edge/b"
    assert chosen(scene.decide(longest_row=100, exclude={"pool/main"}))[0] == "edge/b"
    assert chosen(scene.decide(variant="big"))[0] == "pool/main"
    nobody = scene.decide(exclude={"edge/a", "edge/b", "pool/main"})
    assert isinstance(nobody.refusal, NothingAlive)


def test_an_ejected_target_is_not_asked() -> None:
    scene = Scene()
    scene.predictor.error = ZeroDivisionError("boom")
    pool = scene.fleet.targets["pool/main"]
    pool.path_breaker.trip("silent", NOW, 0.5)
    assert pool.ejected
    assert chosen(scene.decide())[0] == "edge/b"


def test_work_beyond_the_table_takes_its_last_point_and_an_unmeasured_target_a_usual_time() -> None:
    fleet = fleet_of(edge_a=variant(compute_s=None), edge_b=variant(compute_s=0.04))
    predictor = Predictor(fleet)
    predictor.error = ZeroDivisionError("boom")
    subject = FallbackPlacer(predictor, fleet, on_change=lambda _: None)
    assert chosen(subject.decide(ask(units=5000.0), NOW))[0] == "edge/b"
    fleet.targets["edge/b"].queue_estimate.launch(1, 0.01, NOW)
    assert chosen(subject.decide(ask(units=5000.0), NOW))[0] == "edge/a"


def test_it_is_told_once_that_placement_fails_and_once_that_it_has_healed() -> None:
    scene = Scene()
    scene.predictor.error = error = ZeroDivisionError("boom")
    for _ in range(50):
        scene.decide()
    assert scene.heard == [error]
    scene.predictor.error = None
    for _ in range(HEALED - 1):
        scene.decide()
    assert scene.heard == [error]
    scene.decide()
    assert scene.heard == [error, None]


def test_a_number_that_is_none_is_told_with_its_target() -> None:
    scene = Scene()
    scene.predictor.finish_s = nan
    scene.decide()
    (error,) = scene.heard
    assert isinstance(error, PredictionFailed)
    assert "nan" in str(error)


@interpreted_only
@pytest.mark.parametrize("policy", [Placer, UtilityPlacer])
def test_estimators_that_say_nan_stop_neither_policy(policy: type[Placer], monkeypatch: pytest.MonkeyPatch) -> None:
    broken: set[VariantCost] = set()
    predict_s, call_s = VariantCost.predict_s, VariantCost.call_s
    monkeypatch.setattr(VariantCost, "predict_s", lambda cost, units: nan if cost in broken else predict_s(cost, units))
    monkeypatch.setattr(VariantCost, "call_s", lambda cost: nan if cost in broken else call_s(cost))
    fleet = fleet_of(edge_a=variant(compute_s=0.02), edge_b=variant(compute_s=0.02))
    heard: list[Exception | None] = []
    subject = FallbackPlacer(policy(fleet), fleet, on_change=heard.append)
    for offered in fleet.offered("minilm", "1"):
        broken.add(offered.cost)
        subject.decide(ask(), NOW)
    assert chosen(subject.decide(ask(), NOW))[1] == "least-request"
    assert len(heard) == 1

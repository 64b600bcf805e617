"""The quick form of placement decides as the plain one (`plain_placement.py`), over random fleets."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.estimate.queue_externality import QueuePosition
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.fleet.pricing import Tier
from gateway.core.fleet.queue_estimate import QueueEstimate
from gateway.core.fleet.target import TargetSpec
from gateway.core.placement.ask import Ask
from gateway.core.placement.placer import estimate
from gateway.core.placement.utility import UtilityPlacer, queue_position
from tests.support.gateway.fleets import NOW, ask
from tests.support.gateway.plain_placement import Plain, PlainLedger, plain_candidates
from tidegate.fleet.conditions import DeviceConditions
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.types import LoadReport

seeds = st.integers(0, 2**32)
CHANCES_CUT = 1e-4  # a chance leaves out what is four spreads off


def fleet_in_use(draw: Random) -> Fleet:
    """One to thirty-six targets, each in some state that a target in service may be in."""
    fleet = Fleet(lambda _model, _version: "tokens", draw=draw.random)
    for number in range(draw.choice((1, 2, 3, 5, 8, 32, 36))):
        tier: Tier = "pool" if draw.random() < 0.25 else "edge"
        id = f"{tier}/{number}"
        fleet.add(TargetSpec(id, tier, "simulated", foreign=draw.random() < 0.1), NOW - 100.0)
        slow = 0.2 + 3.0 * draw.random()
        cost = tuple((units, slow * (0.004 + 0.0003 * units)) for units in (8.0, 32.0, 128.0))
        variant = VariantOffer(
            "int8", "int8", cost if draw.random() < 0.9 else (), None, None, 1.0 - 0.2 * draw.random()
        )
        fleet.fold(LinkUp(id, id, 1, (ModelOffer("minilm", "1", (variant,)),)), NOW - 100.0)
        in_use(fleet, id, draw)
    for target in fleet.targets.values():
        target.takes(NOW)  # who is mute is found out by whoever asks first
    return fleet


def in_use(fleet: Fleet, id: str, draw: Random) -> None:
    target = fleet.targets[id]
    link_s = 0.002 + 0.03 * draw.random()
    for turn in range(draw.randrange(12)):
        target.link.record(
            link_s * (1.0 + 3.0 * draw.random() ** 4), NOW - 3.0 + 0.2 * turn, draw.choice((0, 0, 65536))
        )
    if draw.random() < 0.5:
        target.queue_estimate.report(LoadReport(1, 1, 2, 1, 0.2 * draw.random()), "link", NOW - 0.2 * draw.random())
    for key in range(draw.randrange(6)):
        due = ask(budget_s=0.5 * draw.random())
        target.queue_estimate.launch(
            key, 0.05 * draw.random(), NOW - 0.1 + 0.01 * key, draw.choice((None, queue_position(due)))
        )
    for _ in range(draw.randrange(30)):
        target.queue_estimate.error.record(0.05 * draw.random(), 0.08 * draw.random())
    if draw.random() < 0.2:  # acknowledged once, silent now
        target.link.acknowledges = True
        for key in range(draw.randrange(1, 5)):
            target.link.sent(100 + key, NOW - 0.3 * draw.random())
    if draw.random() < 0.2:
        target.refused(draw.choice((None, 0.1)), NOW - 0.02)
    if draw.random() < 0.2:
        target.warm_up(NOW - 5.0)
    if draw.random() < 0.1:
        target.breaker.trip("for the test", NOW - 0.1, 0.5)
    if draw.random() < 0.2:
        fleet.heard(id, load=None, doubt="", now=NOW, conditions=DeviceConditions(battery=draw.random(), metered=True))


def question(draw: Random) -> Ask:
    return ask(budget_s=0.01 + 0.6 * draw.random() ** 2, units=1.0 + 200.0 * draw.random())._replace(
        priority=draw.randrange(5), body_bytes=draw.choice((0, 0, 100_000)), weight=draw.choice((1.0, 0.3))
    )


def schooled(placer: UtilityPlacer, draw: Random) -> UtilityPlacer:
    for _ in range(draw.choice((0, 200))):
        said = draw.random()
        placer.calibration.record(said, said, draw.random() < 0.9 * said)
    return placer


def plain(placer: UtilityPlacer, asked: Ask) -> list[Plain]:
    offers = placer.fleet.offered(asked.model, asked.version)
    return plain_candidates(offers, asked, placer.prices, placer.calibration.curve, NOW)


@pytest.mark.slow
@given(seeds)
def test_every_prediction_is_the_plain_one(seed: int) -> None:
    draw = Random(seed)
    placer = UtilityPlacer(fleet_in_use(draw))
    asked = question(draw)
    for one in plain(placer, asked):
        quick = estimate(one.offered, asked.units, NOW, asked.body_bytes, asked.answer_bytes)
        for name in ("compute_s", "wait_s", "link_s", "margin_s", "finish_s", "cost", "trust"):
            assert getattr(quick, name) == pytest.approx(getattr(one, name), rel=1e-9, abs=1e-12), name


@pytest.mark.slow
@given(seeds)
@settings(max_examples=200)
def test_nobody_who_was_passed_over_would_have_been_worth_more(seed: int) -> None:
    draw = Random(seed)
    placer = schooled(UtilityPlacer(fleet_in_use(draw)), draw)
    asked = question(draw)
    everybody = plain(placer, asked) if len(placer.fleet.targets) <= 32 else []

    decision = placer.decide(asked, NOW)

    if decision.chosen is None or not everybody:
        return
    values = {one.offered.target.id: one.value for one in everybody}
    assert values.keys() == {one.target.id for one in decision.candidates}
    assert values[decision.chosen.target.id] == pytest.approx(max(values.values()), abs=2 * CHANCES_CUT)
    for candidate, verdict in zip(decision.candidates, decision.judged, strict=True):
        if verdict is not None:
            assert verdict.value == pytest.approx(values[candidate.target.id], abs=CHANCES_CUT)


events = st.lists(st.tuples(st.sampled_from(["launch", "answer", "finish", "report", "accepted"]), seeds), max_size=40)


@pytest.mark.slow
@given(events)
def test_a_ledgers_wait_is_the_plain_one_whatever_happened_to_it(happened: list[tuple[str, int]]) -> None:
    quick, slow, now = QueueEstimate(), PlainLedger(), NOW
    for sequence, (what, seed) in enumerate(happened):
        draw = Random(seed)
        now += 0.2 * draw.random() ** 3
        key = draw.choice(list(slow.under_way)) if slow.under_way else None
        if what == "launch":
            work_s = 0.1 * draw.random()
            place = QueuePosition(now + draw.random(), now + 2.0)
            quick.launch(sequence, work_s, now, place)
            slow.launched(sequence, work_s, place.key, now)
        elif what == "report":
            delay_s = 0.3 * draw.random()
            quick.report(LoadReport(1, sequence, 1, 1, delay_s), "link", now)
            slow.report = now, delay_s
            slow.spoken_of |= slow.acknowledged
        elif key is not None and what == "accepted":
            quick.accepted(key)
            slow.acknowledged.add(key)
        elif key is not None:
            quick.finish(key, now, computed=what == "answer")
            slow.ended(key, now, computed=what == "answer")
        for later_s in (0.0, 0.03, 0.3, 2.0):
            assert quick.wait_s(now + later_s) == pytest.approx(slow.wait_s(now + later_s), abs=1e-12)

"""A condition of no target is shown where those of targets are: JSON, metric, state and `tidegate status`."""

from __future__ import annotations

from msgspec.structs import replace

from gateway.catalog import Catalog
from gateway.commands.status import ailments
from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.core.fleet.name_claims import NameClaim, NameClaims
from gateway.observe.conditions import condition_family, conditions_json, loop_conditions, name_conditions
from gateway.observe.deadline_observer import DeadlineObserver
from gateway.observe.unknown_versions import UnknownVersions
from gateway.operate.admin import state_of
from tests.support.gateway.fleets import spec
from tests.support.models.tiny_models import double_manifest
from tests.support.mqtt.device_messages import offer
from tidegate.estimate.stall_cost import LoopStall, StallCost
from tidegate.outcome import DeadlineExceeded, Overloaded
from tidegate.types import Call, InferRequest


def test_a_name_with_two_agents_is_shown_to_operators_with_both_sides() -> None:
    catalog = Catalog(())
    fleet, claims = Fleet(catalog.feature_of, draw=lambda: 0.5), NameClaims()
    for at, (boot, epoch, started_at) in enumerate((("a", 11, -60.0), ("b", 12, 0.5), ("a", 13, -60.0))):
        claims.claim("kiosk", NameClaim(boot, epoch, f"10.0.0.{boot}", started_at), float(at))

    others = name_conditions(claims, 5.0)
    (told,) = conditions_json(fleet, 5.0, others)
    assert (told["target"], told["condition"], told["for_s"]) == ("edge/kiosk", "name_conflict", 3.0)
    assert "kept, as it has run longer: 10.0.0.a, epoch 13" in told["evidence"]
    assert "refused: 10.0.0.b, epoch 12" in told["evidence"]
    (sample,) = condition_family(fleet, others).samples
    assert sample.labels == {"target": "edge/kiosk", "condition": "name_conflict"}
    assert state_of(fleet, catalog, 5.0, {}, others)["ailing"] == [told]
    (line,) = ailments([{"id": told["target"], "ailing": [told]}])
    assert line.startswith("[yellow]edge/kiosk[/]: name_conflict for 3")


def test_a_version_that_targets_serve_and_of_which_there_is_no_manifest_is_shown() -> None:
    catalog = Catalog([double_manifest()])
    fleet = Fleet(catalog.feature_of, draw=lambda: 0.5)
    unknown = UnknownVersions(fleet, catalog)
    for number in range(5):
        fleet.add(spec(f"edge/{number}"), 0.0)
        others = (offer("double"),) if number == 4 else (offer("double", "2"), offer("private"))
        fleet.fold(LinkUp(f"edge/{number}", f"edge/{number}", 1, others), 0.0)
    assert unknown.conditions(1.0)
    (told,) = unknown.conditions(3.0)
    assert (told.subject, told.name, told.since) == ("model/double", "version_unknown", 1.0)
    assert told.evidence.startswith("edge/0, edge/1, edge/2 and 1 more serve double 2, of which")
    catalog.ship([replace(double_manifest(), version="2")])
    assert unknown.conditions(4.0) == []


def test_a_gateway_whose_own_loop_costs_deadlines_is_shown_for_as_long_as_it_does() -> None:
    fleet, cost = Fleet(Catalog(()).feature_of, draw=lambda: 0.5), StallCost()
    assert loop_conditions("one", cost) == []
    late = DeadlineObserver(cost.missed)
    call = Call(InferRequest("m", ()), "oip-http", 10.0, 10.5)
    late.ended(call, Overloaded("full"), 10.5)
    late.ended(call, DeadlineExceeded("late"), 10.5)
    cost.stalled(LoopStall(10.1, 10.5))
    assert cost.look(10.5)
    (told,) = conditions_json(fleet, 12.5, loop_conditions("one", cost))
    assert (told["target"], told["condition"], told["for_s"]) == ("gateway/one", "loop_stalled", 2.0)
    assert "1 deadline was missed by it" in told["evidence"]

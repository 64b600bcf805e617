"""The console's rows of models: where each is in memory."""

from __future__ import annotations

from gateway.core.fleet.fleet import Fleet
from gateway.core.fleet.link_events import LinkUp
from gateway.operate.console.models import model_rows
from tests.support.gateway.fleets import NOW, spec
from tidegate.fleet.offers import ModelOffer, ModelState, VariantOffer


def offered(state: ModelState = "ready", *, cold_s: float = 0.0, variant: str = "int8", name: str = "m") -> ModelOffer:
    return ModelOffer(name, "1", (VariantOffer(variant, variant, ((1.0, 0.01),)),), state, cold_s=cold_s)


def fleet_with(*offers: tuple[ModelOffer, ...]) -> Fleet:
    fleet = Fleet(lambda model, version: "rows")
    for number, of_target in enumerate(offers):
        fleet.add(spec(f"edge/{number}"), NOW)
        fleet.fold(LinkUp(f"edge/{number}", f"edge/{number}", 1, of_target), NOW)
    return fleet


def test_a_model_is_counted_where_it_is_in_memory_and_where_it_is_not() -> None:
    fleet = fleet_with(
        (offered(), offered(name="other", variant="fp32")),
        (offered("soaking", variant="fp32"),),
        (offered("evicted", cold_s=2.0),),
        (offered("evicted", cold_s=3.5),),
        (offered("loading"),),
        (offered("warming"),),
        (offered("bad"),),
    )
    first, other = model_rows(fleet.targets.values())
    assert first == {
        "model": "m", "version": "1", "ready": 2, "cold": 2, "cold_s": 3.5, "coming": 2, "bad": 1,
        "variants": ["fp32", "int8"],
    }  # fmt: skip
    assert (other["model"], other["ready"]) == ("other", 1)


def test_what_a_target_had_that_is_away_is_not_in_memory() -> None:
    fleet = fleet_with((offered(),))
    fleet.add(spec("edge/away"), NOW)
    assert [one["ready"] for one in model_rows(fleet.targets.values())] == [1]
    assert model_rows([]) == []

"""Offers from the network are bounded alike by either way in, so that no device can break the placement of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tidegate.fleet import offers
from tidegate.fleet.messages import BadMessage, decode_up
from tidegate.fleet.offers import ModelOffer, VariantOffer, decode_offers, encode_offers
from tidegate.fleet.topics import DeviceTopic
from tidegate.link import frames
from tidegate.link.frames import ProtocolViolation

Take = Callable[[list[dict[str, Any]]], tuple[ModelOffer, ...]]
VARIANT: dict[str, Any] = {"name": "int8", "precision": "int8"}


def over_the_link(said: list[dict[str, Any]]) -> tuple[ModelOffer, ...]:
    return frames.offers_of(json.dumps(said).encode())


def over_mqtt(said: list[dict[str, Any]]) -> tuple[ModelOffer, ...]:
    inventory = {"dev": "kiosk-1", "e": 1, "s": 1, "m": 1, "rev": 1, "offers": said, "v": 1}
    return decode_up(DeviceTopic.INVENTORY, json.dumps(inventory).encode()).offers  # type: ignore[union-attr]


def model(**variant: Any) -> list[dict[str, Any]]:
    return [{"name": "m", "version": "1", "variants": [VARIANT | variant]}]


ways = pytest.mark.parametrize("take", [over_the_link, over_mqtt])


@ways
@pytest.mark.parametrize(
    "said",
    [
        model(slots=10**400),
        model(slots=10**9),
        model(slots=-1),
        model(quality=1.001),
        model(quality=-1.5),
        model(quality=7e300),
        model(max_batch=0),
        model(max_batch=2**31),
        model(max_tokens=-3),
        model(max_tokens=2**31),
        model(cost=[[1.0, 0.0]]),
        model(cost=[[1.0, 1e-320]]),
        model(cost=[[1.0, 1e7]]),
        model(cost=[[-1.0, 1.0]]),
        model(cost=[[1e300, 1.0]]),
        model(cost=[[1.0, 1.0], [1.0, 2.0]]),
        model(cost=[[0.0, 1.0], [5e-324, 2.0]]),
        model(cost=[[units, 1.0] for units in range(offers.MOST_COST_POINTS + 1)]),
        model(name=""),
        model(name="x" * 129),
        model(name="fp32; degraded=0"),
        model(name="fp32\r\nx: y"),
        model(name="größer"),
        model(precision="x" * 129),
        [{"name": "", "version": "1", "variants": []}],
        [{"name": "m" * 257, "version": "1", "variants": []}],
        [{"name": "m", "version": "1" * 129, "variants": []}],
        [{"name": "m", "version": "1", "variants": [VARIANT | {"name": str(one)} for one in range(257)]}],
        [{"name": str(one), "version": "1", "variants": []} for one in range(offers.MOST_OFFERS + 1)],
    ],
)  # fmt: skip
def test_what_no_target_can_offer_is_refused_by_either_way(take: Take, said: list[dict[str, Any]]) -> None:
    with pytest.raises((ProtocolViolation, BadMessage)):
        take(said)


@ways
@pytest.mark.parametrize(
    "said",
    [
        model(),
        model(slots=offers.MOST_SLOTS, quality=1.0, max_batch=1, max_tokens=2**31 - 1),
        model(quality=-1.0, cost=[[1, 0.002], [64, 0.011], [64.5, 0.012]]),
        model(name="head-int8.v2_1", unknown={"key": [1]}),
        [{"name": "m" * 256, "version": "2" * 128, "variants": []}],
    ],
)
def test_what_a_target_offers_is_taken_by_either_way(take: Take, said: list[dict[str, Any]]) -> None:
    [taken] = take(said)

    assert (taken.name, taken.version) == (said[0]["name"], said[0]["version"])
    for variant, one in zip(taken.variants, said[0]["variants"], strict=True):
        told = {name: getattr(variant, name) for name in one if name not in ("cost", "unknown")}
        assert told == {name: one[name] for name in told}
        assert [list(point) for point in variant.cost] == one.get("cost", [])


@pytest.mark.slow
def test_all_that_a_site_may_tell_comes_through_the_link() -> None:
    """A summary walks 256 offers of a model: as many variants, if each is of another name."""
    many = tuple(VariantOffer(f"v{number}", "int8", ((1.0, 0.01),)) for number in range(256))
    told = tuple(ModelOffer(f"model-{number}", "1", many[:4]) for number in range(4096))

    for said in ((ModelOffer("m", "1", many),), told):
        assert frames.offers_of(encode_offers(said)) == said


def test_the_slots_of_a_site_are_told_up_to_the_most_that_is_taken() -> None:
    """One device with as many as it may say must not make all of its site's offers worthless."""
    site = (ModelOffer("m", "1", (VariantOffer("bf16", "bf16", slots=offers.MOST_SLOTS + 4),)),)

    assert decode_offers(encode_offers(site))[0].variants[0].slots == offers.MOST_SLOTS


def test_bad_offers_say_where_they_are_bad() -> None:
    with pytest.raises(ProtocolViolation, match=r"offers that cannot be read: .*65536.*variants\[0\].slots"):
        over_the_link(model(slots=10**9))
    with pytest.raises(BadMessage, match="cost points of m must have distinct work"):
        over_mqtt(model(cost=[[1, 1], [1, 2]]))

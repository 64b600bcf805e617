"""Which advertised addresses become targets, and how refused ones are reported."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from gateway.core.access.networks import PRIVATE, AllowedNetworks
from gateway.fleet_sync.freshness import DeviceView, Freshness
from gateway.targets.address_policy import NAMED, AddressPolicy


def view(name: str, *urls: str, freshness: Freshness = Freshness.FRESH) -> DeviceView:
    return DeviceView(name=name, epoch=1, urls=urls, offers=(), load=None, freshness=freshness, age_s=0.0, reason="")


def test_an_allowed_address_is_a_target_and_no_other_is() -> None:
    advertised = AddressPolicy(AllowedNetworks(PRIVATE), "link")
    spec = advertised.spec_of(view("till", "10.0.0.7:9001"))
    assert spec is not None and (spec.id, spec.address) == ("edge/till", "10.0.0.7:9001")
    assert advertised.spec_of(view("attic", "169.254.169.254:80")) is None
    assert advertised.spec_of(view("cellar", "10.0.0.8:9001", freshness=Freshness.DEAD)) is None
    assert advertised.refused == {"attic": "169.254.169.254 is in no network of advertised_networks"}


def test_a_device_that_moves_into_an_allowed_network_is_refused_no_more() -> None:
    advertised = AddressPolicy(AllowedNetworks(PRIVATE), "link")
    advertised.spec_of(view("attic", "8.8.8.8:9001"))
    assert advertised.spec_of(view("attic", "10.0.0.9:9001")) is not None
    assert advertised.refused == {}


def test_what_was_judged_holds_for_the_same_address_only() -> None:
    advertised = AddressPolicy(AllowedNetworks(PRIVATE), "link")
    spec = advertised.spec_of(view("till", "10.0.0.7:9001"))
    assert advertised.spec_of(view("till", "10.0.0.7:9001")) is spec, "each heartbeat of a fleet asks"
    moved = advertised.spec_of(view("till", "10.0.0.9:9001"))
    assert moved is not None and moved.address == "10.0.0.9:9001"
    assert advertised.spec_of(view("till", "8.8.8.8:9001")) is None
    assert advertised.spec_of(view("till", "10.0.0.9:9001")) == moved
    assert advertised.spec_of(view("till", "10.0.0.9:9001", freshness=Freshness.DEAD)) is None


@pytest.mark.slow
def test_a_whole_fleet_behind_a_wrong_setting_is_a_few_lines_of_log() -> None:
    advertised = AddressPolicy(AllowedNetworks(()), "link")
    with capture_logs() as lines:
        for number in range(10_000):
            advertised.spec_of(view(f"d{number}", "10.0.0.7:9001"))
            advertised.spec_of(view(f"d{number}", "10.0.0.7:9001"))
    assert len(advertised.refused) == 10_000
    assert len(lines) < NAMED + 12
    assert lines[-1]["devices"] == 8192

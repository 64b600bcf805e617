"""Which peer may ask for help as which device, and what becomes of its request. Pure."""

from __future__ import annotations

import pytest

from gateway.core.access.asker import asked_call, why_not_asker
from tests.support.serving.hosts import echo_request
from tidegate.caller import Grant, Identity
from tidegate.outcome import Forbidden, InvalidRequest
from tidegate.placement_pin import Pin
from tidegate.types import HELP, Call

DEVICE = Identity("device:edge/attic", Grant("homes", models=("echo",), highest_priority=2, pin="site"))


@pytest.mark.parametrize(
    ("claimed", "proven", "known", "words"),
    [
        ("edge/attic", "edge/attic", False, ""),
        ("edge/attic", "", True, ""),
        ("edge/attic", "", False, "not known to this fleet"),
        ("edge/attic", "edge/cellar", True, "shows the credential of edge/cellar"),
        ("pool/main", "pool/main", True, "only devices"),
        ("gateway/main", "", True, "only devices"),
        ("edge/", "", True, "only devices"),
        ("edge/a b", "", True, "only devices"),
        ("", "", True, "only devices"),
    ],
)
def test_a_peer_asks_as_the_device_that_it_proves_to_be(claimed: str, proven: str, known: bool, words: str) -> None:
    why_not = why_not_asker(claimed, proven=proven, known=known)
    assert words in why_not if words else why_not == ""


def test_a_helped_call_has_one_hop_and_the_rights_of_its_device_whatever_it_says() -> None:
    said = Call(echo_request(), "link", 0.0, priority=1, path=("gateway/other", "edge/innocent"), tenant="acme")
    call = asked_call(said, DEVICE, "edge/attic", None)
    assert (call.path, call.protocol, call.asker) == (("edge/attic",), HELP, "edge/attic")
    assert (call.priority, call.pin, call.identity) == (2, "site", DEVICE)
    assert call.tenant == "acme"  # for the layer that knows whether the device may act for it


def test_the_bearer_of_a_credential_is_held_to_the_device_s_rights_too() -> None:
    bearer = Identity("key:1", Grant("acme"))
    call = asked_call(Call(echo_request(), "link", 0.0, priority=4), DEVICE, "edge/attic", bearer)
    assert (call.identity, call.priority, call.pin) == (bearer, 4, "site")
    with pytest.raises(Forbidden):
        asked_call(Call(echo_request(model="other"), "link", 0.0), DEVICE, "edge/attic", bearer)


@pytest.mark.parametrize("pin", ["edge", "site"])
def test_a_pinned_request_has_no_business_at_a_gateway(pin: Pin) -> None:
    with pytest.raises(InvalidRequest, match="does not leave edge/attic"):
        asked_call(Call(echo_request(), "link", 0.0, pin=pin), DEVICE, "edge/attic", None)

"""A gateway that its broker refuses is told so by its own name and fleet, once, and again when that changes."""

from __future__ import annotations

from gateway.core.access.broker_rights import BrokerRights


def test_a_refusal_names_the_gateway_its_fleet_the_reason_and_the_way_out() -> None:
    words = BrokerRights("demo", "main").answered("Not authorized")
    assert words is not None
    assert "speak as main in the fleet demo (Not authorized)" in words
    assert "`tidegate broker config --fleet`" in words and "gw~main" in words


def test_it_is_news_once_and_so_is_its_end() -> None:
    rights = BrokerRights("demo", "main")
    assert rights.answered("") is None
    first = rights.answered("Not authorized")
    assert first == rights.refusal != ""
    assert rights.answered("Not authorized") is None
    assert rights.answered("") == rights.refusal == ""
    assert rights.answered("Quota exceeded") != first
    assert "no refusal" in repr(BrokerRights("demo", "main"))

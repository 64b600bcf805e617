"""What is known of a neighbour, where it is, and what a device answers for one. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.help.help_choice import HelpingPeer, HelpLimits, HelpNeed, choose_place
from edge_agent.core.help.neighbour_addresses import neighbour_addresses, neighbours_by_mqtt
from edge_agent.core.help.neighbour_admission import (
    MARGIN,
    NeighbourRequest,
    OwnLoad,
    check_neighbours_request,
    why_not_neighbour,
)
from edge_agent.core.help.neighbour_view import STALE_S, NeighbourView
from tidegate.fleet.offers import ModelOffer
from tidegate.outcome import DeadlineExceeded, InvalidRequest, NotSupported, Overloaded, ServeError
from tidegate.types import LoadReport

LIMITS = HelpLimits(max_in_flight=4, max_request_bytes=1000)
NEED = HelpNeed(left_s=1.0, here_s=2.0, size_bytes=10)
OFFERS = (ModelOffer("encoder", "1", ()), ModelOffer("away", "1", (), state="failed"))
IDLE = OwnLoad(neighbours=0, most_neighbours=2, queued=0, most_queued=8)
GOOD = NeighbourRequest(
    asker="edge/kiosk", path=("edge/kiosk",), pin="any", is_step=False, generates=False, left_s=1.0, finish_s=0.1
)


def load(queue_delay_s: float) -> LoadReport:
    return LoadReport(1, 1, 0, 0, queue_delay_s)


def peer(name: str, took_s: float | None, why_not: str = "", *, near: bool = False) -> HelpingPeer:
    return HelpingPeer(name, took_s, why_not, is_neighbour=near)


@pytest.mark.parametrize(
    ("peers", "gateways_only", "chosen"),
    [
        ([peer("gw", 0.2), peer("near", 0.1, near=True)], "", "near"),
        ([peer("gw", 0.1), peer("near", 0.2, near=True)], "", "gw"),
        ([peer("gw", 0.1), peer("near", 0.1, near=True)], "", "near"),  # alike: it costs no uplink
        ([peer("gw", 0.1, "its link is lost"), peer("near", 0.2, near=True)], "", "near"),
        ([peer("gw", 0.2), peer("near", 0.1, "it told nothing", near=True)], "", "gw"),
        ([peer("gw", 0.2), peer("near", 0.1, near=True)], "only a gateway verifies evidence", "gw"),
        ([peer("near", 0.1, near=True)], "only a gateway verifies evidence", ""),
        ([peer("near", 0.6, near=True), peer("gw", 0.9)], "", "gw"),  # the neighbour would not take it
        ([peer("near", 0.6, near=True)], "", ""),
        ([peer("near", 1.5, near=True)], "", ""),  # its queue is too long: the queue here decides
    ],
)
def test_of_gateways_and_neighbours_the_one_that_answers_first_is_asked(
    peers: list[HelpingPeer], gateways_only: str, chosen: str
) -> None:
    need = HelpNeed(NEED.left_s, NEED.here_s, NEED.size_bytes, gateways_only=gateways_only)
    choice = choose_place(need, peers, 0, LIMITS)
    assert choice.peer == chosen
    assert choice.is_neighbour == (chosen == "near")
    assert bool(choice.why) == (not chosen)


def test_a_neighbour_is_known_by_its_queue_its_models_and_the_age_of_both() -> None:
    view = NeighbourView("edge/near")
    assert "not told its queue" in view.why_not("encoder", 0.0)
    view.greeted("edge/near", OFFERS)
    view.loaded(load(0.25), None, now=10.0)
    view.measured(0.01)
    assert view.why_not("encoder", 10.0 + STALE_S) == ""
    assert "does not answer for 'away'" in view.why_not("away", 10.0)
    assert "for 6 s" in view.why_not("encoder", 16.0)
    assert view.took_s(None) == pytest.approx(0.26)
    assert view.took_s(0.1) == pytest.approx(0.36)
    view.loaded(load(0.0), (), now=20.0)
    assert "does not answer for 'encoder'" in view.why_not("encoder", 20.0)
    assert view.told(21.0) == {"models": [], "rtt_ms": 10.0, "queue_delay_ms": 0.0, "report_age_s": 1.0}
    view.greeted("edge/other", OFFERS)
    assert "another device answers there, edge/other" in view.why_not("encoder", 20.0)


def test_addresses_are_configured_or_published_and_a_device_passes_over_itself() -> None:
    configured = ("kiosk-1", "kiosk-2", "kiosk-3@10.0.0.3:9001", "kiosk-4")
    assert neighbours_by_mqtt(configured, "kiosk-1") == ("kiosk-2", "kiosk-4")
    published = {"kiosk-2": ("10.0.0.2:9001", "10.1.0.2:9001"), "kiosk-4": (), "kiosk-1": ("10.0.0.1:9001",)}
    assert neighbour_addresses(configured, published, "kiosk-1") == {
        "10.0.0.2:9001": "edge/kiosk-2",
        "10.0.0.3:9001": "edge/kiosk-3",
    }


@pytest.mark.parametrize(
    ("claimed", "proven", "words"),
    [
        ("edge/kiosk", None, ""),
        ("edge/kiosk", "edge/kiosk", ""),
        ("edge/kiosk", "edge/till", "the certificate of edge/till"),
        ("edge/kiosk", "", "no certificate"),
        ("gateway/main", None, "only devices"),
        ("edge/a/b", None, "only devices"),
        ("", None, "only devices"),
        ("edge/near", "edge/near", "this device itself"),
    ],
)
def test_a_neighbour_is_who_its_certificate_says(claimed: str, proven: str | None, words: str) -> None:
    told = why_not_neighbour(claimed, "edge/near", proven=proven)
    assert (words in told) if words else told == ""


@pytest.mark.parametrize(
    ("changes", "load", "error"),
    [
        ({"path": ()}, IDLE, InvalidRequest),
        ({"path": ("edge/till",)}, IDLE, InvalidRequest),
        ({"path": ("edge/till", "edge/kiosk")}, IDLE, InvalidRequest),
        ({"pin": "edge"}, IDLE, InvalidRequest),
        ({"is_step": True}, IDLE, NotSupported),
        ({"generates": True}, IDLE, NotSupported),
        ({}, OwnLoad(2, 2, 0, 8), Overloaded),
        ({}, OwnLoad(0, 2, 5, 8), Overloaded),
        ({"finish_s": 0.51}, IDLE, DeadlineExceeded),
        ({"left_s": 0.0}, IDLE, DeadlineExceeded),
    ],
)
def test_a_device_answers_its_neighbour_only_behind_its_own_callers(
    changes: dict[str, object], load: OwnLoad, error: type[ServeError]
) -> None:
    check_neighbours_request(GOOD, IDLE)
    with pytest.raises(error):
        check_neighbours_request(_changed(changes), load)


@given(
    st.lists(st.sampled_from(("edge/kiosk", "edge/till", "gateway/main")), max_size=3),
    st.integers(0, 4),
    st.integers(0, 10),
    st.floats(0.0, 2.0),
    st.floats(0.0, 2.0),
)
def test_what_is_answered_came_from_one_hop_and_is_surely_in_time(
    path: list[str], neighbours: int, queued: int, left_s: float, finish_s: float
) -> None:
    load = OwnLoad(neighbours, 2, queued, 8)
    try:
        check_neighbours_request(_changed({"path": tuple(path), "left_s": left_s, "finish_s": finish_s}), load)
    except ServeError:
        return
    assert path == ["edge/kiosk"]
    assert neighbours < 2 and queued <= 4
    assert finish_s <= MARGIN * left_s


def _changed(changes: dict[str, object]) -> NeighbourRequest:
    said = {name: getattr(GOOD, name) for name in NeighbourRequest.__struct_fields__}
    return NeighbourRequest(**{**said, **changes})

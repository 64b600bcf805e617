"""Which gateways there are, by what was heard of each and when."""

from __future__ import annotations

from gateway.core.peers.fair_share import QuotaUse
from gateway.core.peers.peers import FRESH_S, MOST_PEERS, NAMESAKE_S, SILENT_S, PeerReport, Peers

REPORT = PeerReport({"acme": {"requests": QuotaUse(3.0, 3.0)}})


def met(*names: str, now: float = 0.0) -> Peers:
    peers = Peers("main")
    peers.connected(up=True, now=now)
    for name in names:
        peers.state(name, 1, now, online=True)
    return peers


def test_its_own_name_is_no_other_gateway() -> None:
    assert met("main", "b").names(0.0) == ["b"]
    assert met("main").count(0.0) == 1


def test_one_that_goes_or_is_silent_is_not_counted() -> None:
    peers = met("b", "c")
    assert peers.count(1.0) == 3
    peers.state("b", 1, 1.0, online=False)
    assert peers.names(1.0) == ["c"]
    assert peers.count(SILENT_S) == 1, "a state that was kept proves no life"


def test_what_a_former_life_left_behind_says_nothing_of_this_one() -> None:
    peers = met()
    peers.report("b", 7, REPORT, 1.0)
    peers.state("b", 6, 1.1, online=False)  # a will that comes late
    assert peers.count(1.2) == 2 and peers.reports(1.2) == [REPORT]
    peers.state("b", 8, 1.3, online=True)  # it has started again, and nothing was asked of it yet
    assert peers.count(1.4) == 2 and peers.reports(1.4) == [] and peers.unknown(1.4) == 1


def test_one_that_lives_is_counted_though_a_later_one_of_its_name_has_gone() -> None:
    peers = met("b")
    peers.state("b", 2, 1.0, online=True)  # another one, by mistake
    peers.state("b", 2, 2.0, online=False)
    assert peers.count(2.0) == 1
    peers.state("b", 1, 3.0, online=True)
    assert peers.names(3.0) == ["b"]
    peers.report("b", 1, REPORT, 3.1)
    assert peers.reports(3.2) == [REPORT]


def test_one_that_starts_again_with_its_clock_set_back_is_counted() -> None:
    peers = met()
    peers.report("b", 9, REPORT, 1.0)
    peers.report("b", 5, PeerReport(), 2.0)
    assert (peers.names(2.0), peers.reports(2.0)) == (["b"], [PeerReport()])


def test_a_report_is_known_for_a_moment() -> None:
    peers = met("b")
    assert peers.unknown(0.0) == 1
    peers.report("b", 1, REPORT, 1.0)
    assert (peers.unknown(1.5), peers.reports(1.5)) == (0, [REPORT])
    assert (peers.unknown(1.1 + FRESH_S), peers.reports(1.1 + FRESH_S)) == (1, [])


def test_without_a_broker_nobody_is_known_to_have_gone() -> None:
    peers = met("b", "c")
    peers.connected(up=False, now=3.0)
    assert peers.count(500.0) == 3 and peers.unknown(500.0) == 2
    peers.connected(up=True, now=500.0)
    assert peers.count(501.0) == 3, "they have to connect as well"
    peers.state("b", 1, 502.0, online=True)
    assert peers.names(500.0 + SILENT_S) == ["b"]


def test_as_many_as_are_expected_are_counted_though_they_are_not_seen() -> None:
    peers = Peers("main", expected=4)
    assert (peers.count(0.0), peers.unknown(0.0)) == (4, 3)


def test_names_without_end_take_no_room_from_those_that_live() -> None:
    peers = met("b")
    for number in range(2 * MOST_PEERS):
        peers.state(f"x{number}", 1, 1.0, online=number % 2 == 0)
    assert peers.count(1.0) <= 1 + MOST_PEERS
    assert "b" in peers.names(1.0)


def test_another_process_that_speaks_under_its_name_in_two_sessions_is_a_namesake() -> None:
    peers = met()
    peers.namesake(1, 0.0)  # a former life of this gateway
    peers.namesake(2, 1.0)  # a broker that brought back what it had kept, perhaps
    peers.namesake(2, 1.1)
    assert not peers.has_namesake(1.2)
    peers.namesake(3, 2.0)
    assert peers.has_namesake(2.0) and not peers.has_namesake(2.0 + NAMESAKE_S)
    peers.namesake(4, 900.0)
    assert not peers.has_namesake(900.0)

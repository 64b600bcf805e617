"""What pools announce, folded in any order: who is there, who is lost, and which of two of one name is used."""

from __future__ import annotations

from itertools import permutations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet.announced_pools import SILENT_S, AnnouncedPools
from tidegate.fleet.pool_messages import PoolDeath, PoolState

NOW = 100.0


def said(
    epoch: int = 5, sequence: int = 1, *, boot: str = "b1", at: str = "10.0.0.1:1", draining: bool = False
) -> PoolState:
    return PoolState("a", epoch, sequence, boot, at, draining=draining)


def died(epoch: int = 5, reason: str = "lost", *, boot: str = "b1") -> PoolDeath:
    return PoolDeath("a", epoch, boot, reason)  # type: ignore[arg-type]


def heard(*messages: PoolState | PoolDeath, most: int = 8) -> AnnouncedPools:
    pools = AnnouncedPools(most=most)
    pools.session(up=True, now=NOW)
    for one in messages:
        take(pools, one)
    return pools


def take(pools: AnnouncedPools, message: PoolState | PoolDeath, now: float = NOW) -> bool:
    return pools.state(message, now) if isinstance(message, PoolState) else pools.death(message)


def there(pools: AnnouncedPools, now: float = NOW) -> list[tuple[str, bool]]:
    return [(one.state.address, one.lost) for one in pools.pools(now)]


def test_a_will_makes_it_lost_and_its_own_word_ends_it() -> None:
    assert there(heard(said(), died())) == [("10.0.0.1:1", True)]
    assert there(heard(said(), died(reason="shutdown"))) == []
    assert there(heard(said(), died(), died(reason="shutdown"))) == []
    assert there(heard(said(), died(reason="shutdown"), died())) == []


def test_a_late_will_does_not_end_the_session_that_followed() -> None:
    assert there(heard(said(5), said(6), died(5))) == [("10.0.0.1:1", False)]
    assert there(heard(died(5), said(6))) == [("10.0.0.1:1", False)]
    assert there(heard(said(boot="b1"), said(6, boot="b2"), died(5, boot="b1"))) == [("10.0.0.1:1", False)]


def test_words_from_before_the_end_of_a_session_do_not_revive_it() -> None:
    assert there(heard(said(5, 1), died(5), said(5, 2))) == [("10.0.0.1:1", True)]
    assert there(heard(said(5, 1), died(5), said(6, 1))) == [("10.0.0.1:1", False)]


def test_a_restart_at_another_address_takes_its_own_place() -> None:
    assert there(heard(said(), died(), said(9, boot="b2", at="10.0.0.2:1"))) == [("10.0.0.2:1", False)]


def test_a_restart_with_a_clock_set_back_is_believed_once_the_old_one_is_lost() -> None:
    assert there(heard(said(9), said(5, boot="b2", at="10.0.0.2:1"))) == [("10.0.0.1:1", False)]
    assert there(heard(said(9), died(9), said(5, boot="b2", at="10.0.0.2:1"))) == [("10.0.0.2:1", False)]


MESSAGES = (said(5, 1), said(5, 2, at="10.0.0.2:1"), died(5), said(6, 1, at="10.0.0.3:1", draining=True))


@pytest.mark.parametrize("order", list(permutations(MESSAGES)))
def test_order_does_not_matter_within_a_process(order: tuple[PoolState | PoolDeath, ...]) -> None:
    (one,) = heard(*order).pools(NOW)
    assert (one.state.address, one.state.draining, one.lost) == ("10.0.0.3:1", True, False)


@given(st.lists(st.sampled_from(MESSAGES), min_size=1))
def test_neither_order_nor_repetition_matters_within_a_process(messages: list[PoolState | PoolDeath]) -> None:
    once_in_order = [one for one in MESSAGES if one in messages]
    assert there(heard(*messages)) == there(heard(*once_in_order))


def test_silence_makes_it_lost_only_while_there_is_a_broker() -> None:
    pools = heard(said())
    assert pools.next_wake(NOW) == NOW + SILENT_S
    assert there(pools, NOW + SILENT_S - 0.1) == [("10.0.0.1:1", False)]
    assert there(pools, NOW + SILENT_S) == [("10.0.0.1:1", True)]
    pools.session(up=False, now=NOW + 1)
    assert there(pools, NOW + 1e6) == [("10.0.0.1:1", False)]
    pools.session(up=True, now=NOW + 1e6)
    assert there(pools, NOW + 1e6 + 1) == [("10.0.0.1:1", False)]
    assert there(pools, NOW + 1e6 + SILENT_S) == [("10.0.0.1:1", True)]
    assert take(pools, said(5, 2), NOW + 1e6 + SILENT_S)
    assert there(pools, NOW + 1e6 + SILENT_S) == [("10.0.0.1:1", False)]


def test_a_retained_state_that_is_removed_makes_it_lost_until_it_speaks() -> None:
    pools = heard(said())
    assert pools.cleared("a") and not pools.cleared("a") and not pools.cleared("b")
    assert there(pools) == [("10.0.0.1:1", True)]
    take(pools, said(5, 2))
    assert there(pools) == [("10.0.0.1:1", False)]


def taking_turns() -> AnnouncedPools:
    """Two live processes with one name: the second takes the session over, the first comes back, and so on."""
    first, second = "10.0.0.1:1", "10.0.0.2:1"
    return heard(
        said(5, boot="b1", at=first),
        died(5, boot="b1"),
        said(6, boot="b2", at=second),
        died(6, boot="b2"),
        said(7, boot="b1", at=first),
    )


def test_of_two_live_processes_of_one_name_the_first_keeps_it_and_the_other_is_shown() -> None:
    pools = taking_turns()
    assert there(pools) == [("10.0.0.1:1", False), ("10.0.0.2:1", False)]
    take(pools, died(7, boot="b1"))
    take(pools, said(8, boot="b2", at="10.0.0.2:1"))
    assert there(pools) == [("10.0.0.1:1", True), ("10.0.0.2:1", False)]


def test_the_dispute_ends_with_the_silence_or_the_shutdown_of_either() -> None:
    pools = taking_turns()
    take(pools, said(7, 2, boot="b1", at="10.0.0.1:1"), NOW + SILENT_S - 1)
    assert there(pools, NOW + SILENT_S) == [("10.0.0.1:1", False)]
    pools = taking_turns()
    take(pools, said(8, boot="b2", at="10.0.0.2:1"), NOW + SILENT_S)
    assert there(pools, NOW + SILENT_S) == [("10.0.0.2:1", False)]
    pools = taking_turns()
    take(pools, died(6, "shutdown", boot="b2"))
    assert there(pools) == [("10.0.0.1:1", False)]


def test_of_two_the_other_has_the_name_at_once_when_the_first_is_shut_down() -> None:
    pools = taking_turns()
    assert take(pools, died(7, "shutdown", boot="b1"))
    assert there(pools) == [("10.0.0.2:1", False)]
    take(pools, said(8, boot="b2", at="10.0.0.2:1"))
    assert there(pools) == [("10.0.0.2:1", False)]


def test_without_a_session_nothing_is_due() -> None:
    pools = heard(said())
    pools.session(up=False, now=NOW)
    assert pools.next_wake(NOW) == inf
    assert repr(pools) == "<AnnouncedPools 1 known, 0 without room>" and len(pools) == 1


def test_deaths_of_pools_that_were_never_heard_are_bounded() -> None:
    pools = AnnouncedPools(most=1)
    pools.death(PoolDeath("b", 1, "x", "lost"))
    pools.death(PoolDeath("a", 5, "b1", "lost"))  # for which there is no room
    pools.state(said(), NOW)
    assert there(pools) == [("10.0.0.1:1", False)]


def test_it_is_bounded_and_a_lost_one_makes_room() -> None:
    pools = heard(*(PoolState(f"p{n}", 1, 1, "b", "10.0.0.1:1") for n in range(100)), most=3)
    assert [one.state.pool for one in pools.pools(NOW)] == ["p0", "p1", "p2"]
    assert 1 <= len(pools.refused) <= 16
    pools.death(PoolDeath("p1", 1, "b", "lost"))
    assert pools.state(PoolState("q", 1, 1, "b", "10.0.0.1:1"), NOW)
    assert [one.state.pool for one in pools.pools(NOW)] == ["p0", "p2", "q"]

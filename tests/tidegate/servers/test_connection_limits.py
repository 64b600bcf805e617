"""Which connection a full server admits, and which one it evicts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.servers.connection_limits import ConnectionTable, client_key


@dataclass(eq=False)
class Caller:
    client: str = "1.1.1.1"
    idle: bool = True


def crowd(callers: list[Caller], *, most: int = 100, per_client: int = 100) -> ConnectionTable[Caller]:
    made: ConnectionTable[Caller] = ConnectionTable(max_connections=most, max_per_client=per_client)
    for caller in callers:
        assert made.enter(caller) == (True, None)
    return made


def test_a_connection_without_a_request_is_evicted_first_and_the_oldest_of_them_before_others() -> None:
    asked, silent, later = Caller(), Caller(), Caller()
    door = crowd([asked, silent, later], per_client=3)
    door.record_request(asked)

    assert [door.enter(Caller())[1] for _ in range(2)] == [silent, later]
    assert door.evicted == 2


def test_of_used_connections_the_least_recently_used_is_evicted() -> None:
    first, second = Caller(), Caller()
    door = crowd([first, second], per_client=2)
    for caller in (first, second, first):
        door.record_request(caller)

    assert door.enter(Caller()) == (True, second)


def test_a_busy_connection_stays_and_the_newcomer_is_turned_away() -> None:
    busy = Caller(idle=False)
    door = crowd([busy], per_client=1)

    assert door.enter(Caller()) == (False, None)
    assert (len(door), door.turned_away) == (1, 1)
    assert repr(door) == "<ConnectionTable 1 of 100 from 1 clients, 0 evicted, 1 turned away>"


def test_a_client_at_its_limit_evicts_no_other_client() -> None:
    mine, others = Caller("2.2.2.2"), Caller("3.3.3.3")
    door = crowd([others, mine], most=3, per_client=1)

    assert door.enter(Caller("2.2.2.2")) == (True, mine)
    assert door.enter(Caller("4.4.4.4")) == (True, None)
    assert door.enter(Caller("5.5.5.5")) == (True, others)  # the door itself is full


def test_a_connection_that_has_left_is_forgotten() -> None:
    caller = Caller()
    door = crowd([caller], most=1)
    door.leave(caller)
    door.leave(caller)
    door.record_request(caller)

    assert len(door) == 0
    assert door.enter(Caller("9.9.9.9")) == (True, None)
    door.record_request(caller)
    assert len(door) == 1


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=60))
def test_there_are_never_more_than_the_limits_and_never_is_a_busy_one_evicted(
    arrivals: list[tuple[str, bool, bool]],
) -> None:
    door: ConnectionTable[Caller] = ConnectionTable(max_connections=5, max_per_client=3)
    inside: list[Caller] = []
    for client, idle, asks in arrivals:
        caller = Caller(client, idle)
        welcome, leaver = door.enter(caller)
        if leaver is not None:
            assert leaver.idle
            inside.remove(leaver)
        if welcome:
            inside.append(caller)
            if asks:
                door.record_request(caller)
        assert len(door) == len(inside) <= 5
        assert all(sum(one.client == name for one in inside) <= 3 for name in "abc")


@pytest.mark.parametrize(("host", "client"), [
    ("192.0.2.7", "192.0.2.7"),
    ("::ffff:192.0.2.7", "192.0.2.7"),
    ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
    ("fe80::1%eth0", "fe80::/64"),
    ("a socket", "a socket"),
])  # fmt: skip
def test_a_client_is_an_address_or_a_network_of_64_bits(host: str, client: str) -> None:
    assert client_key(host) == client

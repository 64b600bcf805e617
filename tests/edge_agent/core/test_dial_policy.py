"""The dial policy dials the gateways that do not reach the device by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.core.dial_policy import MOST_GATEWAYS, DialPlan

A, B = "10.0.0.1:8004", "10.0.0.2:8004"
BOTH = {A: "gateway/a", B: "gateway/b"}


def test_a_gateway_that_comes_by_itself_is_not_dialled() -> None:
    roads = DialPlan("auto", patience_s=3.0)

    dialled = [roads.addresses_to_dial(BOTH, ["gateway/a", "gateway/b"], float(now)) for now in range(60)]

    assert set(dialled) == {frozenset()}


def test_a_gateway_that_does_not_come_is_dialled_once_patience_is_over() -> None:
    roads = DialPlan("auto", patience_s=3.0)

    assert roads.addresses_to_dial(BOTH, ["gateway/b"], 10.0) == frozenset()
    assert roads.addresses_to_dial(BOTH, ["gateway/b"], 12.9) == frozenset()
    assert roads.addresses_to_dial(BOTH, ["gateway/b"], 13.0) == {A}


def test_a_stream_that_is_lost_and_comes_back_in_time_is_no_reason_to_dial() -> None:
    roads = DialPlan("auto", patience_s=3.0)
    roads.addresses_to_dial(BOTH, ["gateway/a", "gateway/b"], 0.0)

    for now, callers in ((10.0, []), (12.0, []), (12.5, ["gateway/a", "gateway/b"]), (14.0, []), (16.5, [])):
        assert roads.addresses_to_dial(BOTH, callers, now) == frozenset()


def test_a_gateway_that_had_to_be_dialled_is_dialled_at_once_when_it_is_back() -> None:
    roads = DialPlan("auto", patience_s=3.0)
    roads.addresses_to_dial({A: "gateway/a"}, [], 0.0)
    assert roads.addresses_to_dial({A: "gateway/a"}, [], 3.0) == {A}

    assert roads.addresses_to_dial({}, [], 100.0) == frozenset()
    assert roads.addresses_to_dial({A: "gateway/a"}, [], 200.0) == {A}


def test_the_direct_path_is_preferred_once_it_has_stood_for_a_while() -> None:
    roads = DialPlan("auto", patience_s=3.0, steady_s=2.0)
    roads.addresses_to_dial({A: "gateway/a"}, [], 0.0)
    roads.addresses_to_dial({A: "gateway/a"}, [], 3.0)

    assert roads.addresses_to_dial({A: "gateway/a"}, ["gateway/a"], 4.0) == {A}
    assert roads.addresses_to_dial({A: "gateway/a"}, [], 5.0) == {A}, "it flapped: what was dialled stays"
    assert roads.addresses_to_dial({A: "gateway/a"}, ["gateway/a"], 6.0) == {A}
    assert roads.addresses_to_dial({A: "gateway/a"}, ["gateway/a"], 8.0) == frozenset()


def test_a_gateway_of_unknown_name_is_dialled_to_hear_it_and_left_if_it_was_here_already() -> None:
    roads = DialPlan("auto", patience_s=3.0, steady_s=2.0)
    roads.addresses_to_dial({A: ""}, ["gateway/a"], 0.0)
    assert roads.addresses_to_dial({A: ""}, ["gateway/a"], 3.0) == {A}

    roads.addresses_to_dial({A: "gateway/a"}, ["gateway/a"], 4.0)
    assert roads.addresses_to_dial({A: "gateway/a"}, ["gateway/a"], 6.0) == frozenset()


def test_always_is_all_and_never_is_none() -> None:
    assert DialPlan("always").addresses_to_dial(BOTH, ["gateway/a"], 0.0) == {A, B}
    assert DialPlan("never").addresses_to_dial(BOTH, [], 1e9) == frozenset()


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.floats(0, 10),
            st.sets(st.sampled_from(["gateway/a", "gateway/b", "gateway/x"])),
            st.dictionaries(st.sampled_from([A, B, "h:1", "h:2"]), st.sampled_from(["", "gateway/a", "gateway/b"])),
        ),
        max_size=30,
    )
)
def test_only_known_addresses_are_dialled_and_none_that_has_been_here_steadily(
    steps: list[tuple[float, set[str], dict[str, str]]],
) -> None:
    roads, now, here = DialPlan("auto"), 0.0, {"gateway/a": 0.0, "gateway/b": 0.0}
    for wait_s, callers, gateways in steps:
        wanted = roads.addresses_to_dial(gateways, callers, now)
        assert wanted <= gateways.keys()
        now += wait_s
    settled = {A: "gateway/a", B: "gateway/b"}
    roads.addresses_to_dial(settled, here, now)
    assert roads.addresses_to_dial(settled, here, now + 2.01) == frozenset()


def test_strangers_cannot_make_it_dial_without_bound() -> None:
    roads = DialPlan("auto", patience_s=0.0)

    for batch in range(50):
        flood = {f"10.{batch}.0.{one}:1": f"gateway/{batch}-{one}" for one in range(256)}
        assert len(roads.addresses_to_dial(flood, [], float(batch))) <= MOST_GATEWAYS

    assert len(repr(roads)) < 20 * 3 * MOST_GATEWAYS

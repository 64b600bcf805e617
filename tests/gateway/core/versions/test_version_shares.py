"""Which version answers requests that name none: by who serves what, and carefully while it soaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.versions.version_shares import LEAST, VersionTargets, sample_order, shares_by_version

standings = st.dictionaries(
    st.sampled_from(["1", "2", "3"]),
    st.builds(VersionTargets, st.integers(0, 50), st.integers(0, 50), st.integers(0, 3)),
    max_size=3,
)


@pytest.mark.parametrize(
    ("standing", "wanted"),
    [
        ({"1": VersionTargets(3), "2": VersionTargets(1)}, {"1": 0.75, "2": 0.25}),
        ({"1": VersionTargets(3), "2": VersionTargets(0, 1)}, {"1": 12 / 13, "2": 1 / 13}),
        ({"1": VersionTargets(edges=3, pools=1), "2": VersionTargets()}, {"1": 1.0}),
        ({"1": VersionTargets(pools=1), "2": VersionTargets(edges=2)}, {"2": 1.0}),
        ({"1": VersionTargets(pools=1), "2": VersionTargets(soaking=1)}, {"2": 1.0}),
        ({"1": VersionTargets(pools=1), "2": VersionTargets()}, {"1": 1.0}),
        ({"1": VersionTargets(), "2": VersionTargets()}, {}),
    ],
)
def test_each_version_gets_the_share_of_the_edges_that_serve_it(
    standing: dict[str, VersionTargets], wanted: dict[str, float]
) -> None:
    assert shares_by_version(standing) == pytest.approx(wanted)


def test_a_lone_canary_of_a_large_fleet_still_gets_what_its_soak_waits_for() -> None:
    assert shares_by_version({"1": VersionTargets(1000), "2": VersionTargets(soaking=1)})["2"] >= LEAST * 0.9


@pytest.mark.slow
@given(standings)
def test_shares_add_up_and_nobody_is_sent_where_nobody_serves(standing: dict[str, VersionTargets]) -> None:
    found = shares_by_version(standing)

    assert not found or sum(found.values()) == pytest.approx(1.0)
    assert all(any(standing[version]) for version in found)
    assert bool(found) == any(any(one) for one in standing.values())


@pytest.mark.slow
@given(standings, st.floats(0, 1, exclude_max=True))
def test_every_version_has_its_turn_once_and_the_first_is_one_that_is_served(
    standing: dict[str, VersionTargets], draw: float
) -> None:
    found = shares_by_version(standing)
    order = sample_order(["1", "2", "3"], found, draw)

    assert sorted(order) == ["1", "2", "3"]
    assert not found or order[0] in found


def test_who_is_asked_first_goes_by_chance_and_who_is_next_by_share() -> None:
    shared = {"1": 0.7, "2": 0.2, "3": 0.1}

    assert sample_order(["1", "2", "3"], shared, 0.69) == ["1", "2", "3"]
    assert sample_order(["1", "2", "3"], shared, 0.71) == ["2", "1", "3"]
    assert sample_order(["1", "2", "3"], shared, 0.95) == ["3", "1", "2"]

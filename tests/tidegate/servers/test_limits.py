"""The shares that a process's ports have of its connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.servers.limits import PortGroup, ServerLimits, limits_by_port


@given(budget=st.integers(128, 2**20), ports=st.sets(st.sampled_from(["http", "link", "operators"])))
def test_the_shares_of_all_ports_are_the_budget_and_half_is_for_http(budget: int, ports: set[PortGroup]) -> None:
    shares = limits_by_port(ServerLimits(max_connections=budget), ("grpc", *sorted(ports)))
    assert sum(one.connections for one in shares.values()) == budget
    assert all(one.connections >= budget // 16 for one in shares.values())
    if "http" in ports:
        assert shares["http"].connections == budget // 2

"""The shares that a process's ports have of its connections."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tidegate.servers.limits import PortGroup, ServerLimits, connection_budget, limits_by_port


@given(budget=st.integers(128, 2**20), ports=st.sets(st.sampled_from(["http", "link", "operators"])))
def test_the_shares_of_all_ports_are_the_budget_and_half_is_for_http(budget: int, ports: set[PortGroup]) -> None:
    shares = limits_by_port(ServerLimits(max_connections=budget), ("grpc", *sorted(ports)))
    assert sum(one.connections for one in shares.values()) == budget
    assert all(one.connections >= budget // 16 for one in shares.values())
    if "http" in ports:
        assert shares["http"].connections == budget // 2


@pytest.fixture
def files(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many as this process may open meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (request.param, hard))
    yield request.param
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("files", "connections", "warned"), [
    (4096, 3584, False), (1024, 512, False), (640, 128, False), (600, 128, True), (256, 128, True), (100, 50, True),
], indirect=["files"])  # fmt: skip
def test_connections_are_what_the_files_leave_and_of_few_files_half(files: int, connections: int, warned: bool) -> None:
    assert connection_budget() == connections < files
    with capture_logs() as logged:
        shares = limits_by_port(ServerLimits(), ("http", "grpc"))
        limits_by_port(ServerLimits(max_connections=90), ("http", "grpc"))  # as its operator wants it
    assert sum(one.connections for one in shares.values()) == connections
    assert [(one["files"], one["connections"]) for one in logged] == ([(files, connections)] if warned else [])

"""What EndpointSlices mean: which pods take requests, which drain, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.discovery.endpoint_slices import (
    MOST_ENDPOINTS,
    BadObject,
    EndpointSlice,
    EndpointSlices,
    ServiceTarget,
    decode,
    resource_version,
)
from tests.support.discovery.cluster_api import endpoint, slice_of


def parsed(one: dict[str, Any]) -> EndpointSlice:
    return decode(EndpointSlice, msgspec.json.encode(one))


def targets(*slices: dict[str, Any], port_name: str | None = None) -> tuple[list[ServiceTarget], str]:
    found = EndpointSlices(port_name)
    found.listed(parsed(one) for one in slices)
    return found.targets()


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({"ready": True, "serving": True, "terminating": False}, "there"),
        ({}, "there"),
        ({"ready": None, "serving": None, "terminating": None}, "there"),
        ({"ready": False, "serving": False, "terminating": False}, "absent"),
        ({"ready": False, "serving": True, "terminating": True}, "draining"),
        ({"ready": True, "serving": True, "terminating": True}, "draining"),  # publishNotReadyAddresses
        ({"ready": False, "serving": False, "terminating": True}, "absent"),
        ({"ready": False, "terminating": True}, "absent"),
    ],
)
def test_conditions(conditions: dict[str, bool | None], expected: str) -> None:
    one = {**endpoint("pool-0", "10.0.0.1"), "conditions": conditions}
    found, _ = targets(slice_of("a", 8101, one))
    assert ["draining" if target.draining else "there" for target in found] == (
        [] if expected == "absent" else [expected]
    )


def test_an_id_is_the_pods_name_and_else_the_host_name_or_the_address() -> None:
    bare = {"addresses": ["10.0.0.3"]}
    hosted = {"addresses": ["10.0.0.2"], "hostname": "pool-1", "targetRef": None}
    found, _ = targets(slice_of("a", 8101, endpoint("pool-0", "10.0.0.1", zone="z"), hosted, bare))
    assert found == [
        ServiceTarget("10-0-0-3", "10.0.0.3:8101"),
        ServiceTarget("pool-0", "10.0.0.1:8101", "z"),
        ServiceTarget("pool-1", "10.0.0.2:8101"),
    ]


def test_a_pod_in_two_slices_is_one_target_by_ipv4_and_drains_if_either_says_so() -> None:
    v6 = slice_of("a", 8101, endpoint("pool-0", "fd00::1"), addressType="IPv6")
    v4 = slice_of("b", 8101, endpoint("pool-0", "10.0.0.1"))
    ends = slice_of("c", 8101, endpoint("pool-0", "10.0.0.1", ready=False, terminating=True))
    assert targets(v6)[0] == [ServiceTarget("pool-0", "[fd00::1]:8101")]
    assert targets(v6, v4)[0] == [ServiceTarget("pool-0", "10.0.0.1:8101")]
    assert targets(v6, v4, ends)[0] == [ServiceTarget("pool-0", "10.0.0.1:8101", draining=True)]


def test_the_port_is_the_only_one_or_the_named_one() -> None:
    two = [{"name": "grpc", "port": 8101}, {"name": "metrics", "port": 9090}]
    one = slice_of("a", 0, endpoint("pool-0", "10.0.0.1"), ports=two)
    found, warning = targets(one)
    assert found == [] and "2 ports (grpc, metrics): set port_name" in warning
    assert targets(one, port_name="grpc")[0] == [ServiceTarget("pool-0", "10.0.0.1:8101")]
    assert "no port 'http'" in targets(one, port_name="http")[1]
    for ports in ([], None, [{"name": "", "port": None}], [{"name": "x", "port": 0}]):
        assert targets({**one, "ports": ports})[0] == []


def test_no_slice_at_all_is_said_to_be_odd() -> None:
    assert targets() == ([], "there is no EndpointSlice of this Service: is its name right?")
    assert targets(slice_of("a", 8101)) == ([], "")


def test_changes_are_by_slice() -> None:
    found = EndpointSlices(None)
    found.listed([parsed(slice_of("a", 1, endpoint("p0", "10.0.0.1"))), parsed(slice_of("b", 1))])
    found.changed(parsed(slice_of("b", 1, endpoint("p1", "10.0.0.2"))))
    assert [one.name for one in found.targets()[0]] == ["p0", "p1"]
    found.removed(parsed(slice_of("a", 1)))
    found.removed(parsed(slice_of("never", 1)))
    assert [one.name for one in found.targets()[0]] == ["p1"]
    found.listed([])
    assert found.targets()[0] == []


def test_what_is_too_large_or_odd_is_refused() -> None:
    full = [endpoint(f"p{number}", "10.0.0.1") for number in range(1000)]
    with pytest.raises(BadObject, match="no EndpointSlice"):
        parsed(slice_of("a", 1, *full, endpoint("one-more", "10.0.0.1")))
    found = EndpointSlices(None)
    of_a_thousand = parsed(slice_of("a", 1, *full))
    for number in range(MOST_ENDPOINTS // 1000):
        meta = msgspec.structs.replace(of_a_thousand.metadata, name=f"s{number}")
        found.changed(msgspec.structs.replace(of_a_thousand, metadata=meta))
    with pytest.raises(BadObject, match="more than"):
        found.changed(msgspec.structs.replace(of_a_thousand, metadata=of_a_thousand.metadata))
    assert len(found) == MOST_ENDPOINTS // 1000  # what was known stays


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"metadata": {}, "endpoints": [{"addresses": 1}]}',
        b'{"metadata": {"name": "' + b"x" * 300 + b'"}}',
        b'{"metadata": {}, "ports": [{"port": 70000}]}',
        b"\xff",
    ],
)
def test_hostile_bodies_are_refused_with_words(body: bytes) -> None:
    with pytest.raises(BadObject, match="no EndpointSlice"):
        decode(EndpointSlice, body)


def test_the_version_of_a_bookmark() -> None:
    assert resource_version(b'{"kind": "EndpointSlice", "metadata": {"resourceVersion": "12"}}') == "12"

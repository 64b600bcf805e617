"""What a gateway tells a site of its caller: through the wire, and what the other side refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.serving.hosts import echo_request
from tidegate.link.origin import MOST_HOPS, Origin, originated, route_of, write_route
from tidegate.outcome import InvalidRequest
from tidegate.rpc import link_pb2
from tidegate.types import Call, Route

CALL = Call(echo_request(), "link", 10.0, 12.0)


def through(origin: Origin) -> Call:
    frame = link_pb2.Request()
    origin.write_to(frame.origin)
    return originated(CALL, link_pb2.Request.FromString(frame.SerializeToString()), "gateway/region")


def test_all_that_a_caller_requires_arrives() -> None:
    call = Call(
        echo_request(), "openai", 10.0, 12.0, tenant="acme#key:3f9a", pin="edge", min_quality=0.5, ttft_s=0.4,
        tpot_s=0.05, resumes=False, path=("top",),
    )  # fmt: skip

    there = through(Origin.of(call, "region", 10.1))

    assert (there.path, there.tenant, there.pin, there.min_quality) == (("top", "region"), "acme", "edge", 0.5)
    assert (there.ttft_s, there.tpot_s, there.resumes) == (pytest.approx(0.3, abs=1e-5), pytest.approx(0.05), False)
    assert (there.arrived_at, there.deadline) == (10.0, 12.0)


def test_what_a_caller_does_not_require_stays_unsaid() -> None:
    there = through(Origin.of(CALL, "region", 10.0))
    assert (there.tenant, there.pin, there.ttft_s, there.tpot_s, there.resumes) == ("", "any", None, None, True)


def test_a_gateway_that_says_nothing_is_in_the_path_by_its_own_name() -> None:
    assert originated(CALL, link_pb2.Request(), "gateway/old").path == ("old",)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda origin: origin.ClearField("path"), "came through 0 gateways"),
        (lambda origin: origin.path.extend(["a"] * MOST_HOPS), f"came through {MOST_HOPS + 1} gateways"),
        (lambda origin: origin.path.append("x" * 129), "with names"),
        (lambda origin: setattr(origin, "tenant", "a/b"), "no tenant's name"),
        (lambda origin: setattr(origin, "pin", "moon"), "pinned to"),
        (lambda origin: setattr(origin, "pin", ""), "pinned to"),
        (lambda origin: setattr(origin, "min_quality", float("nan")), "quality"),
        (lambda origin: setattr(origin, "min_quality", 1.5), "quality"),
    ],
)
def test_what_no_gateway_says_is_refused(spoil: Callable[[link_pb2.Origin], object], words: str) -> None:
    frame = link_pb2.Request()
    Origin(("region",)).write_to(frame.origin)
    spoil(frame.origin)
    with pytest.raises(InvalidRequest, match=words):
        originated(CALL, frame, "gateway/region")


def test_a_route_comes_through_and_its_words_can_stand_in_a_header() -> None:
    frame = link_pb2.ServedBy()
    write_route(frame, Route("edge/a", "faster", "int8", attempts=2, hedged=True, degraded=True))
    assert route_of(frame) == Route("edge/a", "faster", "int8", attempts=2, hedged=True, degraded=True)

    frame.target, frame.reason = "edge/\r\nset-cookie: x", "a; variant=fp32" + "x" * 200
    route = route_of(frame)
    assert route.served_by == "edge/set-cookie: x"
    assert ";" not in route.reason
    assert len(route.reason) < 130

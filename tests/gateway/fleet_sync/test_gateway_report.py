"""Reports of gateways to each other survive the way, and what does not fit is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.peers.demand_terms import DemandTerms
from gateway.core.peers.fair_share import QuotaUse
from gateway.core.peers.peers import CloudSpend, PeerReport
from gateway.fleet_sync.gateway_report import MAX_BYTES, decode_report, encode_report
from tidegate.fleet.messages import BadMessage

REPORT = PeerReport({"acme": {"requests": QuotaUse(12.5, 3.0)}}, DemandTerms(1.5, 0.25, 0.5), CloudSpend(0.2, 1.5))


def test_what_is_said_arrives() -> None:
    told = decode_report(encode_report("main", 7, REPORT))
    assert (told.gateway, told.epoch, told.content) == ("main", 7, REPORT)
    assert decode_report(encode_report("main", 7, PeerReport())).content == PeerReport()


@pytest.mark.parametrize(
    "change",
    [
        {"gw": "a/b"},
        {"gepoch": 0},
        {"ask": {"acme": {"requests": [-1.0, 0.0]}}},
        {"ask": {"acme": {"requests": 1.0}}},
        {"ask": {"acme": {"requests": [1e300, 0.0]}}},
        {"ask": {"": {"requests": [1.0, 1.0]}}},
        {"ask": {"x" * 300: {"requests": [1.0, 1.0]}}},
        {"ask": {"acme": {f"k{number}": [1.0, 1.0] for number in range(9)}}},
        {"ask": {f"t{number}": {} for number in range(1025)}},
        {"need": [1.0, 2.0]},
        {"need": [1.0, -2.0, 0.0]},
        {"cloud": [0.1, 0.5]},
        {"cloud": [0.1, 1e9]},
        {"v": 2},
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    message = {**json.loads(encode_report("main", 7, REPORT)), **change}
    with pytest.raises(BadMessage):
        decode_report(json.dumps(message).encode())


@pytest.mark.parametrize("payload", [b"", b"[]", b"\xff", b"[" * 100_000, b" " * (MAX_BYTES + 1), b'{"gw":"a"}'])
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_report(payload)

"""A fallback model stands in for callers that demand nothing of the model itself, and that may use it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec.structs import replace

from gateway.core.versions.fallback_model import may_stand_in
from tests.support.gateway.app import TWO_VARIANTS
from tidegate.caller import Grant, Identity
from tidegate.models.manifest import Stateful
from tidegate.types import Call, InferRequest

OWN = replace(TWO_VARIANTS, name="large", fallback_model="small")
OTHER = replace(TWO_VARIANTS, name="small")
CALL = Call(InferRequest("large", ()), "oip-http", 0.0, 1.0)


def identity(*models: str) -> Identity:
    return Identity("key-1", Grant("acme", models))


@pytest.mark.parametrize(
    ("call", "version", "stands"),
    [
        ({}, "", True),
        ({"variant": "int8"}, "", True),
        ({"pin": "edge"}, "", True),  # placement keeps it for either model
        ({"attested": True}, "", True),
        ({"identity": identity("*")}, "", True),
        ({"identity": identity("large", "small")}, "", True),
        ({"identity": identity("large")}, "", False),
        ({"variant": "bf16"}, "", False),
        ({"min_quality": 0.1}, "", False),
        ({"request": InferRequest("large", (), "3")}, "", False),
        ({}, "3", False),
        ({"path": ("region",)}, "", False),
        ({"protocol": "deferred"}, "", False),
        ({"tokens": cast(Any, object())}, "", False),
    ],
)
def test_what_a_caller_demands_decides(call: dict[str, Any], version: str, stands: bool) -> None:
    assert may_stand_in(replace(CALL, **call), OWN, OTHER, version) is stands


@pytest.mark.parametrize("changes", [{"pin": "edge"}, {"inputs": ()}, {"sequence": Stateful({"a": "b"})}])
def test_a_model_that_takes_or_gives_something_else_never_does(changes: dict[str, Any]) -> None:
    assert not may_stand_in(CALL, OWN, replace(OTHER, **changes), "")

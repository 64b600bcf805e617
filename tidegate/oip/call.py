"""Makes a checked `Call` of a decoded request, with its deadline, its priority and its constraints on the answer.

Both OIP servers and the OpenAI routes turn headers and parameters into a `Call` only here, so that a
budget means the same on every protocol. The instant is taken by the server as the request arrives, before its body is
decoded: decoding is part of the caller's wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from tidegate.models.manifest import Manifest
from tidegate.oip.budget import MAX_BUDGET_S, OPENAI_TIMEOUT_HEADER, budget_s, priority_of
from tidegate.oip.check import checker_of
from tidegate.oip.orca import LOAD_FORMAT_KEY
from tidegate.oip.request_constraints import (
    PIN_KEY,
    REQUIRE_KEY,
    attested_of,
    defer_of,
    min_quality_of,
    pin_of,
    resumes_of,
    variant_of,
)
from tidegate.oip.tenant import tenant_of
from tidegate.oip.token_budgets import TOKEN_BUDGET_ALIASES, token_budgets
from tidegate.trace_context import PARENT_KEY, STATE_KEY
from tidegate.types import Call, InferRequest

HOP_KEY: Final = "tidegate-hop"  # the gateway that passed a call on: a target leaves judging the answer to it
GATEWAY_HOP: Final = "gateway"

_KEPT: Final = frozenset({PARENT_KEY, STATE_KEY, OPENAI_TIMEOUT_HEADER, LOAD_FORMAT_KEY, *TOKEN_BUDGET_ALIASES})
_NEVER_LOST: Final = frozenset({PIN_KEY, REQUIRE_KEY})
_TRACE: Final = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
# What every hop can carry: any other character ends a gRPC call, and half of one is no text to protobuf.
_STATE: Final = re.compile("[ -~]*")
_NO_HEADERS: Final[Mapping[str, str]] = {}


def kept_headers(items: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """The headers or metadata that a layer may need, with lower-case names; of a repeated one the last counts.

    Credentials are not among them: they are read by the guard (`guard.py`) and go no further, into no log and no repr.

    A `traceparent` that is none is dropped, as W3C Trace Context requires: the next service would start a new trace. So
    is a `tracestate` that is none.
    """
    kept: dict[str, str] = {}
    for name, value in items:
        key = name.lower()
        if (key in _KEPT or key.startswith("tidegate-")) and _is_whole(key, value):
            # Of a pin that is sent twice neither value may be lost: both joined are no pin, and are refused. Nor may
            # a requirement be hidden by another.
            kept[key] = f"{kept[key]}, {value}" if key in _NEVER_LOST and key in kept else value
    return kept or _NO_HEADERS


def _is_whole(key: str, value: str) -> bool:
    if key == PARENT_KEY:
        return _TRACE.fullmatch(value) is not None
    return key != STATE_KEY or _STATE.fullmatch(value) is not None


def call_of(
    request: InferRequest,
    manifest: Manifest,
    *,
    protocol: str,
    headers: Mapping[str, str],
    arrived_at: float,
    remaining_s: float | None = None,
    streamed: bool = False,
) -> Call:
    """The checked call.

    Args:
        remaining_s: what is left of the transport's own deadline.
        streamed: the answer goes to an OpenAI client token by token: its read timeout bounds silences, not the whole.

    Raises:
        InvalidRequest: the request, a budget, the priority, a demand or the tenant is wrong.
        ModelNotFound: the manifest is that of another model or version.
    """
    checker = checker_of(manifest)
    checker.check(request)
    parameters = request.parameters
    generative = manifest.generative
    if not headers and not parameters and generative is None:
        deadline = None if remaining_s is None else arrived_at + min(remaining_s, MAX_BUDGET_S)
        return Call(request, protocol, arrived_at, deadline)
    tokens = token_budgets(headers, parameters, generative, streamed=streamed)
    budget = budget_s(_without_timeout(headers) if streamed else headers, parameters, remaining_s)
    variant = variant_of(headers, parameters)
    checker.check_variant(variant)
    return Call(
        request=request,
        protocol=protocol,
        arrived_at=arrived_at,
        deadline=None if budget is None else arrived_at + budget,
        priority=priority_of(parameters),
        variant=variant,
        headers=headers,
        pin=pin_of(headers, parameters),
        min_quality=min_quality_of(headers, parameters),
        tenant=tenant_of(headers, parameters),
        attested=attested_of(headers, parameters),
        defer=defer_of(headers, parameters),
        ttft_s=tokens.ttft_s,
        tpot_s=tokens.tpot_s,
        resumes=resumes_of(headers, parameters),
    )


def came_by_gateway(call: Call) -> bool:
    """Whether a gateway passed the call on to this target, over its link stream or by OIP."""
    return call.protocol == "link" or call.headers.get(HOP_KEY) == GATEWAY_HOP


def _without_timeout(headers: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in headers.items() if name != OPENAI_TIMEOUT_HEADER}

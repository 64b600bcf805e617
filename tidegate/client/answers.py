"""What a call gives: the answer itself and, as an object, what the gateway did for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.oip.reply import (
    ATTESTED_KEY,
    BUDGET_LEFT_KEY,
    CUT_KEY,
    HELPED_BY_KEY,
    LAST_KNOWN_KEY,
    REQUEST_ID_KEY,
    RESUMED_KEY,
    ROUTE_KEY,
    SERVED_BY_KEY,
    SPLIT_KEY,
    TIMING_KEY,
)
from tidegate.oip.request_constraints import VERSION_KEY
from tidegate.oip.unknown_headers import WARNING_KEY

_NO_STAGES: Final[Mapping[str, float]] = {}


@dataclass(frozen=True)
class CallRecord:
    """Where and why an answer was made, as its headers say. Empty texts and None: the server did not say.

    `stages` are seconds by name (admit, queue, link, compute, …). `tidegate explain REQUEST_ID` tells the rest.
    """

    by: str = ""  # edge/NAME or pool/NAME
    reason: str = ""  # cheapest, only, faster, hedge, fallback, escalated, …: docs/headers.md
    variant: str = ""
    version: str = ""
    attempts: int = 1
    hedged: bool = False
    fallback: bool = False
    degraded: bool = False
    provisional: bool = False
    budget_left_s: float | None = None  # negative: it is late
    stages: Mapping[str, float] = field(default_factory=dict)
    resumed: str = ""
    split: str = ""  # where the first half of a cut model was computed
    helped_by: str = ""  # of a device that was asked: the gateway or neighbour that it had answer, and why
    last_known: str = ""  # how old an answer is that was given since nothing else was to be had, and to what
    cut: str = ""
    attested: str = ""
    request_id: str = ""
    warning: str = ""


def call_record(words: Mapping[str, str]) -> CallRecord:
    """What the headers (or the last event of a stream) tell. What cannot be read counts as not said."""
    reason, told = _route(words.get(ROUTE_KEY, ""))
    return CallRecord(
        by=words.get(SERVED_BY_KEY, ""),
        reason=reason,
        variant=told.get("variant", ""),
        version=words.get(VERSION_KEY, ""),
        attempts=int(_number(told.get("attempts")) or 1),
        hedged=told.get("hedged") == "1",
        fallback=told.get("fallback") == "1",
        degraded=told.get("degraded") == "1",
        provisional=told.get("provisional") == "1",
        budget_left_s=_seconds(words.get(BUDGET_LEFT_KEY)),
        stages=_stages(words.get(TIMING_KEY, "")),
        resumed=words.get(RESUMED_KEY, ""),
        split=words.get(SPLIT_KEY, ""),
        helped_by=words.get(HELPED_BY_KEY, ""),
        last_known=words.get(LAST_KNOWN_KEY, ""),
        cut=words.get(CUT_KEY, ""),
        attested=words.get(ATTESTED_KEY, ""),
        request_id=words.get(REQUEST_ID_KEY, ""),
        warning=words.get(WARNING_KEY, ""),
    )


@dataclass(frozen=True)
class EmbeddingsAnswer:
    """Vectors in the order of the texts."""

    vectors: NDArray[np.float32]  # float32[texts, dimensions]
    tokens: int
    served: CallRecord


@dataclass(frozen=True)
class InferenceAnswer:
    """A model's outputs by name; `answer["logits"]` is an array."""

    outputs: Mapping[str, NDArray[Any]]
    model_version: str
    served: CallRecord

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.outputs[name]


@dataclass(frozen=True)
class TextAnswer:
    """A text that a model wrote. `finish_reason`: stop, length, tool_calls, …"""

    text: str
    finish_reason: str
    usage: Mapping[str, int]  # prompt_tokens, completion_tokens, total_tokens
    served: CallRecord
    tool_calls: tuple[Mapping[str, Any], ...] = ()


def _route(text: str) -> tuple[str, dict[str, str]]:
    reason, *told = text.split("; ")
    return reason, {name: value for name, _, value in (one.partition("=") for one in told)}


def _stages(text: str) -> Mapping[str, float]:
    """Of Server-Timing, `queue;dur=0.1, compute;dur=6.3`; entries without a duration are left out."""
    if not text:
        return _NO_STAGES
    found = {}
    for entry in text.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "dur" and (taken_s := _seconds(value)) is not None:
                found[name] = taken_s
    return found


def _seconds(milliseconds: str | None) -> float | None:
    value = _number(milliseconds)
    return None if value is None else value / 1e3


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None

"""A target's load beside its answer, in the two readable forms of ORCA.

A caller with plain unary calls learns as much as one with a link stream: the trailer (HTTP: header)
`endpoint-load-metrics` of each answer is the same report as a `Load` frame. It comes as text unless the caller asks for
JSON with `endpoint-load-metrics-format: json`, as for Triton or vLLM; unlike theirs it comes without a request, too,
since it is cheap and a gateway always wants it.

    TEXT named_metrics.tidegate_epoch=17, named_metrics.tidegate_sequence=4, named_metrics.tidegate_queued=2, …
    JSON {"named_metrics":{"tidegate_epoch":17,"tidegate_sequence":4,"tidegate_queued":2,…}}

Everything is a named metric, since ORCA's own fields are shares of a machine that we do not measure.

Source: ORCA open request cost aggregation (xDS), "inline per-request reports"; Triton's "ORCA header metrics".
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

import msgspec

from tidegate.types import LoadReport

LOAD_KEY: Final = "endpoint-load-metrics"
LOAD_FORMAT_KEY: Final = "endpoint-load-metrics-format"

_FIELDS: Final = ("epoch", "sequence", "queued", "in_flight", "queue_delay_s")
_MAP: Final = "named_metrics"
_OWN: Final = "tidegate_"
_TEXT: Final = "TEXT "
_JSON: Final = "JSON "


def load_text(load: LoadReport, form: str = "text") -> str:
    """The trailer's value; a form that is unknown is answered in text, as a wish and not a demand."""
    if form.strip().lower() == "json":
        named = {_OWN + field: getattr(load, field) for field in _FIELDS}
        return _JSON + msgspec.json.encode({_MAP: named}).decode()
    return _TEXT + ", ".join([f"{_MAP}.{_OWN}{field}={getattr(load, field)}" for field in _FIELDS])


def load_from_text(text: str) -> LoadReport | None:
    """The load that a target reports in either form; None if it is foreign or damaged: a report is only advice."""
    found = _json_metrics(text.removeprefix(_JSON)) if text.startswith(_JSON) else _text_metrics(text)
    try:
        epoch, sequence, queued, in_flight = (int(found[_OWN + field]) for field in _FIELDS[:4])
        queue_delay_s = float(found[_OWN + "queue_delay_s"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if min(epoch, sequence, queued, in_flight) < 0 or not isfinite(queue_delay_s) or queue_delay_s < 0:
        return None
    return LoadReport(epoch, sequence, queued, in_flight, queue_delay_s)


def _text_metrics(text: str) -> Mapping[str, Any]:
    pairs = [part.strip().partition("=") for part in text.removeprefix(_TEXT).split(",")]
    return {name.removeprefix(f"{_MAP}."): value for name, _, value in pairs}


def _json_metrics(text: str) -> Mapping[str, Any]:
    try:
        named = msgspec.json.decode(text, type=dict[str, Any]).get(_MAP)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return {}
    return named if isinstance(named, dict) else {}

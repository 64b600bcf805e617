"""The cache key is a digest of everything in a request that may change its answer.

    model, version as it is demanded, its manifest                      what is asked for
    variant, least quality, pin                                         what may answer it
    tenant                                                              whose answer it is; "" where tenants share
    inputs: names, datatypes, shapes, parameters, contents              what is asked
    outputs with their parameters, parameters of the request            how it is answered

Left out is what changes only when, where and for whom an answer is computed: the request's id, budgets, priority,
trace. Everything else counts, also a parameter that nothing here knows: two keys for one answer cost a computation, one
key for two answers would be wrong. The order of inputs counts for the same reason.

`uncacheable` names why a request cannot have a key at all. A generation that is drawn by chance has another answer each
time; one with a seed, or at temperature 0, has not.

The digest is SHA-256: callers choose the contents, so that a key must not be forgeable.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import msgspec

from tidegate.generate.request import SEED_KEY, TEMPERATURE_KEY
from tidegate.models.manifest import Manifest
from tidegate.types import DEFERRED, Call, Parameters

_NEUTRAL: Final = frozenset({"priority", "timeout", "traceparent", "tracestate"})
_OURS: Final = "tidegate-"  # what they demand is in the call already
_SEQUENCE: Final = "sequence_id"
_ENCODER: Final = msgspec.msgpack.Encoder()


def cache_key(call: Call, version: str, *, mark: str, tenant: str) -> bytes | None:
    """The key of a request; None of one whose words cannot be encoded.

    Args:
        version: as the caller demands it; "" takes any.
        mark: of the manifest that the request was checked against (`manifest_mark`).
        tenant: "" where tenants share answers.
    """
    request = call.request
    words = (
        request.model_name,
        version,
        mark,
        call.variant,
        call.min_quality,
        call.pin,
        tenant,
        [(one.name, one.datatype.value, one.shape, _sorted(one.parameters), len(one.raw)) for one in request.inputs],
        [(one.name, _sorted(one.parameters)) for one in request.outputs],
        [one for one in _sorted(request.parameters) if one[0] not in _NEUTRAL and not one[0].startswith(_OURS)],
    )
    try:
        digest = sha256(_ENCODER.encode(words))
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    for tensor in request.inputs:
        digest.update(tensor.raw)  # each with its length among the words, so that no two splits are alike
    return digest.digest()


def series_key(call: Call, version: str, *, mark: str, tenant: str, series: str) -> bytes | None:
    """The key of the newest answer in a series of requests: as `cache_key`, by the series instead of the inputs."""
    named = msgspec.structs.replace(call.request, inputs=())
    return cache_key(msgspec.structs.replace(call, request=named), version, mark=mark, tenant=f"{tenant}\0{series}")


def uncacheable(call: Call, manifest: Manifest, max_input_bytes: float) -> str:
    """Why an answer to this request is neither kept nor given from what is kept; "" where it may be."""
    request = call.request
    parameters = request.parameters
    if call.attested or manifest.require is not None:
        return "attested"
    if manifest.sequence is not None or _SEQUENCE in parameters:
        return "sequence"
    if call.path and not call.asker:
        return "upstream"  # it asks to learn how fast this site is; its own cache knows the answer as well
    if call.protocol == DEFERRED:
        return "deferred"  # its tenant is not known, so that tenants would share its answer
    if call.tokens is not None or request.text is not None:
        return "streamed"
    if manifest.generative is not None and not is_repeatable(parameters):
        return "chance"
    if not all(one.sha256 for one in manifest.variants):
        return "foreign"  # nothing would tell that another server has changed what it serves
    if sum([len(tensor.raw) for tensor in request.inputs]) > max_input_bytes:
        return "large"
    return ""


def is_repeatable(parameters: Parameters) -> bool:
    """Whether a generation would give the same tokens again."""
    temperature = parameters.get(TEMPERATURE_KEY, 0.0)
    greedy = not isinstance(temperature, str) and float(temperature) == 0.0
    return greedy or SEED_KEY in parameters


def manifest_mark(manifest: Manifest) -> str:
    """A digest of a manifest, which names its artefacts by theirs: another one is another model, whatever its name."""
    return sha256(_ENCODER.encode(manifest)).hexdigest()


def _sorted(parameters: Parameters) -> list[tuple[str, object]]:
    return sorted(parameters.items()) if parameters else []

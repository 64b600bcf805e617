"""Whether a fallback model may stand in for a call whose own model found no target in time.

Never where its caller demands something of the model itself: a version, or a quality, which is measured against each
model's own reference and compares no two models. A demanded variant it must have. A step of a sequence has its state at
the model's own target, a stream may have begun, a request of another gateway falls
back there, and a deferred one can wait for its own model. A caller needs the
right to use the fallback model as well.

Pure.
"""

from __future__ import annotations

from tidegate.models.alike import interchangeable
from tidegate.models.manifest import Manifest
from tidegate.types import DEFERRED, Call


def may_stand_in(call: Call, own: Manifest, other: Manifest, demanded_version: str) -> bool:
    """Whether the other model may answer the call.

    Args:
        demanded_version: by a header; "" for none.
    """
    if call.request.model_version or demanded_version or call.min_quality > 0.0:
        return False
    if call.tokens is not None or call.path or call.protocol == DEFERRED or other.sequence is not None:
        return False
    if call.variant and other.variant(call.variant) is None:
        return False
    if call.identity is not None and not call.identity.may_use(other.name):
        return False
    return interchangeable(own, other)

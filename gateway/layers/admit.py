"""Refuse a call the moment it is clear that there is no room for it: the enforcement of `core/admission/admission.py`.

Nothing is decided here. A call that was admitted releases its place again, however the call ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from zlib import crc32

from gateway.core.access.entitlement import second_payer
from gateway.core.admission.admission import Admission, AdmissionRequest
from gateway.layers.stack import Layer, Service
from tidegate.types import Call, InferRequest, Reply

_READ_BYTES: Final = 4096  # of each tensor: enough to tell requests apart, little enough to cost nothing


def admit(
    admission: Admission, now: Callable[[], float], share_of: Callable[[InferRequest], float] = lambda _request: 1.0
) -> Layer:
    """Args:
    share_of: the weight of the request's model; asked only while requests are shed.
    """

    def layer(inner: Service) -> Service:
        async def service(call: Call) -> Reply:
            entered_at = now()
            asked = AdmissionRequest(
                call.tenant,
                call.priority,
                lambda: fingerprint(call.request),
                lambda: share_of(call.request),
                second_payer(call),
            )
            quota = admission.tenants.paying(call.tenant, asked.also_pays)
            refusal = admission.enter(asked, entered_at)
            if refusal is not None:
                raise refusal
            try:
                return await inner(call)
            finally:
                admission.leave_quota(quota, now() - entered_at)

        return service

    return layer


def fingerprint(request: InferRequest) -> int:
    """What is asked, as a number that a retry shares: request ids may be new, contents are not."""
    found = crc32(request.model_name.encode())
    for tensor in request.inputs:
        found = crc32(memoryview(tensor.raw)[:_READ_BYTES], found)
    return found

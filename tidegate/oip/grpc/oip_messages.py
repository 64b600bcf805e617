"""The OIP message of a request, and of its answer, as bytes: shared by all transports to a target.

What comes back is checked for being an answer to this very request, so that a target that mixes up its callers is
found out here and not by a caller.
"""

from __future__ import annotations

from tidegate.oip.grpc.codec import message_from_request
from tidegate.oip.grpc.codec import response_from_bytes as answer_from_bytes
from tidegate.outcome import BadAnswer
from tidegate.types import InferRequest, InferResponse


def request_bytes(request: InferRequest) -> bytes:
    return message_from_request(request).SerializeToString()


def response_from_bytes(raw: bytes, request: InferRequest) -> InferResponse:
    """Raises BadAnswer for what is no answer to `request`."""
    response = answer_from_bytes(raw)
    # Not every server repeats the model and the id, but one that does must repeat ours.
    if response.model_name not in ("", request.model_name):
        raise BadAnswer(f"asked {request.model_name}, answered by {response.model_name}")
    if response.id not in ("", request.id):
        raise BadAnswer("the answer carries the id of another request")
    return response

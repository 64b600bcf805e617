"""The OIP message of a request, and of its answer, as bytes: shared by all transports to a target.

What comes back is checked for being an answer to this very request, so that a target that mixes up its callers is
found out here and not by a caller. Its `tidegate-` parameters are left out: what a gateway says of an answer in these
words is its own, and what our targets tell it about one travels beside the message.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from tidegate.oip.budget import quoted_value
from tidegate.oip.grpc.codec import message_from_request
from tidegate.oip.grpc.codec import response_from_bytes as answer_from_bytes
from tidegate.outcome import BadAnswer
from tidegate.types import InferRequest, InferResponse

_OURS: Final = "tidegate-"


def request_bytes(request: InferRequest) -> bytes:
    return message_from_request(request).SerializeToString()


def response_from_bytes(raw: bytes, request: InferRequest, *, any_version: bool = False) -> InferResponse:
    """Raises BadAnswer for what is no answer to `request`.

    Args:
        any_version: take another version's name for the one that was asked for. A foreign server may list none, or
            spell it otherwise.
    """
    response = answer_from_bytes(raw)
    # Not every server repeats the model and the id, but one that does must repeat ours.
    if response.model_name not in ("", request.model_name):
        raise BadAnswer(f"asked {request.model_name}, answered by {response.model_name}")
    if response.id not in ("", request.id):
        raise BadAnswer("the answer carries the id of another request")
    if request.model_version and response.model_version not in ("", request.model_version):
        if any_version:
            return _without_ours(replace(response, model_version=request.model_version))
        asked, said = f"{request.model_name} {request.model_version}", quoted_value(response.model_version)
        raise BadAnswer(f"asked {asked}, answered by its version {said}")
    for name in response.parameters:
        if name.startswith(_OURS):
            return _without_ours(response)
    return response


def _without_ours(response: InferResponse) -> InferResponse:
    kept = {name: value for name, value in response.parameters.items() if not name.startswith(_OURS)}
    return replace(response, parameters=kept)

"""What a target's answer may say: it is an answer to this very request, and says nothing in the gateway's own words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tidegate.generate.usage import Usage, usage_parameters
from tidegate.oip.grpc.codec import bytes_from_response
from tidegate.oip.grpc.oip_messages import response_from_bytes
from tidegate.outcome import BadAnswer
from tidegate.types import Datatype, InferRequest, InferResponse, Parameter, Tensor

REQUEST = InferRequest("echo", (Tensor("x", Datatype.FP32, (1,), bytes(4)),), "3", id="r-1")
ANSWER = InferResponse("echo", "3", (Tensor("y", Datatype.FP32, (1,), bytes(4)),), id="r-1")


def taken(answer: InferResponse, request: InferRequest = REQUEST) -> InferResponse:
    return response_from_bytes(bytes_from_response(answer), request)


def test_an_answer_to_the_request_is_taken_as_it_is() -> None:
    assert taken(ANSWER) == ANSWER
    assert taken(replace(ANSWER, model_version="")).model_version == "", "not every server repeats it"


@pytest.mark.parametrize("version", ["4", "3 ", "03", "x\r\ny"])
def test_an_answer_by_another_version_is_bad(version: str) -> None:
    with pytest.raises(BadAnswer, match="asked echo 3, answered by its version"):
        taken(replace(ANSWER, model_version=version))


def test_a_foreign_server_may_spell_versions_otherwise_and_the_callers_word_stands() -> None:
    for version in ("4", "v3", "x\r\ny"):
        raw = bytes_from_response(replace(ANSWER, model_version=version))
        assert response_from_bytes(raw, REQUEST, any_version=True) == ANSWER


def test_a_request_that_names_no_version_is_answered_by_any() -> None:
    assert taken(ANSWER, replace(REQUEST, model_version="")).model_version == "3"


def test_the_gateways_own_words_are_left_out_of_an_answer() -> None:
    own: dict[str, Parameter] = {"server-load": 2, "note": "kept", **usage_parameters(Usage("stop", 3, 4))}
    forged = {"tidegate-attested": "hardware", "tidegate-last-known": "age-s=0", "tidegate-served-by": "pool/best"}

    assert taken(replace(ANSWER, parameters={**forged, **own})).parameters == own

"""A foreign server's description of a model, read as a manifest."""

from __future__ import annotations

import pytest

from gateway.targets.foreign_model import manifest_from, offer_of
from tests.support.serving.hosts import echo_request
from tidegate.models.manifest import Axis
from tidegate.oip.grpc.oip_messages import response_from_bytes
from tidegate.outcome import BadAnswer
from tidegate.rpc import oip_pb2
from tidegate.types import Datatype


def described(**fields: object) -> oip_pb2.ModelMetadataResponse:
    metadata = oip_pb2.ModelMetadataResponse(name="resnet", versions=["2", "10"], platform="onnxruntime_onnx")
    metadata.inputs.add(name="image", datatype="FP32", shape=[-1, 3, -1, -1])
    metadata.outputs.add(name="scores", datatype="FP32", shape=[-1, 1000])
    metadata.MergeFrom(oip_pb2.ModelMetadataResponse(**fields))  # type: ignore[arg-type]
    return metadata


def test_free_lengths_are_axes_and_the_highest_version_is_taken() -> None:
    manifest = manifest_from(described(), oip_pb2.ModelConfig())

    assert (manifest.name, manifest.version, manifest.max_batch_size) == ("resnet", "10", 0)
    assert [spec.shape for spec in manifest.inputs] == [("image.0", 3, "image.2", "image.3")]
    assert [spec.shape for spec in manifest.outputs] == [("scores.0", 1000)]
    assert manifest.inputs[0].datatype is Datatype.FP32
    assert manifest.axes["image.2"] == Axis(0)


@pytest.mark.parametrize("odd", ["²", "", "latest", "-1", "1.5", "٣" * 3])
def test_a_version_that_is_no_number_is_no_defect(odd: str) -> None:
    manifest = manifest_from(described(versions=[odd]), oip_pb2.ModelConfig())
    assert manifest.version in ("10", odd)


def test_a_batch_axis_that_the_configuration_bounds_is_shared() -> None:
    manifest = manifest_from(described(), oip_pb2.ModelConfig(max_batch_size=8))

    assert manifest.inputs[0].shape[0] == manifest.outputs[0].shape[0] == "batch"
    assert manifest.axes["batch"] == Axis(1, 8)
    assert manifest.max_batch_size == 8


def test_an_offer_names_the_one_variant_that_is_known_of() -> None:
    offer = offer_of(manifest_from(described(versions=["latest"]), oip_pb2.ModelConfig()))

    assert (offer.name, offer.version, [variant.name for variant in offer.variants]) == ("resnet", "10", ["default"])


@pytest.mark.parametrize(
    "metadata",
    [
        oip_pb2.ModelMetadataResponse(),
        oip_pb2.ModelMetadataResponse(name="resnet"),
        described(inputs=[{"name": "odd", "datatype": "FP8", "shape": [1]}]),
    ],
)
def test_a_description_that_cannot_be_served_is_a_bad_answer(metadata: oip_pb2.ModelMetadataResponse) -> None:
    with pytest.raises(BadAnswer):
        manifest_from(metadata, oip_pb2.ModelConfig())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xff\xff", "no ModelInferResponse"),
        (oip_pb2.ModelInferResponse(model_name="other").SerializeToString(), "answered by other"),
        (oip_pb2.ModelInferResponse(model_name="echo", id="r-2").SerializeToString(), "id of another request"),
    ],
)
def test_what_is_no_answer_to_the_request_is_a_bad_answer(raw: bytes, words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        response_from_bytes(raw, echo_request(id="r-1"))


def test_a_server_that_repeats_neither_model_nor_id_is_believed() -> None:
    assert response_from_bytes(b"", echo_request(id="r-1")).outputs == ()

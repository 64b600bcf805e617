"""Two artefacts are one model, or the error names what differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidegate.models.manifest import Bounds
from tidegate.tools.build.agree import agreed_signature, disagreements
from tidegate.tools.build.inspect.signature import Dimension, ModelSignature, SignaturePort
from tidegate.types import Datatype


def ids(*shape: Dimension, bounds: Bounds | None = None) -> SignaturePort:
    return SignaturePort("ids", Datatype.INT64, shape, bounds)


def signature(
    source: str, *inputs: SignaturePort, output: tuple[Dimension, ...] = ("batch", 4), **more: object
) -> ModelSignature:
    return ModelSignature(source, inputs, (SignaturePort("vector", Datatype.FP32, output),), "fp32", **more)  # type: ignore[arg-type]


EDGE = signature("e.onnx", ids("batch", "sequence"), SignaturePort("mask", Datatype.INT64, ("batch", "sequence")))
POOL = ModelSignature(
    "p.pt2",
    (SignaturePort("mask", Datatype.INT64, ("s1", "s2")), ids("s1", "s2", bounds=Bounds(0, 99))),
    (SignaturePort("", Datatype.FP32, ("s1", 4)),),
    "fp32",
    {"s1": (1, None), "s2": (2, 256)},
)


def test_artefacts_agree_whatever_the_order_of_their_inputs_and_the_names_of_their_symbols() -> None:
    assert disagreements([EDGE, POOL]) == ()


def test_the_model_has_the_names_of_onnx_and_the_ranges_and_bounds_of_the_program() -> None:
    model = agreed_signature([EDGE, POOL])
    assert [(spec.name, spec.shape) for spec in model.inputs] == [
        ("ids", ("batch", "sequence")),
        ("mask", ("batch", "sequence")),
    ]
    assert [(spec.name, spec.shape) for spec in model.outputs] == [("vector", ("batch", 4))]
    assert model.axes == {"batch": (1, None), "sequence": (2, 256)}
    assert model.inputs[0].bounds == Bounds(0, 99)


def test_a_program_alone_gets_names_of_ours() -> None:
    model = agreed_signature([POOL])
    assert model.inputs[0].shape == ("batch", "mask_1")
    assert model.outputs[0].name == "output"
    assert model.axes == {"batch": (1, None), "mask_1": (2, 256)}


def test_several_outputs_without_names_are_numbered_and_may_be_named() -> None:
    two = replace(
        POOL, outputs=(SignaturePort("", Datatype.FP32, ("s1",)), SignaturePort("", Datatype.FP32, ("u0", 3)))
    )
    assert [spec.name for spec in agreed_signature([two]).outputs] == ["output_0", "output_1"]
    assert [spec.name for spec in agreed_signature([two], ["a", "b"]).outputs] == ["a", "b"]
    assert agreed_signature([two]).outputs[1].shape == ("output_1_0", 3)


def test_dimensions_without_a_name_are_axes_of_their_own() -> None:
    model = agreed_signature([signature("e.onnx", ids(None, None), output=(None, 4))])
    assert model.inputs[0].shape == ("batch", "ids_1")
    assert model.outputs[0].shape == ("vector_0", 4)


def test_one_name_for_two_different_axes_gets_a_number() -> None:
    model = agreed_signature([signature("e.onnx", ids(None, "batch"), output=("batch", 4))])
    assert model.inputs[0].shape == ("batch", "batch_2")
    assert model.outputs[0].shape == ("batch_2", 4)


def test_a_fixed_output_length_that_one_file_forgot_is_taken_from_the_other() -> None:
    forgetful = signature("e.onnx", ids("batch", "sequence"), output=("batch", "anything"))
    exact = signature("p.pt2", ids("s1", "s2"), output=("s1", 4))
    assert disagreements([forgetful, exact]) == ()
    assert agreed_signature([forgetful, exact]).outputs[0].shape == ("batch", 4)


def test_bounds_are_what_all_artefacts_accept() -> None:
    one, two = (signature(name, ids("b", bounds=Bounds(low, high))) for name, low, high in (("a", 0, 9), ("b", 1, 5)))
    assert agreed_signature([one, two]).inputs[0].bounds == Bounds(1, 5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (signature("p.pt2", ids("b", "s")), "e.onnx takes ids, mask, but p.pt2 takes ids"),
        (replace(POOL, outputs=()), "e.onnx gives 1 outputs, but p.pt2 gives 0"),
        (
            replace(POOL, inputs=(POOL.inputs[0], SignaturePort("ids", Datatype.INT32, ("s1", "s2")))),
            "input 'ids' is INT64 in e.onnx, but INT32 in p.pt2",
        ),
        (replace(POOL, inputs=(POOL.inputs[0], ids("s1"))), "input 'ids' has 2 dimensions in e.onnx, but 1 in p.pt2"),
        (
            replace(POOL, inputs=(POOL.inputs[0], ids("s1", 128))),
            "input 'ids', dimension 1: variable in e.onnx, but fixed to 128 in p.pt2",
        ),
        (
            replace(POOL, outputs=(SignaturePort("", Datatype.FP32, ("s1", 5)),)),
            "output 'vector', dimension 1: fixed to 4 in e.onnx, but fixed to 5 in p.pt2",
        ),
    ],
)
def test_what_disagrees_is_named_with_both_files(other: ModelSignature, message: str) -> None:
    assert disagreements([EDGE, other]) == (message,)

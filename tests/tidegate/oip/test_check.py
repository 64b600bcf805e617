"""A request against its manifest: what passes, what is refused, and the text of the refusal."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from msgspec.structs import replace

from tests.support.serving.host import digits, minilm, mirror
from tidegate.models.manifest import Axis, Bounds, Cost, Manifest, TensorSpec
from tidegate.oip.check import Checker, check, checker_of, quoted_input
from tidegate.outcome import InvalidRequest, ModelNotFound
from tidegate.types import Datatype, InferRequest, RequestedOutput, Tensor


def tensor(name: str, array: Any, datatype: Datatype = Datatype.INT64) -> Tensor:
    values = np.asarray(array, dtype=datatype.numpy_name)
    return Tensor(name, datatype, values.shape, values.tobytes())


def text_request(ids: Any = ((101, 7592, 102),), mask: Any = None, **changes: Any) -> InferRequest:
    mask = np.ones_like(np.asarray(ids)) if mask is None else mask
    request = InferRequest("minilm", (tensor("input_ids", ids), tensor("attention_mask", mask)))
    return replace(request, **changes)


def refusal(request: InferRequest, manifest: Manifest) -> str:
    with pytest.raises(InvalidRequest) as refused:
        check(request, manifest)
    return refused.value.message


@pytest.mark.parametrize(
    "request_",
    [
        text_request(),
        text_request(np.zeros((1, 1))),
        text_request(np.full((64, 256), 30521)),
        text_request(mask=[[0, 0, 0]]),
        text_request(model_version="1"),
        text_request(outputs=(RequestedOutput("sentence_embedding"),)),
        text_request(inputs=tuple(reversed(text_request().inputs))),
    ],
)
def test_what_the_manifest_allows_passes(request_: InferRequest) -> None:
    check(request_, minilm())


IDS, MASK = text_request().inputs


@pytest.mark.parametrize(("request_", "words"), [
    (text_request(inputs=(IDS,)), "missing input 'attention_mask'; .* takes: input_ids, attention_mask"),
    (text_request(inputs=()), "missing input 'attention_mask', 'input_ids'"),
    (text_request(inputs=(IDS, MASK, MASK)), "'attention_mask' came more than once"),
    (text_request(inputs=(IDS, IDS)), "missing input 'attention_mask'"),
    (text_request(inputs=(IDS, MASK, replace(MASK, name="token_type_ids"))), "unknown input 'token_type_ids'"),
    (text_request(inputs=(IDS, tensor("attention_mask", [[1, 1, 1]], Datatype.INT32))), "must be INT64, got INT32"),
    (text_request([101, 102]), r"must have 2 dimensions \[batch, sequence\], got \[2\]"),
    (text_request([[[101]]]), r"must have 2 dimensions .*, got \[1, 1, 1\]"),
    (text_request(np.zeros((1, 0))), "axis 'sequence' must be 1 to 256, got 0"),
    (text_request(np.zeros((1, 5000))), "axis 'sequence' must be 1 to 256, got 5000"),
    (text_request(np.zeros((65, 1))), "axis 'batch' must be 1 to 64, got 65"),
    (text_request(mask=[[1, 1]]), "axis 'sequence' is 2 here but 3"),
    (text_request([[101, -1, 102]]), r"element \[0, 1\] is -1, allowed is 0 to 30521"),
    (text_request([[101, 30522, 102]]), r"element \[0, 1\] is 30522"),
    (text_request(mask=[[1, 1, 2]]), r"'attention_mask': element \[0, 2\] is 2, allowed is 0 to 1"),
    (text_request(inputs=(replace(IDS, raw=IDS.raw[:-1]), MASK)), "needs 24 bytes, got 23"),
    (text_request(inputs=(replace(IDS, raw=b""), MASK)), "needs 24 bytes, got 0"),
    (text_request(inputs=(replace(IDS, shape=(1, 4)), MASK)), "needs 32 bytes, got 24"),
    (text_request(inputs=(replace(IDS, shape=(-1, 3)), MASK)), "axis 'batch' must be 1 to 64, got -1"),
    (text_request(outputs=(RequestedOutput("logits"),)), "unknown output 'logits'; .* gives: sentence_embedding"),
    (text_request(outputs=(RequestedOutput("sentence_embedding"),) * 2), "asked for more than once"),
    (text_request(id="x" * 1025), "id has 1025 characters"),
])  # fmt: skip
def test_what_it_does_not_allow_is_refused_by_name(request_: InferRequest, words: str) -> None:
    assert re.search(words, refusal(request_, minilm()))


def test_another_model_or_version_is_not_found() -> None:
    with pytest.raises(ModelNotFound):
        check(text_request(model_name="other"), minilm())
    with pytest.raises(ModelNotFound):
        check(text_request(model_version="2"), minilm())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.001, 1.001])
def test_numbers_outside_of_any_bounds_are_refused(value: float) -> None:
    image = np.zeros((1, 1, 8, 8))
    image[0, 0, 3, 4] = value
    request = InferRequest("digits", (tensor("image", image, Datatype.FP32),))
    assert "element [0, 0, 3, 4] is" in refusal(request, digits())


def test_a_fixed_dimension_must_be_what_it_is() -> None:
    request = InferRequest("digits", (tensor("image", np.zeros((1, 3, 8, 8)), Datatype.FP32),))
    assert "a fixed dimension must be 1, got 3" in refusal(request, digits())


def one_input(datatype: Datatype, bounds: Bounds | None) -> Manifest:
    return Manifest(
        name="one",
        version="1",
        inputs=(TensorSpec("x", datatype, ("n",), bounds),),
        outputs=(),
        variants=(),
        cost=Cost("items", "x"),
        axes={"n": Axis(min=0)},
    )


@pytest.mark.parametrize(("datatype", "bits", "allowed"), [
    (Datatype.BF16, [0x3F80, 0x0000], True),  # 1.0, 0.0
    (Datatype.BF16, [0x3F80, 0x4000], False),  # 2.0
    (Datatype.BF16, [0x7FC0, 0x0000], False),  # NaN
    (Datatype.BF16, [0xBF80, 0x0000], False),  # -1.0
    (Datatype.FP16, [0x3C00, 0x0000], True),
    (Datatype.FP16, [0x7E00, 0x0000], False),
])  # fmt: skip
def test_half_precision_is_bounded_by_its_value_and_not_by_its_bits(
    datatype: Datatype, bits: list[int], allowed: bool
) -> None:
    request = InferRequest("one", (Tensor("x", datatype, (2,), np.array(bits, "<u2").tobytes()),))
    manifest = one_input(datatype, Bounds(0, 1))
    if allowed:
        check(request, manifest)
    else:
        assert "allowed is 0 to 1" in refusal(request, manifest)


def test_a_boolean_is_zero_or_one_and_no_other_byte() -> None:
    manifest = one_input(Datatype.BOOL, None)
    check(InferRequest("one", (Tensor("x", Datatype.BOOL, (2,), b"\x00\x01"),)), manifest)
    assert "element [1] is 2" in refusal(
        InferRequest("one", (Tensor("x", Datatype.BOOL, (2,), b"\x00\x02"),)), manifest
    )


def test_byte_strings_are_counted() -> None:
    manifest = one_input(Datatype.BYTES, None)
    raw = struct.pack("<I", 2) + b"hi" + struct.pack("<I", 0)
    check(InferRequest("one", (Tensor("x", Datatype.BYTES, (2,), raw),)), manifest)
    assert "needs 3 elements, got 2" in refusal(
        InferRequest("one", (Tensor("x", Datatype.BYTES, (3,), raw),)), manifest
    )
    assert "runs past the end" in refusal(InferRequest("one", (Tensor("x", Datatype.BYTES, (2,), raw[:-1]),)), manifest)


@pytest.mark.slow
@given(
    st.sampled_from([Datatype.INT8, Datatype.INT32, Datatype.INT64, Datatype.UINT8, Datatype.UINT64]).flatmap(
        lambda datatype: st.tuples(
            st.just(datatype), stn.arrays(np.dtype(datatype.numpy_name), st.integers(0, 20)),
        )
    ),
    st.integers(-3, 3),
    st.integers(0, 100),
)  # fmt: skip
def test_bounds_hold_exactly_for_every_integer_type(
    typed: tuple[Datatype, np.ndarray[Any, Any]], low: int, high: int
) -> None:
    datatype, values = typed
    request = InferRequest("one", (tensor("x", values, datatype),))
    inside = all(low <= int(value) <= high for value in values)
    manifest = one_input(datatype, Bounds(low, high))
    if inside:
        check(request, manifest)
    else:
        refusal(request, manifest)


def test_a_tensor_that_lies_askew_in_its_buffer_is_read_all_the_same() -> None:
    buffer = memoryview(b"abc" + np.array([[1, 2, 3]], "<i8").tobytes())[3:]
    check(text_request(inputs=(replace(IDS, raw=buffer), MASK)), minilm())


def test_optional_inputs_may_stay_away() -> None:
    check(InferRequest("mirror", (tensor("in_FP32", [1.0], Datatype.FP32),)), mirror())


def test_a_variant_is_known_by_its_name() -> None:
    checker = checker_of(minilm())
    checker.check_variant("")
    checker.check_variant("fp32")
    with pytest.raises(InvalidRequest, match="no variant 'fp64'; its variants are: int8, fp32"):
        checker.check_variant("fp64")


def test_a_manifest_is_compiled_once_and_only_so_many_are_kept() -> None:
    manifest = minilm()
    assert checker_of(manifest) is checker_of(manifest)
    others = [checker_of(minilm()) for _ in range(300)]
    assert len({id(checker) for checker in others}) == 300
    assert isinstance(checker_of(manifest), Checker)


def test_a_value_from_the_network_is_shown_escaped_and_never_long() -> None:
    assert quoted_input("a\nb\x00") == r"'a\nb\x00'"
    assert len(quoted_input("x" * 10_000_000)) == 80
    assert repr(Checker(minilm())) == "<Checker minilm:1 2 inputs>"


@pytest.mark.parametrize("tokens", [1, 64, 65, 256])
@pytest.mark.parametrize("wrong", [-1, 30522, -(2**63), 2**63 - 1])
def test_a_value_out_of_bounds_is_found_in_short_and_in_long_rows(tokens: int, wrong: int) -> None:
    ids = np.full((1, tokens), 30521)
    check(text_request(ids), minilm())
    ids[0, -1] = wrong
    assert f"element [0, {tokens - 1}] is {wrong}" in refusal(text_request(ids), minilm())

"""OpenAI's embeddings request, cut into calls and put together again."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.serving.host import digits, minilm
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.models.manifest import Batching
from tidegate.openai.embeddings import (
    CALL_COST_TOKENS,
    MAX_INPUTS,
    EmbeddingsRequest,
    TokenRow,
    answer,
    check_dimensions,
    group_limits,
    groups,
    infer_request,
    parse,
    text_of,
    token_rows,
    vectors,
)
from tidegate.openai.wrong_parameter import WrongParameter
from tidegate.outcome import BadAnswer, InvalidRequest, TooLarge
from tidegate.types import Datatype, InferResponse, Tensor


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "minilm", **fields})


@pytest.mark.parametrize(("given_", "texts", "tokens"), [
    ("hello", ("hello",), ()),
    (["a", "b"], ("a", "b"), ()),
    ([101, 102], (), ((101, 102),)),
    ([[101], [102, 103]], (), ((101,), (102, 103))),
])  # fmt: skip
def test_all_four_forms_of_input_are_taken(given_: Any, texts: Any, tokens: Any) -> None:
    asked = parse(body(input=given_))
    assert (asked.texts, asked.tokens, asked.base64) == (texts, tokens, False)


def test_fields_that_mean_nothing_here_are_passed_by() -> None:
    assert parse(body(input="x", user="u", new={"a": 1}, encoding_format="base64")).base64


@pytest.mark.parametrize(("raw", "parameter"), [
    (body(), "input"),
    (body(input=None), "input"),
    (body(input=1), "input"),
    (body(input=""), "input"),
    (body(input=[]), "input"),
    (body(input=["a", ""]), "input"),
    (body(input=[[]]), "input"),
    (body(input=[[1], []]), "input"),
    (body(input=["a", 1]), "input"),
    (body(input=["a", [1]]), "input"),
    (body(input=[1.5]), "input"),
    (body(input=[True]), "input"),
    (body(input=[-1]), "input"),
    (body(input=[2**40]), "input"),
    (body(input=["a"] * (MAX_INPUTS + 1)), "input"),
    (body(input="a", encoding_format="int8"), "encoding_format"),
    (body(input="a", dimensions="many"), "dimensions"),
    (b'{"input":"a"}', "model"),
])  # fmt: skip
def test_a_wrong_parameter_is_named(raw: bytes, parameter: str) -> None:
    with pytest.raises(WrongParameter) as refused:
        parse(raw)
    assert refused.value.parameter == parameter


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"x":' + b"[" * 100_000])
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(raw)


def test_a_text_may_have_a_megabyte_and_no_more() -> None:
    assert parse(body(input="x" * 1_000_000)).texts
    for text in ("x" * 1_000_001, "é" * 500_001):
        with pytest.raises(TooLarge):
            parse(body(input=["a", text]))


def test_a_model_without_text_is_refused_by_name() -> None:
    with pytest.raises(WrongParameter, match="'digits' takes no text"):
        text_of(digits())


@pytest.mark.parametrize("dimensions", [None, 384])
def test_the_models_own_length_may_be_asked_for(dimensions: int | None) -> None:
    check_dimensions(EmbeddingsRequest("minilm", False, dimensions), minilm())


def test_another_length_is_refused() -> None:
    with pytest.raises(WrongParameter, match="gives 384 dimensions"):
        check_dimensions(EmbeddingsRequest("minilm", False, 256), minilm())


def test_tokens_beyond_the_models_length_are_cut_and_said_so() -> None:
    assert token_rows([(1, 2, 3), (1, 2)], 2) == [TokenRow((1, 2), truncated=True), TokenRow((1, 2))]


@given(st.lists(st.integers(1, 256), max_size=60), st.integers(1, 8), st.one_of(st.none(), st.integers(1, 2000)))
def test_every_row_is_in_one_group_that_holds_it(lengths: list[int], max_rows: int, max_work: int | None) -> None:
    found = groups(lengths, max_rows=max_rows, max_work=max_work)
    assert sorted(index for group in found for index in group) == list(range(len(lengths)))
    for group in found:
        longest = max(lengths[index] for index in group)
        assert len(group) <= max_rows
        assert max_work is None or len(group) == 1 or len(group) * longest <= max_work


@given(st.lists(st.integers(1, 256), min_size=1, max_size=60))
def test_grouping_never_costs_more_than_a_call_for_each(lengths: list[int]) -> None:
    found = groups(lengths, max_rows=1000, max_work=None)
    cost = sum(CALL_COST_TOKENS + len(group) * max(lengths[index] for index in group) for group in found)
    assert cost <= sum(CALL_COST_TOKENS + length for length in lengths)


def test_short_and_long_texts_go_in_calls_of_their_own() -> None:
    assert groups([5, 250, 6, 5], max_rows=8, max_work=None) == [[0, 3, 2], [1]]


def test_groups_stay_within_a_batch_of_the_model() -> None:
    assert group_limits(minilm()) == (32, None)
    tight = msgspec.structs.replace(minilm(), batching=Batching(max_batch_size=1000, max_work=512))
    assert group_limits(tight) == (64, 512)


def test_rows_are_padded_to_the_longest_and_masked() -> None:
    request = infer_request(minilm(), [TokenRow((101, 7, 102)), TokenRow((101, 102))])
    arrays = {tensor.name: tensor_to_array(tensor).tolist() for tensor in request.inputs}
    assert arrays == {
        "input_ids": [[101, 7, 102], [101, 102, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
    }
    assert [output.name for output in request.outputs] == ["sentence_embedding"]
    assert (request.model_name, request.model_version) == ("minilm", "1")


def response(tensor: Tensor) -> InferResponse:
    return InferResponse("minilm", "1", (tensor,))


def test_the_vectors_are_those_of_the_answer() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert vectors(response(array_to_tensor("e", array, Datatype.FP32)), "e", 2).tolist() == array.tolist()


@pytest.mark.parametrize("tensor", [
    array_to_tensor("other", np.zeros((2, 3)), Datatype.FP32),
    array_to_tensor("e", np.zeros((3, 3)), Datatype.FP32),
    array_to_tensor("e", np.zeros(2), Datatype.FP32),
    Tensor("e", Datatype.FP32, (2, 3), b"short"),
])  # fmt: skip
def test_an_answer_of_another_shape_is_a_bad_one(tensor: Tensor) -> None:
    with pytest.raises(BadAnswer):
        vectors(response(tensor), "e", 2)


@pytest.mark.parametrize("as_base64", [False, True])
def test_the_answer_is_in_the_callers_order_and_counts_what_was_read(as_base64: bool) -> None:
    rows = [TokenRow((1, 2, 3)), TokenRow((1,), truncated=True)]
    found = {1: np.array([0.25], "<f4"), 0: np.array([-0.5], "<f4")}
    told = answer(EmbeddingsRequest("minilm", as_base64, None), rows, found, {"tidegate-served-by": "edge/attic"})
    embeddings = [item["embedding"] for item in told["data"]]
    if as_base64:
        embeddings = [np.frombuffer(base64.b64decode(item), "<f4").tolist() for item in embeddings]
    assert embeddings == [[-0.5], [0.25]]
    assert [item["index"] for item in told["data"]] == [0, 1]
    assert told["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert told["tidegate"] == {"tidegate-served-by": "edge/attic", "truncated": [1]}


def test_nothing_is_said_of_truncation_where_there_was_none() -> None:
    told = answer(EmbeddingsRequest("minilm", False, None), [TokenRow((1,))], {0: np.zeros(1, "<f4")}, {})
    assert told["tidegate"] == {}


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_vector_that_json_has_no_form_for_is_refused_and_comes_as_base64(odd: float) -> None:
    rows, found = [TokenRow((1,)), TokenRow((2,))], {0: np.zeros(1, "<f4"), 1: np.array([odd], "<f4")}
    with pytest.raises(InvalidRequest, match=r"the vector of input\[1\] holds infinity or NaN"):
        answer(EmbeddingsRequest("minilm", False, None), rows, found, {})
    told = answer(EmbeddingsRequest("minilm", True, None), rows, found, {})
    assert base64.b64decode(told["data"][1]["embedding"]) == found[1].tobytes()

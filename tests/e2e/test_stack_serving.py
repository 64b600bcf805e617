"""The main job, through the front door: real models, real text, clients as they are."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from numpy.typing import NDArray

from tests.e2e.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SHORT = "Time and tide wait for no one."
LONG = "The tide comes in and the tide goes out, and nobody has ever talked it out of either. " * 12  # ~ 250 tokens


def post(url: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers with lower-case names, and the JSON body."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, {key.lower(): value for key, value in answer.headers.items()}, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {key.lower(): value for key, value in error.headers.items()}, json.load(error)


def embed_at(http: str, text: str, **headers: str) -> tuple[int, dict[str, str], Any]:
    return post(f"{http}/v1/embeddings", {"model": "minilm", "input": text}, **headers)


def embed(stack: Stack, text: str, **headers: str) -> tuple[int, dict[str, str], Any]:
    return embed_at(stack.http, text, **stack.headers, **headers)


def tokens(count: int) -> dict[str, NDArray[np.int64]]:
    """Input arrays of one row: markers around a repeated word."""
    ids = np.array([[101, *[2051] * (count - 2), 102]], dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


# -- placement -----------------------------------------------------------------------------------------------------


def test_a_short_text_is_answered_by_an_edge_and_the_headers_say_why(stack: Stack) -> None:
    status, headers, body = embed(stack, SHORT)
    assert status == 200
    assert headers["tidegate-served-by"].startswith("edge/edge-")
    assert "variant=int8" in headers["tidegate-route"]
    assert headers["tidegate-route"].split(";")[0] in ("cheapest", "faster")
    assert 0 < float(headers["tidegate-budget-left-ms"]) < 2000
    assert "compute" in headers["server-timing"]
    assert len(body["data"][0]["embedding"]) == 384


def test_a_text_beyond_the_edges_limit_is_answered_by_the_pool_and_the_headers_say_why(stack: Stack) -> None:
    status, headers, _ = embed(stack, LONG)
    assert status == 200
    assert headers["tidegate-served-by"] == "pool/pool"
    assert headers["tidegate-route"].startswith("only;")
    assert "variant=fp32" in headers["tidegate-route"]


def test_a_demanded_precision_is_served_where_it_is_to_be_had(stack: Stack) -> None:
    _, headers, _ = embed(stack, SHORT, **{"tidegate-variant": "fp32"})
    assert headers["tidegate-served-by"] == "pool/pool"
    assert headers["tidegate-route"].startswith("demanded;")


def test_a_budget_that_nobody_can_make_is_refused_within_it(stack: Stack) -> None:
    status, _, body = embed(stack, LONG, **{"tidegate-budget-ms": "1"})
    assert status == 504
    assert "error" in body


def test_the_wrong_shape_is_the_callers_fault_and_the_next_request_works(stack: Stack) -> None:
    bad = {"inputs": [{"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [101, 102]}]}
    status, _, body = post(f"{stack.http}/v2/models/minilm/infer", bad)
    assert status == 400
    assert "input_ids" in body["error"]
    assert embed(stack, SHORT)[0] == 200


def test_a_request_for_digits_is_answered_with_ten_probabilities(stack: Stack) -> None:
    image = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}
    status, _, body = post(f"{stack.http}/v2/models/digits/infer", {"inputs": [image]})
    assert status == 200
    probabilities = body["outputs"][0]["data"]
    assert len(probabilities) == 10
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-3)


# -- clients -------------------------------------------------------------------------------------------------------


def triton_inputs(module: Any, arrays: dict[str, NDArray[np.int64]]) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        one = module.InferInput(name, list(array.shape), "INT64")
        one.set_data_from_numpy(array)
        inputs.append(one)
    return inputs


def check_embedding(result: Any) -> NDArray[np.float32]:
    vector: NDArray[np.float32] = result.as_numpy("sentence_embedding")
    assert vector.shape == (1, 384)
    assert float(np.linalg.norm(vector)) == pytest.approx(1.0, abs=1e-3)
    return vector


@pytest.mark.clients
def test_tritonclient_over_http(stack: Stack) -> None:
    with triton_http.InferenceServerClient(stack.http.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("minilm")
        assert client.get_model_metadata("minilm")["outputs"][0]["name"] == "sentence_embedding"
        assert client.get_model_config("minilm")["max_batch_size"] == 0
        check_embedding(client.infer("minilm", triton_inputs(triton_http, tokens(12))))


@pytest.mark.clients
async def test_tritonclient_over_http_asynchronously(stack: Stack) -> None:
    async with triton_http_aio.InferenceServerClient(stack.http.removeprefix("http://")) as client:
        assert await client.is_server_ready()
        check_embedding(await client.infer("minilm", triton_inputs(triton_http_aio, tokens(12))))


@pytest.mark.clients
def test_tritonclient_over_grpc(stack: Stack) -> None:
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("minilm")
        assert client.get_model_metadata("minilm").outputs[0].name == "sentence_embedding"
        result = client.infer("minilm", triton_inputs(triton_grpc, tokens(12)))
        check_embedding(result)
        assert result.get_response().parameters["tidegate-served-by"].string_param.startswith("edge/")


@pytest.mark.clients
async def test_tritonclient_over_grpc_asynchronously(stack: Stack) -> None:
    async with triton_grpc_aio.InferenceServerClient(stack.grpc) as client:
        assert await client.is_server_ready()
        answers = await asyncio.gather(
            *(client.infer("minilm", triton_inputs(triton_grpc_aio, tokens(length))) for length in range(4, 24, 2))
        )
        for answer in answers:
            check_embedding(answer)


@pytest.mark.clients
def test_the_openai_sdk(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.http}/v1", api_key="any") as client:
        answer = client.embeddings.create(model="minilm", input=[SHORT, LONG])
        assert [len(one.embedding) for one in answer.data] == [384, 384]
        assert answer.usage.prompt_tokens > 100
        floats = client.embeddings.create(model="minilm", input=SHORT, encoding_format="float")
        both = np.array([answer.data[0].embedding, floats.data[0].embedding])
        assert float(both[0] @ both[1]) > 0.98  # a batch with a long text may go to the pool, the single one to an edge
        assert "minilm" in {model.id for model in client.models.list()}
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="no-such-model", input=SHORT)


# -- what `tidegate up --json` promises ----------------------------------------------------------------------------


def test_the_ready_line_names_every_process_and_stdout_holds_nothing_else(stack: Stack) -> None:
    assert [one["role"] for one in stack.ready["processes"]] == ["broker", "pool", "edge", "edge", "gateway"]
    assert all(one["pid"] and one["address"] for one in stack.ready["processes"])
    assert len(stack.stdout) == 1


def test_each_process_has_a_log_and_a_configuration_to_look_at(stack: Stack) -> None:
    for name in ("gateway", "pool", "edge-1", "edge-2"):
        assert (stack.data_dir / "run" / f"{name}.yaml").is_file()
        assert (stack.data_dir / "logs" / f"{name}.log").is_file()


def test_metrics_are_where_the_ready_line_says(stack: Stack) -> None:
    with urllib.request.urlopen(f"{stack.ready['metrics']}/metrics", timeout=30) as answer:
        assert b"tidegate_" in answer.read()


def test_the_models_of_a_repository_elsewhere_are_used_where_they_are(stack: Stack, models: Path) -> None:
    assert not (stack.data_dir / "models").exists()
    assert models.is_dir()

"""The demo models on an edge: what the int8 artefacts answer, and that the edge keeps within the limits it offers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tokenizers
from numpy.typing import NDArray

from edge_agent.app import EdgeApp
from edge_agent.config import EdgeConfig
from tidegate import clock
from tidegate.arrays import array_to_tensor, tensor_to_array
from tidegate.config import load
from tidegate.models.repository import Repository
from tidegate.outcome import NotSupported
from tidegate.types import Call, Datatype, InferRequest

pytestmark = pytest.mark.slow

SENTENCES = (
    "The tide takes no orders from the harbour master.",
    "Hot water",
    "A queue that is bounded can be honest about how long it will take, and one that is not can only hope; so the "
    "edge refuses at its door what it could not answer in time, and whoever asked can still ask somebody else.",
)


@asynccontextmanager
async def edge(repository: Repository, folder: Path, *models: str) -> AsyncIterator[EdgeApp]:
    keys: dict[str, Any] = {"model_repository": repository.root, "state_dir": folder, "models": models}
    async with EdgeApp(load(EdgeConfig, name="kiosk-1", grpc_port=0, http_port=None, **keys)) as app:
        yield app


def call(model: str, **arrays: NDArray[Any]) -> Call:
    types = {"i": Datatype.INT64, "f": Datatype.FP32}
    tensors = tuple(array_to_tensor(name, array, types[array.dtype.kind]) for name, array in arrays.items())
    return Call(InferRequest(model, tensors), "oip-grpc", clock.now(), clock.now() + 10.0)


def tokens(*lengths: int) -> Call:
    """Rows of as many tokens each as `lengths` says, padded to the longest."""
    ids = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
    for row, length in enumerate(lengths):
        ids[row, :length] = 2000 + np.arange(length)
    return call("minilm", input_ids=ids, attention_mask=(ids > 0).astype(np.int64))


def fp32_reference(repository: Repository, ids: NDArray[Any], mask: NDArray[Any]) -> NDArray[Any]:
    manifest = repository.manifest("minilm")
    path = next(
        repository.artefact(manifest, one)
        for one in manifest.variants
        if (one.engine, one.precision) == ("onnx", "fp32")
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (embedding,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    return np.asarray(embedding)


async def test_embeddings_are_close_to_the_unquantized_model_and_normalised(
    demo_repository: Repository, tmp_path: Path
) -> None:
    manifest = demo_repository.manifest("minilm")
    path = demo_repository.tokenizer(manifest)
    assert path is not None
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    async with edge(demo_repository, tmp_path, "minilm") as app:
        for sentence in SENTENCES:
            ids = np.array([tokenizer.encode(sentence).ids], dtype=np.int64)
            mask = np.ones_like(ids)

            reply = await app.host.infer(call("minilm", input_ids=ids, attention_mask=mask))

            embedding = tensor_to_array(reply.response.outputs[0])
            assert reply.variant == "int8"
            assert np.linalg.norm(embedding) == pytest.approx(1.0, abs=1e-5)
            assert float((embedding @ fp32_reference(demo_repository, ids, mask).T)[0, 0]) > 0.97


async def test_the_largest_work_that_it_offers_is_taken_and_anything_more_is_not(
    demo_repository: Repository, tmp_path: Path
) -> None:
    async with edge(demo_repository, tmp_path, "minilm") as app:
        (variant,) = app.host.offers()[0].variants
        assert (variant.max_batch, variant.max_tokens) == (4, 128)

        reply = await app.host.infer(tokens(128, 128, 128, 128))
        assert reply.response.outputs[0].shape == (4, 384)

        for beyond in (tokens(129), tokens(1, 1, 1, 1, 1)):
            with pytest.raises(NotSupported, match="too much work for 'minilm:2' on edge/kiosk-1"):
                await app.host.infer(beyond)


async def test_the_measured_cost_grows_with_the_tokens_and_predicts_a_call(
    demo_repository: Repository, tmp_path: Path
) -> None:
    async with edge(demo_repository, tmp_path, "minilm") as app:
        (runner,) = app.deployment.runners
        time = runner.service_time("int8")
        assert time.predict_s(4) < min(time.predict_s(128), time.predict_s(512))  # a busy machine mixes up neighbours
        predicted_s = time.predict_s(64)

        taken_s = sorted([(await app.host.infer(tokens(64))).stages["compute"] for _ in range(9)])[4]

        assert 0.05 < taken_s / predicted_s < 20.0  # a shared machine; the correction narrows it down


async def test_both_demo_models_are_served_side_by_side(demo_repository: Repository, tmp_path: Path) -> None:
    async with edge(demo_repository, tmp_path, "minilm", "digits") as app:
        image = np.full((1, 1, 8, 8), 0.5, dtype=np.float32)

        reply = await app.host.infer(call("digits", image=image))

        probabilities = tensor_to_array(reply.response.outputs[0])
        assert probabilities.shape == (1, 10)
        assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-3)
        assert app.host.ready()

"""Answers through the gateway are the models' own: embeddings as from the model run directly, digits as accurate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.http.aio as triton_http_aio
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.e2e.stack import Stack
from tidegate.models.repository import Repository
from tidegate.tools.build.demo.corpus import texts

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(400)]

SENTENCES = 500
AT_ONCE = 4  # requests under way: more only wait, on as few cores as a test has
BUDGET = {"tidegate-budget-ms": "60000"}  # quality is asked about here, not time


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return texts(SENTENCES)


@pytest.fixture(scope="module")
def reference(models: Path, sentences: list[str]) -> NDArray[np.float32]:
    """The exported program run by torch in this process, one text at a time: another runtime than the pool's."""
    import torch  # slow to import, and only wanted here

    repository = Repository(models)
    manifest = repository.manifest("minilm")
    variant = manifest.variant("fp32-export")
    tokenizer_path = repository.tokenizer(manifest)
    assert variant is not None and tokenizer_path is not None and manifest.text is not None
    model = torch.export.load(repository.artefact(manifest, variant)).module()
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(manifest.text.max_tokens)
    rows = []
    torch.set_num_threads(1)  # the system's processes are on the same cores; threads that wait for each other spin
    with torch.inference_mode():
        for encoded in tokenizer.encode_batch(sentences):
            ids = torch.tensor([encoded.ids])
            rows.append(first_tensor(model(ids, torch.ones_like(ids)))[0].numpy())
    return np.array(rows)


def first_tensor(answer: Any) -> Any:
    return answer[0] if isinstance(answer, tuple | list) else answer


async def through_the_gateway(stack: Stack, sentences: list[str], variant: str) -> NDArray[np.float32]:
    """One request for each sentence, a few at once, in the variant that is demanded."""
    room = asyncio.Semaphore(AT_ONCE)

    async def embed(text: str) -> list[float]:
        async with room:
            headers = {"tidegate-variant": variant, **BUDGET}
            answer = await client.embeddings.create(model="minilm", input=text, extra_headers=headers)
            return answer.data[0].embedding

    async with openai.AsyncOpenAI(base_url=f"{stack.http}/v1", api_key="any", timeout=60) as client:
        return np.array(await asyncio.gather(*(embed(text) for text in sentences)))


async def test_embeddings_from_the_pool_are_those_of_the_model(
    stack: Stack, sentences: list[str], reference: NDArray[np.float32]
) -> None:
    answers = await through_the_gateway(stack, sentences, "fp32")
    cosines = (answers * reference).sum(axis=1)
    assert cosines.shape == (SENTENCES,)
    assert cosines.min() >= 0.9999


async def test_embeddings_from_int8_edges_are_close_to_those_of_the_model(
    stack: Stack, models: Path, sentences: list[str], reference: NDArray[np.float32]
) -> None:
    tokenizer = Tokenizer.from_file(str(Repository(models).tokenizer(Repository(models).manifest("minilm"))))
    tokenizer.no_padding()
    short = [number for number, text in enumerate(sentences) if len(tokenizer.encode(text).ids) <= 128]
    assert len(short) > SENTENCES // 2
    answers = await through_the_gateway(stack, [sentences[number] for number in short], "int8")
    cosines = (answers * reference[short]).sum(axis=1)
    assert cosines.mean() >= 0.98


@pytest.mark.parametrize("variant", ["int8", "fp32"])
async def test_the_accuracy_of_digits_is_what_the_manifest_says(stack: Stack, models: Path, variant: str) -> None:
    said = Repository(models).manifest("digits").variant(variant)
    assert said is not None and said.quality is not None and said.quality.metric == "top1"
    from tidegate.tools.build.demo.digits import held_out  # imports torch: slow, and only wanted here

    images, labels = held_out()
    assert len(labels) == said.quality.samples
    guesses = await recognise(stack, images, variant)
    assert abs(float((guesses == labels).mean()) - said.quality.value) <= 0.005


async def recognise(stack: Stack, images: NDArray[np.float32], variant: str) -> NDArray[np.int64]:
    async with triton_http_aio.InferenceServerClient(stack.http.removeprefix("http://")) as client:
        guesses = []
        for start in range(0, len(images), 4):  # the edge takes four rows
            batch = images[start : start + 4]
            one = triton_http_aio.InferInput("image", list(batch.shape), "FP32")
            one.set_data_from_numpy(batch)
            answer = await client.infer("digits", [one], headers={"tidegate-variant": variant, **BUDGET})
            guesses.append(answer.as_numpy("probabilities").argmax(axis=1))
    return np.concatenate(guesses)

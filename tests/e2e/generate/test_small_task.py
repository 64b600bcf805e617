"""A small task through the gateway and on the bare model: the same answers, and so the same score.

What a load of accuracy tests would do (lm-eval's `generate_until`): a few examples, a question, and the first line of
what comes. The model is real. Of the pool's variant each answer has to be `generate`'s own, so it is batch invariant.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from gateway.app import Gateway
from tests.support.pool.edge_and_pool import edge_and_pool
from tests.support.stepping import run_one
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.generation.limits import GenerationLimits, limits_of
from tidegate.generate.request import GenerateRequest
from tidegate.generate.text.text_models import TextModels
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.repository import Repository, save_manifest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MODEL, MOST = "smollm2", 6
EXAMPLES = (("the capital of Spain", "Madrid"), ("two plus three", "5"), ("the opposite of hot", "cold"))
QUESTIONS = (
    ("the capital of France", "Paris"), ("the capital of Italy", "Rome"), ("the capital of Japan", "Tokyo"),
    ("the capital of Germany", "Berlin"), ("one plus one", "2"), ("ten minus four", "6"),
    ("the opposite of up", "down"), ("the opposite of big", "small"), ("the opposite of black", "white"),
    ("the day after Monday", "Tuesday"), ("the color of the sky", "blue"), ("the opposite of old", "young"),
)  # fmt: skip


def asked(question: str) -> str:
    told = "".join([f"Question: What is {one}?\nAnswer: {answer}\n\n" for one, answer in EXAMPLES])
    return f"{told}Question: What is {question}?\nAnswer:"


def score(answers: list[str]) -> int:
    pairs = zip(answers, QUESTIONS, strict=True)
    return sum(bool(re.search(rf"\b{right}\b", answer, re.I)) for answer, (_, right) in pairs)


@pytest.fixture(scope="module")
def models(smollm2_repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's own, with a pool's variant that is batch invariant."""
    manifest = next(one for one in smollm2_repository.manifests() if one.name == MODEL)
    source = smollm2_repository.folder(manifest)
    root = tmp_path_factory.mktemp("models")
    folder = root / MODEL / manifest.version
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "model.yaml":
            (folder / file.name).symlink_to(file.resolve())
    save_manifest(folder, replace(manifest, variants=tuple(invariant(one) for one in manifest.variants)))
    return root


def invariant(variant: Variant) -> Variant:
    if variant.engine != "transformers" or variant.generation is None:
        return variant
    return replace(variant, generation=replace(variant.generation, batch_invariant=True))


async def through_the_gateway(gateway: Gateway, variant: str) -> list[str]:
    """All questions at once, answered by the variant."""
    headers = {"tidegate-variant": variant, "tidegate-budget-ms": "120000"}

    async def ask(client: openai.AsyncOpenAI, question: str) -> str:
        made = await client.completions.create(
            model=MODEL, prompt=asked(question), max_tokens=MOST, temperature=0, stop="\n", extra_headers=headers
        )
        return made.choices[0].text

    url = f"{gateway.addresses['http']}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=120.0) as client:
        return list(await asyncio.gather(*[ask(client, question) for question, _ in QUESTIONS]))


async def bare(models: Path, manifest: Manifest, variant: Variant) -> list[str]:
    """The engine's own runtime for an edge, `generate` for the pool; one question after another."""
    texts = TextModels(Repository(models))
    text = await texts.of(manifest)
    assert manifest.generative is not None
    artefact = models / MODEL / manifest.version / variant.artefact
    found = []
    for prompt in [await text.encode(asked(question), room=2000) for question, _ in QUESTIONS]:
        ids = await asyncio.to_thread(_generated, artefact, variant.engine, limits_of(manifest, variant), prompt)
        detokenizer = text.detokenizer(prompt)
        said = "".join([detokenizer.push(id) for id in ids]) + detokenizer.flush()
        found.append(said.partition("\n")[0])
    await texts.aclose()
    return found


_loaded: dict[Path, Any] = {}


def _generated(artefact: Path, engine: Any, limits: GenerationLimits | None, prompt: tuple[int, ...]) -> list[int]:
    import torch

    assert limits is not None
    if engine != "transformers":
        if artefact not in _loaded:
            _loaded[artefact] = load_generative_engine(engine, artefact, limits=limits, threads=1)
        return list(run_one(_loaded[artefact], GenerateRequest(prompt, MOST)).ids)
    from tidegate.engines.generation.continuous_batching import load_causal_model

    torch.set_num_threads(1)
    if artefact not in _loaded:
        _loaded[artefact] = load_causal_model(artefact, torch.device("cpu"))
    ids = torch.tensor([prompt])
    words = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": list(limits.stop_tokens)}
    made: list[int] = _loaded[artefact].generate(ids, max_new_tokens=MOST, **words)[0, len(prompt) :].tolist()
    return [id for id in made if id not in limits.stop_tokens]


@pytest.mark.timeout(600)
async def test_a_task_has_the_same_score_through_the_gateway_and_on_the_bare_model(
    models: Path, tmp_path: Path
) -> None:
    manifest = next(one for one in Repository(models).manifests() if one.name == MODEL)
    served: dict[str, list[str]] = {}
    async with edge_and_pool(models, tmp_path) as serving:
        for variant in manifest.variants:
            served[variant.name] = await through_the_gateway(serving.gateway, variant.name)
    for variant in manifest.variants:
        alone = await bare(models, manifest, variant)
        assert served[variant.name] == alone, variant.name
        assert score(served[variant.name]) == score(alone) >= len(QUESTIONS) // 2, alone

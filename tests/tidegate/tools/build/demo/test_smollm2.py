"""SmolLM2 as it is built: whole, described, and answering in both variants as its runtimes alone do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.stepping import run, run_one
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.generation.limits import limits_of
from tidegate.generate.engine import GenerativeEngine
from tidegate.generate.request import GenerateRequest
from tidegate.generate.token_stream import TokenStream
from tidegate.generate.vocabulary import vocabulary_digest
from tidegate.models.manifest import Manifest, Where
from tidegate.models.repository import Repository
from tidegate.tools.build.cli import model
from tidegate.tools.build.demo.demo_models import RECIPES, intact_manifest
from tidegate.workers.process import EngineSpec, WorkerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # whoever comes first waits for the build

QUESTIONS = ("What is the capital of France?", "Write one sentence about rivers.", "What is 2+2?")


@pytest.fixture(scope="module")
def manifest(smollm2_repository: Repository) -> Manifest:
    return smollm2_repository.manifest("smollm2")


@pytest.fixture(scope="module")
def tokenizer(smollm2_repository: Repository, manifest: Manifest) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(smollm2_repository.folder(manifest) / "tokenizer.json"))


def asked(tokenizer: Any, question: str, max_tokens: int = 40) -> GenerateRequest:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return GenerateRequest(tuple(tokenizer.encode(text).ids), max_tokens)


def loaded(repository: Repository, manifest: Manifest, where: Where) -> GenerativeEngine:
    (variant,) = manifest.variants_for(where)
    artefact = repository.artefact(manifest, variant)
    return load_generative_engine(variant.engine, artefact, limits=limits_of(manifest, variant) or pytest.fail())


def test_it_is_whole_and_says_where_its_weights_come_from(
    smollm2_repository: Repository, manifest: Manifest, tokenizer: Any
) -> None:
    assert intact_manifest(smollm2_repository.root, "smollm2", RECIPES["smollm2"][1]) == manifest
    assert "Q4_1" in manifest.summary
    arguments = ["verify", "smollm2", "--digests-only", "--repository", str(smollm2_repository.root)]
    done = CliRunner().invoke(model, arguments)
    recorded = [one.golden.name for one in manifest.variants if one.golden is not None]
    assert done.exit_code == 0 and done.output.count("ok ") == 3 + len(recorded) and "tokenizer.json" in done.output
    listed = CliRunner().invoke(model, ["list", "--repository", str(smollm2_repository.root)]).output
    assert "269.1 MB" in listed and "86.5 MB" in listed  # with the files beside the artefacts
    generative = manifest.generative
    assert generative is not None
    assert (generative.context, generative.vocabulary_size, generative.stop_tokens) == (8192, 49152, (2,))
    assert generative.vocabulary == vocabulary_digest(tokenizer)
    assert generative.chat_template is not None
    assert [(one.name, one.engine, one.where) for one in manifest.variants] == [
        ("bf16", "transformers", ("pool",)),
        ("int4", "onnxruntime-genai", ("edge",)),
    ]
    for variant in manifest.variants:
        cost = variant.generation
        assert cost is not None and cost.prefill_ms > 0.0 and [batch for batch, _ in cost.step_ms] == [1, cost.slots]
    assert {path.name for path in smollm2_repository.folder(manifest).iterdir()} == {
        "model.yaml",
        "tokenizer.json",
        "chat_template.jinja",
        *recorded,
        *(one.artefact for one in manifest.variants),
        *(file.name for one in manifest.variants for file in one.files),
    }


def test_the_edges_variant_answers_as_onnxruntime_genai_alone_does(
    smollm2_repository: Repository, manifest: Manifest, tokenizer: Any
) -> None:
    import numpy as np
    import onnxruntime_genai

    requests = [asked(tokenizer, question) for question in QUESTIONS]
    texts = run(loaded(smollm2_repository, manifest, "edge"), *requests)
    assert "Paris" in tokenizer.decode(list(texts[0].ids))

    bare = onnxruntime_genai.Model(str(smollm2_repository.folder(manifest)))
    for request, text in zip(requests, texts, strict=True):
        parameters = onnxruntime_genai.GeneratorParams(bare)
        parameters.set_search_options(max_length=len(request.prompt) + request.max_tokens, do_sample=False)
        generator = onnxruntime_genai.Generator(bare, parameters)
        generator.append_tokens(np.array(request.prompt, np.int32))
        said = []
        while not generator.is_done():
            generator.generate_next_token()
            said.append(int(generator.get_next_tokens()[0]))
        assert list(text.ids) == said[: len(text.ids)]
        assert said[len(text.ids) :] in ([], [2])


def test_the_pools_variant_answers_as_transformers_generate_does(
    smollm2_repository: Repository, manifest: Manifest, tokenizer: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    requests = [asked(tokenizer, question, 24) for question in QUESTIONS]
    engine = loaded(smollm2_repository, manifest, "pool")
    texts = [run_one(engine, request) for request in requests]
    assert "Paris" in tokenizer.decode(list(texts[0].ids))
    bare = AutoModelForCausalLM.from_pretrained(
        smollm2_repository.folder(manifest), dtype="auto", attn_implementation="sdpa"
    ).eval()
    for request, text in zip(requests, texts, strict=True):
        # Token by token along our own text, so that a tie that is rounded otherwise is one token and not all after it.
        with torch.no_grad():
            logits = bare(torch.tensor([[*request.prompt, *text.ids]])).logits[0, len(request.prompt) - 1 :].float()
        for token, row in zip(text.ids, logits, strict=False):
            assert row[token] >= row.max() - 0.25  # two steps of bf16 at logits of 16 to 32
    assert len({text.ids for text in texts}) == 3


@pytest.mark.parametrize("where", ["edge", "pool"])
async def test_each_variant_runs_in_a_worker_process_inside_its_sandbox(
    smollm2_repository: Repository, manifest: Manifest, tokenizer: Any, where: Where
) -> None:
    (variant,) = manifest.variants_for(where)
    artefact: Path = smollm2_repository.artefact(manifest, variant)
    spec = EngineSpec("smollm2", variant.engine, artefact, (), generation=limits_of(manifest, variant))
    async with WorkerProcess("w") as worker:
        assert (await worker.load(spec)).slots == (variant.generation.slots if variant.generation else 0)
        stream = TokenStream()
        generated = await worker.generate("smollm2", asked(tokenizer, QUESTIONS[0]), stream, token_interval_s=0.1)
        stream.end()
        assert generated.usage.finish_reason == "stop"
        assert "Paris" in tokenizer.decode(list(generated.ids))
        assert tuple(token for batch in await stream.take() for token in batch.ids) == generated.ids

"""Continuous batching on a GPU: texts are transformers' own, in bf16 too if that is asked for, and memory is known."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.models.tiny_llama import END
from tests.support.paced_generation import asking
from tests.support.stepping import run, run_one
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.generation.limits import GenerationLimits

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.cuda, pytest.mark.slow]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def weights(cuda: None, request: Any, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    LlamaForCausalLM.from_pretrained(tiny_llama, dtype=getattr(torch, request.param)).save_pretrained(folder)
    return folder / "model.safetensors"


def prompts(count: int) -> list[tuple[int, ...]]:
    random = Random(5)
    return [tuple(random.randrange(3, 250) for _ in range(random.randrange(1, 100))) for _ in range(count)]


def generated(weights: Path, asked: list[tuple[int, ...]], tokens: int) -> list[tuple[int, ...]]:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(weights.parent, attn_implementation="sdpa", dtype="auto").eval().to("cuda")
    found = []
    for prompt in asked:
        ids = torch.tensor([prompt], device="cuda")
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        text = tuple(said[0, len(prompt) :].tolist())
        found.append(text[: text.index(END)] if END in text else text)
    return found


def test_greedy_texts_in_company_are_those_of_generate(weights: Path) -> None:
    """In bf16 with `batch_invariant`; in fp32 as it is."""
    invariant = "bfloat16" in str(weights)
    engine = load_generative_engine(
        "transformers", weights, limits=GenerationLimits(slots=16, batch_invariant=invariant), device="cuda"
    )
    asked = prompts(16)
    expected = generated(weights, asked, 24)
    assert [text.ids for text in run(engine, *(asking(24, *prompt) for prompt in asked))] == expected


def test_sampled_texts_repeat_with_their_seed_and_cancelled_ones_leave_nothing(weights: Path) -> None:
    from tidegate.generate.request import Sampling

    engine = load_generative_engine("transformers", weights, device="cuda")
    request = asking(20, ignore_stop=True, sampling=Sampling(temperature=0.9, top_p=0.9, seed=7))
    assert run_one(engine, request).ids == run_one(engine, request).ids
    for id in range(1, 5):
        engine.begin(id, asking(50, id + 3, ignore_stop=True))
    engine.step([1, 2, 3, 4])
    for id in range(1, 5):
        engine.cancel(id)
    assert engine.step([]) == []
    assert run_one(engine, asking(8)).ids == run_one(engine, asking(8)).ids


def test_what_it_holds_of_the_device_is_known(weights: Path) -> None:
    engine: Any = load_generative_engine("transformers", weights, device="cuda")
    assert 0 < engine.device_meter.held_bytes < engine.device_meter.device_bytes

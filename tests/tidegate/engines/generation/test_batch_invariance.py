"""With `batch_invariant` the texts of a bf16 model are transformers' own, whatever is computed beside them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.support.models.tiny_llama import END
from tests.support.paced_generation import asking
from tests.support.stepping import run, run_one
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.errors import EngineError
from tidegate.engines.generation.batch_invariance import BatchInvariance
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.generate.engine import GenerativeEngine
from tidegate.generate.request import Sampling

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bf16 that is wide enough for the kernels of real ones, whose likeliest tokens are close together."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=END, pad_token_id=END,
        tie_word_embeddings=True, initializer_range=0.12,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("bf16")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder / "model.safetensors"


def engine(weights: Path, *, batch_invariant: bool = True, slots: int = 16, **limits: Any) -> GenerativeEngine:
    said = GenerationLimits(slots=slots, batch_invariant=batch_invariant, **limits)
    return load_generative_engine("transformers", weights, limits=said)


def prompts(count: int) -> list[tuple[int, ...]]:
    random = Random(11)
    return [tuple(random.randrange(3, 500) for _ in range(random.choice((1, 2, 7, 40, 120)))) for _ in range(count)]


@pytest.fixture(scope="module")
def expected(weights: Path) -> list[tuple[int, ...]]:
    """What `generate` says, alone and in bf16."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(weights.parent, dtype="auto", attn_implementation="sdpa").eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    said = []
    for prompt in prompts(24):
        ids = torch.tensor([prompt])
        words = {"attention_mask": torch.ones_like(ids), "eos_token_id": -1, "do_sample": False}
        said.append(tuple(model.generate(ids, max_new_tokens=40, **words)[0, len(prompt) :].tolist()))
    torch.set_num_threads(threads)
    return said


def test_texts_are_those_of_generate_alone_and_in_any_company(weights: Path, expected: list[tuple[int, ...]]) -> None:
    one = engine(weights)
    asked = [asking(40, *prompt, ignore_stop=True) for prompt in prompts(24)]
    assert [text.ids for text in run(one, *asked[:16])] == expected[:16]
    assert [text.ids for text in run(one, *asked[23:7:-1])] == expected[23:7:-1]
    assert run_one(one, asked[0]).ids == expected[0]
    plain = engine(weights, batch_invariant=False)
    others = [text.ids for text in run(plain, *asked[:16])]
    assert others != expected[:16], "the model is such that a batch rounds otherwise: else nothing is shown here"


def test_no_prompt_is_computed_in_parts_unless_it_is_longer_than_a_step(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidegate.engines.generation import continuous_batching  # imports for seconds, and is only wanted here

    monkeypatch.setattr(continuous_batching, "_WHOLE_STEP_TOKENS", 64)
    monkeypatch.setattr(continuous_batching, "_STEP_TOKENS", {"cpu": 64})
    one: Any = engine(weights, slots=4)
    step = one.processor.inputs_and_outputs
    for id, length in ((1, 40), (2, 40), (3, 20), (4, 150), (5, 7)):
        one.begin(id, asking(3, *range(5, 5 + length), ignore_stop=True))
        if id == 3:
            one.cancel(3)
    lengths, ended = [], set[int]()
    while len(ended) < 4:
        ended |= {progress.id for progress in one.step([1, 2, 4, 5]) if progress.finished}
        bounds = step.cumulative_seqlens_q[: step.num_request_in_batch + 1].tolist()
        lengths.append(sorted((end - first for first, end in pairwise(bounds)), reverse=True))
    assert lengths == [[40], [40, 1], [62, 1, 1], [63, 1], [25], [7, 1], [1, 1], [1]]


def test_chance_is_a_sequences_own_in_a_batch_as_well(weights: Path) -> None:
    one = engine(weights)
    asked = [asking(20, *prompt, ignore_stop=True, sampling=Sampling(1.0, seed=7), logprobs=2) for prompt in prompts(8)]
    together = run(one, *asked)
    alone = [run_one(one, request) for request in asked]
    assert [text.ids for text in together] == [text.ids for text in alone]
    assert [text.logprobs for text in together] == [text.logprobs for text in alone]


def test_a_sequence_that_waits_for_room_can_be_cancelled_and_a_failure_forgets_it(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: Any = engine(weights, slots=2)
    one.begin(1, asking(3, *([5, 6] * 300)))
    one.begin(2, asking(3, *([5, 6] * 300)))
    one.cancel(2)
    one.begin(2, asking(3, 8))

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr(one.processor, "_generation_step", fail)
        with pytest.raises(EngineError):
            one.step([1, 2])
    assert one.step([]) == [] and len(run(one, asking(3, 8), asking(3, 9))) == 2


def test_a_model_with_windows_is_refused_by_the_keys_name(weights: Path) -> None:
    from tidegate.engines.generation.continuous_batching import load_causal_model

    model = load_causal_model(weights, torch.device("cpu"))
    model.config.layer_types = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(EngineError, match="batch_invariant: is for models with full attention"):
        BatchInvariance(model)

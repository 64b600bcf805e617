"""Continuous batching by transformers, on a tiny Llama: its texts are transformers' own, and what it holds is freed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.models.generative import COST, TALKER, talker
from tests.support.models.tiny_llama import CONTEXT, END, VOCABULARY_SIZE
from tests.support.paced_generation import asking
from tests.support.stepping import Text, run, run_one
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.errors import EngineError, EngineOutOfMemory
from tidegate.engines.generation.limits import GenerationLimits, engine_cache_bytes
from tidegate.generate.engine import GenerativeEngine
from tidegate.generate.request import Sampling
from tidegate.generate.token_stream import TokenStream
from tidegate.workers.process import EngineSpec, WorkerProcess

pytestmark = pytest.mark.slow

PROMPT = (5, 6, 7)
PAGE = 32
PAGE_BYTES = PAGE * 2 * 2 * 2 * 16 * 4  # keys and values of 2 layers, 2 heads of 16, in fp32


@pytest.fixture(scope="module")
def weights(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in fp32: in bf16 its likeliest tokens are now and then two, and a batch rounds otherwise."""
    import torch
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("fp32")
    LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).save_pretrained(folder)
    return folder / "model.safetensors"


def engine(weights: Path, **limits: Any) -> GenerativeEngine:
    return load_generative_engine("transformers", weights, limits=GenerationLimits(**limits))


@pytest.fixture(scope="module")
def tiny(weights: Path) -> GenerativeEngine:
    """One that all tests share which leave nothing behind."""
    return engine(weights)


@pytest.fixture(scope="module")
def reference(weights: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(weights.parent, attn_implementation="sdpa").eval()


def generated(reference: Any, prompt: tuple[int, ...], tokens: int, **how: Any) -> tuple[int, ...]:
    """What transformers' own `generate` says."""
    import torch

    ids = torch.tensor([prompt])
    said = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **how)
    return tuple(said[0, len(prompt) :].tolist())


def prompts(count: int, longest: int) -> list[tuple[int, ...]]:
    random = Random(5)
    return [tuple(random.randrange(3, 250) for _ in range(random.randrange(1, longest))) for _ in range(count)]


def test_greedy_texts_are_those_of_generate_alone_and_side_by_side(tiny: GenerativeEngine, reference: Any) -> None:
    asked = prompts(16, 100)
    expected = [generated(reference, prompt, 24) for prompt in asked]
    expected = [ids[: ids.index(END)] if END in ids else ids for ids in expected]
    assert [text.ids for text in run(tiny, *(asking(24, *prompt) for prompt in asked))] == expected
    assert [run_one(tiny, asking(24, *prompt)).ids for prompt in asked[:4]] == expected[:4]


def test_a_prompt_of_several_steps_says_the_same_and_others_go_on_meanwhile(
    weights: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidegate.engines.generation import continuous_batching

    monkeypatch.setattr(continuous_batching, "_STEP_TOKENS", {"cpu": 20})
    one, long = engine(weights), prompts(1, 200)[0] * 3
    one.begin(1, asking(40, ignore_stop=True))
    one.step([1])
    one.begin(2, asking(8, *long[:150], ignore_stop=True))
    steps = [{progress.id for progress in one.step([2, 1])} for _ in range(8)]
    assert steps[:7] == [{1}] * 7 and steps[7] == {1, 2}
    one.cancel(1)
    one.cancel(2)
    text = run_one(one, asking(8, *long[:150], ignore_stop=True))  # under an id that has just been cancelled
    assert text.ids == generated(reference, long[:150], 8, eos_token_id=-1) and END not in text.ids


def test_a_text_stops_at_a_token_of_the_model_or_of_the_request_unless_that_is_ignored(
    tiny: GenerativeEngine, weights: Path
) -> None:
    whole = run_one(tiny, asking(30)).ids
    at = next(n for n in range(3, 30) if whole[n] not in whole[:n])
    for text in (
        run_one(tiny, asking(30, stop_tokens=(whole[at],))),
        run_one(engine(weights, stop_tokens=(whole[at], 1)), asking(30)),
    ):
        assert text.ids == whole[:at]
        assert text.end is not None and (text.end.finished, text.end.stop_token) == ("stop", True)
    ignoring = run_one(engine(weights, stop_tokens=(whole[at],)), asking(30, ignore_stop=True))
    assert len(ignoring.ids) == 30 and whole[at] not in ignoring.ids  # it says something else in its place
    assert run_one(tiny, asking(30, stop_tokens=(whole[at],), ignore_stop=True)).ids == whole


def test_a_text_goes_on_where_another_engine_stopped(tiny: GenerativeEngine) -> None:
    for prompt in (PROMPT, tuple(range(3, 80))):
        whole = run_one(tiny, asking(30, *prompt, ignore_stop=True)).ids
        assert run_one(tiny, asking(18, *prompt, *whole[:12], ignore_stop=True)).ids == whole[12:]


def test_a_text_ends_with_max_tokens_or_the_context(tiny: GenerativeEngine, weights: Path) -> None:
    for one, request, tokens in (
        (tiny, asking(1), 1),
        (tiny, asking(1000, *([9] * (CONTEXT - 5)), ignore_stop=True), 5),
        (engine(weights, context=10), asking(1000, ignore_stop=True), 7),
    ):
        text = run_one(one, request)
        assert len(text.ids) == tokens
        assert text.end is not None and (text.end.finished, text.end.stop_token) == ("length", False)


def test_each_sequence_of_a_batch_is_sampled_in_its_own_way(tiny: GenerativeEngine) -> None:
    requests = [
        asking(12, 5, 6, ignore_stop=True),
        asking(12, 5, 6, ignore_stop=True, sampling=Sampling(1.5, seed=3)),
        asking(12, 5, 6, ignore_stop=True, sampling=Sampling(1.5, 0.9, 20, seed=3), logprobs=2),
        asking(12, 5, 6, ignore_stop=True, sampling=Sampling(1.5, seed=-(2**63))),
        asking(12, 5, 6, ignore_stop=True, sampling=Sampling(2.0, top_k=1)),
        asking(12, 5, 6, ignore_stop=True, logprobs=0),
    ]
    together = run(tiny, *requests)
    assert [text.ids for text in together] == [run_one(tiny, request).ids for request in requests]
    greedy, hot, filtered, seeded, one_left, with_logprobs = (text.ids for text in together)
    assert greedy == one_left == with_logprobs and len({greedy, hot, filtered, seeded}) == 4
    assert len({run_one(tiny, asking(12, sampling=Sampling(2.0), ignore_stop=True)).ids for _ in range(5)}) == 5


def test_logprobs_are_the_models_own(tiny: GenerativeEngine, reference: Any) -> None:
    import torch

    text = run_one(tiny, asking(6, 5, 6, 7, logprobs=3, sampling=Sampling(1.5, seed=1), ignore_stop=True))
    with torch.no_grad():
        logits = reference(torch.tensor([[5, 6, 7, *text.ids]])).logits[0, 2:-1]
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert len(text.logprobs) == len(text.top) == 6
    for n, token in enumerate(text.ids):
        assert text.logprobs[n] == pytest.approx(float(expected[n, token]), abs=1e-3)
        best = expected[n].topk(3)
        assert [top.id for top in text.top[n]] == best.indices.tolist()
        assert [top.logprob for top in text.top[n]] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert run_one(tiny, asking(2, logprobs=0)).top == ()


def test_what_begins_as_an_earlier_prompt_is_cached_in_whole_pages(weights: Path) -> None:
    one = engine(weights)
    prompt = prompts(1, 200)[0] * 4
    cold = run_one(one, asking(4, *prompt[:100]))
    warm = run_one(one, asking(4, *prompt[:80], 9, 9, 9))
    same = run_one(one, asking(4, *prompt[:100]))
    assert (cold.cached_tokens, warm.cached_tokens, same.cached_tokens) == (0, 2 * PAGE, 3 * PAGE)
    assert same.ids == cold.ids


def test_prompts_under_different_salts_share_no_page(weights: Path) -> None:
    one = engine(weights)
    prompt = (prompts(1, 200)[0] * 4)[:100]

    def run_under(salt: str) -> Any:
        return run_one(one, replace(asking(4, *prompt), cache_salt=salt))

    runs = [run_under(salt) for salt in ("", "one", "two", "one", "")]
    assert [run.cached_tokens for run in runs] == [0, 0, 0, 3 * PAGE, 3 * PAGE]
    assert {tuple(run.ids) for run in runs} == {tuple(runs[0].ids)}


def test_a_cancelled_sequence_says_nothing_more_and_its_pages_are_free(weights: Path) -> None:
    one: Any = engine(weights, slots=2)
    one.begin(1, asking(200))
    one.begin(2, asking(50, 9, 8, 7, ignore_stop=True))
    one.step([1, 2])
    one.cancel(1)
    one.cancel(1)
    one.cancel(99)
    one.begin(3, asking(3, ignore_stop=True))  # its slot is free at once
    one.cancel(3)  # before it was ever stepped
    seen = {progress.id for _ in range(10) for progress in one.step([2])}
    assert seen == {2}
    held = one.processor.scheduler
    assert len(held.active_requests) == 1 and not held.waiting_requests
    one.cancel(2)
    assert one.step([]) == [] and not held.has_pending_requests()
    assert repr(one) == "<ContinuousBatchingEngine model.safetensors 0 of 2 slots>"


def test_where_the_cache_is_too_small_for_all_each_still_says_what_it_says_alone(
    weights: Path, tiny: GenerativeEngine
) -> None:
    small = engine(weights, slots=8, cache_bytes=(2 + 8) * PAGE_BYTES)
    requests = [asking(100, *prompt, ignore_stop=True) for prompt in prompts(8, 60)]
    assert [text.ids for text in run(small, *requests)] == [run_one(tiny, one).ids for one in requests]


def test_the_caches_size_is_what_it_was_given(weights: Path) -> None:
    one: Any = engine(weights, cache_bytes=12 * PAGE_BYTES)
    assert one.processor.cache.cache_tensor.nbytes <= 12 * PAGE_BYTES
    with pytest.raises(EngineError, match=r"together are 241 tokens.*room for 96"):
        engine(weights, cache_bytes=5 * PAGE_BYTES).begin(1, asking(200, *range(3, 44)))
    with pytest.raises(EngineError, match=f"page of the attention cache is {PAGE_BYTES} bytes"):
        engine(weights, cache_bytes=100)
    with pytest.raises(EngineOutOfMemory, match="cannot batch it"):
        engine(weights, cache_bytes=2**45)


@pytest.mark.parametrize("counted", [False, True])
def test_a_whole_context_has_room_where_nobody_says_how_large_caches_may_be(
    weights: Path, tmp_path: Path, counted: bool
) -> None:
    copy = shutil.copytree(weights.parent, tmp_path / "copy")
    said = json.loads((copy / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (copy / "config.json").write_text(json.dumps(said))
    variant = replace(TALKER.variants[0], generation=replace(COST, slots=1, cache_bytes=PAGE_BYTES // PAGE))
    given = engine_cache_bytes(talker(context=4096), variant, None) if counted else 0
    one = engine(copy / weights.name, slots=1, context=4096, cache_bytes=given)
    one.begin(1, asking(4096 - 10, *range(3, 13)))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asking(1, *range(3, CONTEXT), 3, 3, 3), f"context of {CONTEXT}"),
        (asking(1, 5, VOCABULARY_SIZE), f"not from 0 to {VOCABULARY_SIZE - 1}"),
        (asking(1, 5, -1), "not from 0 to"),
        (asking(1, schema="{}"), "leave `json_schema` out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_computed_is_refused_and_holds_no_slot(weights: Path, request_: Any, words: str) -> None:
    one = engine(weights, slots=1)
    with pytest.raises(EngineError, match=words):
        one.begin(1, request_)
    one.begin(2, asking(2))
    with pytest.raises(EngineError, match="1 slots, and all are taken"):
        one.begin(3, asking(2))
    one.cancel(2)


def test_a_failure_ends_all_that_there_is_and_the_engine_goes_on(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one: Any = engine(weights)
    expected = run_one(one, asking(8)).ids
    one.begin(1, asking(50))
    one.begin(2, asking(50, 9))
    one.step([1, 2])

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(one.processor, "_generation_step", fail)
        with pytest.raises(EngineError, match=r"transformers cannot run it: CUDA out of memory"):
            one.step([1, 2])
    assert one.step([]) == []
    assert run_one(one, asking(8)).ids == expected


def test_an_artefact_that_cannot_be_loaded_is_one_error_that_names_it(weights: Path, tmp_path: Path) -> None:
    artefact = tmp_path / "model.safetensors"
    with pytest.raises(EngineError, match="there is no such artefact"):
        engine(artefact)
    artefact.write_bytes(b"no weights")
    with pytest.raises(EngineError, match=re.escape(str(artefact))):
        engine(artefact)
    shutil.copyfile(weights, artefact)
    with pytest.raises(EngineError, match=re.escape(f"{artefact}: transformers cannot load it")):
        engine(artefact)
    with pytest.raises(EngineError, match=r"called model\.safetensors"):
        engine(tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineError, match=r"no CUDA device|not a device"):
        load_generative_engine("transformers", weights, device="cuda:7")


def test_code_that_a_configuration_names_is_not_run(weights: Path, tmp_path: Path) -> None:
    shutil.copyfile(weights, tmp_path / weights.name)
    config = json.loads((weights.parent / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(EngineError, match="transformers cannot load it"):
        engine(tmp_path / weights.name)
    assert not (tmp_path / "ran").exists()


async def test_it_runs_in_a_worker_process_inside_its_sandbox(tiny: GenerativeEngine, weights: Path) -> None:
    spec = EngineSpec("tiny", "transformers", weights, (), generation=GenerationLimits(slots=3))
    async with WorkerProcess("w") as worker:
        assert (await worker.load(spec)).slots == 3
        stream = TokenStream()
        told = await worker.generate("tiny", asking(20), stream, token_interval_s=0.05)
        stream.end()
        assert told.ids == run_one(tiny, asking(20)).ids
        assert tuple(token for batch in await stream.take() for token in batch.ids) == told.ids


def test_a_text_that_nothing_came_of_is_told(tiny: GenerativeEngine) -> None:
    first = run_one(tiny, asking(1)).ids[0]
    text: Text = run_one(tiny, asking(5, stop_tokens=(first,)))
    assert text.ids == () and text.end is not None and text.end.stop_token


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5, seed=3), Sampling(0.9, 0.95, 40, seed=-7)], ids=repr)
def test_an_answer_goes_on_where_another_engine_stopped(tiny: GenerativeEngine, sampling: Sampling) -> None:
    prompt = tuple(range(5, 45))
    whole = run_one(tiny, asking(24, *prompt, sampling=sampling, ignore_stop=True)).ids
    assert len(set(whole)) > 3
    for at in (1, 2, 7, 23):
        rest = asking(24 - at, *prompt, *whole[:at], sampling=sampling, ignore_stop=True, answered=at)
        assert run_one(tiny, rest).ids == whole[at:], at

"""The paced generative engine: the times of its table, the same tokens in every run, and errors that name the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.models.generative import TALKER
from tests.support.paced_generation import asking, write_pace
from tidegate import clock
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.errors import EngineError
from tidegate.engines.generation.limits import NO_LIMITS, GenerationLimits, limits_of
from tidegate.engines.generation.paced_generation import PacedGenerativeEngine
from tidegate.generate.engine import SequenceProgress
from tidegate.generate.request import GenerateRequest, Sampling
from tidegate.token_sink import TokenBatch, TopLogprob


def engine(
    folder: Path, *, slow: float = 1.0, limits: GenerationLimits = NO_LIMITS, **changes: Any
) -> PacedGenerativeEngine:
    loaded = load_generative_engine("paced", write_pace(folder, **changes), limits=limits, paced_slow=slow)
    assert isinstance(loaded, PacedGenerativeEngine)
    return loaded


def run(one: PacedGenerativeEngine, request: GenerateRequest) -> tuple[tuple[int, ...], SequenceProgress]:
    """All tokens, and the last progress."""
    one.begin(1, request)
    ids: tuple[int, ...] = ()
    while True:
        for progress in one.step([1]):
            if progress.batch is not None:
                assert progress.batch.first == len(ids)
                ids += progress.batch.ids
            if progress.finished is not None:
                return ids, progress


def step_s(one: PacedGenerativeEngine, *due: int) -> float:
    began_at = clock.now()
    one.step(due)
    return clock.now() - began_at


def test_every_run_gives_the_same_tokens_and_another_prompt_or_seed_others(tmp_path: Path) -> None:
    first, last = run(engine(tmp_path), asking(30))
    again, _ = run(engine(tmp_path), asking(30))
    other, _ = run(engine(tmp_path), asking(30, 9, 9, 9))
    seeded, _ = run(engine(tmp_path), asking(30, sampling=Sampling(1.0, seed=7)))
    assert (len(first), last.finished, last.stop_token) == (30, "length", False)
    assert first == again and len({first, other, seeded}) == 3
    assert len(set(first)) > 25


def test_a_text_goes_on_where_another_engine_of_the_vocabulary_stopped(tmp_path: Path) -> None:
    limits = GenerationLimits(vocabulary_size=1000)
    whole, _ = run(engine(tmp_path, limits=limits), asking(30, 5, 6))
    rest, _ = run(engine(tmp_path, limits=limits, slow=0.5), asking(18, 5, 6, *whole[:12]))
    assert rest == whole[12:]


def test_tokens_are_of_the_vocabulary_and_no_stop_tokens(tmp_path: Path) -> None:
    ids, _ = run(engine(tmp_path, limits=GenerationLimits(vocabulary_size=4, stop_tokens=(0, 2))), asking(50))
    assert set(ids) == {1, 3}
    with pytest.raises(EngineError, match="key 'ids'"):
        engine(tmp_path, limits=GenerationLimits(vocabulary_size=2, stop_tokens=(0, 1)))


def test_a_text_ends_by_chance_or_at_a_token_that_the_caller_named_but_not_where_that_is_ignored(
    tmp_path: Path,
) -> None:
    ids, _ = run(engine(tmp_path), asking(30))
    stopped, last = run(engine(tmp_path), asking(30, stop_tokens=(ids[10],)))
    assert (stopped, last.finished, last.stop_token, last.batch) == (ids[:10], "stop", True, None)
    assert run(engine(tmp_path), asking(30, stop_tokens=(ids[10],), ignore_stop=True))[0] == ids

    one = engine(tmp_path, stop_chance=0.1, step_ms=((1.0, 0.01),))
    lengths = [len(run(one, asking(200, n))[0]) for n in range(60)]
    assert 6.0 < sum(lengths) / 60 < 15.0 and len(set(lengths)) > 10
    assert len(run(one, asking(200, ignore_stop=True))[0]) == 200


def test_a_text_ends_with_its_context(tmp_path: Path) -> None:
    ids, last = run(engine(tmp_path, context=20), asking(100, *range(15)))
    assert (len(ids), last.finished) == (5, "length")
    assert len(run(engine(tmp_path, limits=GenerationLimits(context=16)), asking(100, *range(15)))[0]) == 1


@pytest.mark.slow
def test_a_step_takes_what_its_batch_and_its_contexts_take_times_how_slow_it_is(tmp_path: Path) -> None:
    one = engine(
        tmp_path, slow=2.0, prefill_ms=0.0, prefill_chunk=1000, step_ms=((1.0, 10.0), (3.0, 20.0)), context_us=50.0
    )
    for n in (1, 2, 3):
        one.begin(n, asking(50, *range(100)))
    one.step([1, 2, 3])
    # The least of a few: a busy machine only ever adds to it.
    assert 0.030 <= min(step_s(one, 1) for _ in range(4)) < 0.045  # 2 × (10 ms + 0.05 ms × some 100 tokens)
    assert 0.070 <= min(step_s(one, 1, 2, 3) for _ in range(4)) < 0.090  # 2 × (20 ms + 0.05 ms × some 300 tokens)


def test_a_long_prompt_is_computed_in_chunks_while_others_go_on(tmp_path: Path) -> None:
    one = engine(tmp_path, prefill_ms=0.1, prefill_chunk=100)
    one.begin(1, asking(50))
    one.step([1])
    one.begin(2, asking(50, *range(250)))
    began_at = clock.now()
    steps = [{progress.id for progress in one.step([2, 1])} for _ in range(4)]
    assert steps == [{1}, {1}, {1, 2}, {1, 2}]
    assert clock.now() - began_at >= 0.025


def test_a_prompt_that_begins_as_an_earlier_one_is_cached_as_far(tmp_path: Path) -> None:
    one = engine(tmp_path, prefill_ms=0.2, prefill_chunk=10**6, cache_tokens=64)
    _, cold = run(one, asking(1, *range(48)))
    _, warm = run(one, asking(1, *range(40), 7, 7, 7))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
    assert run(one, asking(1, *range(48)))[1].cached_tokens == 47  # the last one is computed in any case
    run(one, asking(1, *range(1000, 1064)))  # which is all that it remembers
    assert run(one, asking(1, *range(48)))[1].cached_tokens == 0
    assert run(engine(tmp_path), asking(1, *range(48)))[1].cached_tokens == 0
    assert run(one, replace(asking(1, *range(48)), cache_salt="a"))[1].cached_tokens == 0


def test_logprobs_are_zeros_where_they_are_asked_for(tmp_path: Path) -> None:
    def first_batch(logprobs: int | None) -> TokenBatch | None:
        one = engine(tmp_path)
        one.begin(1, asking(1, logprobs=logprobs))
        return one.step([1])[0].batch

    plain = first_batch(None)
    assert plain is not None
    token = plain.ids[0]
    assert plain == TokenBatch(0, (token,))
    assert first_batch(0) == TokenBatch(0, (token,), (0.0,))
    assert first_batch(5) == TokenBatch(0, (token,), (0.0,), ((TopLogprob(token, 0.0),),))


def test_what_it_cannot_do_is_refused_and_a_cancelled_sequence_frees_its_slot(tmp_path: Path) -> None:
    one = engine(tmp_path, slots=1, context=8)
    for request, words in ((asking(1, *range(8)), "context of 8"), (asking(1, schema="{}"), "leave `json_schema` out")):
        with pytest.raises(EngineError, match=words):
            one.begin(1, request)
    one.begin(1, asking(5))
    with pytest.raises(EngineError, match="1 slots, and all are taken"):
        one.begin(2, asking(5))
    one.cancel(1)
    one.cancel(3)
    one.begin(2, asking(5))
    assert repr(one) == "<PacedGenerativeEngine generation.yaml 1 of 1 slots>" and one.slots == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_ms": ()}, "key 'step_ms': a cost table needs"),
        ({"prefill_ms": -1.0}, "key 'prefill_ms': must be 0 or more, not -1"),
        ({"context_us": float("nan")}, "key 'context_us'"),
        ({"slots": 0}, "key 'slots': must be from 1 to 4096, not 0"),
        ({"context": 1}, "key 'context': must be 2 or more"),
        ({"prefill_chunk": 0}, "key 'prefill_chunk'"),
        ({"cache_tokens": -1}, "key 'cache_tokens'"),
        ({"ids": (5, 4)}, "key 'ids'"),
        ({"stop_chance": 1.5}, "key 'stop_chance'"),
        ({"noise_sigma": 9.0}, "key 'noise_sigma'"),
    ],
)
def test_a_figure_that_is_none_is_named_with_the_file_and_a_way_out(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineError, match=re.escape(words)) as told:
        engine(tmp_path, **changes)
    assert str(tmp_path) in str(told.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no such artefact"),
        ("[", "no readable YAML"),
        ("prefill_ms: fast\nstep_ms: [[1, 1]]", "key 'prefill_ms': Expected `float`"),
        ("prefill_ms: 1\nstep_ms: [[1, 1]]\nwarp: 9", "unknown field `warp`"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "pace.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EngineError, match=words):
        load_generative_engine("paced", path)


def test_noise_varies_the_steps_and_not_the_tokens(tmp_path: Path) -> None:
    one = engine(tmp_path, step_ms=((1.0, 2.0),), noise_sigma=0.8)
    one.begin(1, asking(100))
    times_s = [step_s(one, 1) for _ in range(12)][1:]
    assert max(times_s) > 1.5 * min(times_s)
    assert run(engine(tmp_path, noise_sigma=0.8), asking(9))[0] == run(engine(tmp_path), asking(9))[0]


def test_an_engine_that_nobody_knows_or_whose_runtime_is_missing_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match="no engine that generates is called 'onnx': onnxruntime-genai, paced, trans"):
        load_generative_engine("onnx", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tidegate.engines.generation.onnx_genai", None)
    with pytest.raises(EngineError, match=re.escape("pip install 'tidegate[edge-llm]'")):
        load_generative_engine("onnxruntime-genai", tmp_path)


def test_the_limits_of_an_engine_are_its_models_and_its_variants() -> None:
    limits = limits_of(TALKER, TALKER.variants[0], cache_bytes=99)
    assert limits == GenerationLimits(slots=4, context=512, cache_bytes=99, stop_tokens=(2,), vocabulary_size=1000)

"""The onnxruntime-genai engine on a tiny Llama: what it says, when it stops, what it refuses, and what it frees."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.models.tiny_llama import CONTEXT, END, VOCABULARY_SIZE
from tests.support.paced_generation import asking
from tests.support.stepping import Text, run, run_one
from tidegate.engines.engine import load_generative_engine
from tidegate.engines.errors import EngineError
from tidegate.engines.generation.limits import NO_LIMITS, GenerationLimits
from tidegate.generate.engine import GenerativeEngine
from tidegate.generate.request import Sampling
from tidegate.generate.token_stream import TokenStream
from tidegate.models.repository import Repository
from tidegate.outcome import InvalidRequest
from tidegate.workers.process import EngineSpec, WorkerProcess

pytestmark = pytest.mark.slow

PROMPT = (5, 6, 7)
SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": false}'
)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values of 2 layers, 2 heads of 16, in fp32


def engine(artefact: Path, **limits: Any) -> GenerativeEngine:
    return load_generative_engine("onnxruntime-genai", artefact, limits=GenerationLimits(**limits))


@pytest.fixture(scope="module")
def tiny(tiny_genai: Path) -> GenerativeEngine:
    """One that all tests share which leave nothing behind."""
    return engine(tiny_genai)


def bare(artefact: Path, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """What onnxruntime-genai says without us."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(artefact.parent))
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + tokens, do_sample=False)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    said: list[int] = []
    while not generator.is_done():
        generator.generate_next_token()
        said.append(int(generator.get_next_tokens()[0]))
    return said


def test_a_greedy_text_is_the_one_of_the_runtime_alone_also_of_a_prompt_in_chunks(
    tiny: GenerativeEngine, tiny_genai: Path
) -> None:
    for prompt in (PROMPT, tuple(3 + 7 * n % 250 for n in range(150))):
        text = run_one(tiny, asking(40, *prompt))
        expected = bare(tiny_genai, prompt, 40)
        stopped = expected[-1] == END
        assert list(text.ids) == (expected[:-1] if stopped else expected)
        assert text.end is not None and text.end.stop_token == stopped


def test_sequences_side_by_side_say_what_each_says_alone(tiny: GenerativeEngine) -> None:
    requests = [asking(12 + n, *range(3 + n, 90 + 20 * n)) for n in range(4)]
    assert [text.ids for text in run(tiny, *requests)] == [run_one(tiny, one).ids for one in requests]


def test_a_step_is_one_token_of_the_most_urgent_or_a_chunk_of_its_prompt(tiny: GenerativeEngine) -> None:
    tiny.begin(1, asking(5))
    assert [progress.id for progress in tiny.step([1])] == [1]
    tiny.begin(2, asking(5, *range(3, 153)))
    assert [[progress.id for progress in tiny.step([2, 1])] for _ in range(3)] == [[], [], [2]]
    assert [progress.id for progress in tiny.step([1, 2])] == [1]
    tiny.cancel(1)
    tiny.cancel(2)


def test_a_text_stops_at_a_token_of_the_model_or_of_the_request_unless_that_is_ignored(
    tiny: GenerativeEngine, tiny_genai: Path
) -> None:
    whole = run_one(tiny, asking(30)).ids
    at = next(n for n in range(3, 30) if whole[n] not in whole[:n])
    for text in (
        run_one(tiny, asking(30, stop_tokens=(whole[at],))),
        run_one(engine(tiny_genai, stop_tokens=(whole[at], 1)), asking(30)),
    ):
        assert text.ids == whole[:at]
        assert text.end is not None and (text.end.finished, text.end.stop_token) == ("stop", True)

    ignoring = run_one(engine(tiny_genai, stop_tokens=(whole[at],)), asking(30, ignore_stop=True))
    assert len(ignoring.ids) == 30 and whole[at] not in ignoring.ids  # it says something else in its place
    assert run_one(tiny, asking(30, stop_tokens=(whole[at],), ignore_stop=True)).ids == whole


def test_a_text_goes_on_where_another_engine_stopped(tiny: GenerativeEngine) -> None:
    for prompt in (PROMPT, tuple(range(3, 80))):
        whole = run_one(tiny, asking(30, *prompt, ignore_stop=True)).ids
        assert run_one(tiny, asking(18, *prompt, *whole[:12], ignore_stop=True)).ids == whole[12:]


def test_a_text_ends_with_max_tokens_or_the_context(tiny: GenerativeEngine, tiny_genai: Path) -> None:
    for one, request, tokens in (
        (tiny, asking(1), 1),
        (tiny, asking(1000, *([9] * (CONTEXT - 5)), ignore_stop=True), 5),
        (engine(tiny_genai, context=10), asking(1000, ignore_stop=True), 7),
    ):
        text = run_one(one, request)
        assert len(text.ids) == tokens
        assert text.end is not None and (text.end.finished, text.end.stop_token) == ("length", False)


def first_token_shares(one: GenerativeEngine, sampling: Sampling, draws: int) -> Counter[int]:
    """How often which token comes first, with seeds from 0."""
    seen: Counter[int] = Counter()
    for seed in range(draws):
        seeded = replace(sampling, seed=seed)
        seen.update(run_one(one, asking(1, sampling=seeded)).ids or (END,))
    return seen


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(2.0),
        Sampling(2.0, top_k=5),
        Sampling(2.0, top_p=0.5),
        Sampling(1.5, top_p=0.9),
        Sampling(2.0, top_p=0.9, top_k=20),
        Sampling(2.0, top_k=10**9),
        Sampling(2.0, min_p=0.9),
        Sampling(2.0, top_k=20, min_p=0.7),
    ],
    ids=repr,
)
def test_tokens_come_as_often_as_the_model_says_after_temperature_and_filters(
    tiny: GenerativeEngine, sampling: Sampling
) -> None:
    expected = distribution(tiny, sampling)
    draws = 1500
    seen = first_token_shares(tiny, sampling, draws)
    assert set(seen) <= set(expected)  # nothing from beyond the filters
    distance = sum(abs(expected[token] - seen[token] / draws) for token in expected) / 2
    # Of so many draws from the right distribution it is about sqrt(tokens / (2 pi draws)); half of the nucleus's mass
    # elsewhere would be 0.5.
    assert distance < 1.5 * (len(expected) / (2 * 3.14 * draws)) ** 0.5 + 0.01


def distribution(one: GenerativeEngine, sampling: Sampling) -> dict[int, float]:
    """The probabilities of the first token, by hand, of the log-probabilities that the engine gives."""
    text = run_one(one, asking(1, logprobs=VOCABULARY_SIZE))
    heated = {top.id: exp(top.logprob / sampling.temperature) for top in text.top[0]}
    kept = sorted(heated, key=heated.__getitem__, reverse=True)[: sampling.top_k or None]
    mass = sum(heated[token] for token in kept)
    nucleus, so_far = [], 0.0
    for token in kept:
        nucleus.append(token)
        so_far += heated[token] / mass
        if so_far >= sampling.top_p:
            break
    nucleus = [token for token in nucleus if heated[token] >= sampling.min_p * heated[kept[0]]]
    mass = sum(heated[token] for token in nucleus)
    return {token: heated[token] / mass for token in nucleus}


def test_a_seed_gives_the_same_text_again_and_chance_another(tiny: GenerativeEngine) -> None:
    def said(seed: int | None) -> tuple[int, ...]:
        return run_one(tiny, asking(12, sampling=Sampling(2.0, seed=seed), ignore_stop=True)).ids

    for seed in (0, 7, -1, 2**63 - 1, -(2**63)):
        assert said(seed) == said(seed)
    assert len({said(seed) for seed in range(5)}) == 5
    assert len({said(None) for _ in range(5)}) == 5


@pytest.mark.parametrize(
    "sampling", [Sampling(1e-9), Sampling(5e-324), Sampling(2.0, top_p=0.0), Sampling(2.0, top_k=1)]
)
def test_what_leaves_one_token_is_greedy(tiny: GenerativeEngine, sampling: Sampling) -> None:
    assert run_one(tiny, asking(12, sampling=sampling)).ids == run_one(tiny, asking(12)).ids


def test_logprobs_are_the_models_own_and_change_no_token(tiny: GenerativeEngine) -> None:
    plain = run_one(tiny, asking(10))
    text = run_one(tiny, asking(10, logprobs=3))
    assert text.ids == plain.ids and plain.logprobs == () and plain.top == ()
    assert [top[0].id for top in text.top] == list(text.ids)  # greedy
    assert [top[0].logprob for top in text.top] == list(text.logprobs)
    assert all(0.0 > top[0].logprob >= top[1].logprob >= top[2].logprob for top in text.top)
    bare_ones = run_one(tiny, asking(10, logprobs=0))
    assert bare_ones.logprobs == text.logprobs and bare_ones.top == ()
    whole = run_one(tiny, asking(1, logprobs=VOCABULARY_SIZE)).top[0]
    assert log(sum(exp(top.logprob) for top in whole)) == pytest.approx(0.0, abs=1e-6)
    hot = run_one(tiny, asking(1, logprobs=1, sampling=Sampling(2.0, seed=3)))
    assert hot.logprobs[0] == pytest.approx(next(top.logprob for top in whole if top.id == hot.ids[0]))


def test_a_text_follows_its_schema(tiny: GenerativeEngine, tiny_genai: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_genai.parent / "tokenizer.json"))
    for seed in range(3):
        text = run_one(tiny, asking(200, schema=SCHEMA, sampling=Sampling(1.0, seed=seed)))
        assert text.end is not None
        if text.end.finished == "stop":
            assert json.loads(tokenizer.decode(list(text.ids)))["a"] in ("x", "y")
        else:  # blanks without end, which JSON allows
            assert tokenizer.decode(list(text.ids)).startswith("{")


@pytest.mark.parametrize("sampling", [Sampling(0.0, min_p=0.1), Sampling(1.0, top_k=1, min_p=0.1)])
def test_a_greedy_text_follows_its_schema_with_min_p_as_without(tiny: GenerativeEngine, sampling: Sampling) -> None:
    plain = run_one(tiny, asking(20, schema=SCHEMA))
    assert run_one(tiny, asking(20, schema=SCHEMA, sampling=sampling)).ids == plain.ids


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asking(1, *range(3, 3 + CONTEXT)[:CONTEXT], 3), f"context of {CONTEXT}"),
        (asking(1, 5, VOCABULARY_SIZE), f"not from 0 to {VOCABULARY_SIZE - 1}"),
        (asking(1, 5, -1), "not from 0 to"),
        (asking(1, schema='{"type": "nope"}'), "json_schema.*nope"),
        (asking(1, schema="{"), "json_schema"),
        (asking(1, schema='{"$ref": "http://127.0.0.1/x"}'), "json_schema"),
        (asking(1, schema=SCHEMA, sampling=Sampling(1.0, min_p=0.1)), "chosen without `min_p` here"),
        (asking(1, schema=SCHEMA, ignore_stop=True), "leave `ignore_eos` or `json_schema` out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_computed_is_refused_and_holds_no_slot(tiny_genai: Path, request_: Any, words: str) -> None:
    one = engine(tiny_genai, slots=1)
    with pytest.raises(EngineError, match=words):
        one.begin(1, request_)
    assert len(run_one(one, asking(2, ignore_stop=True)).ids) == 2


def test_an_id_that_only_the_manifest_excludes_is_refused(tiny_genai: Path) -> None:
    with pytest.raises(EngineError, match="not from 0 to 99"):
        engine(tiny_genai, vocabulary_size=100).begin(1, asking(1, 100))


def test_slots_are_taken_and_freed_by_the_end_and_by_cancelling(tiny_genai: Path) -> None:
    one = engine(tiny_genai, slots=2)
    assert one.slots == 2 and engine(tiny_genai).slots == 4
    one.begin(1, asking(50))
    one.begin(2, asking(1))
    with pytest.raises(EngineError, match="2 slots, and all are taken"):
        one.begin(3, asking(1))
    one.step([2])
    one.begin(3, asking(1))
    one.cancel(1)
    one.cancel(1)
    one.cancel(99)
    one.begin(4, asking(1))
    assert repr(one) == "<OnnxGenerativeEngine model.onnx 2 of 2 slots>"


def test_a_sequence_that_has_ended_or_was_cancelled_keeps_no_generator(
    tiny_genai: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime_genai

    made, create = [], onnxruntime_genai.Generator
    monkeypatch.setattr(onnxruntime_genai, "Generator", lambda *words: (made.append(create(*words)), made[-1])[1])
    one = engine(tiny_genai)
    one.begin(1, asking(50))
    one.begin(2, asking(1))
    one.step([1])
    one.step([2])
    one.cancel(1)
    assert len(made) == 2
    while made:
        generator = made.pop()
        assert sys.getrefcount(generator) == 2  # the name here, and the argument


def test_caches_are_within_their_bytes_and_wait_for_room_in_order(tiny_genai: Path) -> None:
    one = engine(tiny_genai, slots=4, cache_bytes=30 * TOKEN_BYTES)
    with pytest.raises(EngineError, match=r"together are 31 tokens.*room for 30"):
        one.begin(1, asking(28))
    one.begin(1, asking(17, ignore_stop=True))  # 20 of 30
    one.begin(2, asking(17, ignore_stop=True))  # waits
    one.begin(3, asking(5, ignore_stop=True))  # would fit, and waits behind it
    texts = {id: Text() for id in (1, 2, 3)}
    assert one.step([3, 2]) == []
    order = []
    while any(text.end is None for text in texts.values()):
        for progress in one.step([id for id in (3, 2, 1) if texts[id].end is None]):
            if not texts[progress.id].ids:
                order.append(progress.id)
            texts[progress.id].take(progress)
    assert order == [1, 2, 3]
    assert [len(text.ids) for text in texts.values()] == [17, 17, 5]
    with pytest.raises(EngineError, match=f"cache is {TOKEN_BYTES} bytes, and 100 are given"):
        engine(tiny_genai, cache_bytes=100)


def test_telemetry_is_off_before_a_model_is_loaded(tiny_genai: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime_genai

    called: list[str] = []
    disable, config = onnxruntime_genai.disable_telemetry_events, onnxruntime_genai.Config
    monkeypatch.setattr(
        onnxruntime_genai, "disable_telemetry_events", lambda: (called.append("telemetry off"), disable())[1]
    )
    monkeypatch.setattr(onnxruntime_genai, "Config", lambda path: (called.append("config"), config(path))[1])
    engine(tiny_genai)
    assert called == ["telemetry off", "config"]


@pytest.mark.parametrize("runtime", ["onnx", "onnxruntime-genai"])
def test_no_runtime_keeps_a_file_or_a_socket_open_to_tell_its_maker_with(
    runtime: str, tiny_genai: Path, tmp_path: Path
) -> None:
    """onnxruntime opens a database of events below the cache folder, unless it is told not to before it is loaded."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.support.paced_generation import asking\n"
        "from tests.support.stepping import run_one\n"
        "from tests.support.models.tiny_models import classifier\n"
        "from tidegate.engines.engine import load_engine, load_generative_engine\n"
        "if sys.argv[1] == 'onnx':\n"
        "    one = load_engine('onnx', classifier(Path(sys.argv[3]), features=8), outputs=('scores',))\n"
        "else:\n"
        "    run_one(one := load_generative_engine(sys.argv[1], Path(sys.argv[2])), asking(20))\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        place, flags = os.readlink(f'/proc/self/fd/{fd}'), open(f'/proc/self/fdinfo/{fd}').read()\n"
        "    except FileNotFoundError:\n"
        "        continue\n"
        "    if int(fd) > 2 and (place.startswith('socket') or int(flags.split()[3], 8) & 3):\n"
        "        print(place)\n"
    )
    muted = ("ORT_DISABLE_TELEMETRY", "CI")  # either would do it in our place
    environment = {key: value for key, value in os.environ.items() if key not in muted and "CI" not in key}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", program, runtime, str(tiny_genai), str(tmp_path / "model.onnx")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": {"decoder": {"session_options": {"custom_ops_library": "/tmp/x.so"}}}}, "custom_ops_library"),
        ({"model": {"decoder": {"session_options": {"provider_options": [{"qnn": {}}]}}}}, "provider_options"),
        ({"model": {"decoder": {"filename": "../../x.onnx"}}}, "filename"),
        ({"model": {"decoder": {"pipeline": []}}}, "pipeline"),
        ({"model": {"vision": {"filename": "x"}}}, "vision"),
        ({"model": {"vocab_size": "many"}}, "vocab_size"),
        ({"model": {"decoder": {"head_size": 0}}}, "above 0"),
        ({"engine": {}}, "engine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_configuration_that_says_more_than_a_decoders_is_refused_by_name(
    tiny_genai: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    shutil.copyfile(tiny_genai, tmp_path / "model.onnx")
    config = json.loads((tiny_genai.parent / "genai_config.json").read_text())
    (tmp_path / "genai_config.json").write_text(json.dumps(merged(config, changed)))
    with pytest.raises(EngineError, match=f"genai_config.json.*{words}.*tidegate model add"):
        engine(tmp_path / "model.onnx")


def merged(base: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    parts = {
        key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in changed.items()
    }
    return {**base, **parts}


def test_an_artefact_that_cannot_be_loaded_is_one_error_that_names_it(tiny_genai: Path, tmp_path: Path) -> None:
    artefact = tmp_path / "model.onnx"
    with pytest.raises(EngineError, match="there is no such artefact"):
        engine(artefact)
    artefact.write_bytes(b"no model")
    with pytest.raises(EngineError, match=r"genai_config.json: it cannot be read"):
        engine(artefact)
    shutil.copyfile(tiny_genai.parent / "genai_config.json", tmp_path / "genai_config.json")
    with pytest.raises(EngineError, match=re.escape(f"{artefact}: onnxruntime-genai cannot load it")):
        engine(artefact)
    with pytest.raises(EngineError, match="device 'cuda:0'"):
        load_generative_engine("onnxruntime-genai", tiny_genai, limits=NO_LIMITS, device="cuda:0")


async def test_it_runs_in_a_worker_process_inside_its_sandbox(tiny: GenerativeEngine, tiny_genai: Path) -> None:
    spec = EngineSpec("tiny", "onnxruntime-genai", tiny_genai, (), generation=GenerationLimits(slots=2))
    async with WorkerProcess("w") as worker:
        assert (await worker.load(spec)).slots == 2
        stream = TokenStream()
        generated = await worker.generate("tiny", asking(20), stream, token_interval_s=0.05)
        stream.end()
        assert generated.ids == run_one(tiny, asking(20)).ids
        assert tuple(token for batch in await stream.take() for token in batch.ids) == generated.ids


async def test_a_schema_at_whose_text_the_grammar_fails_is_its_callers_fault_and_not_the_workers(
    tiny_genai: Path,
) -> None:
    spec = EngineSpec("tiny", "onnxruntime-genai", tiny_genai, (), generation=GenerationLimits(slots=2))
    async with WorkerProcess("w") as worker:
        await worker.load(spec)
        with pytest.raises(InvalidRequest, match="cannot follow this `json_schema`: Error committing tokens") as failed:
            await worker.generate("tiny", asking(20, schema='{"enum": ["🌊"]}'), None, token_interval_s=0.05)
        assert "\n" not in failed.value.message
        assert (await worker.generate("tiny", asking(2, ignore_stop=True), None, token_interval_s=0.05)).ids


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5, seed=3), Sampling(0.9, 0.95, 40, seed=-7)], ids=repr)
def test_an_answer_goes_on_where_another_engine_stopped(tiny: GenerativeEngine, sampling: Sampling) -> None:
    prompt = tuple(range(5, 45))
    whole = run_one(tiny, asking(24, *prompt, sampling=sampling, ignore_stop=True)).ids
    assert len(set(whole)) > 3
    for at in (1, 2, 7, 23):
        rest = asking(24 - at, *prompt, *whole[:at], sampling=sampling, ignore_stop=True, answered=at)
        assert run_one(tiny, rest).ids == whole[at:], at


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.95, seed=5)], ids=repr)
def test_a_real_model_in_int4_goes_on_with_the_same_text(smollm2_repository: Repository, sampling: Sampling) -> None:
    """Its logits differ by up to 1 between a token that is computed alone and one within a chunk."""
    manifest = smollm2_repository.manifest("smollm2")
    artefact = smollm2_repository.artefact(manifest, next(one for one in manifest.variants if one.name == "int4"))
    one, prompt = engine(artefact), tuple(range(1000, 1090))
    whole = run_one(one, asking(40, *prompt, sampling=sampling, ignore_stop=True)).ids
    for at in (3, 33):
        rest = asking(40 - at, *prompt, *whole[:at], sampling=sampling, ignore_stop=True, answered=at)
        assert run_one(one, rest).ids == whole[at:], at

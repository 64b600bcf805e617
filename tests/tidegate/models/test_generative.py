"""What a generating model's manifest must say, and how it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.models.generative import COST, TALKER, talker
from tidegate.models.generative import CommitWindow, GenerationCost
from tidegate.models.manifest import Cost, Manifest, TensorSpec
from tidegate.models.repository import manifest_text, parse_manifest
from tidegate.models.validate import problems
from tidegate.types import Datatype


def test_it_reads_back_as_it_was_written() -> None:
    assert problems(TALKER) == ()
    assert parse_manifest(manifest_text(TALKER), Path("model.yaml")) == TALKER
    assert TALKER.kind == "generation"
    assert COST.prompt_weight == 0.125


def test_a_manifest_of_before_is_spelled_as_before() -> None:
    before = replace(TALKER, generative=None, variants=tuple(replace(one, generation=None) for one in TALKER.variants))
    assert "generat" not in manifest_text(before)


def priced(**changes: Any) -> Manifest:
    variant = replace(TALKER.variants[0], generation=replace(COST, **changes))
    return replace(TALKER, variants=(variant,))


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (talker(context=0), "generative.context: 0"),
        (talker(vocabulary="short"), "generative.vocabulary: 'short'"),
        (talker(vocabulary_size=0), "generative.vocabulary_size: 0"),
        (talker(tokenizer="../t.json"), "generative.tokenizer: '../t.json'"),
        (talker(tokenizer_sha256="x"), "generative.tokenizer_sha256: 'x'"),
        (talker(chat_template=None), "generative.chat_template_sha256"),
        (talker(stop_tokens=(1000,)), "generative.stop_tokens"),
        (talker(default_max_tokens=513), "generative.default_max_tokens: 513"),
        (talker(default_ttft_s=0.0), "generative.default_ttft_s: 0"),
        (talker(commit_window=CommitWindow(0.0)), "generative.commit_window.threshold: 0 must be above 0"),
        (talker(commit_window=CommitWindow(0.5, 65)), "generative.commit_window.tokens: 65 must be from 1 to 64"),
        (talker(commit_window=CommitWindow(0.5, max_share=1.5)), "generative.commit_window.max_share: 1.5 must be"),
        (talker(commit_window=CommitWindow(0.5)), "generative.commit_window: no variant of the edge is outdone"),
        (talker(default_tpot_s=float("inf")), "generative.default_tpot_s: inf"),
        (priced(prefill_ms=-1.0), "generation.prefill_ms: -1"),
        (priced(context_us=float("nan")), "generation.context_us: nan"),
        (priced(step_ms=()), "generation.step_ms"),
        (priced(step_ms=((2, 1.0),)), "generation.step_ms"),
        (priced(step_ms=((1, 1.0), (1, 2.0))), "generation.step_ms"),
        (priced(step_ms=((1, 0.0),)), "generation.step_ms"),
        (priced(slots=0), "generation.slots: 0"),
        (priced(cache_bytes=-1), "generation.cache_bytes: -1"),
        (replace(TALKER, variants=(replace(TALKER.variants[0], generation=None),)), "must be there"),
        (replace(TALKER, generative=None), "no section `generative`"),
        (replace(TALKER, cost=Cost("bytes", "text_input")), "counts tokens of input_ids"),
        (replace(TALKER, inputs=TALKER.inputs[:1]), "input_ids INT32, text_input BYTES"),
        (replace(TALKER, inputs=tuple(replace(one, optional=False) for one in TALKER.inputs)), "must be optional"),
        (replace(TALKER, outputs=(TensorSpec("y", Datatype.FP32, (1,)),)), "output_ids INT32, text_output BYTES"),
    ],
)
def test_what_is_wrong_is_named(manifest: Manifest, words: str) -> None:
    found = problems(manifest)
    assert any(words in problem for problem in found), found


def test_a_cost_without_a_step_has_no_weight() -> None:
    assert GenerationCost(prefill_ms=1.0, step_ms=()).prompt_weight == 0.0

"""Golden prompts come back as they were written, fit their model, and ask for no more than a device should compute."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.models.generative import GENERATIVE
from tidegate.generate.teacher_forcing import KnownAnswer, TokenAgreement
from tidegate.rollout.golden_prompts import (
    MAX_PROMPTS,
    MAX_PROMPTS_BYTES,
    BadGoldenPrompts,
    GoldenPrompts,
    decode_prompts,
    disagreement,
    encode_prompts,
    may_still_agree,
)

ANSWERS = (KnownAnswer((5, 6), (7, 8, 9), stopped=True), KnownAnswer((5,), (1,)))


def prompts(*answers: KnownAnswer, **changes: Any) -> bytes:
    return encode_prompts(GoldenPrompts(**{"vocabulary": "d" * 64, "made_by": "int4", "answers": answers} | changes))


def test_they_come_back() -> None:
    assert decode_prompts(prompts(*ANSWERS), GENERATIVE).answers == ANSWERS


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no golden prompts"),
        (b"\xc1" * 40, "no golden prompts"),
        (prompts(*ANSWERS)[:-3], "no golden prompts"),
        (msgspec.msgpack.encode({"v": 1, "cases": []}), "no golden prompts"),
        (prompts(), "no golden prompts"),
        (prompts(*ANSWERS * MAX_PROMPTS), "no golden prompts"),
        (bytes(MAX_PROMPTS_BYTES + 1), "at most 1048576 are allowed"),
        (prompts(*ANSWERS, vocabulary="a" * 64), "of the vocabulary aaaaaaaaaaaa"),
        (prompts(KnownAnswer((), (1,))), "prompt 1 has no tokens"),
        (prompts(*ANSWERS, KnownAnswer((1,), ())), "prompt 3 has no tokens, or no answer"),
        (prompts(KnownAnswer((1,), (1000,))), "prompt 1 has ids that are not from 0 to 999"),
        (prompts(KnownAnswer((-1,), (1,))), "prompt 1 has ids that are not"),
        (prompts(KnownAnswer((1,) * 500, (1,) * 13)), "longer than the model's context of 512"),
        (prompts(*[KnownAnswer((1,) * 500, (1,) * 12)] * 129), "they have 66048 tokens, at most 65536 are allowed"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(raw: bytes, words: str) -> None:
    with pytest.raises(BadGoldenPrompts, match=words):
        decode_prompts(raw, GENERATIVE)


def test_the_share_is_of_all_positions_and_the_worst_prompt_is_named() -> None:
    found = [TokenAgreement(10, 10, 1, 10, 1), TokenAgreement(10, 7, 1, 2, 0)]
    assert disagreement(found, 0.85) == ""
    assert disagreement(found, 0.9) == (
        "17 of 20 golden tokens agree (0.8500), below 0.9; 1 of 2 answers have no difference, "
        "the worst is prompt 2 with 7 of 10"
    )


def test_a_share_that_cannot_be_reached_is_known_before_the_end() -> None:
    assert may_still_agree([TokenAgreement(5, 4)], 20, 0.95)
    assert not may_still_agree([TokenAgreement(5, 3)], 20, 0.95)
    assert may_still_agree([TokenAgreement(5, 0)], 20, 0.0)

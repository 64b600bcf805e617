"""Golden prompts: the golden cases of a model that generates, prompts with the greedy answers that it gave.

Token ids, made where the model was made, with the same variant. A device judges each position of an answer behind the
tokens that were expected before it (`tidegate/generate/teacher_forcing.py`): one rounding that falls the other way on
another processor costs one position, and not all that follow. The bound is `top1_min` of the probe, the share of all
positions.

How much agrees on one machine and on another was not measured, but what differs more: int4 weights that are multiplied
with activations in fp32 instead of int8 agree at 0.978 of the positions (SmolLM2, 24 answers of which 12 are equal
from end to end), and another quantization at 0.71. `GOLDEN_TOKENS_MIN` lies between the two.

Written in msgpack. The vocabulary is named, since ids of another one would be other words. All is bounded, for a device
computes as much as the file asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from tidegate.generate.teacher_forcing import KnownAnswer, TokenAgreement, total
from tidegate.models.generative import Generative
from tidegate.rollout.plan import Digest

GOLDEN_TOKENS_MIN: Final = 0.9  # of all positions, where an operator asks for nothing else: see above
MAX_PROMPTS: Final = 256
MAX_TOKENS: Final = 65_536  # of all prompts and answers together
MAX_PROMPTS_BYTES: Final = 1 << 20


class BadGoldenPrompts(ValueError):
    """A file that holds no golden prompts, or none for this model; the text says why."""


class GoldenPrompts(msgspec.Struct, frozen=True):
    """The file. `made_by` names the variant that gave the answers."""

    vocabulary: Digest
    made_by: Annotated[str, Meta(max_length=200)]
    answers: Annotated[tuple[KnownAnswer, ...], Meta(min_length=1, max_length=MAX_PROMPTS)]
    v: Literal[2] = 2  # 1 is `golden.py`, of models with single answers


_decoder: Final = msgspec.msgpack.Decoder(GoldenPrompts)


def encode_prompts(prompts: GoldenPrompts) -> bytes:
    return msgspec.msgpack.encode(prompts)


def decode_prompts(raw: bytes, model: Generative) -> GoldenPrompts:
    """The prompts, which fit the model. Raises BadGoldenPrompts."""
    if len(raw) > MAX_PROMPTS_BYTES:
        raise BadGoldenPrompts(f"{len(raw)} bytes of golden prompts, at most {MAX_PROMPTS_BYTES} are allowed")
    try:
        prompts = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError, ValueError) as error:
        raise BadGoldenPrompts(f"no golden prompts: {error}") from error
    if problem := _misfit(prompts, model):
        raise BadGoldenPrompts(problem)
    return prompts


def disagreement(agreements: Sequence[TokenAgreement], least: float) -> str:
    """Why the answers do not agree enough; "" when they do.

    Args:
        least: share of all positions.
    """
    together = total(agreements)
    if together.share >= least:
        return ""
    worst = min(range(len(agreements)), key=lambda index: agreements[index].share)
    found = agreements[worst]
    return (
        f"{together.agreed} of {together.positions} golden tokens agree ({together.share:.4f}), below {least:g}; "
        f"{together.equal} of {together.answers} answers have no difference, the worst is prompt {worst + 1} with "
        f"{found.agreed} of {found.positions}"
    )


def may_still_agree(agreements: Sequence[TokenAgreement], positions: int, least: float) -> bool:
    """Whether the share can still be reached when those that are left agree, of so many positions in all."""
    together = total(agreements)
    return positions - (together.positions - together.agreed) >= least * positions


def _misfit(prompts: GoldenPrompts, model: Generative) -> str:
    if prompts.vocabulary != model.vocabulary:
        return f"they are of the vocabulary {prompts.vocabulary[:12]}…, and the model has {model.vocabulary[:12]}…"
    tokens = 0
    for number, one in enumerate(prompts.answers, start=1):
        tokens += len(one.prompt) + one.positions
        if not one.prompt or not one.positions:
            return f"prompt {number} has no tokens, or no answer"
        if len(one.prompt) + one.positions > model.context:
            return f"prompt {number} and its answer are longer than the model's context of {model.context} tokens"
        if not all(0 <= id < model.vocabulary_size for id in (*one.prompt, *one.ids)):
            return f"prompt {number} has ids that are not from 0 to {model.vocabulary_size - 1}"
    return f"they have {tokens} tokens, at most {MAX_TOKENS} are allowed" if tokens > MAX_TOKENS else ""

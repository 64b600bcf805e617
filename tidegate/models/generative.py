"""The part of a manifest that a generating model has: its vocabulary, its text side, and what a token costs.

A generating model takes token ids (`input_ids`) or text, and gives ids and text. Which variants may go on with each
other's answers is said by the vocabulary, of which there is one for all variants of a version. Costs are measured when
a variant is built and again on each device; they are here so that a gateway can place the first request.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Final, Literal, get_args

import msgspec

PROMPT_INPUT: Final = "input_ids"  # the prompt's token ids
ANSWER_OUTPUT: Final = "output_ids"
MAX_TOKENS: Final = "max_tokens"  # the request parameter: of the answer
MAX_CONTEXT = 2**24
MAX_SLOTS = 4096
MAX_COMMIT_TOKENS = 64  # held back of an answer: less than any reader's window
_MAX_STOPS = 256
BeginningMeasure = Literal["mean", "least"]  # `tidegate/generate/beginning_confidence.py`


class CommitWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How sure the beginning of a lesser variant's answer must be before a caller sees any of it.

    `tidegate model calibrate` finds the threshold. See docs/generation.md, "An unsure beginning".
    """

    threshold: float  # above 0, up to 1; what is below it is escalated
    tokens: int = 8  # of the beginning: held back, and judged
    measure: BeginningMeasure = "mean"
    max_share: float = 0.5  # of the answers, at most so many are escalated in the long run: the others are provisional


class Generative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all variants of a generating model have in common. Files are names inside the version's folder."""

    context: int  # tokens: prompt and answer together
    vocabulary: str  # SHA-256 of what the ids mean: `tidegate/generate/vocabulary.py`; "": see `is_text_only`
    vocabulary_size: int  # ids are below it
    tokenizer: str  # a tokenizer.json
    tokenizer_sha256: str
    stop_tokens: tuple[int, ...] = ()  # one of them ends an answer
    chat_template: str | None = None  # a Jinja template; None: no chat, only completions
    chat_template_sha256: str | None = None
    default_max_tokens: int = 256  # of a request that does not say, as far as the context has room
    default_ttft_s: float | None = None  # the budget of the first token where the caller gives none; None: no budget
    default_tpot_s: float | None = None  # the same of each further token, on average
    commit_window: CommitWindow | None = None  # None: what a variant says is shown as it comes

    @property
    def is_text_only(self) -> bool:
        """Whether its tokens are not known here: it is asked in text, and answers in text."""
        return not self.vocabulary

    def max_tokens_after(self, prompt_tokens: int) -> int:
        """Tokens of the answer to a prompt of this length where the request does not say how many it may have."""
        return max(1, min(self.default_max_tokens, self.context - prompt_tokens))


class GenerationCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a variant's tokens cost where it was built, and how many sequences it takes."""

    prefill_ms: float  # for each token of a prompt
    step_ms: tuple[tuple[int, float], ...]  # (sequences at once, one token of each), at a short context
    cached_prefill_ms: float = 0.0  # for each token of a prompt that a cache has
    context_us: float = 0.0  # what each token of its context adds to a sequence's step
    cache_bytes: int = 0  # for each token of its context
    slots: int = 4  # sequences at a time
    batch_invariant: bool = False  # the text must not depend on which others are computed beside it, whatever it costs

    @property
    def prompt_weight(self) -> float:
        """How many tokens of an answer a token of the prompt is worth, in time."""
        return self.prefill_ms / self.step_ms[0][1] if self.step_ms and self.step_ms[0][1] > 0.0 else 0.0


def generative_problems(one: Generative) -> Iterator[str]:
    """What is wrong beyond types and file names, as `key: what is wrong with which value`."""
    if not 1 <= one.context <= MAX_CONTEXT:
        yield f"context: {one.context} must be from 1 to {MAX_CONTEXT} tokens"
    if not 1 <= one.vocabulary_size < 2**31:
        yield f"vocabulary_size: {one.vocabulary_size} must be from 1 to {2**31 - 1}"
    if not 1 <= one.default_max_tokens <= max(1, one.context):
        yield f"default_max_tokens: {one.default_max_tokens} must be from 1 to the context, {one.context}"
    for key in ("default_ttft_s", "default_tpot_s"):
        value = getattr(one, key)
        if value is not None and not (isfinite(value) and value > 0.0):
            yield f"{key}: {value:g} must be a number of seconds above 0; leave it out for no budget"
    if len(one.stop_tokens) > _MAX_STOPS or not all(0 <= id < one.vocabulary_size for id in one.stop_tokens):
        yield f"stop_tokens: must be at most {_MAX_STOPS} ids below vocabulary_size, {one.vocabulary_size}"
    if one.commit_window is not None:
        yield from (f"commit_window.{problem}" for problem in _commit_window_problems(one.commit_window))
    if (one.chat_template is None) != (one.chat_template_sha256 is None):
        yield "chat_template_sha256: must be there with chat_template, and only then"


def _commit_window_problems(window: CommitWindow) -> Iterator[str]:
    if not 0.0 < window.threshold <= 1.0:
        yield f"threshold: {window.threshold:g} must be above 0 and at most 1; leave the section out for none"
    if not 0.0 < window.max_share <= 1.0:
        yield f"max_share: {window.max_share:g} must be above 0 and at most 1"
    if not 1 <= window.tokens <= MAX_COMMIT_TOKENS:
        yield f"tokens: {window.tokens} must be from 1 to {MAX_COMMIT_TOKENS}"
    if window.measure not in get_args(BeginningMeasure):
        yield f"measure: {window.measure!r} must be one of {', '.join(get_args(BeginningMeasure))}"


def generation_cost_problems(one: GenerationCost) -> Iterator[str]:
    """As `generative_problems`, of a variant."""
    for key in ("prefill_ms", "cached_prefill_ms", "context_us"):
        value = getattr(one, key)
        if not (isfinite(value) and value >= 0.0):
            yield f"{key}: {value:g} must be a number that is not negative"
    batches = [batch for batch, _ in one.step_ms]
    if not one.step_ms or batches != sorted(set(batches)) or batches[0] != 1:
        yield f"step_ms: must begin with 1 sequence and go on with more, not {batches}"
    if not all(isfinite(ms) and ms > 0.0 for _, ms in one.step_ms):
        yield "step_ms: times must be above 0"
    if one.cache_bytes < 0:
        yield f"cache_bytes: {one.cache_bytes} must not be negative"
    if not 1 <= one.slots <= MAX_SLOTS:
        yield f"slots: {one.slots} must be from 1 to {MAX_SLOTS}"

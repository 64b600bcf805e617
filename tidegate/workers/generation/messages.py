"""What travels between a process and its worker for generations: a sequence begins, gets credit, and is stepped.

    BeginSequence      →  its prompt follows as INT32; answered by exactly one end, whatever happens
    CreditSequence     →  so many tokens more may come
    CancelSequence     →  end it between two steps; it is still answered (`failed`, with no message)
    StepTaken          ←  what one step brought, of all sequences of an engine: started, tokens, ended, failed

One frame a step, however many sequences it advanced: the frame and waking the parent are most of what a token costs.
A step that brought nothing (a part of a long prompt) is told now and then, as a sign of life (`silence.py`).

A child sends no more tokens of a sequence than it has credit for, nor than `max_tokens`, without a gap, and after its
start; anything else is a defect of the child, and an `UnexpectedMessage` at the parent.

Pure. `tidegate/workers/channel.py` makes frames of it, and bounds them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import FinishReason, Generated, Usage
from tidegate.token_sink import TokenBatch
from tidegate.types import Buffer

MAX_PROMPT_TOKENS: Final = 1 << 20
UNLIMITED: Final = -1  # credit that never ends
_VALUES_A_MESSAGE: Final = 65536  # of ten bytes at most: within channel.MAX_HEADER_BYTES
_FAILED_A_MESSAGE: Final = 32  # of channel.shorten's characters, four bytes at most each

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
# Within a year: what is not finite would spoil for ever what is learnt of times.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=31_536_000)]


class UnexpectedMessage(Exception):
    """A message that no correct end sends, or not now."""


class SequenceMessage(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of what travels for generations. Ids are the parent's, and never used twice."""


class BeginSequence(SequenceMessage, frozen=True, tag="begin", omit_defaults=True):
    """Parent → child. The request's prompt is empty here; the payload holds it."""

    id: int
    key: str  # of the engine
    request: GenerateRequest
    token_interval_s: float
    first_token_s: float
    credit: Annotated[int, msgspec.Meta(ge=UNLIMITED)] = UNLIMITED


class CreditSequence(SequenceMessage, frozen=True, tag="credit"):
    """Parent → child: `tokens` more may come. One that has ended meanwhile is not known, which is no error."""

    id: int
    tokens: Positive


class CancelSequence(SequenceMessage, frozen=True, tag="drop"):
    """Parent → child: end it between two steps. One that has ended meanwhile is not known, which is no error."""

    id: int


class SequenceStarted(msgspec.Struct, frozen=True, array_like=True):
    """The prompt has been computed."""

    id: int
    cached_tokens: Count


class SequenceTokens(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of one sequence."""

    id: int
    batch: TokenBatch


class SequenceEnded(msgspec.Struct, frozen=True, array_like=True):
    """It has ended well, and is forgotten in the child."""

    id: int
    finish_reason: FinishReason
    stop_token: bool  # whether a stop token, which was not sent, ended it
    prefill_s: Seconds
    decode_s: Seconds
    cached_tokens: Count = 0  # of its prompt, where that is known only now; else as its start said


class SequenceFailed(msgspec.Struct, frozen=True, array_like=True):
    """It has ended, and is forgotten in the child: the engine refused it or failed, or it was cancelled ("")."""

    id: int
    message: str
    out_of_memory: bool = False
    refused: bool = False  # by the engine: it asks for what the engine cannot do


class StepTaken(SequenceMessage, frozen=True, tag="step", omit_defaults=True):
    """Child → parent: what is new, in this order. `step_s`: how long the step took; 0.0 where there was none."""

    tokens: tuple[SequenceTokens, ...] = ()
    started: tuple[SequenceStarted, ...] = ()
    ended: tuple[SequenceEnded, ...] = ()
    failed: tuple[SequenceFailed, ...] = ()
    step_s: Seconds = 0.0


SequenceToChild = BeginSequence | CreditSequence | CancelSequence


def prompt_bytes(prompt: Sequence[int]) -> bytes:
    """The payload of a prompt. Raises ValueError: it is too long, or has an id that is no INT32."""
    if not 0 < len(prompt) <= MAX_PROMPT_TOKENS:
        raise ValueError(f"a prompt has from 1 to {MAX_PROMPT_TOKENS} tokens, not {len(prompt)}")
    try:
        return struct.pack(f"<{len(prompt)}i", *prompt)
    except struct.error as error:
        raise ValueError("a prompt's token ids are INT32") from error


def with_prompt(message: BeginSequence, payload: Buffer) -> BeginSequence:
    """The message with the prompt that followed it. Raises UnexpectedMessage."""
    tokens, rest = divmod(len(payload), 4)
    if rest or not 0 < tokens <= MAX_PROMPT_TOKENS:
        raise UnexpectedMessage(f"a prompt of {len(payload)} bytes")
    request = msgspec.structs.replace(message.request, prompt=struct.unpack(f"<{tokens}i", payload))
    return msgspec.structs.replace(message, request=request)


def generated_of(ended: SequenceEnded, *, prompt_tokens: int, cached_tokens: int, ids: Sequence[int]) -> Generated:
    """The whole generation, of what came of it. `cached_tokens`: as its start said, or more by its end."""
    completion = len(ids) + ended.stop_token
    usage = Usage(ended.finish_reason, prompt_tokens, completion, cached_tokens, ended.prefill_s, ended.decode_s)
    return Generated(tuple(ids), usage)


def parts_of(step: StepTaken) -> list[StepTaken]:
    """The same in messages that each fit a frame; nearly always one."""
    if len(step.failed) <= _FAILED_A_MESSAGE and sum(map(_values, step.tokens)) <= _VALUES_A_MESSAGE:
        return [step]
    starts = StepTaken(started=step.started, step_s=step.step_s)
    tokens = [StepTaken(tokens=some) for some in _grouped([part for one in step.tokens for part in _divided(one)])]
    failed = [
        StepTaken(failed=step.failed[at : at + _FAILED_A_MESSAGE])
        for at in range(0, len(step.failed), _FAILED_A_MESSAGE)
    ]
    return [starts, *tokens, StepTaken(ended=step.ended), *failed]


def _values(one: SequenceTokens) -> int:
    """Roughly the values that it holds, of ten bytes at most each."""
    batch = one.batch
    return 4 + len(batch.ids) + len(batch.logprobs) + (2 * sum(map(len, batch.top)) if batch.top else 0)


def _divided(one: SequenceTokens) -> list[SequenceTokens]:
    """The same in parts that each fit a message."""
    batch = one.batch
    if len(batch.ids) < 2 or _values(one) <= _VALUES_A_MESSAGE:
        return [one]
    half = len(batch.ids) // 2
    first = TokenBatch(batch.first, batch.ids[:half], batch.logprobs[:half], batch.top[:half])
    rest = TokenBatch(batch.first + half, batch.ids[half:], batch.logprobs[half:], batch.top[half:])
    return [part for half_ in (first, rest) for part in _divided(SequenceTokens(one.id, half_))]


def _grouped(parts: list[SequenceTokens]) -> list[tuple[SequenceTokens, ...]]:
    groups: list[list[SequenceTokens]] = [[]]
    values = 0
    for part in parts:
        if groups[-1] and values + _values(part) > _VALUES_A_MESSAGE:
            groups.append([])
            values = 0
        groups[-1].append(part)
        values += _values(part)
    return [tuple(group) for group in groups]

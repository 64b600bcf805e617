"""One sequence between what makes its tokens and its reader: what is made, what has left, and what waits for credit.

    made by the source → held, `max_tokens` at most → sent, as far as there is credit → the end, once all has left

It is the same for an engine that is stepped in a worker process (`sequence_loop.py`) and for a server that streams.
Whether the source keeps to its word is asked by `misfit`; tokens beyond `max_tokens` are dropped here.

Pure.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from tidegate.generate.engine import SequenceProgress
from tidegate.generate.usage import FinishReason
from tidegate.token_sink import TokenBatch
from tidegate.workers.generation.messages import UNLIMITED, SequenceEnded

SourceT = TypeVar("SourceT")


class SteppedSequence(Generic[SourceT]):
    """Mutable: `advance` with what its source says, `give_credit` with what its reader took, `release` what may leave.

    Args:
        source: what makes its tokens.
        credit: tokens that its reader takes for now; UNLIMITED: all.
    """

    __slots__ = (
        "cached_at_end",
        "credit",
        "ended",
        "first_at",
        "held",
        "last_at",
        "made",
        "max_tokens",
        "sent",
        "source",
        "started",
        "stepped_at",
    )

    def __init__(self, source: SourceT, max_tokens: int, credit: int) -> None:
        self.source = source
        self.max_tokens = max_tokens
        self.credit = max_tokens if credit == UNLIMITED else credit  # of all its tokens
        self.cached_at_end = 0  # tokens of its prompt, as its source said with the end
        self.made = 0  # tokens by the engine
        self.sent = 0  # of them to the parent
        self.held: list[TokenBatch] = []  # the rest
        self.started = False  # and said so
        self.stepped_at: float | None = None  # first
        self.first_at: float | None = None  # its first token
        self.last_at = 0.0  # its last token
        self.ended: tuple[FinishReason, bool] | None = None  # in the engine; and whether by a stop token

    @property
    def may_go_on(self) -> bool:
        return self.ended is None and self.made < self.credit

    @property
    def full(self) -> bool:
        """Whether it has all the tokens that were asked for, and its engine has not said that it is over."""
        return self.ended is None and self.made >= self.max_tokens

    def step_begins(self, now: float) -> None:
        if self.stepped_at is None:
            self.stepped_at = now

    def misfit(self, progress: SequenceProgress) -> str:
        """What is wrong with what its engine says; "" if nothing."""
        batch = progress.batch
        if batch is None or batch.first == self.made:
            return ""
        return f"the engine gave token {batch.first} of a sequence, of which it has made {self.made}"

    def advance(self, progress: SequenceProgress, now: float) -> bool:
        """Take in what its engine says; whether there is a token in it."""
        batch = progress.batch
        made = batch is not None and bool(batch.ids)
        if made or progress.finished is not None:
            self.last_at = now
            self.first_at = now if self.first_at is None else self.first_at
        if batch is not None and made:
            batch, _ = _cut(batch, self.max_tokens - self.made)
            self.made += len(batch.ids)
            self.held.append(batch)
        if progress.finished is not None:
            self.cached_at_end = progress.cached_tokens
            self.end(progress.finished, stop_token=progress.stop_token)
        return made

    def end(self, reason: FinishReason, *, stop_token: bool = False) -> None:
        self.ended = reason, stop_token

    def give_credit(self, tokens: int) -> None:
        self.credit += tokens

    def starts(self) -> bool:
        """Whether its prompt is computed, which was not said before."""
        started, self.started = self.started, self.first_at is not None
        return self.started and not started

    def release(self) -> list[TokenBatch]:
        """Its tokens that there is credit for."""
        released: list[TokenBatch] = []
        while self.held and (room := self.credit - self.sent) > 0:
            batch, rest = _cut(self.held[0], room)
            if rest is None:
                del self.held[0]
            else:
                self.held[0] = rest
            self.sent += len(batch.ids)
            released.append(batch)
        return released

    def end_of(self, sequence_id: int) -> SequenceEnded | None:
        """Its end, where all its tokens have left."""
        if self.ended is None or self.held:
            return None
        stepped_at = self.last_at if self.stepped_at is None else self.stepped_at
        first_at = self.last_at if self.first_at is None else self.first_at
        reason, stop_token = self.ended
        prefill_s, decode_s = max(0.0, first_at - stepped_at), self.last_at - first_at
        return SequenceEnded(sequence_id, reason, stop_token, prefill_s, decode_s, self.cached_at_end)

    def __repr__(self) -> str:
        return f"<SteppedSequence {self.sent} sent of {self.made} of {self.max_tokens} tokens, credit {self.credit}>"


def _cut(batch: TokenBatch, room: int) -> tuple[TokenBatch, TokenBatch | None]:
    """The first of its tokens, and the rest of it if there is any."""
    if len(batch.ids) <= room:
        return batch, None
    return (
        TokenBatch(batch.first, batch.ids[:room], batch.logprobs[:room], batch.top[:room]),
        TokenBatch(batch.first + room, batch.ids[room:], batch.logprobs[room:], batch.top[room:]),
    )

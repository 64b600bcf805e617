"""The sequences of a worker process, stepped one step at a time by its main thread.

Between two steps the thread looks at its inbox (`tidegate/workers/child.py`): sequences begin, get credit and are
cancelled then, and a call of a plain engine is answered. A step is of one engine, the one with the most urgent
sequence (`token_deadlines.py`), and what it brought leaves in one message.

    due     it has credit                  paused    it has none: it is not stepped, and others go on
    held    an engine that cannot pause went on with it: its tokens wait here for credit, `max_tokens` at most
    ended   and all of it has left: it is forgotten, and its end is said once

An engine is not trusted to keep its own word: tokens that do not follow those before, or do not travel, fail their
sequence; those beyond `max_tokens` are dropped. An engine whose `step` raises fails all that it had, and lives on.
What an engine still says of a sequence that was cancelled is dropped. It can be wrong where `cancel` raises: whether
that engine has freed anything then is its own affair; it is told on stderr.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tidegate import clock
from tidegate.engines.errors import EngineError, is_out_of_memory
from tidegate.generate.engine import GenerativeEngine, SequenceProgress
from tidegate.workers.generation.messages import (
    BeginSequence,
    CancelSequence,
    CreditSequence,
    SequenceEnded,
    SequenceFailed,
    SequenceStarted,
    SequenceToChild,
    SequenceTokens,
    StepTaken,
    UnexpectedMessage,
    parts_of,
)
from tidegate.workers.generation.stepped_sequence import SteppedSequence
from tidegate.workers.generation.token_deadlines import TokenDeadlines

SIGN_EVERY_S: Final = 0.05  # of a worker whose steps bring nothing
_MAX_TEXT: Final = 4000  # characters of an error that travel


class SequenceLoop:
    """Mutable: `take` what came, and `step` for as long as it is `due`. All in one thread.

    Args:
        engines: generating engines by key, as loaded now; a sequence keeps the one that it began with.
        send: writes a frame to the parent.
        pack: makes a frame; raises TypeError or OverflowError where a value cannot be written.
    """

    def __init__(
        self,
        engines: Mapping[str, GenerativeEngine],
        send: Callable[[bytes], None],
        pack: Callable[[StepTaken], bytes],
    ) -> None:
        self._engines = engines
        self._send = send
        self._pack = pack
        self._sequences: dict[int, SteppedSequence[GenerativeEngine]] = {}
        self._deadlines = TokenDeadlines()
        self._sent_at = 0.0

    @property
    def due(self) -> bool:
        """Whether there is something to step."""
        return bool(self._deadlines)

    def take(self, message: SequenceToChild) -> None:
        """Raises UnexpectedMessage."""
        if isinstance(message, BeginSequence):
            self._begin(message)
        elif isinstance(message, CreditSequence):
            self._credit(message.id, message.tokens)
        else:
            self._cancel(message)

    def step(self) -> None:
        """One step of one engine; what it brought is sent. Blocks."""
        order = self._deadlines.order()
        engine = self._sequences[order[0]].source
        due = [one for one in order if self._sequences[one].source is engine]
        began_at = clock.now()
        for one in due:
            self._sequences[one].step_begins(began_at)
        try:
            progress = engine.step(due)
        except Exception as error:  # a foreign runtime may raise anything
            self._engine_failed(engine, error)
            return
        now = clock.now()
        self._tell(*self._gather(engine, progress, now), step_s=now - began_at)

    def _begin(self, message: BeginSequence) -> None:
        if message.id in self._sequences:
            raise UnexpectedMessage(f"sequence {message.id} has begun before")
        engine = self._engines.get(message.key)
        if engine is None:
            error: Exception = EngineError(f"no generating engine is loaded under {message.key!r}")
            self._tell(failed=[_failed(message.id, error)])
            return
        try:
            engine.begin(message.id, message.request)
        except Exception as error:  # a foreign runtime may raise anything
            self._drop(engine, message.id)
            self._tell(failed=[_failed(message.id, error, refused=isinstance(error, EngineError))])
            return
        self._sequences[message.id] = SteppedSequence(engine, message.request.max_tokens, message.credit)
        self._deadlines.begin(
            message.id,
            clock.now(),
            first_token_s=message.first_token_s,
            token_interval_s=message.token_interval_s,
        )
        if not message.credit:
            self._deadlines.pause(message.id)

    def _credit(self, sequence_id: int, tokens: int) -> None:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        sequence.give_credit(tokens)
        if sequence.may_go_on:
            self._deadlines.resume(sequence_id, clock.now())
        if sequence.held or sequence.ended:
            released: list[SequenceTokens] = []
            ended: list[SequenceEnded] = []
            self._release(sequence_id, sequence, released, ended)
            self._tell(released, ended=ended)

    def _cancel(self, message: CancelSequence) -> None:
        sequence = self._forget(message.id)
        if sequence is None:
            return
        if sequence.ended is None:
            self._drop(sequence.source, message.id)
        self._tell(failed=[SequenceFailed(message.id, "")])

    def _gather(
        self, engine: GenerativeEngine, progress: Sequence[SequenceProgress], now: float
    ) -> tuple[list[SequenceTokens], list[SequenceStarted], list[SequenceEnded], list[SequenceFailed]]:
        tokens: list[SequenceTokens] = []
        started: list[SequenceStarted] = []
        ended: list[SequenceEnded] = []
        failed: list[SequenceFailed] = []
        for one in progress:
            sequence = self._sequences.get(one.id)
            if sequence is None or sequence.source is not engine or sequence.ended is not None:
                continue  # it was cancelled, and the engine said so late
            if why := one.error or sequence.misfit(one):
                if not one.error:
                    self._drop(engine, one.id)
                self._forget(one.id)
                failed.append(_failed(one.id, EngineError(why), refused=one.refused))
                continue
            if sequence.advance(one, now):
                self._deadlines.token(one.id, now)
            if sequence.full:
                self._drop(engine, one.id)
                sequence.end("length")
            if not sequence.may_go_on:
                self._deadlines.pause(one.id)
            if sequence.starts():
                started.append(SequenceStarted(one.id, one.cached_tokens))
            self._release(one.id, sequence, tokens, ended)
        return tokens, started, ended, failed

    def _release(
        self,
        sequence_id: int,
        sequence: SteppedSequence[GenerativeEngine],
        tokens: list[SequenceTokens],
        ended: list[SequenceEnded],
    ) -> None:
        """Add the tokens that it has credit for, and its end where all of them have left."""
        tokens += [SequenceTokens(sequence_id, batch) for batch in sequence.release()]
        if (end := sequence.end_of(sequence_id)) is not None:
            self._forget(sequence_id)
            ended.append(end)

    def _engine_failed(self, engine: GenerativeEngine, error: Exception) -> None:
        """All that it was at work on have failed; what had ended in it, and waits for credit, has not."""
        lost = [key for key, one in self._sequences.items() if one.source is engine and one.ended is None]
        for sequence_id in lost:
            self._drop(engine, sequence_id)
            self._forget(sequence_id)
        told = _failed(0, error)
        self._tell(failed=[SequenceFailed(one, told.message, told.out_of_memory) for one in lost])

    def _drop(self, engine: GenerativeEngine, sequence_id: int) -> None:
        try:
            engine.cancel(sequence_id)
        except Exception:  # a foreign runtime may raise anything; the sequence is over all the same
            traceback.print_exc()

    def _forget(self, sequence_id: int) -> SteppedSequence[GenerativeEngine] | None:
        self._deadlines.forget(sequence_id)
        return self._sequences.pop(sequence_id, None)

    def _tell(
        self,
        tokens: Sequence[SequenceTokens] = (),
        started: Sequence[SequenceStarted] = (),
        ended: Sequence[SequenceEnded] = (),
        failed: Sequence[SequenceFailed] = (),
        *,
        step_s: float = 0.0,
    ) -> None:
        now = clock.now()
        if not (tokens or started or ended or failed) and now < self._sent_at + SIGN_EVERY_S:
            return
        self._sent_at = now
        step = StepTaken(tuple(tokens), tuple(started), tuple(ended), tuple(failed), step_s)
        try:
            parts = [self._pack(part) for part in parts_of(step)]
        except (
            TypeError,
            OverflowError,
        ) as error:  # an engine gave ids that are no ints, or logprobs that are no floats
            parts = [self._pack(part) for part in parts_of(self._without_tokens(step, error))]
        for part in parts:
            self._send(part)

    def _without_tokens(self, step: StepTaken, error: Exception) -> StepTaken:
        """The step with its tokens' sequences failed: what an engine gave does not travel."""
        lost = {one.id for one in step.tokens}
        for sequence_id in lost:
            if (sequence := self._forget(sequence_id)) is not None and sequence.ended is None:
                self._drop(sequence.source, sequence_id)
        failed = [_failed(one, EngineError(f"the engine gave tokens that do not travel: {error}")) for one in lost]
        return StepTaken(
            started=tuple(one for one in step.started if one.id not in lost),
            ended=tuple(one for one in step.ended if one.id not in lost),
            failed=(*step.failed, *failed),
            step_s=step.step_s,
        )

    def __repr__(self) -> str:
        return f"<SequenceLoop {len(self._sequences)} sequences {self._deadlines!r}>"


def _failed(sequence_id: int, error: Exception, *, refused: bool = False) -> SequenceFailed:
    """Args: refused: because of what was asked for; a lack of memory is none."""
    words = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    if not isinstance(error, EngineError) and not is_out_of_memory(error):
        traceback.print_exception(error)
    text = words[:_MAX_TEXT].encode("utf-8", "replace").decode() or type(error).__name__  # no surrogate halves travel
    out_of_memory = is_out_of_memory(error)
    return SequenceFailed(sequence_id, text, out_of_memory, refused and not out_of_memory)

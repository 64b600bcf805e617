"""The generations that are with a worker, as its parent sees them.

A sequence waits here until its engine has a slot free, in order and at no cost; then the child has it, and answers for
it with exactly one end. Its tokens go on to the sink in the turn of the loop in which their frame came. What the
reader takes comes back as credit, and no more of it travels than the sequence can still use.

    waiting → with the child → ended or failed            cancelled: left, until the child has said that it is over

Invariants:
* At most `slots` sequences of an engine are with the child. One that was cancelled keeps its slot until the child has
  freed it, between two steps; nothing of it remains then.
* Each `generate` ends exactly once: with all tokens, with the engine's error, with the sink's own exception, with the
  worker's end, or cancelled by its caller.
* What no correct child sends is an UnexpectedMessage: tokens without a start, with a gap, beyond the credit or
  `max_tokens`, or of a sequence that is not there.

What it leaves to others: frames and the child's end (`tidegate/workers/process.py`), who is to begin next.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress

import msgspec

from tidegate import clock
from tidegate.generate.request import GenerateRequest
from tidegate.generate.usage import Generated
from tidegate.outcome import InternalError, InvalidRequest, OutOfMemory, ServeError, TooLarge
from tidegate.token_sink import MAX_WINDOW, TokenSink
from tidegate.workers.generation.messages import (
    UNLIMITED,
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
    generated_of,
    prompt_bytes,
)
from tidegate.workers.generation.silence import WorkerSilence


class SequenceState:
    """One generation that is with the child."""

    __slots__ = ("answer", "cached_tokens", "granted", "ids", "left", "max_tokens", "place", "prompt_tokens", "sink")

    def __init__(self, request: GenerateRequest, sink: TokenSink | None, place: asyncio.Semaphore) -> None:
        self.sink = sink
        self.place = place
        self.prompt_tokens = len(request.prompt)
        self.max_tokens = request.max_tokens
        self.cached_tokens: int | None = None  # None: it has not started
        self.ids: list[int] = []
        self.granted = request.max_tokens if sink is None else min(sink.window, request.max_tokens, MAX_WINDOW)
        self.left = False  # nobody waits for it
        self.answer: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()

    @property
    def may_go_on(self) -> bool:
        """Whether the child owes something for it: a token, or its end."""
        return self.left or len(self.ids) < self.granted or self.granted >= self.max_tokens

    def __repr__(self) -> str:
        return f"<SequenceState {self.prompt_tokens}+{len(self.ids)} of {self.granted} tokens>"


class ActiveSequences:
    """Mutable: `generate` by callers, `take` and `fail_all` by whoever reads the worker's socket.

    Args:
        send: writes a message and its payload to the child; raises a ServeError where it is gone.
    """

    def __init__(self, send: Callable[[SequenceToChild, bytes], None]) -> None:
        self.silence = WorkerSilence()
        self._send = send
        self._places: dict[str, asyncio.Semaphore] = {}
        self._active: dict[int, SequenceState] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._active)

    def engine_loaded(self, key: str, slots: int) -> None:
        """An engine is there, which takes so many sequences at a time; 0: it generates nothing."""
        if slots > 0:
            self._places[key] = asyncio.Semaphore(slots)
        else:
            self._places.pop(key, None)

    async def generate(
        self,
        key: str,
        request: GenerateRequest,
        sink: TokenSink | None,
        *,
        token_interval_s: float,
        first_token_s: float,
    ) -> Generated:
        """As `WorkerProcess.generate`."""
        place = self._places.get(key)
        if place is None:
            raise InternalError(f"no generating engine is loaded under {key!r}")
        try:
            prompt = prompt_bytes(request.prompt)
        except ValueError as error:
            raise TooLarge(str(error)) from error
        await place.acquire()
        sequence_id = next(self._ids)
        try:
            sequence = SequenceState(request, sink, place)
            self._begin(sequence_id, sequence, sink)
            credit = UNLIMITED if sequence.granted >= sequence.max_tokens else sequence.granted
            headed = msgspec.structs.replace(request, prompt=())  # which follows as a payload
            self._send(BeginSequence(sequence_id, key, headed, token_interval_s, first_token_s, credit), prompt)
        except BaseException:
            self._active.pop(sequence_id, None)
            place.release()
            raise
        # From here on the slot belongs to the child's answer and not to the caller, who may leave.
        try:
            return await sequence.answer
        except (asyncio.CancelledError, GeneratorExit):
            self._abandon(sequence_id, sequence)
            raise

    def take(self, step: StepTaken) -> None:
        """Take in what a step brought. Raises UnexpectedMessage."""
        self.silence.sign(clock.now(), step.step_s)
        for started in step.started:
            self._started(started)
        for tokens in step.tokens:
            self._tokens(tokens)
        for ended in step.ended:
            self._ended(ended)
        for failed in step.failed:
            self._failed(failed)

    def fail_all(self, error: Callable[[], ServeError]) -> None:
        """The child is gone, and so is all that was with it."""
        active, self._active = self._active, {}
        for sequence in active.values():
            sequence.place.release()
            if not sequence.answer.done():
                sequence.answer.set_exception(error())

    def silent_s(self, now: float) -> float:
        """For how long the child has given no sign, though it owes one; 0 where it owes none."""
        return self.silence.silent_s(now) if self._owed() else 0.0

    def patience_s(self) -> float:
        """How long it may be silent, by what its steps have taken; inf while too few are known."""
        prompts = [one.prompt_tokens for one in self._active.values() if one.cached_tokens is None]
        return self.silence.patience_s(max(prompts, default=0))

    def _owed(self) -> bool:
        return any(one.may_go_on for one in self._active.values())

    def _begin(self, sequence_id: int, sequence: SequenceState, sink: TokenSink | None) -> None:
        if not self._owed():
            self.silence.begin(clock.now())
        self._active[sequence_id] = sequence
        if sink is not None:
            sink.on_credit(lambda tokens: self._credit(sequence_id, tokens))

    def _credit(self, sequence_id: int, tokens: int) -> None:
        """The reader has taken so many. More than the sequence can use, or a window can hold, is not passed on."""
        sequence = self._active.get(sequence_id)
        if sequence is None or sequence.left:
            return
        under_way = sequence.granted - len(sequence.ids)
        more = min(tokens, sequence.max_tokens - sequence.granted, MAX_WINDOW - under_way)
        if more <= 0:
            return
        if not self._owed():
            self.silence.begin(clock.now())
        sequence.granted += more
        self._send_if_there(CreditSequence(sequence_id, more))

    def _started(self, started: SequenceStarted) -> None:
        sequence = self._known(started.id)
        if sequence.cached_tokens is not None or started.cached_tokens > sequence.prompt_tokens:
            raise UnexpectedMessage(f"a second start of sequence {started.id}, or too much from a cache")
        sequence.cached_tokens = started.cached_tokens
        if sequence.sink is not None and not sequence.left:
            try:
                sequence.sink.started(sequence.prompt_tokens, started.cached_tokens)
            except Exception as error:  # a caller's own; it must not end the worker
                self._refused_by_sink(started.id, sequence, error)

    def _tokens(self, tokens: SequenceTokens) -> None:
        sequence = self._known(tokens.id)
        batch, ids = tokens.batch, sequence.ids
        if (
            batch.first != len(ids)
            or sequence.cached_tokens is None
            or len(ids) + len(batch.ids) > sequence.granted
            or not batch.ids
        ):
            raise UnexpectedMessage(
                f"{len(batch.ids)} tokens of sequence {tokens.id} from {batch.first} on, with {len(ids)} there "
                f"and credit for {sequence.granted}"
            )
        ids += batch.ids
        if sequence.sink is not None and not sequence.left:
            try:
                sequence.sink.put(batch)
            except Exception as error:  # a caller's own; it must not end the worker
                self._refused_by_sink(tokens.id, sequence, error)

    def _ended(self, ended: SequenceEnded) -> None:
        sequence = self._over(ended.id)
        if ended.cached_tokens > sequence.prompt_tokens:
            raise UnexpectedMessage(
                f"{ended.cached_tokens} tokens from a cache of a prompt of {sequence.prompt_tokens}"
            )
        cached_tokens = max(ended.cached_tokens, sequence.cached_tokens or 0)
        self.silence.prompt(sequence.prompt_tokens - cached_tokens, ended.prefill_s)
        if sequence.answer.done():
            return
        sequence.answer.set_result(
            generated_of(ended, prompt_tokens=sequence.prompt_tokens, cached_tokens=cached_tokens, ids=sequence.ids)
        )

    def _failed(self, failed: SequenceFailed) -> None:
        sequence = self._over(failed.id)
        if sequence.answer.done():
            return
        if not failed.message:
            raise UnexpectedMessage(f"an end of sequence {failed.id} for no reason")
        kind = OutOfMemory if failed.out_of_memory else InvalidRequest if failed.refused else InternalError
        sequence.answer.set_exception(kind(failed.message))

    def _known(self, sequence_id: int) -> SequenceState:
        sequence = self._active.get(sequence_id)
        if sequence is None:
            raise UnexpectedMessage(f"something of sequence {sequence_id}, which is not there")
        return sequence

    def _over(self, sequence_id: int) -> SequenceState:
        sequence = self._known(sequence_id)
        del self._active[sequence_id]
        sequence.place.release()
        return sequence

    def _abandon(self, sequence_id: int, sequence: SequenceState) -> None:
        if sequence.answer.done() and not sequence.answer.cancelled():
            sequence.answer.exception()  # seen, though its caller was cancelled in the moment in which it was set
        elif self._active.get(sequence_id) is sequence:
            sequence.answer.cancel()  # where the caller was dropped without a cancellation
            self._leave(sequence_id, sequence)

    def _refused_by_sink(self, sequence_id: int, sequence: SequenceState, error: Exception) -> None:
        if not sequence.answer.done():
            sequence.answer.set_exception(error)
        self._leave(sequence_id, sequence)

    def _leave(self, sequence_id: int, sequence: SequenceState) -> None:
        if not self._owed():
            self.silence.begin(clock.now())
        sequence.left, sequence.sink = True, None
        self._send_if_there(CancelSequence(sequence_id))

    def _send_if_there(self, message: SequenceToChild) -> None:
        with suppress(ServeError):  # it is gone, and `fail_all` says so to everyone
            self._send(message, b"")

    def __repr__(self) -> str:
        left = sum(one.left for one in self._active.values())
        return f"<ActiveSequences {len(self._active)} with the child, {left} of them left>"

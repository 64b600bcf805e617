"""The sequences of a server, each a request to it: what a worker's child does for engines that it steps itself.

It takes the messages that a worker process would get and tells what one would tell (`messages.py` of
`tidegate/workers/generation`), so the parent's end of both is `ActiveSequences`: slots, credit and silence are there.

    credit     the server does not wait for a reader: it goes on, and its tokens wait here, `max_tokens` at most
    a step     what one read of a stream brought; it took as long as the time since the read before it
    cancelled  the connection is closed, and then the sequence is said to be over. The server notices within a step
    a defect   of one stream fails its sequence, as that of an engine would; what the server says about the request
               (400) refuses it
    the end    a connection that breaks, or an error of the server (500) while it says that it is not well, is told to
               `on_broken`, and every sequence fails with the server
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Final, Protocol

import structlog

from cloud_pool.vllm.answer import ServerRefused, VllmAnswer
from cloud_pool.vllm.http_client import ServerGone, VllmClient
from cloud_pool.vllm.wire import EventLines, ServerFault, request_body
from tidegate import clock
from tidegate.engines.errors import EngineError
from tidegate.engines.generation.limits import GenerationLimits
from tidegate.engines.generation.prompt_check import check_prompt
from tidegate.generate.engine import SequenceProgress
from tidegate.generate.request import GenerateRequest
from tidegate.runtime.owned_task import cancel_and_wait
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
    with_prompt,
)
from tidegate.workers.generation.stepped_sequence import SteppedSequence

_REFUSALS: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
_MAX_TEXT: Final = 2000

log = structlog.get_logger("vllm")


class TellStep(Protocol):
    """Called with what is new; raises nothing."""

    def __call__(self, step: StepTaken, /) -> None: ...


class ServerSequences:
    """Mutable: `take` messages, until `aclose`.

    Args:
        name: of the model, in errors.
        limits: all of them known; what they say is checked here, since the server may die of a token that it lacks.
        on_broken: called with the reason when the server cannot go on.
    """

    def __init__(
        self,
        name: str,
        client: VllmClient,
        limits: GenerationLimits,
        tell: TellStep,
        on_broken: Callable[[str], None],
    ) -> None:
        self._name = name
        self._client = client
        self._limits = limits
        self._tell = tell
        self._on_broken = on_broken
        self._sequences: dict[int, SteppedSequence[asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: SequenceToChild, prompt: bytes) -> None:
        """Take in what the parent says. What follows from it is told in a later turn of the loop."""
        if isinstance(message, BeginSequence):
            self._begin(with_prompt(message, prompt))
        elif isinstance(message, CreditSequence):
            self._credit(message)
        else:
            self._cancel(message)

    async def aclose(self) -> None:
        """End all requests, and tell nothing more."""
        self._sequences.clear()
        await cancel_and_wait(*self._tasks)

    def _begin(self, message: BeginSequence) -> None:
        try:
            self._check(message.request)
        except EngineError as error:
            failed = SequenceFailed(message.id, str(error)[:_MAX_TEXT], refused=True)
            asyncio.get_running_loop().call_soon(self._tell, StepTaken(failed=(failed,)))
            return
        task = asyncio.create_task(self._run(message.id, message.request), name=f"sequence {message.id} of vLLM")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._sequences[message.id] = SteppedSequence(task, message.request.max_tokens, message.credit)

    def _check(self, request: GenerateRequest) -> None:
        limits = self._limits
        check_prompt(
            self._name,
            request.prompt,
            free_slots=limits.slots - len(self._sequences),
            slots=limits.slots,
            context=limits.context,
            vocabulary_size=limits.vocabulary_size,
        )
        if request.schema:
            raise EngineError("vLLM has no tokenizer here, and follows no JSON schema: leave `json_schema` out")

    def _credit(self, message: CreditSequence) -> None:
        if (sequence := self._sequences.get(message.id)) is not None:
            sequence.give_credit(message.tokens)
            # Later: whoever gives credit is in the midst of reading.
            asyncio.get_running_loop().call_soon(self._release, message.id)

    def _cancel(self, message: CancelSequence) -> None:
        sequence = self._sequences.pop(message.id, None)
        if sequence is None:
            return
        over = StepTaken(failed=(SequenceFailed(message.id, ""),))
        if sequence.source.done():
            asyncio.get_running_loop().call_soon(self._tell, over)
            return
        sequence.source.add_done_callback(lambda _: self._tell(over))
        sequence.source.cancel()

    async def _run(self, sequence_id: int, request: GenerateRequest) -> None:
        """Ask for one answer, and tell what comes of it."""
        began_at = clock.now()
        try:
            await self._stream(sequence_id, request, began_at)
        except UnexpectedMessage as error:
            self._fail(sequence_id, f"vLLM sent {error}")
        except ServerRefused as refused:
            await self._refused(sequence_id, refused.fault)
        except ServerGone as error:
            self._on_broken(f"closed a connection ({error})")
        except Exception as error:  # a defect of ours: its caller would wait until the watchdog ends them all
            log.exception("a sequence of vLLM failed", model=self._name)
            self._fail(sequence_id, f"{type(error).__name__} in the pool's part of vLLM")

    async def _stream(self, sequence_id: int, request: GenerateRequest, began_at: float) -> None:
        limits = self._limits
        max_tokens = min(request.max_tokens, limits.context - len(request.prompt))
        answer = VllmAnswer(
            sequence_id,
            prompt_tokens=len(request.prompt),
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            stop_tokens=() if request.ignore_stop else (*limits.stop_tokens, *request.stop_tokens),
            vocabulary_size=limits.vocabulary_size,
        )
        lines, read_at = EventLines(), began_at
        async with self._client.stream(request_body(request, request.prompt, max_tokens, limits.stop_tokens)) as data:
            sequence = self._sequences[sequence_id]
            sequence.step_begins(began_at)
            async for some in data:
                now = clock.now()
                # The first token took its prompt, which is no step.
                step_s = now - read_at if sequence.made else 0.0
                try:
                    for progress in _progress(answer, lines.feed(some)):
                        sequence.advance(progress, now)
                finally:  # with what was good before a defect
                    self._tell(self._released(sequence_id, step_s))
                read_at = now
        answer.end(done=lines.done)

    def _release(self, sequence_id: int) -> None:
        """Tell what new credit lets out."""
        if (step := self._released(sequence_id, 0.0)) != StepTaken():
            self._tell(step)

    def _released(self, sequence_id: int, step_s: float) -> StepTaken:
        """The tokens that there is credit for, and the end where all of them have left; else a sign of life."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return StepTaken(step_s=step_s)
        started = (SequenceStarted(sequence_id, 0),) if sequence.starts() else ()
        tokens = tuple(SequenceTokens(sequence_id, batch) for batch in sequence.release())
        ended: tuple[SequenceEnded, ...] = ()
        if (end := sequence.end_of(sequence_id)) is not None:
            del self._sequences[sequence_id]
            ended = (end,)
        return StepTaken(tokens, started, ended, step_s=step_s)

    async def _refused(self, sequence_id: int, fault: ServerFault) -> None:
        if fault.code in _REFUSALS:
            self._fail(sequence_id, f"vLLM refuses it: {fault.message}", refused=True)
        elif fault.code < HTTPStatus.INTERNAL_SERVER_ERROR or await self._client.healthy():
            self._fail(sequence_id, f"vLLM answered {fault.code}: {fault.message}")
        else:
            self._on_broken(f"is not well ({fault.message})")

    def _fail(self, sequence_id: int, why: str, *, refused: bool = False) -> None:
        """It has ended, for a reason that is its own."""
        if (sequence := self._sequences.pop(sequence_id, None)) is None:
            return
        began = sequence.made > 0
        text = why[:_MAX_TEXT].encode("utf-8", "replace").decode()
        self._tell(StepTaken(failed=(SequenceFailed(sequence_id, text, refused=refused and not began),)))

    def __repr__(self) -> str:
        return f"<ServerSequences {len(self._sequences)} of {self._limits.slots} slots>"


def _progress(answer: VllmAnswer, events: Iterable[bytes]) -> Iterator[SequenceProgress]:
    return (progress for event in events if (progress := answer.take(event)) is not None)

"""One request under way: performs what `gateway/core/request/machine.py` decides, with tasks, timers and targets.

An execution holds the request's machine and turns the machine's actions into IO: a launch awaits a target, a wake is
one loop timer, an end is a reply or an error. Every event goes back into the machine with its instant; nothing is
decided here.

The first attempt, and each fallback with nothing else under way, is awaited in the caller's own task: most requests
need no task of their own, and a task costs as much as the whole placement. Only a hedge beside a pending attempt gets
a task, owned by the dispatcher until it has ended. To end an attempt that is awaited inline (the deadline passed, or
the hedge won) the execution cancels its own task and takes that cancellation back, as `asyncio.timeout` does, so that a
caller's cancellation is never mistaken for its own.

Where a model's manifest says how sure it must be, the confidence of its answers is read from their tensors here, and
goes into the machine with the answer; an unsure one is kept until the machine has decided. Of a generation the first
tokens are judged, which are held back for it by its `AttemptTokens`: its target is asked for their probabilities.

The tokens of a generation come through an `AttemptTokens` each, which notes them in the answer so far: what the request
for the rest of it and the one reply of all its parts are made from (`continued_generation.py`).

When the caller is cancelled every attempt is cancelled with it, and with each the work in the far queue.
A target that raises anything but a ServeError has a defect: it is logged with its traceback, and the request goes on
elsewhere as after any failure. The same where its offer is such that an attempt there cannot even be launched.

A target is not believed beyond what is known here. Its seconds are clipped to those that the attempt took, the counts
of a generation to what was asked, and a variant that it does not offer counts as the one that was placed. All of that
is done once, as an answer is taken in (`_believed`): what tenants pay, what estimators learn and what metrics count is
the same then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from math import inf
from typing import Final

import structlog
from msgspec.structs import replace

from gateway.core.health.breaker import blame
from gateway.core.history.recorder import (
    MAX_EVENTS_PER_REQUEST,
    AnswerRecord,
    RequestEvent,
    RequestRecord,
    trace_id_of,
    truncated_words,
)
from gateway.core.placement.ask import Ask
from gateway.core.placement.placement import Placement
from gateway.core.placement.placer import Candidate
from gateway.core.placement.utility import token_objectives
from gateway.core.request.answer_so_far import AnswerSoFar
from gateway.core.request.attempt import AttemptTelemetry
from gateway.core.request.hedging import EARLY_S
from gateway.core.request.machine import (
    Action,
    Answer,
    Cancel,
    Keep,
    Launch,
    Refuse,
    Release,
    RequestMachine,
    Show,
    WakeAt,
)
from gateway.core.request.resumption import Resumption
from gateway.serving.attempt_tokens import AttemptTokens, BeginningJudge, UnreadTokens
from gateway.serving.cache_salt import under_tenant
from gateway.serving.context import DispatchContext
from gateway.serving.continued_generation import continued_request, joined_response, response_so_far
from gateway.serving.work_estimate import tensor_bytes
from gateway.targets.site import SiteTarget
from tidegate import clock
from tidegate.generate.beginning_confidence import beginning_confidence
from tidegate.generate.request import LOGPROBS_KEY
from tidegate.generate.usage import SPENT, STOPPED, FinishReason, clipped_usage, usage_if_generated
from tidegate.models.work import prompt_ids
from tidegate.outcome import Disconnected, InternalError, InvalidRequest, ServeError, Unreachable
from tidegate.token_sink import TokenSink
from tidegate.tracing.propagation import outgoing_context
from tidegate.types import Accepted, Call, InferRequest, InferResponse, Reply, Route

log = structlog.get_logger(__name__)

_ALWAYS_NOTED: Final = (
    "launched",
    "begun",
    "answered",
    "failed",
    "cancelled",
)  # two of each attempt, and those are few
_OF_TEMPLATES: Final = 4096  # tokens that a server's own template may add to a prompt in words


class RequestExecution:
    """One request under way."""

    __slots__ = (
        "_answered_before", "_answers", "_ask", "_attempts", "_attested", "_base_cancelling", "_body_bytes", "_call",
        "_context", "_disputed", "_end", "_inline", "_interrupted", "_judged", "_loop", "_machine", "_next", "_notes",
        "_placed_at", "_request", "_rests_on", "_resumption", "_rows", "_sink", "_so_far", "_started_at", "_streamed",
        "_streams", "_taken_at", "_task", "_tasks", "_timer", "_unshown", "_waiter", "_wake_due_at", "_wasted",
    )  # fmt: skip

    def __init__(
        self,
        context: DispatchContext,
        call: Call,
        ask: Ask,
        once: Placement | None = None,
        *,
        taken_at: float | None = None,
        placement: Placement | None = None,
    ) -> None:
        """Args:
        once: places the request instead, for a single attempt.
        taken_at: when the dispatcher got the call.
        placement: instead of the context's; None: that.
        """
        request = call.request
        self._context = context
        self._call = call
        self._ask = ask
        self._taken_at = call.arrived_at if taken_at is None else taken_at
        # The version is settled here: what "the latest" is may differ from target to target during a rollout.
        self._request: InferRequest = request if request.model_version else request.pinned(ask.version)
        if ask.generation is not None:
            self._request = under_tenant(self._request, call.tenant)
        self._rows, self._body_bytes = ask.rows, ask.body_bytes
        self._judged = judged = context.judges.of(ask.model, ask.version)
        escalations = judged.escalations if judged is not None else None
        hedges = context.hedges
        terms = None if once is not None else context.ask_builder.resumption_terms(call)
        self._sink: TokenSink | None = UnreadTokens() if call.tokens is None and terms is not None else call.tokens
        self._so_far = None if self._sink is None else AnswerSoFar(self._sink.window)
        self._resumption = None if terms is None or self._so_far is None else Resumption(terms, self._so_far)
        if once is None:
            self._machine = RequestMachine(
                ask,
                placement or context.placement,
                hedges=hedges,
                escalations=escalations,
                resumption=self._resumption,
                handovers=context.handovers,
            )
        else:
            self._machine = RequestMachine(ask, once, max_attempts=1, hedges=hedges)
        self._attested = ask.attested
        self._rests_on: dict[int, str] = {}  # by attempt: its target's evidence, where that is required
        self._attempts: dict[int, AttemptTelemetry] = {}  # under way, by number
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of those that have one
        self._next: Launch | None = None  # to be awaited inline
        self._inline: int | None = None  # being awaited inline
        self._interrupted = False  # we cancelled our own task to end the inline attempt
        self._timer: asyncio.TimerHandle | None = None
        self._wake_due_at = 0.0  # the instant that the machine asked for; the timer may ring before
        self._waiter: asyncio.Future[None] | None = None
        self._notes: list[RequestEvent] = []  # what happened, for explanations
        self._answers: dict[int, tuple[Reply, float, float]] = {}  # by attempt: the reply, its link time, its instant
        self._streams: dict[int, AttemptTokens] = {}  # by attempt under way, where its answer comes token by token
        self._unshown: dict[int, AttemptTokens] = {}  # by attempt that has answered: what it said is held back still
        self._disputed: tuple[AttemptTelemetry, ...] = ()  # whose targets called the request invalid
        self._streamed: int | None = None  # of those the one that has begun last
        self._answered_before: dict[int, int] = {}  # by attempt: the tokens that it goes on after, where there are any
        self._wasted = 0  # tokens that were computed more than once, or came and were given to no one
        self._end: Answer | Refuse | None = None

    async def run(self) -> Reply:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task, self._base_cancelling = task, task.cancelling()
        self._started_at = self._placed_at = clock.now()
        try:
            actions = self._machine.arrived(self._started_at)
            self._placed_at = clock.now()
            self._perform(actions, self._placed_at)
            while self._end is None:
                await (self._wait() if self._next is None else self._attempt_inline(self._next))
        except BaseException as error:
            now = clock.now()
            self._perform(self._machine.cancelled(now), now)
            why = error.args[0] if isinstance(error, asyncio.CancelledError) and error.args else "the caller left"
            if why in (STOPPED, SPENT) and self._streamed is not None:
                task.uncancel()
                return self._stopped(self._streamed, now) if why == STOPPED else self._cut(self._streamed, now)
            for held in self._unshown.values():
                self._waste(held)
            self._learn_cut()
            self._remember(f"cancelled: {why}", now)
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            # A cancelled task keeps its error, whose traceback knows this frame: a request that knew its task would be
            # there until garbage is collected.
            del self._task, task
        return self._finish(self._end)

    # the machine's actions

    def _perform(self, actions: list[Action], now: float) -> None:
        unlaunched: tuple[int, ServeError] | None = None
        for action in actions:
            if isinstance(action, WakeAt):  # every list but the last has one
                self._wake_at(action.at)
            elif isinstance(action, Launch):
                if (error := self._launch(action, now)) is not None:
                    unlaunched = action.attempt, error
            elif isinstance(action, Cancel):
                self._cancel(action, now)
            elif isinstance(action, Show):
                self._show(action.attempt, self._streams[action.attempt], self._machine.route_of(action.attempt), now)
            elif isinstance(action, Keep):
                self._streams[action.attempt].keep()
            elif isinstance(action, Release):
                self._streams[action.attempt].release()
            else:
                self._end = action
        if unlaunched is not None:  # once the others are done: what follows from it replaces their timer
            self._perform(self._machine.failed(*unlaunched, now), now)
        if self._waiter is not None and not self._waiter.done() and (self._end or self._next):
            self._waiter.set_result(None)

    def _launch(self, launch: Launch, now: float) -> ServeError | None:
        """Returns why the attempt could not be launched, which is a defect; None where it is under way."""
        number, one = launch.attempt, launch.candidate
        offered = one.offered
        self._notes.append(
            RequestEvent(now, "launched", number, offered.target.spec.id, offered.variant.name, one.finish_s)
        )
        if number == 0 and self._call.on_accepted is not None:  # another gateway asks: its link to here works
            self._call.on_accepted(Accepted(0, one.finish_s))
        generation = self._ask.generation
        try:
            self._attempts[number] = AttemptTelemetry(
                one,
                self._context.next_key(),
                launch.ask.units,
                now,
                self._body_bytes,
                prefix=() if generation is None else generation.prefix,
            )
        except Exception as defect:
            return self._unlaunched(number, one, defect, now)
        if launch.answered and self._resumption is not None:
            self._answered_before[number] = launch.answered
            self._wasted += self._resumption.terms.prompt_tokens + launch.answered  # which had been computed
        if self._inline is None and self._next is None:
            self._next = launch
            return None
        task = self._loop.create_task(self._attempt(launch), name=f"attempt at {launch.candidate.target.id}")
        self._tasks[number] = task
        self._context.spawn(task)
        return None

    def _unlaunched(self, number: int, candidate: Candidate, defect: Exception, now: float) -> ServeError:
        """An attempt that the target's offer does not let us launch: a failure of the target, like any defect of it."""
        log.exception("an attempt cannot be launched", target=candidate.target.id)
        error = InternalError(f"defect: {type(defect).__name__}")
        candidate.offered.target.breaker.record(blame(error).target, now, self._context.draw())
        self._told_failed(number, candidate, error, now)
        return error

    def _wake_at(self, at: float) -> None:
        if self._call.deadline is not None and at < self._call.deadline and self._streamed is None:
            self._note(RequestEvent(at, "look", 0))
        self._wake_due_at = at
        if self._timer is not None:
            if self._timer.when() <= at:
                return  # it rings first and is set anew then: most requests have been answered before
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._ring)

    def _cancel(self, cancel: Cancel, now: float) -> None:
        number = cancel.attempt
        attempt = self._attempts.pop(number, None)
        self._leave(number)
        if attempt is None:  # a defect met its launch or its end, which the machine has not heard of
            return
        if self._streamed not in (None, number) and not attempt.has_begun:
            self._lose_race(number, attempt)
        if cancel.error is None:
            attempt.cancelled(now, hopeless=cancel.hopeless)
            self._note(RequestEvent(now, "cancelled", number))
        else:
            attempt.stalled(cancel.error, now, self._context.draw())
            self._told_failed(number, attempt.candidate, cancel.error, now)
        if self._next is not None and self._next.attempt == number:
            self._next = None
        elif number == self._inline:
            self._interrupted = True
            self._task.cancel()
        elif number in self._tasks:
            self._tasks[number].cancel()

    def _lose_race(self, number: int, attempt: AttemptTelemetry) -> None:
        """Count an attempt that is cancelled since another one gave the first token: its prompt, computed in vain."""
        generation, candidate = self._ask.generation, attempt.candidate
        if generation is None:
            return
        if number not in self._answered_before:  # else it was counted at its launch
            self._wasted += generation.prompt_tokens
        budget, tokens, price = self._context.placer.cloud_budget, candidate.tokens, candidate.target.spec.token_price
        if budget is None or tokens is None or candidate.offered.zone != "cloud":
            return
        slot_s = tokens.first_s / max(1, candidate.variant.slots)
        budget.spent(slot_s if price.is_free else price.of(generation.prompt_tokens, 0))

    # what happens: each becomes an event of the machine

    def _ring(self) -> None:
        now = clock.now()
        if now + EARLY_S < self._wake_due_at:
            self._timer = self._loop.call_at(self._wake_due_at, self._ring)
            return
        self._timer = None
        self._perform(self._machine.timer(now), now)

    def _accepted(self, number: int, accepted: Accepted) -> None:
        now = clock.now()
        if (attempt := self._attempts.get(number)) is not None:
            attempt.accepted(now, accepted)
            self._note(RequestEvent(now, "accepted", number, seconds=accepted.finish_in_s))
        self._perform(self._machine.accepted(number, accepted, now), now)

    def _begun(self, number: int, tokens: AttemptTokens) -> bool:
        """The first token of an attempt is here; whether this is the attempt that answers."""
        if number not in self._attempts or self._end is not None:
            return False
        now = clock.now()
        self._note(RequestEvent(now, "begun", number))
        self._streamed = number
        self._perform(self._machine.begun(number, now), now)
        if number not in self._attempts:  # another one had begun
            return False
        self._attempts[number].begun(tokens.first_at or now, tokens.cached_tokens)
        if self._call.on_begun is not None:
            self._call.on_begun(self._machine.route_of(number))
        return True

    def _held(self, number: int, tokens: AttemptTokens) -> None:
        """The first token of an attempt is here, and is held back."""
        if (attempt := self._attempts.get(number)) is None or self._end is not None:
            return
        now = clock.now()
        self._note(RequestEvent(now, "held", number))
        attempt.begun(tokens.first_at or now, tokens.cached_tokens)
        self._perform(self._machine.held(number, now), now)

    def _judge(self, number: int, tokens: AttemptTokens) -> None:
        """Enough of an attempt's answer is held back to know how sure it is."""
        if number not in self._attempts or self._end is not None:
            return
        now, confidence = clock.now(), self._beginning_confidence(tokens)
        self._note(RequestEvent(now, "judged", number, confidence=confidence))
        self._perform(self._machine.judged(number, confidence, now), now)

    def _beginning_confidence(self, tokens: AttemptTokens) -> float | None:
        assert self._judged is not None and self._judged.window is not None
        beginning = tokens.beginning
        return None if beginning is None else beginning_confidence(beginning, self._judged.window.measure)

    def _show(self, number: int, tokens: AttemptTokens, route: Route, now: float) -> None:
        """What an attempt holds back is the caller's."""
        self._note(RequestEvent(now, "begun", number))
        self._streamed = number
        if self._call.on_begun is not None:
            self._call.on_begun(route)
        tokens.show()

    def _differed(self, number: int) -> None:
        """A successor says something else than what the caller has."""
        now = clock.now()
        self._note(RequestEvent(now, "differed", number))
        self._perform(self._machine.differed(number, now), now)

    def _answered(self, number: int, reply: Reply) -> None:
        attempt = self._over(number)
        if attempt is None:
            return
        now = clock.now()
        try:
            reply = self._believed(number, attempt, reply, now)
            work = self._context.ask_builder.computed(self._request, reply.response)
        except Exception as error:  # of ours: the attempt is over all the same, for the request and all who count it
            log.exception("an answer cannot be used", target=attempt.candidate.target.id)
            defect = InternalError(f"defect: {type(error).__name__}")
            self._note_failure(number, attempt, defect, now)
            self._perform(self._machine.failed(number, defect, now), now)
            return
        link_s = attempt.answered(reply.stages, reply.load, now, tensor_bytes(reply.response.outputs), work=work)
        self._answers[number] = reply, link_s, now
        if self._context.listener is not None:
            self._context.listener.answered(attempt.candidate.offered.target.spec.id)
        confidence = None
        if (held := self._unshown.get(number)) is not None:
            confidence = None if held.is_judged else self._beginning_confidence(held)
        elif self._judged is not None and self._judged.judge is not None:
            variant = reply.variant or attempt.candidate.variant.name
            confidence = self._judged.judge.confidence(variant, self._request.outputs, reply.response.outputs)
        stages = {**reply.stages, "batch_wait": reply.batch_wait_s} if reply.batch_wait_s else reply.stages
        self._notes.append(
            RequestEvent(
                now, "answered", number, seconds=link_s, stages=stages, confidence=confidence, batch=reply.batch_size
            )
        )
        budget = self._context.placer.cloud_budget
        if budget is not None and attempt.candidate.offered.zone == "cloud":
            # What it took is its batch's compute, of which its rows are a share; a generation has a slot of several.
            share = self._rows / max(reply.batch_size, self._rows)
            if attempt.candidate.tokens is not None:
                share = 1.0 / max(1, attempt.candidate.variant.slots)
            paid_s = self._paid_s(attempt.candidate, reply)
            budget.spent(reply.stages.get("compute", attempt.candidate.compute_s) * share if paid_s is None else paid_s)
        self._perform(self._machine.answered(number, now, confidence), now)

    def _believed(self, number: int, attempt: AttemptTelemetry, reply: Reply, now: float) -> Reply:
        """The reply without what is more than can be; nearly always the same object."""
        took_s, stages = now - attempt.launched_at, reply.stages
        if stages and stages.get("queue", 0.0) + stages.get("compute", 0.0) > took_s:
            reply = _clipped_stages(reply, took_s)
        offered = attempt.candidate.offered
        if reply.variant != offered.variant.name and reply.variant:
            offers = self._context.placer.fleet.offers(offered.model, offered.version).all
            if offers.get((offered.target.spec.id, reply.variant)) is None:
                reply = replace(reply, variant=offered.variant.name)
        if self._ask.generation is not None:
            response = self._with_known_counts(reply.response, took_s, before=self._answered_before.get(number, 0))
            if response is not reply.response:
                reply = replace(reply, response=response)
        return reply

    def _with_known_counts(self, response: InferResponse, took_s: float, *, before: int = 0) -> InferResponse:
        """A generation's answer with no more tokens and seconds than are possible.

        Args:
            before: tokens of the whole answer that were given before: a part of this one's prompt.
        """
        generation = self._ask.generation
        if generation is None:
            return response
        return clipped_usage(
            response,
            prompt_tokens=_most_prompt_tokens(self._request, generation.prompt_tokens) + before,
            completion_tokens=max(0, generation.max_tokens - before),
            took_s=took_s,
        )

    @staticmethod
    def _paid_s(candidate: Candidate, reply: Reply) -> float | None:
        """What an answer's tokens cost, in seconds of a pool; None where they have no price."""
        price = candidate.offered.target.spec.token_price
        usage = None if price.is_free else usage_if_generated(reply.response)
        return None if usage is None else price.of(usage.prompt_tokens, usage.completion_tokens)

    def _failed(self, number: int, error: ServeError) -> None:
        attempt = self._over(number)
        if attempt is None:
            return
        if (held := self._unshown.pop(number, None)) is not None:
            self._waste(held)
        now = clock.now()
        self._note_failure(number, attempt, error, now)
        self._perform(self._machine.failed(number, error, now), now)

    def _note_failure(self, number: int, attempt: AttemptTelemetry, error: ServeError, now: float) -> None:
        attempt.failed(error, now, self._context.draw())
        if type(error) is InvalidRequest:
            self._disputed += (attempt,)
        self._told_failed(number, attempt.candidate, error, now)

    def _told_failed(self, number: int, candidate: Candidate, error: ServeError, now: float) -> None:
        if self._context.listener is not None:
            self._context.listener.failed(self._call, candidate.target.id, error)
        self._note(RequestEvent(now, "failed", number, words=truncated_words(f"{error.code}: {error.message}")))

    def _leave(self, number: int) -> None:
        """Nothing more of this attempt is given to the caller."""
        tokens = self._streams.pop(number, None)
        if tokens is not None:
            self._waste(tokens)

    def _waste(self, tokens: AttemptTokens) -> None:
        """Leave an attempt's tokens, and count those that were computed in vain."""
        if tokens.is_held and self._ask.generation is not None:
            self._wasted += self._ask.generation.prompt_tokens
        tokens.leave()
        self._wasted += tokens.wasted

    def _over(self, number: int) -> AttemptTelemetry | None:
        """Take an attempt off the list of those under way; None if it was cancelled as it ended."""
        if number == self._inline:
            self._inline = None  # its place in the caller's task is free for a fallback
        if (tokens := self._streams.get(number)) is not None:
            tokens.release()  # it was well until here, and what it has said is a part of the answer
            if tokens.is_held:
                self._unshown[number] = self._streams.pop(number)
        self._leave(number)
        return self._attempts.pop(number, None)

    # attempts

    async def _attempt_inline(self, launch: Launch) -> None:
        self._next, self._inline = None, launch.attempt
        try:
            await self._attempt(launch)
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
        finally:
            self._inline = None
        # Whatever way the interrupted attempt ended, our own cancellation is taken back here.
        if self._interrupted:
            self._interrupted = False
            if self._task.uncancel() > self._base_cancelling:
                raise asyncio.CancelledError  # the caller left as well

    async def _attempt(self, launch: Launch) -> None:
        try:
            reply = await self._send(launch)
        except ServeError as error:
            self._failed(launch.attempt, error.without_frames())
        except Exception as error:
            log.exception("a target has a defect", target=launch.candidate.target.id)
            self._failed(launch.attempt, InternalError(f"defect: {type(error).__name__}"))
        else:
            self._answered(launch.attempt, reply)

    def _send(self, launch: Launch) -> Awaitable[Reply]:
        call, offered = self._call, launch.candidate.offered
        target_id = offered.target.spec.id
        target = self._context.targets.get(target_id)
        if target is None:
            raise Unreachable(f"{target_id} has just left")
        assert call.deadline is not None
        if self._attested:
            self._check_evidence(launch, call.deadline)
        traceparent, tracestate = outgoing_context(call, launch.attempt)
        request = self._request
        if launch.answered and self._resumption is not None:
            request = continued_request(request, self._resumption.answer, self._resumption.terms)
        elif self._is_judged(launch.candidate) and LOGPROBS_KEY not in request.parameters:
            request = replace(request, parameters={**request.parameters, LOGPROBS_KEY: 0})
        if isinstance(target, SiteTarget):
            return target.relay(
                _as_placed(call, launch.ask),
                request,
                budget_s=call.deadline - clock.now(),
                traceparent=traceparent,
                tracestate=tracestate,
                on_accepted=partial(self._accepted, launch.attempt),
                tokens=None if self._sink is None else self._tokens_of(launch, self._sink),
            )
        now = clock.now()
        return target.infer(
            request,
            variant=offered.variant.name,
            budget_s=call.deadline - now,
            priority=call.priority,
            traceparent=traceparent,
            tracestate=tracestate,
            on_accepted=partial(self._accepted, launch.attempt),
            tokens=None if self._sink is None else self._tokens_of(launch, self._sink),
            objectives=token_objectives(launch.candidate, self._ask, now, goes_on=launch.answered > 0),
        )

    def _tokens_of(self, launch: Launch, sink: TokenSink) -> AttemptTokens:
        assert self._so_far is not None
        gaps = launch.candidate.offered.cost.token_gaps
        number = launch.attempt
        judge = None
        if self._judged is not None and not launch.answered and self._is_judged(launch.candidate):
            judge = BeginningJudge(
                self._judged.escalations.window,
                held=lambda: self._held(number, tokens),
                judged=lambda: self._judge(number, tokens),
                hides_logprobs=LOGPROBS_KEY not in self._request.parameters,
            )
        begin, differ = partial(self._begun, number), partial(self._differed, number)
        tokens = AttemptTokens(sink, self._so_far, begin, gaps, differ, judge)
        self._streams[number] = tokens
        return tokens

    def _is_judged(self, candidate: Candidate) -> bool:
        """Whether the beginning of an answer from there is judged: one that may be escalated, of a lesser variant."""
        judged = self._judged
        if judged is None or self._sink is None or candidate.variant.name not in judged.improvable:
            return False
        # A site judges its own answers, and says how it came to them.
        return (
            candidate.target.spec.tier != "site" and judged.escalations.raised(self._ask, candidate.variant) is not None
        )

    def _check_evidence(self, launch: Launch, deadline: float) -> None:
        """Check that the target's evidence still counts.

        Nothing is awaited from here until the target's connection is taken, so that connection is the one that was
        checked: another connection begins without evidence.
        """
        attestation = launch.candidate.target.attestation
        if missing := attestation.why_not_valid_at(deadline):
            raise Disconnected(f"{launch.candidate.target.id} is attested no more: {missing}")
        self._rests_on[launch.attempt] = str(attestation)

    async def _wait(self) -> None:
        """Wait until there is an attempt to await inline, or the end."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # the end

    def _finish(self, end: Answer | Refuse) -> Reply:
        now = clock.now()
        shown = None if isinstance(end, Refuse) else self._unshown.pop(end.attempt, None)
        for held in self._unshown.values():
            self._waste(held)
        if shown is not None and isinstance(end, Answer):
            self._show(end.attempt, shown, end.route, now)
        if isinstance(end, Refuse):
            self._learn_cut()
            end.error.attempted = bool(self._machine.reasons)
            end.error.request_id = self._remember(f"{end.error.code}: {end.error.message}", now)
            raise end.error
        for disputed in self._disputed:
            disputed.contradicted(now, self._context.draw())
        if end.attempt not in self._answers:
            return self._replied(end.attempt, end.route, "length", now)
        assert self._call.deadline is not None
        reply, link_s, answered_at = self._answers[end.attempt]
        if self._resumption is not None and end.attempt in self._answered_before:
            before, terms = self._answered_before[end.attempt], self._resumption.terms
            joined = joined_response(reply.response, self._resumption.answer, before, terms)
            reply = replace(reply, response=self._with_known_counts(joined, inf))
        usage = usage_if_generated(reply.response)
        if usage is not None:
            self._context.ask_builder.learn_length(
                self._ask, usage.completion_tokens, ended=usage.finish_reason == "stop"
            )
        route = end.route
        if reply.route is not None and end.candidate.offered.target.spec.tier == "site":
            route = _through_site(route, reply.route)
        request_id = self._remember(AnswerRecord(end.attempt, route, usage), now)
        if route.provisional:
            answered_at = now  # it waited for a better one
        if reply.variant and reply.variant != route.variant:
            route = replace(route, variant=reply.variant)  # the target answered in another variant than was placed
        return Reply(
            response=reply.response,
            stages=self._stages(end, reply, link_s),
            route=route,
            budget_left_s=self._call.deadline - answered_at,
            batch_size=reply.batch_size,
            variant=route.variant,
            attested=self._rests_on.get(end.attempt, ""),
            request_id=request_id,
            batch_wait_s=min(reply.batch_wait_s, reply.stages.get("queue", 0.0)),
            link_out_s=self._link_out_s(end, link_s),
            first_token_s=None if self._call.tokens is None else self._first_token_s(),
        )

    def _stopped(self, attempt: int, now: float) -> Reply:
        """The end of an answer of which its front has had all that it wants: what came of it, which the front has."""
        self._context.ask_builder.learn_length(self._ask, len(self._so_far or ()), ended=True)
        return self._replied(attempt, self._machine.route_of(attempt), "stop", now)

    def _cut(self, attempt: int, now: float) -> Reply:
        """The end of an answer that goes no further because nobody pays for more."""
        self._learn_cut()
        return self._replied(attempt, self._machine.route_of(attempt), "length", now, cut=SPENT)

    def _replied(self, attempt: int, route: Route, reason: FinishReason, now: float, *, cut: str = "") -> Reply:
        """The reply that the caller's tokens are, where no target said how they ended."""
        assert self._so_far is not None
        response = response_so_far(self._request, self._so_far, reason)
        response = self._with_known_counts(response, inf)
        request_id = self._remember(AnswerRecord(attempt, route, usage_if_generated(response)), now)
        assert self._call.deadline is not None
        return Reply(
            response=response,
            route=route,
            budget_left_s=self._call.deadline - now,
            variant=route.variant,
            attested=self._rests_on.get(attempt, ""),
            request_id=request_id,
            first_token_s=None if self._call.tokens is None else self._first_token_s(),
            cut=cut,
        )

    def _learn_cut(self) -> None:
        """Learn from an answer that was cut: by its caller, by its deadline, or by a failure."""
        if self._so_far is not None and len(self._so_far):
            self._context.ask_builder.learn_length(self._ask, len(self._so_far), ended=False)

    def _first_token_s(self) -> float | None:
        """From the request's arrival to the answer's first token; None for an answer that came in one piece."""
        for note in self._notes:
            if note.what == "begun":
                return note.at - self._call.arrived_at
        return None

    def _link_out_s(self, end: Answer, link_s: float) -> float:
        """Half of the accept-ack's round trip, or of the link's share without one, as in the waterfall."""
        sent_at, acked_at = 0.0, None
        for note in self._notes:
            if note.attempt == end.attempt and note.what == "launched":
                sent_at = note.at
            elif note.attempt == end.attempt and note.what == "accepted":
                acked_at = note.at
        return link_s / 2 if acked_at is None else min(link_s, (acked_at - sent_at) / 2)

    def _note(self, note: RequestEvent) -> None:
        """Keep an event for explanations; a target may acknowledge more often than is worth remembering."""
        if len(self._notes) < MAX_EVENTS_PER_REQUEST or note.what in _ALWAYS_NOTED:
            self._notes.append(note)

    def _remember(self, end: AnswerRecord | str, now: float) -> str:
        """Add the request's record to the flight recorder; the id by which the request can be explained later."""
        call, machine, memory = self._call, self._machine, self._context.recorder
        number = memory.next_number()
        memory.add(
            RequestRecord(
                number=number,
                request_id=truncated_words(self._request.id),
                trace_id=trace_id_of(call),
                protocol=call.protocol,
                model=self._request.model_name,
                tenant=call.tenant,
                arrived_at=call.arrived_at,
                taken_at=self._taken_at,
                asked_at=self._started_at,
                placed_at=self._placed_at,
                decision=None,
                reasons=tuple(machine.reasons),
                notes=tuple(self._notes),
                end=end if isinstance(end, AnswerRecord) else truncated_words(end),
                elapsed_s=now - call.arrived_at,
                deadline=call.deadline,
                wasted_tokens=self._wasted,
                asker=call.asker,
                half=call.half,
            ),
            machine.decision,
        )
        return memory.name_of(number)

    def _stages(self, end: Answer, reply: Reply, link_s: float) -> dict[str, float]:
        """`admit` is all of ours before placing; a failed attempt's time shows in no stage, only in the total."""
        stages = {
            "admit": self._started_at - self._call.arrived_at,
            "classify": self._placed_at - self._started_at,
        }
        if "queue" in reply.stages:
            stages["queue"] = reply.stages["queue"]
        stages["link"] = link_s
        if "compute" in reply.stages:
            stages["compute"] = reply.stages["compute"]
        return stages

    def __repr__(self) -> str:
        return f"<RequestExecution {self._request.id or '-'} {self._machine!r}>"


def _through_site(route: Route, inner: Route) -> Route:
    """The route with that of the site which answered; a lower precision there is declared here as well."""
    return replace(route, inner=inner, degraded=route.degraded or inner.degraded)


def _clipped_stages(reply: Reply, took_s: float) -> Reply:
    """The reply of a target that claims more seconds than its attempt took: its compute counts first."""
    compute_s = min(reply.stages.get("compute", 0.0), took_s)
    queue_s = min(reply.stages.get("queue", 0.0), took_s - compute_s)
    most = {"queue": queue_s, "compute": compute_s}
    stages = {stage: most.get(stage, said_s) for stage, said_s in reply.stages.items()}
    return replace(reply, stages=stages, batch_wait_s=min(reply.batch_wait_s, queue_s))


def _most_prompt_tokens(request: InferRequest, known: int) -> int:
    """The most tokens that a prompt can have. Args: known: as it was counted here, exactly where it is in ids."""
    if prompt_ids(request) is not None:
        return known
    size_bytes = tensor_bytes(request.inputs)  # a token of words is a byte at least
    if request.text is not None:
        words = request.text
        size_bytes += sum([memoryview(one).nbytes for one in words.fields.values()]) + len(words.begun.encode())
    return size_bytes + _OF_TEMPLATES


def _as_placed(call: Call, ask: Ask) -> Call:
    """The call with what was demanded when its target was chosen: by its caller, its model, or an unsure answer."""
    return replace(call, pin=ask.pin, min_quality=ask.min_quality, attested=ask.attested)

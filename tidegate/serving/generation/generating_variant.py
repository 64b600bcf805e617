"""A generating variant of a target: from a call to its tokens, its answer, and what is learned from both.

    call → checked against the manifest → a slot, in its turn → the worker's tokens to the call's sink → ids and usage

How long a generation takes is predicted from its work, which counts all the tokens that it may have
(`tidegate/models/work.py`), by the cost points of the warm-up times what was seen since. What is learned counts the
tokens that an answer really had, and the time in its slot without the pauses of its reader. How much of `max_tokens`
answers use is learned as one share for the model (`EXPECTED_WEIGHT`); it predicts how soon slots come free, and
nothing is refused for it.

How urgent a token is to its worker follows from the call's deadline: each unit of its work has an equal share of the
time that is left.

It can be wrong for a batch that grows while a generation runs, which then takes longer than any alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from math import inf
from typing import Final, Protocol

import numpy as np
from msgspec.structs import replace

from tidegate import clock
from tidegate.estimate.service_time import ServiceTime
from tidegate.generate.check import checked_generation
from tidegate.generate.request import OUTPUT_IDS, TEXT_OUTPUT, GenerateRequest
from tidegate.generate.usage import Generated, Usage, usage_parameters
from tidegate.metrics.generated import GeneratedCounts, GeneratingState
from tidegate.models.manifest import Manifest, Variant
from tidegate.models.work import generated_units
from tidegate.outcome import DeadlineExceeded, NotSupported
from tidegate.serving.generation.sequence_meter import SequenceMeter
from tidegate.serving.generation.sequence_scheduler import SequenceNeed, SequenceResult, SequenceScheduler
from tidegate.serving.target_model import Computation, Computed
from tidegate.token_sink import TokenSink
from tidegate.types import Call

EXPECTED_WEIGHT: Final = 0.1  # of the latest answer in the share of `max_tokens` that answers use
_LEAST_S: Final = 1e-3  # of a token's share of the time that is left
_WITHHELD: Final = frozenset({TEXT_OUTPUT})


class SequenceWorkers(Protocol):
    """The workers that have the variant loaded, each a place of the scheduler."""

    def generate(
        self,
        place: str,
        variant: str,
        request: GenerateRequest,
        sink: TokenSink,
        *,
        token_interval_s: float,
        first_token_s: float,
    ) -> Awaitable[Generated]:
        """As `WorkerProcess.generate`. Raises Unreachable where the worker is gone, dies or hangs."""
        ...

    def unready(self) -> str:
        """Why there is none, for a caller to read."""
        ...


class GeneratingVariant:
    """Mutable: `measured` at the warm-up, `compute` for each call.

    Args:
        scheduler: who begins when, on which worker.
        counts: the target's own, of all its models.
    """

    def __init__(
        self,
        manifest: Manifest,
        variant: Variant,
        scheduler: SequenceScheduler,
        workers: SequenceWorkers,
        counts: GeneratedCounts,
    ) -> None:
        assert manifest.generative is not None and variant.generation is not None
        self.manifest = manifest
        self.variant = variant
        self.scheduler = scheduler
        self.service: ServiceTime | None = None
        self._generative = manifest.generative
        self._cache_bytes = variant.generation.cache_bytes
        self._workers = workers
        self._counts = counts
        self._expected_share = 1.0

    def state(self, model: str) -> GeneratingState:
        """How it is doing, under this name of its model."""
        queue = self.scheduler
        return GeneratingState(
            model, self.variant.name, queue.in_flight, queue.queued, queue.slots, queue.reserved_bytes
        )

    def measured(self, points: Sequence[tuple[float, float]]) -> ServiceTime:
        """What it costs here, as (work units, seconds)."""
        self.service = ServiceTime(points)
        return self.service

    async def compute(self, computation: Computation) -> Computed:
        """Wait for a slot, and generate.

        Raises:
            InvalidRequest: it asks for what the model does not have; the message has the numbers.
            NotSupported: it wants the answer as text.
            Unreachable: there is no worker, or it died or hung under this call.
            OutOfMemory, Overloaded, DeadlineExceeded: by `sequence_queue.py`, or the time ran out on its way.
            InternalError: the engine failed on it.
        """
        call = computation.call
        request = checked_generation(self._generative, call.request)
        if any(output.name == TEXT_OUTPUT for output in call.request.outputs):
            raise NotSupported(f"a target answers in token ids ({OUTPUT_IDS!r}), not in text: ask a gateway")
        if self.service is None:
            need = SequenceNeed(computation.deadline, 0.0, 0.0, 0.0, 0)  # refused: there is no worker yet
        else:
            self.service.relax(clock.now())
            need = self._need(computation, request, self.service)
        meter = SequenceMeter(call.tokens, request.max_tokens)
        began_at: list[float] = []

        async def work(place: str) -> Generated:
            began_at.append(now := clock.now())
            left_s = max(0.0, computation.deadline - now) / max(1.0, computation.work.units)
            prompt_units = max(1.0, computation.work.units - request.max_tokens + 1)
            async with meter.reading():
                return await self._workers.generate(
                    place,
                    self.variant.name,
                    request,
                    meter,
                    token_interval_s=max(_LEAST_S, left_s),
                    first_token_s=max(_LEAST_S, left_s * prompt_units),
                )

        try:
            done = await self.scheduler.run(need, work, unavailable=self._workers.unready, on_accepted=call.on_accepted)
        except BaseException as error:
            if began_at:
                self._broken(request, meter, clock.now() - began_at[0])
            if isinstance(error, DeadlineExceeded) and meter.tokens and clock.now() >= computation.deadline:
                words = f"ran out of time after {meter.tokens} of up to {request.max_tokens} tokens"
                raise DeadlineExceeded(words) from None
            raise
        return self._answer(computation, request, meter, done)

    def _need(self, computation: Computation, request: GenerateRequest, service: ServiceTime) -> SequenceNeed:
        # A stop token may end an answer at once, unless it is told to ignore them or the model has none.
        whole = request.ignore_stop or not (self._generative.stop_tokens or request.stop_tokens)
        prompt, share = len(request.prompt), 1.0 if whole else self._expected_share
        certain = generated_units(self.manifest, prompt, request.max_tokens if whole else 1)
        expected = generated_units(self.manifest, prompt, max(1.0, share * request.max_tokens))
        return SequenceNeed(
            deadline=computation.deadline,
            # Proof is what was measured alone: that many sequences at once were slow says nothing of the next one.
            certain_s=min(1.0, service.residual.factor) * service.table.floor_for(certain),
            expected_s=service.predict_s(expected),
            longest_s=service.predict_s(computation.work.units),
            cache_bytes=(prompt + request.max_tokens) * self._cache_bytes,
            priority=computation.call.priority,
            first_by=_first_by(computation.call),
            first_s=service.predict_s(generated_units(self.manifest, prompt, 1)),
        )

    def _answer(
        self,
        computation: Computation,
        request: GenerateRequest,
        meter: SequenceMeter,
        done: SequenceResult[Generated],
    ) -> Computed:
        now = clock.now()
        paused_s = min(done.held_s, meter.paused_s(now))
        usage = done.result.usage
        usage = replace(usage, decode_s=max(0.0, usage.decode_s - paused_s))
        self._learn(usage, done.held_s - paused_s, request.max_tokens)
        arrived_at, first_at = computation.call.arrived_at, meter.first_at
        self._counts.ended(self.manifest.name, usage, None if first_at is None else max(0.0, first_at - arrived_at))
        ids = np.asarray(done.result.ids, dtype=np.int32)
        return Computed(
            {OUTPUT_IDS: ids},
            done.queue_s,
            done.held_s,
            1,
            withheld=_WITHHELD,
            parameters=usage_parameters(usage),
            pace_s=(usage.prefill_s + usage.decode_s) / max(1.0, _units(self.manifest, usage)),
        )

    def _learn(self, usage: Usage, took_s: float, max_tokens: int) -> None:
        if self.service is not None:
            self.service.record(_units(self.manifest, usage), took_s)
        share = min(1.0, usage.completion_tokens / max_tokens)
        self._expected_share += EXPECTED_WEIGHT * (share - self._expected_share)

    def _broken(self, request: GenerateRequest, meter: SequenceMeter, took_s: float) -> None:
        """It has ended without an answer: what it cost until then is learned from all the same."""
        self._counts.broken(self.manifest.name, meter.tokens)
        if meter.tokens and self.service is not None:
            units = generated_units(self.manifest, len(request.prompt), meter.tokens)
            self.service.record(units, max(0.0, took_s - meter.paused_s(clock.now())))

    def __repr__(self) -> str:
        return (
            f"<GeneratingVariant {self.manifest.name}:{self.manifest.version}/{self.variant.name} {self.scheduler!r}>"
        )


def _first_by(call: Call) -> float:
    """The instant by which its first token should be made; infinite where that does not matter."""
    return inf if call.ttft_s is None or call.tokens is None else call.arrived_at + call.ttft_s


def _units(manifest: Manifest, usage: Usage) -> float:
    """The work that was done."""
    return generated_units(manifest, usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens)

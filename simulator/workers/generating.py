"""A simulated device or pool that generates: the real queue for slots, and steps of a batch on virtual time.

    a step takes  (prompt tokens in it × prefill_ms + step_ms(sequences that have begun)) × luck × how slow it is now

as `tidegate/engines/generation/paced_generation.py` has it: each step computes at most `CHUNK` tokens of prompts, the
oldest first, and one token of every sequence whose prompt is done. A prompt's last chunk gives its first token. All
tokens that a step gives one gateway leave in one frame.

Who begins is decided by `tidegate/serving/generation/sequence_queue.py`, the file that devices and pools use; how much
of `max_tokens` answers use is learned as there. What a sequence costs the others in its batch is therefore in the
simulation, and memory for caches is not: there is always enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp
from typing import Final

from simulator.event_queue import Alarm, EventQueue
from simulator.scenarios.scenario import Decoding, GenerationSpec, ModelSpec
from simulator.workers.generation_foresight import EngineTimes, ForeseenSequence, WaitingJob, foresee
from simulator.workers.job import VERSION, ForeseenEnd, JobCaller, SimulatedJob
from simulator.workers.slowness import Slowness
from simulator.workers.worker import SimulatedWorker
from tidegate.estimate.cost_table import CostTable
from tidegate.estimate.service_time import ServiceTime
from tidegate.fleet.offers import ModelOffer, VariantOffer
from tidegate.netsim.links.regime import Windows
from tidegate.outcome import DeadlineExceeded, ServeError
from tidegate.serving.generation.generating_variant import EXPECTED_WEIGHT
from tidegate.serving.generation.sequence_queue import SequenceQueue, SequenceTicket
from tidegate.types import Accepted

CHUNK: Final = 128  # tokens of prompts in one step
_PLACE: Final = "engine"
_SHORT, _LONG, _TOKENS = 8, 128, 16  # of the warm-up (`tidegate/workers/generation/warmup.py`)


def generating_offers(models: Mapping[str, ModelSpec], tier: str, slow: float) -> tuple[ModelOffer, ...]:
    """What a worker of this tier offers, with the table that its warm-up would measure."""
    offers = []
    for name, model in models.items():
        spec = model.generation
        one = None if spec is None else spec.edge if tier == "edge" else spec.pool
        if spec is None or one is None:
            continue
        weight, step_ms = spec.prompt_weight, one.step_ms[0][1]
        short_ms = _SHORT * one.prefill_ms
        points = {
            1.0 + weight * _SHORT: short_ms,
            _TOKENS + weight * _SHORT: short_ms + (_TOKENS - 1) * step_ms,
            1.0 + weight * _LONG: _LONG * one.prefill_ms,
        }
        cost = tuple((units, slow * ms / 1e3) for units, ms in sorted(points.items()))
        precision, quality = ("int4", model.edge_quality) if tier == "edge" else ("bf16", model.pool_quality)
        variant = VariantOffer(precision, precision, cost, None, spec.context, quality, slots=one.slots)
        offers.append(ModelOffer(name, VERSION, (variant,)))
    return tuple(offers)


class _Sequence:
    """One generation in its slot."""

    __slots__ = ("began_at", "first_at", "job", "left")

    def __init__(self, job: SimulatedJob, began_at: float) -> None:
        assert job.generation is not None
        self.job = job
        self.began_at = began_at
        self.first_at = 0.0
        self.left = job.generation.prompt  # tokens of the prompt that are to be computed


class _Engine:
    """One model's engine and queue."""

    __slots__ = ("decoding", "expected_share", "queue", "running", "service", "spec", "stepping", "steps")

    def __init__(
        self, spec: GenerationSpec, decoding: Decoding, offer: ModelOffer, max_queue: int, slow: float
    ) -> None:
        self.spec = spec
        self.decoding = decoding
        self.service = ServiceTime(offer.variants[0].cost)
        self.steps = CostTable([(float(batch), slow * ms / 1e3) for batch, ms in decoding.step_ms])
        self.expected_share = 1.0
        self.queue = SequenceQueue(max_size=max_queue)
        self.queue.open(_PLACE, slots=decoding.slots)
        self.running: dict[int, _Sequence] = {}  # by ticket, the oldest first
        self.stepping = False


class GeneratingWorker(SimulatedWorker):
    """Mutable: `take` jobs, `give_up` what is cancelled, `crash` and `restart`."""

    def __init__(
        self,
        events: EventQueue,
        id: str,
        models: Mapping[str, ModelSpec],
        *,
        slow: float,
        max_queue: int,
        sigma: float,
        slowness: Slowness,
        standstills: Windows,
        luck: Callable[[], float],
    ) -> None:
        """Args:
        slow: times the reference device's milliseconds.
        luck: a standard normal for each step.
        """
        self._tier = id.partition("/")[0]
        super().__init__(events, id, generating_offers(models, self._tier, slow), slowness, standstills)
        self._models = models
        self._slow = slow
        self._max_queue = max_queue
        self._sigma = sigma
        self._luck = luck
        self._start()

    def _start(self) -> None:
        self._engines: dict[str, _Engine] = {}
        for offer in self.offers:
            spec = self._models[offer.name].generation
            assert spec is not None
            decoding = spec.edge if self._tier == "edge" else spec.pool
            assert decoding is not None
            self._engines[offer.name] = _Engine(spec, decoding, offer, self._max_queue, self._slow)
        self._jobs: dict[int, SimulatedJob] = {}  # waiting or running, by ticket
        self._ticket_of: dict[SimulatedJob, int] = {}
        self._tickets = 0
        self._alarm = Alarm(self._events, self._tick)

    def crash(self) -> None:
        super().crash()
        self._start()

    @property
    def queued(self) -> int:
        return sum(one.queue.queued for one in self._engines.values())

    @property
    def in_flight(self) -> int:
        return sum(one.queue.in_flight for one in self._engines.values())

    def queue_delay_s(self, now: float) -> float:
        return max([one.queue.wait_s(now) for one in self._engines.values()], default=0.0)

    def take(self, job: SimulatedJob, now: float) -> None:
        job.arrived_at = now
        engine, asked = self._engines[job.model], job.generation
        assert asked is not None
        self._tickets += 1
        ticket = self._ticket(engine, job, self._tickets)
        try:
            stands = engine.queue.admit(ticket, now)
        except ServeError as error:
            self._refuse(job, error, now)
            return
        self._jobs[ticket.id] = job
        self._ticket_of[job] = ticket.id
        longest_s = engine.service.predict_s(engine.spec.prompt_weight * asked.prompt + asked.max_tokens)
        job.asker.accepted(job, Accepted(stands.ahead, stands.wait_s + longest_s))
        self._pump(engine, now)

    def _ticket(self, engine: _Engine, job: SimulatedJob, id: int) -> SequenceTicket:
        asked, service = job.generation, engine.service
        assert asked is not None
        weight = engine.spec.prompt_weight * asked.prompt
        expected = weight + max(1.0, engine.expected_share * asked.max_tokens)
        certain_s = min(1.0, service.residual.factor) * service.table.floor_for(weight + 1.0)
        first_s = service.predict_s(weight + 1.0)
        return SequenceTicket(
            id=id,
            deadline=job.deadline,
            certain_s=certain_s,
            expected_s=service.predict_s(expected),
            cache_bytes=0,
            priority=job.priority,
            first_by=asked.first_by,
            first_s=first_s,
        )

    def give_up(self, job: SimulatedJob, now: float) -> None:
        job.settled = True
        ticket_id = self._ticket_of.get(job)
        if ticket_id is not None:
            self._leave(self._engines[job.model], ticket_id)

    def foreseen(self, coming: Sequence[tuple[float, SimulatedJob]], now: float) -> dict[SimulatedJob, ForeseenEnd]:
        ends: dict[SimulatedJob, ForeseenEnd] = {}
        for name, engine in self._engines.items():
            there = [(now, job) for id, job in self._jobs.items() if job.model == name and id not in engine.running]
            waiting = []
            for arrives_at, job in (*there, *[one for one in coming if one[1].model == name]):
                ticket = self._ticket(engine, job, 0)
                waiting.append(WaitingJob(ticket.key, ticket.latest_start, arrives_at, job))
            running = [
                ForeseenSequence(
                    one.job, one.left, 0 if one.job.generation is None else one.job.generation.made, one.first_at
                )
                for one in engine.running.values()
            ]
            times = EngineTimes(
                engine.decoding.slots,
                CHUNK,
                self._slow * engine.decoding.prefill_ms / 1e3,
                engine.steps.seconds_for,
                self._slowness.at,
                self._ends_at,
            )
            ends |= foresee(times, running, waiting, now)
        return ends

    def _leave(self, engine: _Engine, ticket_id: int) -> SimulatedJob:
        engine.queue.leave(ticket_id)
        engine.running.pop(ticket_id, None)
        job = self._jobs.pop(ticket_id)
        del self._ticket_of[job]
        return job

    def _pump(self, engine: _Engine, now: float) -> None:
        for late in engine.queue.expire(now):
            self._refuse(self._leave(engine, late.id), DeadlineExceeded("its time is over before its turn came"), now)
        while (taken := engine.queue.take(now)) is not None:
            ticket = taken[0]
            engine.running[ticket.id] = _Sequence(self._jobs[ticket.id], now)
        if engine.running and not engine.stepping:
            self._step(engine, now)
        wakes = [one.queue.next_wake() for one in self._engines.values()]
        self._alarm.set(min([wake for wake in wakes if wake is not None], default=None), self.epoch)
        self._moved()

    def _step(self, engine: _Engine, now: float) -> None:
        room, prefilled = CHUNK, {}
        for id, one in engine.running.items():
            if one.left and room:
                prefilled[id] = min(room, one.left)
                room -= prefilled[id]
        begun = [id for id, one in engine.running.items() if not one.left]
        work_s = self._slow * sum(prefilled.values()) * engine.decoding.prefill_ms / 1e3
        if begun:
            work_s += engine.steps.seconds_for(float(len(begun)))
        seconds = work_s * exp(self._sigma * self._luck()) * self._slowness.at(now)
        engine.stepping = True
        self._events.schedule(self._ends_at(now, seconds), self._stepped, self.epoch, engine, prefilled, begun, seconds)

    def _stepped(
        self, epoch: int, engine: _Engine, prefilled: Mapping[int, int], begun: Sequence[int], seconds: float
    ) -> None:
        if epoch != self.epoch or not self.alive:
            return
        now, engine.stepping = self._events.now, False
        self.compute_s += seconds
        share_s = seconds / (len(prefilled) + len(begun))
        speaking: list[_Sequence] = []
        for id in (*prefilled, *begun):
            one = engine.running.get(id)
            if one is None:  # cancelled meanwhile
                continue
            one.job.useful_s += share_s
            computed = prefilled.get(id, 0)
            one.left -= computed
            if computed and one.job.generation is not None:
                one.job.generation.prefilled += computed
            if not one.left:
                self._made(one, now)
                if one.job.generation is not None and one.job.generation.made:
                    speaking.append(one)
        by_asker: dict[JobCaller, list[SimulatedJob]] = {}
        for one in speaking:
            by_asker.setdefault(one.job.asker, []).append(one.job)
        for asker, jobs in by_asker.items():
            asker.made(jobs)
        for id, one in list(engine.running.items()):
            self._end_if_done(engine, id, one, now)
        self._pump(engine, now)

    def _made(self, one: _Sequence, now: float) -> None:
        asked = one.job.generation
        assert asked is not None
        if not asked.made:
            one.first_at, asked.first_s = now, now - one.began_at
        asked.made += asked.length > 0  # else its prompt had all of the answer, and what it makes is the end
        asked.rest_s = now - one.first_at

    def _end_if_done(self, engine: _Engine, id: int, one: _Sequence, now: float) -> None:
        job, asked = one.job, one.job.generation
        assert asked is not None
        if not one.left and asked.made >= min(asked.length, asked.max_tokens):
            self._leave(engine, id)
            job.settled = True
            units = engine.spec.prompt_weight * asked.prompt + asked.made
            engine.service.record(units, now - one.began_at)
            share = asked.made / asked.max_tokens
            engine.expected_share += EXPECTED_WEIGHT * (share - engine.expected_share)
            job.asker.answered(job, one.began_at - job.arrived_at, now - one.began_at, self.load_report(now))
        elif now >= job.deadline:
            self._leave(engine, id)
            self._refuse(job, DeadlineExceeded(f"ran out of time after {asked.made} tokens"), now)

    def _tick(self, epoch: int) -> None:
        if epoch == self.epoch and self.alive:
            for engine in self._engines.values():
                self._pump(engine, self._events.now)

    def __repr__(self) -> str:
        return (
            f"<GeneratingWorker {self.id} {'alive' if self.alive else 'gone'}, {self.in_flight} of {self.queued} wait>"
        )

"""An oracle's view of generations: what a worker foresees is what it then does, and to know it pays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from simulator.event_queue import EventQueue
from simulator.optimum.bound import upper_bound
from simulator.simulation import simulate
from simulator.workers.generating import GeneratingWorker
from simulator.workers.job import JobGeneration, SimulatedJob
from simulator.workers.slowness import Slowness
from tests.simulator.world.test_generating import writers
from tidegate.netsim.links.regime import Windows
from tidegate.outcome import ServeError
from tidegate.types import Accepted, LoadReport


class TokenTimesSeen:
    """The caller of jobs: when each had its first token, and when it was done."""

    def __init__(self, events: EventQueue) -> None:
        self.events = events
        self.first_at: dict[int, float] = {}
        self.done_at: dict[int, float] = {}

    def accepted(self, job: SimulatedJob, word: Accepted) -> None: ...

    def made(self, jobs: Sequence[SimulatedJob]) -> None:
        for job in jobs:
            self.first_at.setdefault(job.id, self.events.now)

    def answered(self, job: SimulatedJob, queue_s: float, compute_s: float, load: LoadReport) -> None:
        self.done_at[job.id] = self.events.now

    def refused(self, job: SimulatedJob, error: ServeError, load: LoadReport) -> None: ...


def test_a_generating_worker_foresees_what_it_then_does() -> None:
    # given a device with 4 slots, heat and a standstill in the middle, five jobs there and one that is still to come
    events = EventQueue()
    worker = GeneratingWorker(
        events,
        "edge/a",
        writers().scenario.models,
        slow=1.0,
        max_queue=9,
        sigma=0.0,
        slowness=Slowness(faults=((Windows([(2.0, 3.0)]), 2.0),)),
        standstills=Windows([(2.5, 2.7)]),
        luck=lambda: 0.0,
    )
    seen = TokenTimesSeen(events)
    jobs = [
        SimulatedJob(
            n, seen, "talker", rows=1, length=0, deadline=30.0 + n, priority=0, luck=0.0,
            generation=JobGeneration(40 + 30 * n, 20 + 10 * n, 200),
        )
        for n in range(6)
    ]  # fmt: skip
    events.run(until=1.0)
    for job in jobs[:5]:
        worker.take(job, 1.0)

    foreseen = worker.foreseen([(1.5, jobs[5])], 1.0)
    events.schedule(1.5, worker.take, jobs[5], 1.5)
    events.run()

    # A step that is under way when it is asked, and heat that begins within a stretch of steps, are not seen exactly.
    assert set(foreseen) == set(jobs)
    for job, end in foreseen.items():
        assert end.done_at == pytest.approx(seen.done_at[job.id], abs=0.5)
        assert end.first_at == pytest.approx(seen.first_at[job.id], abs=0.5)


@pytest.mark.slow
def test_it_pays_to_know_the_future_of_generations() -> None:
    crowded = writers(("rate: 2", "rate: 5"))
    kept = {
        policy: sum(simulate(crowded, policy, seed).tally.generations.kept for seed in (1, 2))
        for policy in ("value", "least-request", "clairvoyant")
    }
    assert kept["clairvoyant"] > kept["value"]
    assert kept["clairvoyant"] > kept["least-request"]


def test_the_bound_of_single_answers_says_that_it_is_none_of_generations() -> None:
    with pytest.raises(ValueError, match="talker generates"):
        upper_bound(writers(), 1)

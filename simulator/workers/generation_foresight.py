"""The true future of an engine that generates, played forward from where it stands, as if nothing else came.

It is for an oracle alone (`simulator/baselines/clairvoyant.py`): each answer's true length, how many tokens its caller
will wait for, the device's heat and its standstills are known; the luck of single steps is taken at its median. Slots
are given in the order of the real queue, and steps are those of `generating.py`. While no prompt is computed and nobody
comes or ends, all steps take as long, so as many as that are taken together, but no more than `_STRETCH_S` of them:
heat changes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Final, NamedTuple

from simulator.workers.job import ForeseenEnd, SimulatedJob

_STRETCH_S: Final = 0.5


class EngineTimes(NamedTuple):
    """What an engine's steps take on a device at the speed of its warm-up, in seconds."""

    slots: int
    chunk: int  # tokens of prompts in one step
    token_of_prompt_s: float
    step_s: Callable[[float], float]  # by sequences that have begun
    slow_at: Callable[[float], float]
    ends_at: Callable[[float, float], float]  # (start, seconds of work): with standstills


class WaitingJob(NamedTuple):
    """A job without a slot: smallest key first, and late for sure from an instant on."""

    key: float
    latest_start: float
    arrives_at: float
    job: SimulatedJob


class ForeseenSequence:
    """Mutable: one generation in its slot."""

    __slots__ = ("first_at", "job", "left", "more")

    def __init__(self, job: SimulatedJob, left: int, made: int, first_at: float) -> None:
        """Args: left: tokens of the prompt that are to be computed."""
        asked = job.generation
        assert asked is not None
        self.job = job
        self.left = left
        self.more = max(1, asked.wanted - made)
        self.first_at = first_at


def foresee(
    engine: EngineTimes, running: Sequence[ForeseenSequence], waiting: Sequence[WaitingJob], now: float
) -> dict[SimulatedJob, ForeseenEnd]:
    """When each will have its first token and its last one; without jobs that would be dropped.

    Args:
        waiting: those that are there and those to come.
    """
    ends: dict[SimulatedJob, ForeseenEnd] = {}
    inside = list(running)
    coming = sorted(waiting, key=lambda one: one.arrives_at, reverse=True)  # the next one last
    queue: list[WaitingJob] = []
    at = now
    while inside or queue or coming:
        if not inside and not queue:
            at = max(at, coming[-1].arrives_at)
        while coming and coming[-1].arrives_at <= at:
            queue.append(coming.pop())
        queue.sort(key=lambda one: one.key, reverse=True)
        while queue and len(inside) < engine.slots:
            one = queue.pop()
            if at < one.latest_start:
                assert one.job.generation is not None
                inside.append(ForeseenSequence(one.job, one.job.generation.prompt, 0, 0.0))
        if not inside:
            continue
        at = _stretch(engine, inside, at, coming[-1].arrives_at if coming else None)
        for each in inside:
            if each.more <= 0:
                ends[each.job] = ForeseenEnd(at, each.first_at)
        inside = [each for each in inside if each.more > 0 and at < each.job.deadline]
    return ends


def _stretch(engine: EngineTimes, inside: Sequence[ForeseenSequence], at: float, next_at: float | None) -> float:
    """Take a step, or as many as are alike; when they are over."""
    room, prefilled = engine.chunk, 0
    begun = [one for one in inside if not one.left]
    prompts = [one for one in inside if one.left]
    steps = 1
    step_s = engine.step_s(float(len(begun))) if begun else 0.0
    if prompts:
        for one in prompts:
            taken = min(room, one.left)
            room, prefilled, one.left = room - taken, prefilled + taken, one.left - taken
        step_s += prefilled * engine.token_of_prompt_s
    slow_s = step_s * engine.slow_at(at)
    if not prompts:
        steps = min([one.more for one in begun])
        stretch_s = _STRETCH_S if next_at is None else min(_STRETCH_S, max(0.0, next_at - at))
        steps = max(1, min(steps, ceil(stretch_s / slow_s)))
    ends_at = engine.ends_at(at, steps * slow_s)
    for one in begun:
        one.more -= steps
    for one in prompts:
        if not one.left:
            one.first_at, one.more = ends_at, one.more - 1
    return ends_at
